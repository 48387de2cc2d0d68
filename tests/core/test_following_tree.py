"""The tree that follows indexes: equal to them after every batch, whatever they do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.changes import AnyChange, Cleared, Evicted, Inserted, Swapped
from memserve.core.following_tree import FollowingTree
from memserve.core.tokens import Path, pack
from memserve.errors import ProtocolError
from memserve.types import InstanceId, Medium, Namespace
from tests.core.index_model import BLOCK_SIZE, IndexModel

P0, P1, D0 = InstanceId("P0"), InstanceId("P1"), InstanceId("D0")
INSTANCES = [P0, P1, D0]
PLAIN, TENANT = Namespace(), Namespace(cache_salt="tenant")


def path_of(tokens: list[int], namespace: Namespace = PLAIN) -> Path:
    return Path(tokens, BLOCK_SIZE, namespace)


def inserted(
    parent: int | None, first_key: int, tokens: list[int], medium: Medium = Medium.HBM
) -> Inserted:
    return Inserted(PLAIN, parent, first_key, pack(tokens), medium)


def tree_of(*changes: AnyChange, max_blocks: int = 1000) -> FollowingTree:
    """What P0 has said."""
    tree = FollowingTree(BLOCK_SIZE, INSTANCES, max_blocks)
    tree.apply(P0, changes, 0.0)
    return tree


# ── by example ────────────────────────────────────────────────────────────────────────────────


def test_one_walk_answers_for_all_instances() -> None:
    tree = tree_of(inserted(None, 1, [1, 2, 3, 4, 5, 6]))
    tree.apply(P1, [inserted(None, 1, [1, 2, 3, 4, 9, 9])], 0.0)
    match = tree.match(path_of([1, 2, 3, 4, 5, 6, 7, 8]))
    assert match.as_dict() == {P0: 6, P1: 4}
    assert match.cached_tokens.tolist() == [6, 4, 0]
    assert match.cached_tokens.dtype == np.int64, "times the size of KV, they are many bytes"
    assert (match.cached(D0), match.cached(InstanceId("P9"))) == (0, 0)
    assert tree.num_blocks == 4
    assert tree.match(path_of([1, 2, 3, 4], TENANT)).as_dict() == {}
    assert tree.match(path_of([])).as_dict() == {}
    tree.check_integrity()


def test_blocks_in_dram_are_counted_apart() -> None:
    tree = tree_of(inserted(None, 1, [1, 2, 3, 4, 5, 6]), Swapped([(2, 2)], Medium.DRAM))
    match = tree.match(path_of([1, 2, 3, 4]))
    assert (match.cached(P0), match.in_dram(P0)) == (4, 2)
    tree.apply(P0, [Swapped([(2, 1)], Medium.HBM)], 0.0)
    assert tree.match(path_of([1, 2, 3, 4])).in_dram(P0) == 0
    tree.apply(P0, [Evicted([(3, 1)])], 0.0)
    tree.check_integrity()


def test_growing_block_by_block_makes_one_node() -> None:
    tree = tree_of(*(inserted(key - 1 or None, key, [key, key]) for key in range(1, 100)))
    assert (tree.num_nodes, tree.num_blocks) == (1, 99)


def test_a_split_that_is_no_longer_needed_is_joined_again() -> None:
    tree = tree_of(inserted(None, 1, [1, 1, 2, 2, 3, 3]), inserted(1, 4, [7, 7]))
    assert tree.num_nodes == 3
    tree.apply(P0, [Evicted([(4, 1)])], 0.0)
    assert (tree.num_nodes, tree.num_blocks) == (1, 3)
    tree.check_integrity()


def test_what_nobody_holds_is_not_in_the_tree() -> None:
    tree = tree_of(inserted(None, 1, [1, 1, 2, 2, 3, 3]))
    tree.apply(P1, [inserted(None, 1, [1, 1, 2, 2])], 0.0)
    tree.apply(P0, [Evicted([(1, 3)])], 0.0)
    assert tree.num_blocks == 2
    tree.apply(P1, [Cleared()], 0.0)
    while tree.tidy():
        pass
    assert (tree.num_blocks, tree.num_nodes) == (0, 0)
    tree.check_integrity()


def test_a_lost_life_counts_for_nothing_at_once_and_is_cleared_bit_by_bit() -> None:
    tree = FollowingTree(BLOCK_SIZE, INSTANCES, 1000)
    tree.apply(P0, [inserted(None, key, [key, key]) for key in range(1, 301)], 0.0)
    tree.apply(P1, [inserted(None, 1, [1, 1])], 0.0)
    tree.drop(P0)
    assert tree.match(path_of([1, 1])).as_dict() == {P1: 2}
    assert tree.tidy(100)
    assert 200 <= tree.num_blocks < 300
    tree.apply(P0, [inserted(None, 1, [5, 5])], 0.0)  # the next life
    while tree.tidy():
        tree.check_integrity()
    assert tree.num_blocks == 2
    assert tree.match(path_of([5, 5])).as_dict() == {P0: 2}


def test_many_holders_are_counted_as_exactly_as_few() -> None:
    instances = [InstanceId(f"P{number}") for number in range(100)]
    tree = FollowingTree(BLOCK_SIZE, instances, 1000)
    for number, instance in enumerate(instances):
        tree.apply(instance, [inserted(None, 1, list(range(2 * (number % 7 + 1))))], 0.0)
    expected = {instance: min(n % 7 + 1, 4) * 2 for n, instance in enumerate(instances)}
    assert tree.match(path_of(list(range(9)))).as_dict() == expected
    tree.drop(instances[6])
    tree.apply(instances[5], [Evicted([(2, 5)])], 0.0)
    del expected[instances[6]]
    expected[instances[5]] = 2
    assert tree.match(path_of(list(range(9)))).as_dict() == expected


def test_beyond_the_bound_the_ends_unused_for_longest_go() -> None:
    tree = FollowingTree(BLOCK_SIZE, INSTANCES, 4)
    tree.apply(P0, [inserted(None, 1, [1, 1, 2, 2])], 0.0)
    tree.apply(P0, [inserted(1, 3, [3, 3])], 1.0)
    tree.use(tree.match(path_of([1, 1, 2, 2])), 2.0)
    tree.apply(P0, [inserted(None, 4, [4, 4, 5, 5])], 3.0)
    assert tree.match(path_of([1, 1, 2, 2])).as_dict() == {P0: 4}, "it was used since"
    assert tree.match(path_of([1, 1, 3, 3])).as_dict() == {P0: 2}
    assert tree.is_partial(P0)
    tree.check_integrity()
    tree.apply(P0, [Evicted([(3, 1)]), inserted(3, 6, [6, 6])], 4.0)  # of what it has forgotten
    tree.check_integrity()


def test_a_lost_life_of_many_is_seen_by_the_next_walk() -> None:
    instances = [InstanceId(f"P{number}") for number in range(100)]
    tree = FollowingTree(BLOCK_SIZE, instances, 1000)
    for instance in instances:
        tree.apply(instance, [inserted(None, 1, [1, 1])], 0.0)
    assert len(tree.match(path_of([1, 1])).as_dict()) == 100
    tree.drop(instances[6])
    assert instances[6] not in tree.match(path_of([1, 1])).as_dict()


def test_a_joined_node_is_as_fresh_as_its_fresher_part() -> None:
    tree = FollowingTree(BLOCK_SIZE, INSTANCES, 5)
    tree.apply(P0, [inserted(None, 1, [1, 1, 2, 2]), inserted(1, 3, [3, 3])], 0.0)
    tree.apply(P0, [inserted(None, 4, [9, 9])], 3.0)
    tree.use(tree.match(path_of([1, 1, 3, 3])), 5.0)
    tree.apply(P0, [Evicted([(2, 1)])], 6.0)
    tree.apply(P0, [inserted(None, 5, [7, 7, 8, 8, 9, 9])], 7.0)
    assert tree.match(path_of([9, 9])).as_dict() == {}
    assert tree.match(path_of([1, 1, 3, 3])).as_dict() == {P0: 4}


@pytest.mark.parametrize(
    "changes",
    [
        [inserted(7, 8, [1, 1])],
        [inserted(None, 1, [1, 1, 2, 2]), inserted(None, 3, [1, 1])],
        [inserted(None, 1, [1, 1, 2, 2]), inserted(1, 3, [2, 2])],
        [inserted(None, 1, [1, 1, 2, 2]), inserted(2, 2, [3, 3])],
        [inserted(None, 5, [1, 1]), inserted(5, 3, [3, 3])],
        [inserted(None, 1, [1])],
        [Evicted([(1, 1)])],
        [inserted(None, 1, [1, 1, 2, 2]), Evicted([(1, 1)])],
        [inserted(None, 1, [1, 1]), Evicted([(1, 2)])],
        [inserted(None, 1, [1, 1]), Swapped([(1, 2)], Medium.DRAM)],
    ],
)
def test_changes_that_cannot_be_are_refused(changes: list[AnyChange]) -> None:
    tree = FollowingTree(BLOCK_SIZE, INSTANCES, 100)
    with pytest.raises(ProtocolError):
        tree.apply(P0, changes, 0.0)
    tree.drop(P0)
    while tree.tidy():
        pass
    tree.check_integrity()
    assert tree.num_blocks == 0


# ── against what the indexes hold ─────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str
    tokens: list[int]
    instance: InstanceId
    namespace: Namespace
    number: int


ops = st.builds(
    Op,
    kind=st.sampled_from(
        ["insert"] * 6 + ["evict", "evict", "swap", "swap", "skip", "clear", "drop", "rebuild"]
    ),
    tokens=st.lists(st.integers(0, 1), max_size=13),
    instance=st.sampled_from(INSTANCES),
    namespace=st.sampled_from([PLAIN, PLAIN, TENANT]),
    number=st.integers(0, 5),
)


class Cluster:
    """Indexes, and the tree that hears of them; a batch of changes is applied now and then."""

    def __init__(self, max_blocks: int) -> None:
        self.tree = FollowingTree(BLOCK_SIZE, INSTANCES, max_blocks)
        self.indexes = {instance: IndexModel() for instance in INSTANCES}
        self.now = 0.0

    def do(self, op: Op) -> None:
        self.now += 1.0
        index = self.indexes[op.instance]
        media = [Medium.HBM, Medium.DRAM]
        match op.kind:
            case "insert":
                index.insert(op.namespace, op.tokens, media[op.number == 0])
            case "evict":
                index.evict(op.namespace, op.tokens[: op.number * 2], split=op.number % 2 == 0)
            case "swap":
                index.swap(op.namespace, op.tokens, media[op.number % 2])
            case "skip":
                index.skip_keys(op.number)
            case "clear":
                index.clear()
            case "drop":
                self.indexes[op.instance] = IndexModel()
                self.tree.drop(op.instance)
            case "rebuild":
                index.take_changes()
                self.tree.drop(op.instance)
                for part in index.snapshot(per_part=op.number + 1):
                    self.tree.apply(op.instance, part, self.now)

    def hear(self) -> None:
        for instance, index in self.indexes.items():
            self.tree.apply(instance, index.take_changes(), self.now)
        self.tree.check_integrity()


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.lists(st.lists(ops, max_size=4), max_size=16))
def test_unbounded_it_equals_every_index_after_every_batch(schedule: list[list[Op]]) -> None:
    cluster = Cluster(max_blocks=10_000)
    for batch in schedule:
        for op in batch:
            cluster.do(op)
        cluster.hear()
        for instance, index in cluster.indexes.items():
            assert cluster.tree.index_of(instance) == index.index()
        for op in batch:
            match = cluster.tree.match(path_of(op.tokens, op.namespace))
            for instance, index in cluster.indexes.items():
                assert match.cached(instance) == index.held(op.namespace, op.tokens)
                assert match.in_dram(instance) == index.in_dram(op.namespace, op.tokens)
    while cluster.tree.tidy():
        cluster.tree.check_integrity()
    held = {prefix for index in cluster.indexes.values() for prefix in index.blocks}
    assert cluster.tree.num_blocks == len(held)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.lists(ops, max_size=40), st.integers(0, 8))
def test_bounded_it_never_claims_more_than_is_held(schedule: list[Op], max_blocks: int) -> None:
    cluster = Cluster(max_blocks)
    for op in schedule:
        cluster.do(op)
        cluster.hear()
        for instance, index in cluster.indexes.items():
            known = cluster.tree.index_of(instance)
            truth = index.index()
            assert all(truth.get(key) == block for key, block in known.items())
            assert cluster.tree.is_partial(instance) or known == truth

"""The tree that guesses, against a naive model, and its bounds by example."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.guessing_tree import GuessingTree
from memserve.core.tokens import Path
from memserve.types import InstanceId, Namespace

BLOCK_SIZE = 2
TTL_S = 10.0
P0, P1 = InstanceId("P0"), InstanceId("P1")


P2, P9 = InstanceId("P2"), InstanceId("P9")
PLAIN, TENANT = Namespace(), Namespace(cache_salt="tenant")


class Tree:
    """A `GuessingTree` that is asked and told of token lists."""

    def __init__(self, max_blocks: int = 1000, ttl_s: float = TTL_S) -> None:
        self.tree = GuessingTree(BLOCK_SIZE, [P0, P1, P2], max_blocks, ttl_s)

    def insert(
        self, tokens: list[int], instance: InstanceId, now: float, namespace: Namespace = PLAIN
    ) -> None:
        path = Path(tokens, BLOCK_SIZE, namespace)
        self.tree.learn(path, path.num_blocks, instance, now)

    def match(
        self, tokens: list[int], now: float, namespace: Namespace = PLAIN
    ) -> dict[InstanceId, int]:
        self.tree.expire(now)
        return self.tree.match(Path(tokens, BLOCK_SIZE, namespace)).as_dict()


# ── by example ────────────────────────────────────────────────────────────────────────────────


def test_a_prefix_counts_full_blocks_for_each_instance() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4, 5, 6], P0, 0.0)
    tree.insert([1, 2, 3, 4, 9, 9, 7], P1, 0.0)
    assert tree.match([1, 2, 3, 4, 5, 6, 7, 8], 0.0) == {P0: 6, P1: 4}
    assert tree.match([1, 2, 3, 4, 9, 9, 7], 0.0) == {P0: 4, P1: 6}
    assert tree.match([1, 2, 3], 0.0) == {P0: 2, P1: 2}
    assert tree.match([1, 9], 0.0) == {}
    assert tree.match([], 0.0) == {}
    assert tree.tree.num_blocks == 4
    tree.tree.check_integrity()


def test_less_than_a_block_is_nothing() -> None:
    tree = Tree()
    tree.insert([1], P0, 0.0)
    tree.insert([], P0, 0.0)
    assert tree.tree.num_blocks == 0
    assert tree.match([1], 0.0) == {}
    tree.tree.check_integrity()


def test_blocks_are_told_apart_by_all_their_tokens() -> None:
    tree = GuessingTree(4, [P0], 10, TTL_S)
    tree.learn(Path([1, 2, 3, 4, 5, 6, 7, 8], 4), 2, P0, 0.0)
    assert tree.match(Path([1, 2, 3, 4, 5, 6, 7, 9], 4)).as_dict() == {P0: 4}
    assert tree.match(Path([1, 2, 3, 4, 0, 6, 7, 8], 4)).as_dict() == {P0: 4}


def test_namespaces_share_nothing() -> None:
    tree = Tree()
    tree.insert([1, 2], P0, 0.0, TENANT)
    assert tree.match([1, 2], 0.0) == {}
    assert tree.match([1, 2], 0.0, Namespace(lora_name="other")) == {}
    assert tree.match([1, 2], 0.0, TENANT) == {P0: 2}


def test_match_changes_nothing() -> None:
    tree = Tree(max_blocks=2)
    tree.insert([1, 1], P0, 0.0)
    tree.insert([2, 2], P0, 1.0)
    tree.match([1, 1], 9.0)
    tree.insert([3, 3], P0, 9.0)
    assert tree.match([1, 1], 9.0) == {}, "still the oldest, though it was asked for last"


def test_entries_expire_by_the_caller_s_clock() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4], P0, 0.0)
    tree.insert([1, 2], P1, 5.0)
    assert tree.match([1, 2, 3, 4], 9.9) == {P0: 4, P1: 2}
    assert tree.match([1, 2, 3, 4], 10.0) == {P1: 2}
    tree.tree.expire(10.0)
    assert tree.tree.num_blocks == 1
    tree.tree.check_integrity()
    tree.tree.expire(15.0)
    assert tree.tree.num_blocks == 0
    tree.tree.check_integrity()


def test_a_longer_insert_renews_its_whole_prefix() -> None:
    tree = Tree()
    tree.insert([1, 2], P0, 0.0)
    tree.insert([1, 2, 3, 4], P0, 8.0)
    tree.tree.expire(12.0)
    assert tree.match([1, 2, 3, 4], 12.0) == {P0: 4}


def test_beyond_the_bound_the_oldest_ends_go() -> None:
    tree = Tree(max_blocks=4)
    tree.insert([1, 1, 2, 2], P0, 0.0)
    tree.insert([1, 1, 3, 3], P0, 1.0)
    tree.insert([4, 4, 5, 5], P0, 2.0)
    assert tree.match([1, 1, 2, 2], 2.0) == {P0: 2}
    assert tree.match([1, 1, 3, 3], 2.0) == {P0: 4}
    tree.tree.check_integrity()


def test_a_prompt_longer_than_the_bound_keeps_its_beginning() -> None:
    tree = Tree(max_blocks=3)
    tree.insert([9, 9], P1, 0.0)
    tree.insert(list(range(20)), P0, 1.0)
    assert tree.match(list(range(20)), 1.0) == {P0: 6}
    assert tree.tree.num_blocks == 3
    tree.tree.check_integrity()


def test_a_lost_instance_takes_along_what_only_it_held() -> None:
    tree = Tree()
    tree.insert([1, 2, 3, 4, 5, 6], P0, 0.0)
    tree.insert([1, 2], P1, 0.0)
    tree.insert([7, 7], P0, 0.0, TENANT)
    tree.tree.drop(P0)
    tree.tree.check_integrity()
    assert tree.match([1, 2, 3, 4], 0.0) == {P1: 2}
    assert tree.tree.num_blocks == 1
    tree.tree.drop(P9)
    assert tree.tree.num_blocks == 1


def test_an_end_is_as_fresh_as_what_was_below_it() -> None:
    tree = Tree(max_blocks=3)
    tree.insert([1, 1], P0, 0.0)
    tree.insert([9, 9], P0, 3.0)
    tree.insert([1, 1, 2, 2], P1, 5.0)
    tree.tree.drop(P1)
    tree.insert([7, 7, 8, 8], P0, 6.0)
    assert tree.match([9, 9], 6.0) == {}
    assert tree.match([1, 1], 6.0) == {P0: 2}


def test_telling_the_same_thing_again_does_not_grow_the_tree() -> None:
    tree = Tree(ttl_s=1e9)
    for now in range(1000):
        tree.insert([1, 2, 3, 4], P0, float(now))
        tree.tree.check_integrity()
    assert tree.tree.num_blocks == 2


# ── against a naive model ─────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Op:
    kind: str
    tokens: list[int]
    instance: InstanceId
    namespace: Namespace
    wait_s: float


ops = st.builds(
    Op,
    kind=st.sampled_from(["insert", "insert", "insert", "match", "evict", "drop"]),
    tokens=st.lists(st.integers(0, 1), max_size=13),
    instance=st.sampled_from([P0, P1, P2]),
    namespace=st.sampled_from([PLAIN, PLAIN, Namespace(TENANT)]),
    wait_s=st.sampled_from([0.0, 0.0, 1.0, 6.0]),
)


class NaiveTree:
    """Every known prefix, spelt out."""

    def __init__(self) -> None:
        self.told: dict[tuple[Namespace, InstanceId, tuple[int, ...]], float] = {}

    def insert(
        self, tokens: list[int], instance: InstanceId, now: float, namespace: Namespace
    ) -> None:
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            self.told[namespace, instance, tuple(tokens[:end])] = now

    def match(self, tokens: list[int], now: float, namespace: Namespace) -> dict[str, int]:
        found: dict[str, int] = {}
        for (space, instance, prefix), told in self.told.items():
            is_prefix = tuple(tokens[: len(prefix)]) == prefix
            if space == namespace and is_prefix and now - told < TTL_S:
                found[instance] = max(found.get(instance, 0), len(prefix))
        return found

    def drop(self, instance: InstanceId) -> None:
        self.told = {key: told for key, told in self.told.items() if key[1] != instance}

    def num_blocks(self, now: float) -> int:
        """Blocks that somebody is believed to hold."""
        return len({(key[0], key[2]) for key, told in self.told.items() if now - told < TTL_S})


def apply(op: Op, tree: Tree, naive: NaiveTree, now: float) -> None:
    if op.kind == "insert":
        tree.insert(op.tokens, op.instance, now, op.namespace)
        naive.insert(op.tokens, op.instance, now, op.namespace)
    elif op.kind == "evict":
        tree.tree.expire(now)
        assert tree.tree.num_blocks <= naive.num_blocks(now)
    elif op.kind == "drop":
        tree.tree.drop(op.instance)
        naive.drop(op.instance)


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(st.lists(ops, max_size=40))
def test_unbounded_it_agrees_with_the_naive_model(schedule: list[Op]) -> None:
    tree, naive, now = Tree(), NaiveTree(), 0.0
    for op in schedule:
        now += op.wait_s
        apply(op, tree, naive, now)
        tree.tree.check_integrity()
        expected = naive.match(op.tokens, now, op.namespace)
        assert tree.match(op.tokens, now, op.namespace) == expected
    tree.tree.expire(now)
    assert tree.tree.num_blocks == naive.num_blocks(now)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.lists(ops, max_size=40), st.integers(0, 6))
def test_bounded_it_never_claims_more_and_keeps_the_latest(
    schedule: list[Op], max_blocks: int
) -> None:
    tree, naive, now = Tree(max_blocks), NaiveTree(), 0.0
    for op in schedule:
        now += op.wait_s + 0.001
        apply(op, tree, naive, now)
        tree.tree.check_integrity()
        expected = naive.match(op.tokens, now, op.namespace)
        found = tree.match(op.tokens, now, op.namespace)
        assert all(count <= expected[instance] for instance, count in found.items())
        if op.kind == "insert":
            kept = min(len(op.tokens) // BLOCK_SIZE, max_blocks) * BLOCK_SIZE
            assert found.get(op.instance, 0) == kept

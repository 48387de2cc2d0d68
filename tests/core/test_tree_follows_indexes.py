"""The scheduler's tree against real local indexes: it knows what they say, batch by batch."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.changes import Inserted
from memserve.core.following_tree import FollowingTree
from memserve.core.radix import RadixIndex
from memserve.core.tokens import TOKEN_BYTES, Path
from memserve.types import InstanceId, Medium, Namespace
from tests.core.radix_model import PRIVATE, Pair
from tests.core.test_radix_properties import BLOCK_SIZE, NAMESPACES, step

INSTANCES = [InstanceId("P0"), InstanceId("D0"), InstanceId("PD0")]

Index = dict[int, tuple[int | None, bytes, Medium]]


def index_of(snapshot: list[Inserted]) -> Index:
    """Key → (key above, tokens, medium), as `FollowingTree.index_of` gives it."""
    index: Index = {}
    size = BLOCK_SIZE * TOKEN_BYTES
    for change in snapshot:
        above = change.parent
        for number in range(len(change.token_ids) // size):
            key = change.first_key + number
            index[key] = (above, change.token_ids[number * size :][:size], change.medium)
            above = key
    return index


class Cluster:
    """Real indexes under random operations, and the tree."""

    def __init__(self, seed: random.Random) -> None:
        self.rng = seed
        self.tree = FollowingTree(BLOCK_SIZE, INSTANCES, 10_000)
        self.pairs = {instance: Pair(BLOCK_SIZE, num_places=24) for instance in INSTANCES}

    def turn(self) -> None:
        """A few operations on one instance, then its changes in one batch."""
        instance = self.rng.choice(INSTANCES)
        if self.rng.random() < 0.02:
            self.pairs[instance] = Pair(BLOCK_SIZE, num_places=24)
            self.tree.drop(instance)
        pair = self.pairs[instance]
        for _ in range(self.rng.randrange(6)):
            step(pair, self.rng)
        if self.rng.random() < 0.1:  # a gap, mended
            pair.real.take_changes()
            self.tree.drop(instance)
            self.tree.apply(instance, list(pair.real.snapshot()), 0.0)
        self.tree.apply(instance, pair.real.take_changes(), 0.0)

    def check(self) -> None:
        self.tree.check_integrity()
        for instance, pair in self.pairs.items():
            assert self.tree.index_of(instance) == index_of(list(pair.real.snapshot()))

    def check_matches(self) -> None:
        namespace = self.rng.choice(NAMESPACES)
        tokens = [self.rng.randrange(2) for _ in range(13)]
        path = Path(tokens, BLOCK_SIZE, namespace)
        found = self.tree.match(path)
        for instance, pair in self.pairs.items():
            match = pair.real.match(path)
            held = match.num_blocks if namespace != PRIVATE else 0
            assert found.cached(instance) == held * BLOCK_SIZE
            assert found.in_dram(instance) == int((match.hbm[:held] < 0).sum()) * BLOCK_SIZE


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_the_tree_equals_the_indexes(rng: random.Random, num_turns: int) -> None:
    cluster = Cluster(rng)
    for _ in range(num_turns):
        cluster.turn()
        cluster.check()
        cluster.check_matches()


def test_the_tree_equals_the_indexes_after_a_long_life() -> None:
    cluster = Cluster(random.Random(7))
    for number in range(1500):
        cluster.turn()
        if number % 20 == 0:
            cluster.check()
            cluster.check_matches()
    cluster.check()


def test_growing_conversations_are_followed() -> None:
    """As an engine tells it: decode steps of several requests, block by block, interleaved."""
    index = RadixIndex(BLOCK_SIZE, lambda: 0.0, lambda _: True)
    tree = FollowingTree(BLOCK_SIZE, INSTANCES, 10_000)
    prompts = [[7, 7, number, number] for number in range(8)]
    place = 0
    for turn in range(30):
        for prompt in prompts:
            prompt += [turn, turn]
            path = Path(prompt, BLOCK_SIZE, Namespace())
            first = index.match(path).num_blocks
            new = range(place, place + path.num_blocks - first)
            place += len(new)
            index.insert(path, new, first)
        tree.apply(INSTANCES[0], index.take_changes(), 0.0)
    tree.check_integrity()
    assert tree.index_of(INSTANCES[0]) == index_of(list(index.snapshot()))
    assert tree.num_nodes == index.num_nodes == 9

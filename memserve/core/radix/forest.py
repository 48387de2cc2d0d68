"""The trees of the local index, one for each namespace, and every change of their shape.

`index.py` is the interface; here is what it is made of: walking, growing, splitting, shrinking.
Each change keeps nodes, tiers, counts and the log in step.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from memserve.changes import Inserted
from memserve.core.radix.check import check
from memserve.core.radix.log import ChangeLog
from memserve.core.radix.nodes import ABSENT, Node, Tree
from memserve.core.radix.results import Cursor, Insertion, Locations
from memserve.core.radix.tiers import Tier
from memserve.core.tokens import TOKEN_BYTES, Path, shared_blocks
from memserve.types import Medium, Namespace


class Forest:
    """Whoever changes it gives back, or adds to `Locations`, the places that become free."""

    def __init__(
        self,
        block_size: int,
        clock: Callable[[], float],
        publishes: Callable[[Namespace], bool] | None,
    ) -> None:
        """As `RadixIndex`."""
        self.block_size = block_size
        self.block_bytes = block_size * TOKEN_BYTES
        self.trees: dict[Namespace, Tree] = {}
        self.nodes: dict[int, Node] = {}
        """By number: all but the roots."""
        self.tiers = {m: Tier(m, index, self.nodes) for index, m in enumerate(Medium)}
        self.log = ChangeLog()
        self.num_blocks = 0
        self._clock = clock
        self._publishes = publishes
        self._next_key = 1
        self._numbers = itertools.count(1)

    def check_integrity(self) -> None:
        """Walks over everything. Raises: AssertionError if something contradicts something else."""
        check(self.trees, self.tiers.values(), self.block_bytes)
        nodes = [node for tree in self.trees.values() for node in tree.root.descendants()]
        assert self.nodes == {node.number: node for node in nodes}
        assert self.num_blocks == sum(len(node.keys) for node in nodes)
        assert all(node.keys[-1] < self._next_key for node in nodes)

    # ── walking ───────────────────────────────────────────────────────────────────────────────

    def walk(self, path: Path) -> tuple[Node, int]:
        """Where the known part of a path ends: a node, and the depth in it. Does not mutate."""
        if path.block_size != self.block_size:
            raise ValueError(f"a path in blocks of {path.block_size}, not {self.block_size}")
        tree = self.trees.get(path.namespace)
        if tree is None:
            publishes = self._publishes
            is_published = publishes is not None and publishes(path.namespace)
            tree = Tree(path.namespace, is_published=is_published)  # an insert will keep it
        return self.walk_on(tree.root, 0, path.packed, 0)

    def walk_on(self, node: Node, depth: int, packed: bytes, base: int) -> tuple[Node, int]:
        """On from `depth`, where `node` ends or is passed. `packed` begins at block `base`."""
        block_bytes = self.block_bytes
        if depth < node.end:
            label = node.label[(depth - node.start) * block_bytes :]
            depth += shared_blocks(label, packed, (depth - base) * block_bytes, self.block_size)
        while depth == node.end:
            at = (depth - base) * block_bytes
            child = node.children.get(packed[at : at + block_bytes])
            if child is None:
                break
            node = child
            depth += shared_blocks(child.label, packed, at, self.block_size)
        return node, depth

    def touch(self, node: Node) -> None:
        """The node and all above it are used now."""
        now = self._clock()
        for used in node.lineage():
            used.touched_s = now

    # ── growing ───────────────────────────────────────────────────────────────────────────────

    def insert(
        self,
        node: Node,
        known: int,
        packed: bytes,
        base: int,
        places: Sequence[int],
        first: int,
        tier: Tier,
    ) -> Insertion:
        """The walk along `packed`, which begins at block `base`, ended in `node` at `known`."""
        last = first + len(places)
        tier.reserve(places)
        differing = list(_differing(node, min(known, last), array("i", places), first, tier))
        for _, _, held, given in differing:
            tier.check_unused([new for old, new in zip(held, given, strict=True) if old != new])
        tier.check_unused(places[known - first :])
        duplicates: list[tuple[int, int]] = []
        for part, depth, held, given in differing:
            duplicates += self._fill(part, depth, held, given, tier)
        if known < last:
            label = packed[(known - base) * self.block_bytes : (last - base) * self.block_bytes]
            node = self._grow(node, known, label, places[known - first :], tier)
        cursor = Cursor(node, last)
        self.touch(cursor.node)
        return Insertion(cursor, duplicates)

    def _fill(
        self, node: Node, depth: int, held: array[int], given: array[int], tier: Tier
    ) -> list[tuple[int, int]]:
        """Known blocks of one node lie in the given places, too; returns the duplicates."""
        if held.count(ABSENT) == len(held):
            self._put_known(node, depth, given, tier)
            return []
        duplicates: list[tuple[int, int]] = []
        for at, (old, place) in enumerate(zip(held, given, strict=True), depth):
            if old == ABSENT:
                self._put_known(node, at, [place], tier)
            elif old != place:
                duplicates.append((at, old))
        return duplicates

    def _put_known(self, node: Node, depth: int, places: Sequence[int], tier: Tier) -> None:
        tier.put(node, depth, places)
        if tier.medium is Medium.HBM:
            self.tell_swapped(node, depth, depth + len(places), Medium.HBM)

    def _grow(
        self, node: Node, depth: int, label: bytes, places: Sequence[int], tier: Tier
    ) -> Node:
        """Unknown blocks follow at `depth`, which the node reaches or passes; returns theirs."""
        if depth < node.end:
            node = self._split(node, depth)
        parent_key = node.keys[-1] if node.keys else None
        first_key, self._next_key = self._next_key, self._next_key + len(places)
        keys = array("q", range(first_key, self._next_key))
        tree = node.tree
        if node.parent is not None and not node.children:
            node.extend(label, keys)  # an end that grows, as in decoding, stays one node
        else:
            self.trees[tree.namespace] = tree
            child = self._make_node(tree, node, depth, label, keys)
            node.children[label[: self.block_bytes]] = child
            node = child
        self.num_blocks += len(places)
        tier.put(node, depth, places)
        if tree.is_published:
            self.log.inserted(tree.namespace, parent_key, first_key, label, tier.medium)
        return node

    def _make_node(
        self, tree: Tree, parent: Node, start: int, label: bytes, keys: array[int]
    ) -> Node:
        node = Node(tree, parent, start, label, keys, next(self._numbers))
        self.nodes[node.number] = node
        return node

    def _split(self, node: Node, depth: int) -> Node:
        """Put a new node above this one, with its blocks down to `depth`; returns that.

        The lower one stays the same object: a cursor's node may change to one above, never below.
        """
        assert node.parent is not None
        offset = depth - node.start
        size = offset * self.block_bytes
        label, keys = bytes(node.label[:size]), node.keys[:offset]
        upper = self._make_node(node.tree, node.parent, node.start, label, keys)
        upper.touched_s = node.touched_s
        node.parent.children[bytes(upper.label[: self.block_bytes])] = upper
        del node.label[:size]
        del node.keys[:offset]
        node.start = depth
        node.parent = upper
        upper.children[bytes(node.label[: self.block_bytes])] = node
        node.split_references(upper)
        for tier in self.tiers.values():
            tier.split(upper, node)
        return upper

    # ── shrinking ─────────────────────────────────────────────────────────────────────────────

    def truncate(self, node: Node, depth: int, freed: Locations) -> None:
        """The node's blocks from `depth` on leave with all below: their places are added."""
        assert node.parent is not None
        if node.children:
            self.remove_below(node, freed)
        offset = depth - node.start
        node.cut_references(depth)
        for tier in self.tiers.values():
            freed.add(tier.medium, tier.cut(node, offset))
        self._tell_left(node, node.keys[offset:])
        if not offset:
            parent = node.parent
            del parent.children[bytes(node.label[: self.block_bytes])]
            del self.nodes[node.number]
            if parent.parent is None and not parent.children:
                del self.trees[parent.tree.namespace]
            for tier in self.tiers.values():
                tier.tidy()
        del node.label[offset * self.block_bytes :]
        del node.keys[offset:]

    def remove_below(self, top: Node, freed: Locations) -> None:
        for node in top.descendants():
            for tier in self.tiers.values():
                freed.add(tier.medium, tier.empty(node))
            self._tell_left(node, node.keys)
            node.take_apart()
            del self.nodes[node.number]
        top.children.clear()
        for tier in self.tiers.values():
            tier.tidy()

    # ── telling ───────────────────────────────────────────────────────────────────────────────

    def _tell_left(self, node: Node, keys: array[int]) -> None:
        self.num_blocks -= len(keys)
        if keys and node.tree.is_published:
            self.log.evicted(keys)

    def tell_swapped(self, node: Node, depth: int, end: int, medium: Medium) -> None:
        if node.tree.is_published:
            self.log.swapped(node.keys[depth - node.start : end - node.start], medium)

    def describe(self, node: Node) -> Iterator[Inserted]:
        """A node's blocks: one change for each run of keys in one medium."""
        assert node.parent is not None
        hbm, _ = node.shares
        keys = np.array(node.keys)
        is_hbm = np.array(hbm.places) != ABSENT
        borders = np.flatnonzero((np.diff(keys) != 1) | (np.diff(is_hbm) != 0)) + 1
        edges = [0, *borders.tolist(), len(keys)]
        parent = node.parent.keys[-1] if node.parent.keys else None
        for begin, end in itertools.pairwise(edges):
            label = bytes(node.label[begin * self.block_bytes : end * self.block_bytes])
            medium = Medium.HBM if is_hbm[begin] else Medium.DRAM
            yield Inserted(node.tree.namespace, parent, node.keys[begin], label, medium)
            parent = node.keys[end - 1]


def _differing(
    node: Node, stop: int, places: array[int], first: int, tier: Tier
) -> Iterator[tuple[Node, int, array[int], array[int]]]:
    """Where known blocks from `first` to `stop` do not all lie as said: node, depth, held, given.

    `node` reaches over `stop`, or one above it does.
    """
    if first >= stop:
        return
    for part in node.holding(stop).lineage():
        begin, end = max(first, part.start), min(stop, part.end)
        if begin < end:
            held = tier.share(part).places[begin - part.start : end - part.start]
            given = places[begin - first : end - first]
            if held != given:
                yield part, begin, held, given

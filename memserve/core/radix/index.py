"""The local index: which blocks of which prompts an instance holds, and in which medium.

A path-compressed radix tree over token ids at the granularity of KV blocks, one for each namespace.
A node is one or more blocks without a branch between them; for each block it knows the HBM block,
the DRAM slot, or both. An insert that leaves a prompt within a node splits it there::

    insert A B C at HBM 7 8 9      insert A B D at HBM 7 8 4
    root ── A B C {7 8 9}          root ── A B {7 8} ─┬─ C {9}
                                                      └─ D {4}

The index is closed towards the root: a block that lies nowhere leaves it together with all below,
and whoever caused that is told which places have become free. Nothing here allocates, copies or
frees KV: `workers/mempool.py` owns HBM blocks, `workers/dram.py` DRAM slots, and both tell the
index. What changes is logged in the words of `changes.py`, for the scheduler's prompt trees.

Time: a call costs its blocks and the nodes along its path, never the tree. The paper: section 4.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

from memserve.changes import AnyChange, Inserted
from memserve.core.radix.forest import Forest
from memserve.core.radix.nodes import ABSENT, Node
from memserve.core.radix.results import Cursor, Insertion, Locations, Match
from memserve.core.tokens import Path
from memserve.types import BlockId, Medium, Namespace, SlotId


class RadixIndex:
    """One thread, no locks: the engine's. Keys are given to blocks in rising order, from 1."""

    def __init__(
        self,
        block_size: int,
        clock: Callable[[], float],
        publishes: Callable[[Namespace], bool] | None = None,
    ) -> None:
        """`clock`: seconds, never backwards. `publishes(namespace)`: whether its changes are logged
        for `take_changes`; without it none are."""
        self._forest = Forest(block_size, clock, publishes)
        self._clock = clock
        self._tiers = self._forest.tiers

    @property
    def num_blocks(self) -> int:
        """Known blocks; one that is in both media counts once."""
        return self._forest.num_blocks

    @property
    def num_nodes(self) -> int:
        """Nodes, without the roots."""
        return len(self._forest.nodes)

    def num_in(self, medium: Medium) -> int:
        """Blocks that are in this medium."""
        return self._tiers[medium].num

    # ── look-ups: none of them mutates ────────────────────────────────────────────────────────

    def match(self, path: Path) -> Match:
        """The longest known prefix. A use of it is made known by `touch` or by an insert."""
        node, depth = self._forest.walk(path)
        if not depth:
            return Match(array("i"), array("i"), None)
        end = Cursor(node, depth)
        nodes = node.lineage()
        hbm, dram = (share.places[:] for share in nodes[0].shares)
        for node in nodes[1:]:
            hbm += node.shares[0].places
            dram += node.shares[1].places
        return Match(hbm[:depth], dram[:depth], end)

    def contains(self, place: int, medium: Medium) -> bool:
        """Whether a known block lies there."""
        return self._tiers[medium].holder(place) is not None

    def slot_of(self, block_id: BlockId) -> SlotId | None:
        """Where the block that lies in this HBM block lies in DRAM."""
        slot = self._elsewhere(block_id, Medium.HBM, Medium.DRAM)
        return None if slot == ABSENT else SlotId(slot)

    def block_of(self, slot_id: SlotId) -> BlockId | None:
        """Where the block that lies in this DRAM slot lies in HBM."""
        block_id = self._elsewhere(slot_id, Medium.DRAM, Medium.HBM)
        return None if block_id == ABSENT else BlockId(block_id)

    def key_of(self, place: int, medium: Medium) -> int | None:
        """The key of the block that lies there: another one if the place has changed hands."""
        tier = self._tiers[medium]
        if (node := tier.holder(place)) is None:
            return None
        return node.keys[tier.depths[place] - node.start]

    def depth_of(self, place: int, medium: Medium) -> int:
        """How many blocks are above the one that lies there; 0 if none lies there."""
        tier = self._tiers[medium]
        return tier.depths[place] if tier.holder(place) is not None else 0

    def oldest(self, num_blocks: int, medium: Medium, idle_s: float = 0.0) -> list[int]:
        """So many places to evict, or fewer: unused for longest (`idle_s` at least), ends first.

        No place of a referenced block is named, and none of a block with others below it in this
        medium that are not named before it. Use is known by node, not by block.
        """
        return self._tiers[medium].oldest(num_blocks, self._clock() - idle_s)

    def snapshot(self) -> Iterator[Inserted]:
        """All that is published, parents before children. Not to be used after a change."""
        for tree in self._forest.trees.values():
            if tree.is_published:
                for node in tree.root.descendants():
                    yield from self._forest.describe(node)

    # ── changes ───────────────────────────────────────────────────────────────────────────────

    def insert(
        self,
        path: Path,
        places: Sequence[int],
        first: int = 0,
        medium: Medium = Medium.HBM,
    ) -> Insertion:
        """Blocks `first`… of the path now lie in these HBM blocks or DRAM slots. Touches the path.

        A block that has a place in this medium keeps it. Raises: LookupError if a block before
        `first` is unknown; ValueError for more places than blocks, and for a place that holds
        another block, is named twice or is negative. Nothing has changed then.
        """
        if first + len(places) > path.num_blocks:
            raise ValueError(f"{len(places)} places for blocks {first}… of {path.num_blocks}")
        if not places:
            return Insertion(None, [])
        node, known = self._forest.walk(path)
        if known < first:
            raise LookupError(f"block {known} of the path is unknown: cannot insert from {first}")
        return self._forest.insert(node, known, path.packed, 0, places, first, self._tiers[medium])

    def append(
        self, end: Cursor, packed: bytes, places: Sequence[int], medium: Medium = Medium.HBM
    ) -> Insertion:
        """Blocks with these tokens (`tokens.pack`) follow: `insert` without a walk from the root.

        Raises: LookupError if the cursor is stale; otherwise as `insert`.
        """
        node = end.find()
        if node is None:
            raise LookupError(f"block {end.depth - 1} of the path has left the index")
        if len(packed) != len(places) * self._forest.block_bytes:
            raise ValueError(f"{len(packed)} bytes of tokens for {len(places)} blocks")
        if not places:
            return Insertion(end, [])
        base = end.depth
        node, known = self._forest.walk_on(node, base, packed, base)
        return self._forest.insert(node, known, packed, base, places, base, self._tiers[medium])

    def copied(
        self, source: Medium, sources: Sequence[int], target: Medium, targets: Sequence[int]
    ) -> list[int]:
        """The blocks that lie in these places of one medium now lie in those of another one too.

        Returns: the targets not taken, as the source holds nothing any more, or its block has a
        place there already. Raises: ValueError as `insert` does.
        """
        from_tier, to_tier = self._tiers[source], self._tiers[target]
        to_tier.reserve(targets)
        to_tier.check_unused(targets)
        refused: list[int] = []
        for from_place, to_place in zip(sources, targets, strict=True):
            node = from_tier.holder(from_place)
            depth = from_tier.depths[from_place] if node is not None else 0
            if node is None or to_tier.share(node).places[depth - node.start] != ABSENT:
                refused.append(to_place)
                continue
            to_tier.put(node, depth, [to_place])
            if target is Medium.HBM:
                self._forest.tell_swapped(node, depth, depth + 1, target)
        return refused

    def drop(self, places: Sequence[int], medium: Medium) -> Locations:
        """These places hold no block any more; those that held none are passed over.

        A block that is in no medium now leaves the index with all below it. Returns: the places
        that leave in this way, without those that were named.
        """
        tier = self._tiers[medium]
        other = self._tiers[Medium.DRAM if medium is Medium.HBM else Medium.HBM]
        bare: dict[Node, int] = {}
        for place in places:
            if (node := tier.holder(place)) is None:
                continue
            depth = tier.depths[place]
            tier.vacate(node, depth - node.start)
            if other.share(node).places[depth - node.start] == ABSENT:
                bare[node] = min(depth, bare.get(node, depth))
            elif medium is Medium.HBM:
                self._forest.tell_swapped(node, depth, depth + 1, Medium.DRAM)
        freed = Locations()
        for node, depth in bare.items():
            if node.keys:  # it is not below one that has left already
                self._forest.truncate(node, depth, freed)
        return freed

    def delete(self, path: Path, first: int = 0) -> Locations:
        """Forget blocks `first`… of the path and all below them; returns the places of those."""
        freed = Locations()
        node, known = self._forest.walk(path)
        if known > first:
            self._forest.truncate(node.holding(first + 1), first, freed)
        return freed

    def evict(self, num_blocks: int, medium: Medium, idle_s: float = 0.0) -> Locations:
        """Drop what `oldest` names; returns those places and all that leave with them."""
        places = self.oldest(num_blocks, medium, idle_s)
        freed = self.drop(places, medium)
        freed.add(medium, places)
        return freed

    def touch(self, path: Path, num_blocks: int | None = None) -> None:
        """The first blocks of the path are used now (all that are known, if not said)."""
        node, known = self._forest.walk(path)
        depth = known if num_blocks is None else min(known, num_blocks)
        if depth > 0:
            self._forest.touch(node.holding(depth))

    def acquire(self, path: Path, num_blocks: int | None = None) -> Cursor:
        """Keep the first blocks out of `oldest` until `release`; a block counts its references.

        It binds this index alone: `drop` and `delete` are not hindered, and end the reference.
        Raises: LookupError if not all of them are known, or none is meant.
        """
        depth = path.num_blocks if num_blocks is None else num_blocks
        node, known = self._forest.walk(path)
        if not 0 < depth <= known:
            raise LookupError(f"{depth} blocks to refer to, {known} of the path are known")
        reference = Cursor(node, depth)
        reference.node.acquire(depth)
        return reference

    def release(self, reference: Cursor) -> None:
        """Once for each `acquire`. Does nothing if the block has left meanwhile.

        Raises: KeyError if it was released before.
        """
        if (node := reference.find()) is not None:
            node.release(reference.depth)

    def clear(self) -> Locations:
        """Forget everything; returns all places."""
        freed = Locations()
        for tree in self._forest.trees.values():
            self._forest.remove_below(tree.root, freed)
        self._forest.trees.clear()
        for tier in self._tiers.values():
            tier.tidy()
        self._forest.log.cleared()
        return freed

    def take_changes(self) -> list[AnyChange]:
        """What has changed since the last call, in order."""
        return self._forest.log.take()

    def check_integrity(self) -> None:
        """Walks over everything. Raises: AssertionError if the index contradicts itself."""
        self._forest.check_integrity()

    def _elsewhere(self, place: int, medium: Medium, other: Medium) -> int:
        tier = self._tiers[medium]
        if (node := tier.holder(place)) is None:
            return ABSENT
        return self._tiers[other].share(node).places[tier.depths[place] - node.start]

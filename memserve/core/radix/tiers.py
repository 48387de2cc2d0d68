"""What one medium holds of the local index: which block lies where, and what is evicted first.

`forest.py` changes the shape of the trees and tells the tiers; `index.py` asks them.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from memserve.core.radix.nodes import ABSENT, Node, Share
from memserve.types import Medium

_Entry: TypeAlias = tuple[float, int, Node]
"""A time at which the node had been touched, its number, the node."""


class Tier:
    """One medium: whose block lies in each of its places, and the order of eviction.

    An end is a node with blocks in this medium and nothing in it below. Every end has an entry in
    the queue, under a time at which it had been touched; an entry that turns out to be too early
    is put back under the right one, so that touching a node costs nothing here.
    """

    def __init__(self, medium: Medium, index: int, nodes: Mapping[int, Node]) -> None:
        """`nodes`: all there are, by number."""
        self.medium = medium
        self.index = index
        self._nodes = nodes
        self.num = 0
        """Blocks in this medium."""
        self.numbers = array("Q")
        """By place: the number of the node whose block lies there, or 0. Numbers, for the garbage
        collector would walk over a list of nodes, as long as the medium is large."""
        self.depths = array("I")
        """By place: blocks above the one that lies there; meaningless where nothing does."""
        self._queue: list[_Entry] = []

    def share(self, node: Node) -> Share:
        """What this medium holds of the node."""
        return node.shares[self.index]

    def holder(self, place: int) -> Node | None:
        """The node whose block lies there."""
        if not 0 <= place < len(self.numbers):
            return None
        return self._nodes.get(self.numbers[place])

    def reserve(self, places: Sequence[int]) -> None:
        """Make room in the tables. Raises: ValueError for a negative place, or one named twice."""
        if not places:
            return
        if min(places) < 0:
            raise ValueError(f"{self.medium.value} has no place {min(places)}")
        if len(set(places)) != len(places):
            raise ValueError(f"a place in {self.medium.value} is named twice")
        if (missing := max(places) + 1 - len(self.numbers)) > 0:
            missing = max(missing, len(self.numbers))
            self.numbers.extend(array("Q", [0]) * missing)
            self.depths.extend(array("I", [0]) * missing)

    def check_unused(self, places: Sequence[int]) -> None:
        """Raises: ValueError if something lies in one of them."""
        for place in places:
            if self.numbers[place]:
                raise ValueError(f"{self.medium.value} {place} holds another block")

    # ── blocks come and go ────────────────────────────────────────────────────────────────────

    def put(self, node: Node, depth: int, places: Sequence[int]) -> None:
        """Blocks of the node from `depth` on, so far not in this medium, now lie here."""
        share = self.share(node)
        was_present = bool(share.num or share.below)
        offset = depth - node.start
        share.places[offset : offset + len(places)] = array("i", places)
        share.num += len(places)
        self.num += len(places)
        numbers, depths, number = self.numbers, self.depths, node.number
        for at, place in enumerate(places, depth):
            numbers[place] = number
            depths[place] = at
        if not was_present:
            self._gained(node)
        self.queue_if_end(node)

    def vacate(self, node: Node, offset: int) -> None:
        """The block at this offset of the node leaves this medium."""
        share = self.share(node)
        self.numbers[share.places[offset]] = 0
        share.places[offset] = ABSENT
        share.num -= 1
        self.num -= 1
        if not share.num and not share.below:
            self._lost(node)

    def cut(self, node: Node, offset: int) -> list[int]:
        """The node ends here from now on, with nothing below it; returns the places given up."""
        share = self.share(node)
        rest = share.places[offset:]
        del share.places[offset:]
        if not share.num and not share.below:
            return []
        gone = [place for place in rest if place != ABSENT]
        for place in gone:
            self.numbers[place] = 0
        share.num -= len(gone)
        share.below = 0
        self.num -= len(gone)
        if not share.num:
            self._lost(node)
        self.queue_if_end(node)
        return gone

    def empty(self, node: Node) -> list[int]:
        """The node leaves the tree together with what is above; returns the places given up."""
        share = self.share(node)
        gone = [place for place in share.places if place != ABSENT]
        for place in gone:
            self.numbers[place] = 0
        self.num -= len(gone)
        node.shares[self.index].places = array("i")
        share.num = share.below = 0
        return gone

    def split(self, upper: Node, lower: Node) -> None:
        """The first blocks of `lower` have become a node above it."""
        above, share = self.share(upper), self.share(lower)
        size = len(upper.keys)
        above.places = share.places[:size]
        del share.places[:size]
        if share.num:
            above.num = size - above.places.count(ABSENT)
            share.num -= above.num
            for place in above.places:
                if place != ABSENT:
                    self.numbers[place] = upper.number
        above.below = int(bool(share.num or share.below))
        self.queue_if_end(upper)

    def _gained(self, node: Node) -> None:
        while (parent := node.parent) is not None:
            share = self.share(parent)
            share.below += 1
            if share.num or share.below > 1:
                break
            node = parent

    def _lost(self, node: Node) -> None:
        while (parent := node.parent) is not None:
            share = self.share(parent)
            share.below -= 1
            if share.num or share.below:
                self.queue_if_end(parent)
                break
            node = parent

    # ── the order of eviction ─────────────────────────────────────────────────────────────────

    def queue_if_end(self, node: Node) -> None:
        """Called whenever a node may have become an end."""
        share = self.share(node)
        if share.num and not share.below and not share.is_queued:
            share.is_queued = True
            heapq.heappush(self._queue, self._entry(node))

    def tidy(self) -> None:
        """Drop entries of nodes that are gone, once they are the greater part."""
        if len(self._queue) > 2 * len(self._nodes) + 64:
            self._queue = [entry for entry in self._queue if entry[2].keys]
            heapq.heapify(self._queue)

    def oldest(self, num_blocks: int, touched_before_s: float) -> list[int]:
        """As `RadixIndex.oldest`. A node whose children would all be empty counts as an end."""
        places: list[int] = []
        taken: list[_Entry] = []
        emptied: dict[Node, int] = {}
        upper: list[_Entry] = []
        while len(places) < num_blocks and (node := self._next_end(upper, taken)) is not None:
            if node.touched_s > touched_before_s:
                break
            if self._take_from(node, num_blocks, places):
                self._uncover(node, emptied, upper)
        for entry in taken:
            heapq.heappush(self._queue, entry)
        return places

    def queued(self) -> list[Node]:
        """The nodes that have an entry in the queue, also those that are no ends any more."""
        return [node for _, _, node in self._queue]

    def _next_end(self, upper: list[_Entry], taken: list[_Entry]) -> Node | None:
        """The end that was touched longest ago, from `upper` or from the queue (into `taken`)."""
        queue = self._queue
        while queue:
            touched_s, _, node = queue[0]
            share = self.share(node)
            if not share.num or share.below:
                heapq.heappop(queue)
                share.is_queued = False
            elif touched_s != node.touched_s:
                heapq.heapreplace(queue, self._entry(node))
            elif upper and upper[0] < queue[0]:
                break
            else:
                taken.append(heapq.heappop(queue))
                return node
        return heapq.heappop(upper)[2] if upper else None

    def _take_from(self, node: Node, num_blocks: int, places: list[int]) -> bool:
        """Add the node's places, last block first; whether nothing of it would be left here."""
        held = self.share(node).places
        for offset in range(len(held) - 1, node.num_referenced - 1, -1):
            if len(places) == num_blocks:
                return False
            if held[offset] != ABSENT:
                places.append(held[offset])
        return not node.num_referenced

    def _uncover(self, node: Node, emptied: dict[Node, int], upper: list[_Entry]) -> None:
        """Nothing would be left of `node` in this medium: look what that makes an end."""
        while (parent := node.parent) is not None:
            emptied[parent] = emptied.get(parent, 0) + 1
            share = self.share(parent)
            if emptied[parent] < share.below:
                break
            if share.num:
                heapq.heappush(upper, self._entry(parent))
                break
            node = parent

    def _entry(self, node: Node) -> _Entry:
        return (node.touched_s, node.number, node)

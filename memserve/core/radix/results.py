"""What the local index answers with."""

from __future__ import annotations

from array import array
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from memserve.core.radix.nodes import ABSENT, Node
from memserve.types import BlockId, Medium, SlotId


class Locations(msgspec.Struct):
    """Places that the index does not name any more: their owners may free them."""

    hbm: list[BlockId] = msgspec.field(default_factory=list)
    dram: list[SlotId] = msgspec.field(default_factory=list)

    def add(self, medium: Medium, places: list[int]) -> None:
        """More of them, in this medium. Mutates."""
        cast(list[int], self.hbm if medium is Medium.HBM else self.dram).extend(places)


class Cursor:
    """Behind a certain block of a prompt, in the tree. Opaque.

    It stays right whatever happens to the tree, and goes stale when its block leaves the index.
    """

    __slots__ = ("depth", "key", "node")

    def __init__(self, node: Node, depth: int) -> None:
        """`node`, or one above it, has the block that ends at `depth`."""
        self.node = node.holding(depth)
        self.depth = depth
        self.key = self.node.keys[depth - 1 - self.node.start]
        """Of that block: no other one ever has it."""

    def find(self) -> Node | None:
        """The node that has the block now; None if the cursor is stale."""
        node: Node | None = self.node
        while node is not None and (self.depth <= node.start or not node.keys):
            node = node.parent  # a split has put the block there, if it is known at all
        if node is None or self.depth > node.end:
            return None
        return node if node.keys[self.depth - 1 - node.start] == self.key else None


class Insertion(msgspec.Struct):
    """What became of an insert."""

    end: Cursor | None
    """Behind the last block, for `append`. None after an insert of nothing."""
    duplicates: list[tuple[int, int]]
    """(Block of the path, the place that it has in this medium already), rising. The places that
    were given for these blocks were not taken."""


class Match:
    """The longest known prefix of a path, as it was when asked for."""

    __slots__ = ("_dram", "_hbm", "end")

    def __init__(self, hbm: array[int], dram: array[int], end: Cursor | None) -> None:
        """Its own arrays, ABSENT where a block is not in the medium: [num_blocks] each."""
        self._hbm = hbm
        self._dram = dram
        self.end = end
        """Behind the last known block; None if there is none."""

    @property
    def num_blocks(self) -> int:
        """Known blocks: each is in HBM, in DRAM, or in both."""
        return len(self._hbm)

    @property
    def hbm(self) -> npt.NDArray[np.int32]:
        """[num_blocks] block ids, ABSENT where a block is not in HBM. A copy."""
        return np.array(self._hbm, np.int32)

    @property
    def dram(self) -> npt.NDArray[np.int32]:
        """[num_blocks] slot ids, ABSENT where a block is not in DRAM. A copy."""
        return np.array(self._dram, np.int32)

    @property
    def num_hbm_prefix(self) -> int:
        """Leading blocks that are all in HBM."""
        return self._hbm.index(ABSENT) if ABSENT in self._hbm else len(self._hbm)

    def hbm_prefix(self) -> list[BlockId]:
        """Where those are."""
        return cast(list[BlockId], self._hbm[: self.num_hbm_prefix].tolist())

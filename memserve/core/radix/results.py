"""What the local index answers with."""

from __future__ import annotations

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
        if self.node.parent is None or self.depth > self.node.end:
            return None
        node = self.node.holding(self.depth)
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

    __slots__ = ("dram", "end", "hbm")

    def __init__(
        self, hbm: npt.NDArray[np.int32], dram: npt.NDArray[np.int32], end: Cursor | None
    ) -> None:
        self.hbm = hbm
        """[num_blocks] block ids, ABSENT where a block is not in HBM. Read only."""
        self.dram = dram
        """[num_blocks] slot ids, ABSENT where a block is not in DRAM. Read only."""
        self.end = end
        """Behind the last known block; None if there is none."""

    @property
    def num_blocks(self) -> int:
        """Known blocks: each is in HBM, in DRAM, or in both."""
        return len(self.hbm)

    @property
    def num_hbm_prefix(self) -> int:
        """Leading blocks that are all in HBM."""
        absent = np.flatnonzero(self.hbm == ABSENT)
        return int(absent[0]) if len(absent) else len(self.hbm)

    def hbm_prefix(self) -> list[BlockId]:
        """Where those are."""
        return cast(list[BlockId], self.hbm[: self.num_hbm_prefix].tolist())

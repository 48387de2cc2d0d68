"""SKELETON, signatures only: being filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from memserve.changes import AnyChange, Inserted
from memserve.core.tokens import Path
from memserve.types import BlockId, Medium, Namespace, SlotId

ABSENT = -1  # in the arrays of `Match` only


class Locations(msgspec.Struct):
    """Places that the index does not know any more: their owner may free them."""

    hbm: list[BlockId] = msgspec.field(default_factory=list)
    dram: list[SlotId] = msgspec.field(default_factory=list)


class Cursor:
    """A place in the tree: behind a certain block of a prompt. Survives splits; goes stale when its block leaves."""


class Insertion(msgspec.Struct):
    """What became of an insert."""

    end: Cursor
    """Behind the last block: for `append`."""
    duplicates: list[tuple[int, int]]
    """(Block of the path, place that it has in this medium already): the place given for it was not taken."""


class Match:
    """The longest known prefix of a path, as it was when asked."""

    num_blocks: int
    """Blocks of the path that are known, wherever they are (each is in HBM, in DRAM or in both)."""
    hbm: npt.NDArray[np.int32]
    """[num_blocks] block ids, ABSENT where a block is not in HBM."""
    dram: npt.NDArray[np.int32]
    """[num_blocks] slot ids, ABSENT where a block is not in DRAM."""
    end: Cursor | None
    """Behind the last known block (None if there is none)."""

    @property
    def num_hbm_prefix(self) -> int:
        """Leading blocks that are all in HBM."""
        raise NotImplementedError

    def hbm_prefix(self) -> list[BlockId]:
        """The block ids of those."""
        raise NotImplementedError


class RadixIndex:
    """Which blocks of which prompts an instance holds, and where."""

    def __init__(
        self,
        block_size: int,
        clock: Callable[[], float],
        publishes: Callable[[Namespace], bool] | None = None,
    ) -> None:
        """`publishes(namespace)`: whether its changes are recorded for `take_changes` (None: nothing is)."""

    @property
    def num_blocks(self) -> int: ...  # wherever they are; one in both media counts once
    @property
    def num_nodes(self) -> int: ...
    def num_in(self, medium: Medium) -> int: ...

    # ── look-ups, none mutates ──
    def match(self, path: Path) -> Match: ...
    def contains(self, place: int, medium: Medium) -> bool: ...
    def slot_of(self, block_id: BlockId) -> SlotId | None:
        """Where the block that lies in this HBM block also lies in DRAM. O(1)."""

    def block_of(self, slot_id: SlotId) -> BlockId | None:
        """The other way round. O(1)."""

    def oldest(self, num_blocks: int, medium: Medium, idle_s: float = 0.0) -> list[int]:
        """Up to so many places of the medium to evict: ends of prompts first, untouched for longest (at least `idle_s`: TTL), none referenced. In an order in which each can be dropped alone, with nothing below it in that medium. Does not mutate."""

    def snapshot(self) -> Iterator[Inserted]:
        """The published part as changes, parents before children."""

    def check_integrity(self) -> None:
        """Raises: AssertionError if the index contradicts itself."""

    # ── changes ──
    def insert(
        self, path: Path, places: Sequence[int], first: int = 0, medium: Medium = Medium.HBM
    ) -> Insertion:
        """Blocks `first`… of the path now lie in these HBM blocks (DRAM slots). Touches the path.

        A block that has a place in the medium keeps it. Raises: LookupError if the blocks before `first` are not in the index; ValueError for more places than blocks, or a place that holds another block.
        """

    def append(
        self, end: Cursor, packed: bytes, places: Sequence[int], medium: Medium = Medium.HBM
    ) -> Insertion:
        """Blocks with these tokens (`tokens.pack`, full blocks) follow. As `insert`, without a walk. Raises: LookupError if the cursor is stale: insert the whole path then."""

    def copied(
        self, source: Medium, sources: Sequence[int], target: Medium, targets: Sequence[int]
    ) -> list[int]:
        """Blocks that lie in these places of one medium now also lie in those of the other. Returns the targets not taken (the source left meanwhile, or the block has a place there already)."""

    def relocate(self, medium: Medium, old: int, new: int) -> None:
        """The block lies in another place of the same medium now. Raises: LookupError, ValueError."""

    def drop(self, places: Sequence[int], medium: Medium) -> Locations:
        """These places hold no block any more (unknown ones are ignored). A block without any place leaves the index, with all below it: returns the places that these others lose (not the ones named)."""

    def delete(self, path: Path, first: int = 0) -> Locations:
        """Forget blocks `first`… of the path, as far as known, and all below: returns their places."""

    def evict(self, num_blocks: int, medium: Medium, idle_s: float = 0.0) -> Locations:
        """drop(oldest(…)), returning all places that were given up (of the other medium: what was below)."""

    def touch(self, path: Path, num_blocks: int | None = None) -> None:
        """The first blocks were used now."""

    def acquire(self, path: Path, num_blocks: int | None = None) -> Cursor:
        """Keep the first blocks from being named by `oldest`, until `release` (as often). Raises: LookupError if not all are known."""

    def release(self, reference: Cursor) -> None: ...
    def clear(self) -> Locations:
        """Forget everything; returns all places."""

    def take_changes(self) -> list[AnyChange]:
        """What changed since the last call, in order."""

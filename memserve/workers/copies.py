"""Copies between HBM blocks and DRAM slots, as one process makes them for its own memory.

`DramTier` (`dram.py`) says what is copied where, and has `Copies` do it: `BlockCopies` in an
instance of one rank, `RankedCopies` (`rank_copies.py`) where every rank has a `BlockCopies` for its
part of every block. A copy goes by the name of its owner, and ends exactly once, in a `CopyEnd`
that `poll` returns; from then on it touches neither blocks nor slots.

On a GPU, copies run on two streams of their own, one for each direction of the host link, behind
what the engine had queued; on the CPU they run inside `poll`, a bounded number of bytes at a time.
Only `save` needs no `poll`: it is for blocks about to be overwritten, and on a GPU has a third
stream, which the engine's next work waits for.

Collaborators: `hostmemory.py` has the memory, `ops/blocks.py` copies, in the order of the queues
of `copy_queue.py`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from memserve.errors import StartError, TransferError
from memserve.ops.views import BlockView, Rows
from memserve.types import BlockId, SlotId
from memserve.workers.copy_queue import CopyQueue, make_queue

if TYPE_CHECKING:
    from memserve.ops.blocks import BlockOps
    from memserve.types import Geometry
    from memserve.workers.hostmemory import HostMemory

HOST_POLL_BYTES = 16 << 20
"""Copied by one `poll` on the CPU: 3 ms, where a decode step takes ten times as long."""
CUDA_POLL_BYTES = 512 << 20
"""In flight on a GPU's stream each way while the engine rests: 10 ms of the host link."""
CUDA_BUSY_BYTES = 128 << 20
"""Begun each way at most between two of the engine's steps: 2.4 ms of the host link. The step's own
small copies wait for as long, so it must be over before the step is (`bench/swap_vs_tpot.py`: with
512 MiB, a decode step of 5 ms takes 1.6 to 2.9 times as long)."""
CUDA_BUSY_BYTES_PER_S = 25e9
"""Begun each way while the engine computes: half of the host link."""
OUT_BESIDE_IN = 0.5
"""Of that rate, outwards while something comes in: requests wait for the one and not for the other,
and both at the full rate slow a decode step of 5 ms by more than a twentieth."""
HOST_PIECE_BYTES = 4 << 20
CUDA_PIECE_BYTES = 32 << 20
"""By one call: each costs the host tens of microseconds."""


class Pace(enum.Enum):
    """How copies go on, for the sake of the engine; on the CPU always in the same way."""

    FREE = "free"
    """It has nothing to do: the host link is kept full."""
    BETWEEN_STEPS = "between steps"
    """Begin as much as is over before the next step is."""
    INSIDE_STEP = "inside step"
    """The step's small copies may come at any moment: one piece at a time."""


class CopyEnd(msgspec.Struct, frozen=True):
    """A copy is over; with an `error`, its targets may hold anything."""

    owner: str
    size_bytes: int
    seconds: float
    error: str | None = None


class Copies(Protocol):
    """Who makes the copies of one instance. Owners are new, ids are good: the tier has looked."""

    num_slots: int
    """How many blocks its host memory holds."""

    def copy_out(
        self, owner: str, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId]
    ) -> None:
        """Begin to copy blocks into slots that nobody else may see until it ends."""
        ...

    def copy_in(self, owner: str, slot_ids: Sequence[SlotId], block_ids: Sequence[BlockId]) -> None:
        """Begin to copy slots into blocks that have no other user until it ends."""
        ...

    def save(
        self, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId], *, for_engine: bool
    ) -> None:
        """Copy blocks that are about to be written; whatever is asked for later comes after it.

        `for_engine`: the engine writes them, by work that it queues from now on, and that waits for
        the copy. Else this call does. Raises: TransferError.
        """
        ...

    def cancel(self, owner: str) -> None:
        """End the owner's copy soon, with an error; its `CopyEnd` says when. Unknown: ignored."""
        ...

    def poll(self, pace: Pace = Pace.FREE) -> list[CopyEnd]:
        """Let the copies go on for a bounded time; those that have ended since the last call."""
        ...

    def close(self) -> None:
        """Wait until nothing is in flight, and give the memory back. No `CopyEnd`s follow."""
        ...


class Places(msgspec.Struct, frozen=True):
    """Where one process's blocks and slots lie."""

    blocks: BlockView
    slots: BlockView


def places_of(geometry: Geometry, hbm: torch.Tensor, memory: HostMemory) -> Places:
    """As many slots as fit into `memory`; the blocks lie in `hbm`.

    Both in as few and as long rows as the blocks' layout allows; a slot has all its block's pages
    together. Raises: StartError if not even one block fits.
    """
    num_slots = slots_in(memory.size_bytes, geometry.block_bytes)
    offsets: Sequence[int] = geometry.layer_offsets
    page = geometry.page_bytes
    if geometry.has_whole_blocks:
        offsets, page = offsets[:1], geometry.block_bytes
    rows = Rows(count=1, size_bytes=page, stride=page)
    blocks = BlockView(
        hbm,
        num_blocks=geometry.num_blocks,
        block_stride=geometry.block_stride,
        layer_offsets=offsets,
        rows=rows,
    )
    slots = BlockView(
        memory.tensor,
        num_blocks=num_slots,
        block_stride=geometry.block_bytes,
        layer_offsets=[layer * page for layer in range(len(offsets))],
        rows=rows,
    )
    return Places(blocks, slots)


def slots_in(size_bytes: int, block_bytes: int) -> int:
    """How many blocks so much host memory holds. Raises: StartError for none."""
    if not (num_slots := size_bytes // block_bytes):
        raise StartError(
            f"mempool.dram_gb: {size_bytes} bytes do not hold one block of {block_bytes}"
        )
    return num_slots


class Saver:
    """Copies blocks that are about to be overwritten, on a queue of its own."""

    def __init__(self, places: Places, ops: BlockOps, queue: CopyQueue) -> None:
        self._places = places
        self._ops = ops
        self._queue = queue

    def save(
        self, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId], *, for_engine: bool
    ) -> None:
        """See `Copies`."""
        if for_engine:
            # Others wait for the copy here, and would wait for the steps in flight too. None of
            # these writes the blocks: they were queued when nobody could take them.
            self._queue.follow_engine()
        blocks, slots = self._places.blocks, self._places.slots
        self._ops.swap_blocks(blocks, slots, block_ids, slot_ids, stream=self._queue.stream)
        if for_engine:
            self._queue.hold_engine()
        else:
            self._queue.wait()

    def wait(self) -> None:
        """Return when everything is done."""
        self._queue.wait()


class _Copy(msgspec.Struct):
    owner: str
    source: BlockView
    target: BlockView
    source_ids: list[int]
    target_ids: list[int]
    started_s: float
    num_begun: int = 0
    """Blocks whose copy was at least begun."""
    in_flight: int = 0
    """Pieces begun and not done."""
    size_bytes: int = 0
    error: str | None = None

    @property
    def has_more(self) -> bool:
        return self.error is None and self.num_begun < len(self.source_ids)


class _Lane:
    """One direction: copies that have begun or wait to, and the pieces in flight."""

    def __init__(self, queue: CopyQueue) -> None:
        self.queue = queue
        self.copies: deque[_Copy] = deque()
        self.pieces: deque[tuple[Callable[[], bool], _Copy, int]] = deque()
        """Whether it is done, of which copy, how many bytes."""
        self.flying_bytes = 0
        self.allowance = 0.0
        """Bytes that may be begun while the engine computes; a piece too many is a debt."""


class BlockCopies:
    """`Copies` of this process's memory. One thread, no locks."""

    def __init__(
        self,
        geometry: Geometry,
        hbm: torch.Tensor,
        memory: HostMemory,
        ops: BlockOps,
        clock: Callable[[], float],
        *,
        poll_bytes: int | None = None,
        busy_bytes: int = CUDA_BUSY_BYTES,
        busy_bytes_per_s: float = CUDA_BUSY_BYTES_PER_S,
        piece_bytes: int | None = None,
        make_queue: Callable[[torch.device], CopyQueue] = make_queue,
    ) -> None:
        """As many slots as fit into `memory`, which is taken over; the blocks lie in `hbm`.

        `poll_bytes`: copied by one `poll`, and on a GPU in flight each way at the free pace. While
        the engine computes, `busy_bytes_per_s` are begun each way, `busy_bytes` at most between two
        steps. `piece_bytes`: by one call of `ops`.
        At least one block is copied, whatever these are.
        Raises: StartError if not even one block fits.
        """
        self.places = places_of(geometry, hbm, memory)
        self.num_slots = self.places.slots.num_blocks
        self._memory = memory
        self._ops = ops
        self._clock = clock
        self._poll_bytes = poll_bytes or (CUDA_POLL_BYTES if hbm.is_cuda else HOST_POLL_BYTES)
        self._busy_bytes = busy_bytes
        self._busy_bytes_per_s = busy_bytes_per_s
        self._polled_at = clock()
        self._piece_bytes = piece_bytes or (CUDA_PIECE_BYTES if hbm.is_cuda else HOST_PIECE_BYTES)
        self._piece_blocks = max(1, self._piece_bytes // geometry.block_bytes)
        self._in = _Lane(make_queue(hbm.device))
        self._out = _Lane(make_queue(hbm.device))
        self._saver = Saver(self.places, ops, make_queue(hbm.device))
        self._owners: dict[str, _Copy] = {}

    def copy_out(
        self, owner: str, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId]
    ) -> None:
        """See `Copies`."""
        blocks, slots = self.places.blocks, self.places.slots
        self._begin(self._out, owner, (blocks, slots), (block_ids, slot_ids))

    def copy_in(self, owner: str, slot_ids: Sequence[SlotId], block_ids: Sequence[BlockId]) -> None:
        """See `Copies`."""
        blocks, slots = self.places.blocks, self.places.slots
        self._begin(self._in, owner, (slots, blocks), (slot_ids, block_ids))

    def save(
        self, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId], *, for_engine: bool
    ) -> None:
        """See `Copies`."""
        self._saver.save(block_ids, slot_ids, for_engine=for_engine)

    def cancel(self, owner: str) -> None:
        """See `Copies`."""
        if (copy := self._owners.get(owner)) is not None and copy.error is None:
            copy.error = "cancelled"

    def poll(self, pace: Pace = Pace.FREE) -> list[CopyEnd]:
        """See `Copies`."""
        now = self._clock()
        passed_s, self._polled_at = now - self._polled_at, now
        lanes = (self._in, self._out)
        if not self._in.queue.is_beside_engine:
            budget: float = self._poll_bytes
            for lane in lanes:
                budget -= self._advance(lane, budget, self._poll_bytes, pace)
        else:  # the host link has both directions for itself
            for lane in lanes:
                is_second = lane is self._out and bool(self._in.copies)
                rate = self._busy_bytes_per_s * (OUT_BESIDE_IN if is_second else 1.0)
                self._advance_beside_engine(lane, pace, passed_s * rate)
        return [end for lane in lanes for end in self._take_ended(lane)]

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._owners)

    def close(self) -> None:
        """See `Copies`."""
        for lane in (self._in, self._out):
            lane.queue.wait()
            lane.copies.clear()
            lane.pieces.clear()
        self._saver.wait()
        self._owners.clear()
        self._memory.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _begin(
        self,
        lane: _Lane,
        owner: str,
        views: tuple[BlockView, BlockView],
        ids: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        copy = _Copy(owner, *views, list(ids[0]), list(ids[1]), self._clock())
        self._owners[owner] = copy
        lane.copies.append(copy)

    def _advance_beside_engine(self, lane: _Lane, pace: Pace, earned: float) -> None:
        """`earned`: what may be begun, if the engine computes, since the last call."""
        most = self._busy_bytes
        if pace is Pace.FREE:
            lane.allowance = most
            self._advance(lane, self._poll_bytes, self._poll_bytes, pace)
            return
        lane.allowance = min(most, lane.allowance + earned)
        limit = self._piece_bytes if pace is Pace.INSIDE_STEP else most
        lane.allowance -= self._advance(lane, lane.allowance, limit, pace)

    def _advance(self, lane: _Lane, budget: float, limit: int, pace: Pace) -> int:
        """Begin pieces, in order, of `budget` bytes and with `limit` of them in flight; one more
        may exceed either. Returns how many bytes were begun."""
        begun = 0
        self._land(lane)
        for copy in lane.copies:
            while copy.has_more and begun < budget and lane.flying_bytes < limit:
                begun += self._start_piece(lane, copy, pace)
                self._land(lane)
        return begun

    def _start_piece(self, lane: _Lane, copy: _Copy, pace: Pace) -> int:
        begin = copy.num_begun
        end = min(begin + self._piece_blocks, len(copy.source_ids))
        copy.num_begun = end
        lane.queue.follow_engine()
        try:
            size_bytes = self._ops.swap_blocks(
                copy.source,
                copy.target,
                copy.source_ids[begin:end],
                copy.target_ids[begin:end],
                stream=lane.queue.stream,
                spares_engine=pace is not Pace.FREE,
            )
        except TransferError as error:
            copy.error = str(error)
            return 0
        copy.in_flight += 1
        lane.flying_bytes += size_bytes
        lane.pieces.append((lane.queue.mark(), copy, size_bytes))
        return size_bytes

    def _land(self, lane: _Lane) -> None:
        """Account for the pieces that are done."""
        while lane.pieces and lane.pieces[0][0]():
            _, copy, size_bytes = lane.pieces.popleft()
            copy.in_flight -= 1
            copy.size_bytes += size_bytes
            lane.flying_bytes -= size_bytes

    def _take_ended(self, lane: _Lane) -> list[CopyEnd]:
        ended = [copy for copy in lane.copies if not copy.has_more and not copy.in_flight]
        for copy in ended:
            lane.copies.remove(copy)
            del self._owners[copy.owner]
        now = self._clock()
        return [CopyEnd(c.owner, c.size_bytes, now - c.started_s, c.error) for c in ended]

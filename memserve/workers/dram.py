"""The DRAM tier: host memory for KV blocks that the engine's pool has no room for, and the copies.

A slot holds one block with all its pages together, whatever the engine's layout is::

    free ──copy_out──▶ being written ──done──▶ held ──free──▶ free
      ▲                     │                   │ copy_in: read, by any number of copies at once
      └─────── failed ──────┘                   └ freed while it is read: when the last one ends

A copy goes by the name of its owner, and ends exactly once, in a `CopyEnd` that `poll` returns;
from then on it touches neither blocks nor slots. On a GPU, copies run on two streams of their own,
one for each direction of the host link, behind what the engine had queued; on the CPU they run
inside `poll`, a bounded number of bytes at a time. Only `save` needs no `poll`: it is for blocks
about to be overwritten, and on a GPU has a third stream, which the engine's next work waits for.

What the slots hold, and who keeps the blocks in place during a copy, is `swapping.py`'s matter.
Collaborators: `hostmemory.py` has the memory, `ops/blocks.py` copies, in the order of the queues
of `copy_queue.py`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from memserve.errors import OutOfBlocksError, StartError, TransferError
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
"""In flight on a GPU's stream at least: 10 ms of the host link, about two decode steps. It takes 1%
of HBM's bandwidth meanwhile, and a few multiprocessors at most."""
CUDA_BYTES_PER_S = 150e9
"""In flight for each second between two polls. What begins at a poll starts when the step that runs
then has ended, and has to last until the step after it has: two and a half times the host link."""
HOST_PIECE_BYTES = 4 << 20
CUDA_PIECE_BYTES = 32 << 20
"""By one call: each costs the host tens of microseconds."""


class CopyEnd(msgspec.Struct, frozen=True):
    """A copy is over. With an `error`, the slots of a `copy_out` are free again."""

    owner: str
    size_bytes: int
    seconds: float
    error: str | None = None


class _Copy(msgspec.Struct):
    owner: str
    source: BlockView
    target: BlockView
    source_ids: list[int]
    target_ids: list[int]
    started_s: float
    written: list[SlotId] = []
    """The slots that it fills, and that nobody else may see."""
    read: list[SlotId] = []
    """The slots that it empties."""
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


class DramTier:
    """The slots of one instance and all copies from and to them. One thread, no locks."""

    def __init__(
        self,
        geometry: Geometry,
        hbm: torch.Tensor,
        memory: HostMemory,
        ops: BlockOps,
        clock: Callable[[], float],
        *,
        poll_bytes: int | None = None,
        bytes_per_s: float | None = None,
        piece_bytes: int | None = None,
        make_queue: Callable[[torch.device], CopyQueue] = make_queue,
    ) -> None:
        """As many slots as fit into `memory`, which is taken over; the blocks lie in `hbm`.

        `poll_bytes`: copied by one `poll`, and on a GPU in flight each way, or as much as
        `bytes_per_s` makes of the time since the poll before; `piece_bytes`: by one call of `ops`.
        At least one block is copied, whatever these are.
        Raises: StartError if not even one block fits.
        """
        num_slots = memory.size_bytes // geometry.block_bytes
        if not num_slots:
            raise StartError(
                f"mempool.dram_gb: {memory.size_bytes} bytes do not hold one block"
                f" of {geometry.block_bytes}"
            )
        self._memory = memory
        self._ops = ops
        self._clock = clock
        self.num_slots = num_slots
        self.slot_bytes = geometry.block_bytes
        self._blocks, self._slots = _views(geometry, hbm, memory.tensor, num_slots)
        self._poll_bytes = poll_bytes or (CUDA_POLL_BYTES if hbm.is_cuda else HOST_POLL_BYTES)
        if bytes_per_s is None:
            bytes_per_s = CUDA_BYTES_PER_S if hbm.is_cuda else 0.0
        self._bytes_per_s = bytes_per_s
        self._polled_at = clock()
        piece_bytes = piece_bytes or (CUDA_PIECE_BYTES if hbm.is_cuda else HOST_PIECE_BYTES)
        self._piece_blocks = max(1, piece_bytes // geometry.block_bytes)
        self._in = _Lane(make_queue(hbm.device))
        self._out = _Lane(make_queue(hbm.device))
        self._urgent = make_queue(hbm.device)
        self._owners: dict[str, _Copy] = {}
        self._free = [SlotId(slot) for slot in reversed(range(num_slots))]
        self._held: set[SlotId] = set()
        self._written: set[SlotId] = set()
        self._readers: Counter[SlotId] = Counter()
        self._doomed: set[SlotId] = set()
        """Freed, but still being read."""

    # ── copies ────────────────────────────────────────────────────────────────────────────────

    def copy_out(self, owner: str, block_ids: Sequence[BlockId]) -> list[SlotId]:
        """Begin to copy blocks into free slots, which are the caller's when it ends well.

        Raises: OutOfBlocksError; ValueError if the owner has a copy already.
        """
        self._require_new(owner)
        slot_ids = self._take_slots(len(block_ids))
        self._written.update(slot_ids)
        copy = _Copy(
            owner,
            self._blocks,
            self._slots,
            list(block_ids),
            list(slot_ids),
            self._clock(),
            written=slot_ids,
        )
        self._begin(self._out, copy)
        return list(slot_ids)

    def copy_in(self, owner: str, slot_ids: Sequence[SlotId], block_ids: Sequence[BlockId]) -> None:
        """Begin to copy held slots into blocks, which must have no other user until it ends.

        The slots may be freed meanwhile; they keep their contents until then.
        Raises: ValueError if the owner has a copy already, or a slot is not held.
        """
        self._require_new(owner)
        if unknown := set(slot_ids) - self._held:
            raise ValueError(f"the DRAM slots {sorted(unknown)} hold nothing")
        self._readers.update(slot_ids)
        copy = _Copy(
            owner,
            self._slots,
            self._blocks,
            list(slot_ids),
            list(block_ids),
            self._clock(),
            read=list(slot_ids),
        )
        self._begin(self._in, copy)

    def save(self, block_ids: Sequence[BlockId], *, for_engine: bool) -> list[SlotId]:
        """Copy blocks that somebody is about to write into free slots, which are held at once.

        `for_engine`: the engine writes them, by work that it queues from now on, and that waits for
        the copy. Else this call does. Raises: OutOfBlocksError, TransferError (nothing is held).
        """
        slot_ids = self._take_slots(len(block_ids))
        self._urgent.follow_engine()
        try:
            self._ops.swap_blocks(
                self._blocks, self._slots, block_ids, slot_ids, stream=self._urgent.stream
            )
        except TransferError:
            self._free += slot_ids
            raise
        if for_engine:
            self._urgent.hold_engine()
        else:
            self._urgent.wait()
        self._held.update(slot_ids)
        return slot_ids

    def cancel(self, owner: str) -> None:
        """End the owner's copy soon, with an error; its `CopyEnd` says when. Unknown: ignored."""
        if (copy := self._owners.get(owner)) is not None and copy.error is None:
            copy.error = "cancelled"

    def poll(self) -> list[CopyEnd]:
        """Let the copies go on for a bounded time; those that have ended since the last call."""
        now = self._clock()
        limit = max(self._poll_bytes, int((now - self._polled_at) * self._bytes_per_s))
        self._polled_at = now
        budget = limit
        ended: list[CopyEnd] = []
        for lane in (self._in, self._out):
            if lane.queue.stream is not None:
                budget = limit  # the host link has both directions for itself
            budget = self._advance(lane, budget, limit)
            ended += self._take_ended(lane)
        return ended

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._owners)

    # ── slots ─────────────────────────────────────────────────────────────────────────────────

    @property
    def num_free(self) -> int:
        """Slots that a `copy_out` can have now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that hold a block, are being written, or are still being read."""
        return self.num_slots - len(self._free)

    def free(self, slot_ids: Sequence[SlotId]) -> None:
        """Give up held slots. Raises: ValueError for a slot that is not held."""
        if (unknown := set(slot_ids) - self._held) or len(set(slot_ids)) != len(slot_ids):
            raise ValueError(f"the DRAM slots {sorted(unknown) or list(slot_ids)} are not all held")
        self._held.difference_update(slot_ids)
        for slot_id in slot_ids:
            if self._readers[slot_id]:
                self._doomed.add(slot_id)
            else:
                self._free.append(slot_id)

    def held(self) -> set[SlotId]:
        """The slots that hold a block for the caller (a new set)."""
        return set(self._held)

    def check_integrity(self) -> list[str]:
        """What is wrong with the slots' accounting, as text. Does not mutate."""
        problems: list[str] = []
        states = [*self._free, *self._held, *self._written, *self._doomed]
        if sorted(states) != list(range(self.num_slots)):
            twice = [slot for slot, count in Counter(states).items() if count > 1]
            lost = set(range(self.num_slots)).difference(states)
            problems.append(f"DRAM slots in two states: {twice}; in none: {sorted(lost)}")
        written = {slot for copy in self._owners.values() for slot in copy.written}
        if written != self._written:
            problems.append(f"no copy fills the DRAM slots {sorted(self._written ^ written)}")
        readers = Counter(slot for copy in self._owners.values() for slot in copy.read)
        if readers != +self._readers:
            problems.append(f"DRAM slots are read {dict(readers)}, counted {dict(self._readers)}")
        if idle := self._doomed - set(readers):
            problems.append(f"nobody reads the DRAM slots {sorted(idle)}, which are not free")
        return problems

    def close(self) -> None:
        """Wait until nothing is in flight, and give the memory back. No `CopyEnd`s follow."""
        for lane in (self._in, self._out):
            lane.queue.wait()
            lane.copies.clear()
            lane.pieces.clear()
        self._urgent.wait()
        self._owners.clear()
        self._memory.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _require_new(self, owner: str) -> None:
        if owner in self._owners:
            raise ValueError(f"{owner} has a copy under way")

    def _take_slots(self, count: int) -> list[SlotId]:
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} DRAM slots asked for, {len(self._free)} of {self.num_slots} free"
            )
        return [self._free.pop() for _ in range(count)]

    def _begin(self, lane: _Lane, copy: _Copy) -> None:
        self._owners[copy.owner] = copy
        lane.copies.append(copy)

    def _advance(self, lane: _Lane, budget: int, limit: int) -> int:
        """Begin pieces, in order, while there is room for them; returns what is left of it."""
        self._land(lane)
        for copy in lane.copies:
            while copy.has_more and budget > 0 and lane.flying_bytes < limit:
                budget -= self._start_piece(lane, copy)
                self._land(lane)
        return budget

    def _start_piece(self, lane: _Lane, copy: _Copy) -> int:
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
            self._end(copy)
        now = self._clock()
        return [CopyEnd(c.owner, c.size_bytes, now - c.started_s, c.error) for c in ended]

    def _end(self, copy: _Copy) -> None:
        del self._owners[copy.owner]
        self._written.difference_update(copy.written)
        if copy.error is None:
            self._held.update(copy.written)
        else:
            self._free += copy.written
        self._readers.subtract(copy.read)
        for slot_id in copy.read:
            if not self._readers[slot_id]:
                del self._readers[slot_id]
                if slot_id in self._doomed:
                    self._doomed.remove(slot_id)
                    self._free.append(slot_id)


def _views(
    geometry: Geometry, hbm: torch.Tensor, dram: torch.Tensor, num_slots: int
) -> tuple[BlockView, BlockView]:
    """Of the blocks and of the slots: in as few and as long rows as the blocks' layout allows."""
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
        dram,
        num_blocks=num_slots,
        block_stride=geometry.block_bytes,
        layer_offsets=[layer * page for layer in range(len(offsets))],
        rows=rows,
    )
    return blocks, slots

"""The copies of an instance of several ranks: each rank copies its part, as the driver says.

Slots mean the same on all ranks, as blocks do. A copy has ended when it has ended on every rank,
with all bytes or the first error; then the others are told to stop. What the engine is about to
overwrite is saved by the step itself: it goes to the ranks with the step's own message, so that
neither the driver nor the engine waits for an answer. If a rank cannot save it, the step fails
there, and the instance ends; nothing else could take back what the index knows already.

Collaborators: `dram.py` has the slots; `rank_group.py` the pipes; `rank_dram.py` is a rank's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from memserve.errors import RankLostError, StartError, TransferError
from memserve.types import BlockId, Geometry, SlotId
from memserve.workers.copies import CopyEnd, Pace, slots_in
from memserve.workers.hostmemory import require_available
from memserve.workers.rank_messages import (
    CancelCopy,
    Copied,
    CopyBlocks,
    DramOpened,
    DramOrder,
    DramReport,
    OpenDram,
    SaveBlocks,
    Saved,
    Saving,
    StepOrders,
)

if TYPE_CHECKING:
    from memserve.workers.rank_group import RankGroup

_MEMORY_BYTES_PER_S = 1e9
"""Clearing and pinning host memory is faster than this."""


class _Job(msgspec.Struct):
    started_s: float
    waits_for: set[int]
    """Ranks."""
    size_bytes: int = 0
    error: str | None = None


class RankedCopies:
    """`Copies` by all ranks. One thread makes all calls."""

    def __init__(self, group: RankGroup, geometry: Geometry, size_bytes: int) -> None:
        """Have every rank make its share of `size_bytes` of host memory.

        `geometry`: of any rank. Raises: StartError.
        """
        self._group = group
        self._ranks = range(geometry.tp_size)
        self.num_slots = slots_in(size_bytes, geometry.block_bytes * geometry.tp_size)
        share = self.num_slots * geometry.block_bytes
        self._jobs: dict[str, _Job] = {}
        self._savings: list[Saving] = []
        """For the step that is being made."""
        self._num_steps = 0
        self._answers: dict[int, str | None] = {}
        """To the question that is open: rank → what went wrong there."""
        group.dram = self
        require_available(size_bytes)
        patience_s = group.answer_s + share / _MEMORY_BYTES_PER_S
        for error in self._ask(OpenDram(share), patience_s).values():
            if error is not None:
                raise StartError(error)

    def step(self) -> StepOrders:
        """What the engine's next step has to bring to the ranks. Every step has to."""
        self._num_steps += 1
        savings, self._savings = self._savings, []
        return StepOrders(self._num_steps, savings)

    # ── Copies ────────────────────────────────────────────────────────────────────────────────

    def copy_out(
        self, owner: str, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId]
    ) -> None:
        """See `Copies`."""
        self._begin(owner, block_ids, slot_ids, is_inwards=False)

    def copy_in(self, owner: str, slot_ids: Sequence[SlotId], block_ids: Sequence[BlockId]) -> None:
        """See `Copies`."""
        self._begin(owner, block_ids, slot_ids, is_inwards=True)

    def save(
        self, block_ids: Sequence[BlockId], slot_ids: Sequence[SlotId], *, for_engine: bool
    ) -> None:
        """See `Copies`. Raises: RankLostError."""
        if for_engine:
            self._savings.append(Saving(list(block_ids), list(slot_ids)))
            return
        order = SaveBlocks(list(block_ids), list(slot_ids), self._num_steps)
        for rank, error in self._ask(order, self._group.answer_s).items():
            if error is not None:
                raise TransferError(f"rank {rank}: {error}")

    def cancel(self, owner: str) -> None:
        """See `Copies`."""
        if (job := self._jobs.get(owner)) is not None:
            self._fail(owner, job, "cancelled")

    def poll(self, pace: Pace = Pace.FREE) -> list[CopyEnd]:
        """See `Copies`; the ranks have paces of their own.

        Raises: RankLostError, if a rank does not say that a copy has ended.
        """
        if not self._jobs:
            return []
        self._group.listen_to_all()
        now, patience_s = self._group.clock(), self._group.answer_s
        ended = {owner: job for owner, job in self._jobs.items() if not job.waits_for}
        for owner in ended:
            del self._jobs[owner]
        for job in self._jobs.values():
            if now > job.started_s + patience_s:
                ranks = sorted(job.waits_for)
                raise RankLostError(f"ranks {ranks} have not ended a copy in {patience_s:g} s")
        return [
            CopyEnd(owner, job.size_bytes, now - job.started_s, job.error)
            for owner, job in ended.items()
        ]

    def close(self) -> None:
        """See `Copies`; the ranks give their memory back when they end."""
        for owner in self._jobs:
            self.cancel(owner)
        self._group.wait(lambda: not any(job.waits_for for job in self._jobs.values()))
        self._jobs.clear()

    # ── what the group has heard ──────────────────────────────────────────────────────────────

    def heard(self, rank: int, report: DramReport) -> None:
        """From its agent."""
        match report:
            case DramOpened() | Saved():
                self._answers[rank] = report.error
            case Copied():
                self._ended(rank, report.end)

    def lost(self, rank: int, reason: str) -> None:
        """The rank is gone: nothing reads or writes there any more."""
        self._answers.setdefault(rank, reason)
        for owner, job in self._jobs.items():
            if rank in job.waits_for:
                job.waits_for.remove(rank)
                self._fail(owner, job, reason)

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _begin(
        self,
        owner: str,
        block_ids: Sequence[BlockId],
        slot_ids: Sequence[SlotId],
        *,
        is_inwards: bool,
    ) -> None:
        self._jobs[owner] = _Job(self._group.clock(), set(self._ranks))
        order = CopyBlocks(owner, is_inwards, list(block_ids), list(slot_ids), self._num_steps)
        self._tell(self._ranks, order)

    def _ended(self, rank: int, end: CopyEnd) -> None:
        job = self._jobs.get(end.owner)
        if job is None:
            return  # given up when the tier was closed
        job.waits_for.remove(rank)
        job.size_bytes += end.size_bytes
        if end.error is not None:
            self._fail(end.owner, job, f"rank {rank}: {end.error}")

    def _fail(self, owner: str, job: _Job, reason: str) -> None:
        """The copy has failed as a whole, but some ranks may still be at it."""
        if job.error is None:
            job.error = reason
            self._tell(job.waits_for, CancelCopy(owner))

    def _ask(self, order: OpenDram | SaveBlocks, patience_s: float) -> dict[int, str | None]:
        """Each rank's answer. Raises: RankLostError if one does not come in time."""
        self._answers = {}
        self._tell(self._ranks, order)
        self._group.wait(lambda: len(self._answers) == len(self._ranks), patience_s)
        if missing := [rank for rank in self._ranks if rank not in self._answers]:
            what = "made host memory" if isinstance(order, OpenDram) else "saved blocks"
            raise RankLostError(f"ranks {missing} have not {what} in {patience_s:g} s")
        return self._answers

    def _tell(self, ranks: Sequence[int] | set[int], order: DramOrder) -> None:
        for rank in list(ranks):
            self._group.tell(rank, order)

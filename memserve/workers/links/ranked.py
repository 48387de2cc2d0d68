"""One link made of several: the ranks of two instances exchange their parts side by side.

    RankedLink ─┬─ lane: own rank 0 → peer's rank 0     one `Link` for each pair of ranks that has
                ├─ lane: own rank 1 → peer's rank 0     heads in common (`heads.routes_to`)
                └─ …

A lane is a rank-level link of this process (an instance of one rank), or stands for one in a rank's
process (`workers/rank_group.py`). Block ids mean the same on all ranks of an instance, so every
lane is told the same. A transfer has ended when it has ended on all lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from memserve.types import BlockId, TransferId
from memserve.workers.links.base import Completion, Link


class _Job(msgspec.Struct):
    transfer_id: TransferId
    started_s: float
    waits_for: set[int]
    """Lanes."""
    size_bytes: int = 0
    error: str | None = None


class RankedLink:
    """Merges its lanes: one completion of a transfer, with the bytes of all and the first error."""

    def __init__(
        self, lanes: Sequence[Link], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Takes over the lanes: at least one, all of one kind."""
        self._lanes = list(lanes)
        self._clock = clock
        self._jobs: list[_Job] = []

    @property
    def kind(self) -> str:
        return self._lanes[0].kind

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        self._jobs.append(_Job(transfer_id, self._clock(), set(range(len(self._lanes)))))
        for lane in self._lanes:
            lane.send(transfer_id, source_ids, target_ids)

    def poll(self) -> list[Completion]:
        """An error on one lane cancels the others: the transfer has failed as a whole."""
        if not self._jobs:
            return []
        for number, lane in enumerate(self._lanes):
            for completion in lane.poll():
                self._merge(number, completion)
        done = [job for job in self._jobs if not job.waits_for]
        self._jobs = [job for job in self._jobs if job.waits_for]
        now = self._clock()
        return [
            Completion(job.transfer_id, job.size_bytes, now - job.started_s, job.error)
            for job in done
        ]

    def cancel(self, transfer_id: TransferId) -> None:
        """Whatever the lanes have done by the time at which they hear of it."""
        for job in self._jobs:
            if job.transfer_id == transfer_id:
                job.error = job.error or "cancelled"
                self._cancel_rest(job)

    def close(self, *, is_lost: bool = False) -> None:
        self._jobs.clear()
        for lane in self._lanes:
            lane.close(is_lost=is_lost)

    def _merge(self, number: int, completion: Completion) -> None:
        job = next(
            job
            for job in self._jobs
            if job.transfer_id == completion.transfer_id and number in job.waits_for
        )
        job.waits_for.remove(number)
        job.size_bytes += completion.size_bytes
        if completion.error is not None and job.error is None:
            job.error = completion.error
            self._cancel_rest(job)

    def _cancel_rest(self, job: _Job) -> None:
        for number in job.waits_for:
            self._lanes[number].cancel(job.transfer_id)

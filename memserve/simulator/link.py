"""A link between two simulated instances: takes time, moves nothing.

Each instance has one way out and one way in, at the bandwidth of the profile's link; what goes to
or comes from several peers at once takes turns. A link of a kind in `COPYING_LINKS` is worked by
the sender's own thread, which computes nothing meanwhile; others work beside it, and their end is
noticed when a command would be served. Collaborators: `workers/transfer.py` uses it as any other
link; `worker.py` makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from memserve.simulator.clock import EventQueue
from memserve.types import COPYING_LINKS, BlockId, TransferId
from memserve.workers.links.base import Completion


class Ways:
    """Until when an instance's way out and its way in are taken, and its thread by copying."""

    def __init__(self) -> None:
        self.out_until = 0.0
        self.in_until = 0.0
        self.copies_until = 0.0


class _Job(msgspec.Struct):
    transfer_id: TransferId
    size_bytes: int
    begun: float
    end: float
    error: str | None = None


class SimulatedLink:
    """One direction to one peer. See `links.base.Link` for the contract."""

    def __init__(
        self,
        kind: str,
        block_bytes: int,
        seconds: Callable[[int, str], float],
        source: Ways,
        target: Ways,
        queue: EventQueue,
        wake: Callable[[], None],
    ) -> None:
        """`seconds(size_bytes, kind)`: on an idle link. `wake` is called when something ended."""
        self.kind = kind
        self._block_bytes = block_bytes
        self._seconds = seconds
        self._source = source
        self._target = target
        self._queue = queue
        self._wake = wake
        self._jobs: list[_Job] = []

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        """Takes both ways from the moment that both are free."""
        now = self._queue.now()
        size_bytes = len(source_ids) * self._block_bytes
        begin = max(now, self._source.out_until, self._target.in_until)
        end = begin + self._seconds(size_bytes, self.kind)
        self._source.out_until = self._target.in_until = end
        if self.kind in COPYING_LINKS:
            self._source.copies_until = end
        self._jobs.append(_Job(transfer_id, size_bytes, now, end))
        self._queue.at(end, self._wake)

    def poll(self) -> list[Completion]:
        """What has ended by now."""
        if not self._jobs:
            return []
        now = self._queue.now()
        ended = [job for job in self._jobs if job.end <= now or job.error is not None]
        if not ended:
            return []
        self._jobs = [job for job in self._jobs if job not in ended]
        return [
            Completion(
                job.transfer_id,
                0 if job.error is not None else job.size_bytes,
                now - job.begun,
                job.error,
            )
            for job in ended
        ]

    def cancel(self, transfer_id: TransferId) -> None:
        """Its completion comes with the next `poll`; the ways stay taken."""
        for job in self._jobs:
            if job.transfer_id == transfer_id:
                job.error = "cancelled"
                self._queue.after(0.0, self._wake)

    def close(self, *, is_lost: bool = False) -> None:
        """No completions follow."""
        self._jobs.clear()

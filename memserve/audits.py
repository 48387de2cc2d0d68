"""Questions to instances about their own accounting, and the answers that have not come yet.

Collaborator: `cluster.py` knows whom to ask, passes the answers on, and says who is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from memserve.core.vocabulary import Seat
from memserve.messages import AnyCommand, Audit, Audited
from memserve.types import InstanceId


class Audits:
    """Of one cluster; several may go on at a time."""

    def __init__(self, send: Callable[[Seat, AnyCommand], None], timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._open: dict[tuple[int, InstanceId], asyncio.Future[Audited]] = {}
        self._last_id = 0

    async def ask(self, seats: Iterable[Seat]) -> dict[InstanceId, Audited | None]:
        """Each one's answer; None if it is lost before, or the time is over."""
        self._last_id += 1
        audit_id = self._last_id
        asked: dict[InstanceId, asyncio.Future[Audited]] = {}
        for seat in seats:
            asked[seat.instance] = asyncio.get_running_loop().create_future()
            self._open[audit_id, seat.instance] = asked[seat.instance]
            self._send(seat, Audit(epoch=seat.epoch, audit_id=audit_id))
        if asked:
            await asyncio.wait(asked.values(), timeout=self._timeout_s)
        for instance in asked:
            self._open.pop((audit_id, instance), None)
        return {
            instance: answer.result() if answer.done() and not answer.cancelled() else None
            for instance, answer in asked.items()
        }

    def answered(self, event: Audited) -> None:
        """Answers that come too late are dropped."""
        waiter = self._open.pop((event.audit_id, event.instance), None)
        if waiter is not None and not waiter.done():
            waiter.set_result(event)

    def lost(self, instance: InstanceId) -> None:
        """It will not answer any more."""
        for key in [key for key in self._open if key[1] == instance]:
            self._open.pop(key).cancel()

"""The driver's view of its ranks: the links that they have to peers, and whether they live.

The driver is the process of an instance with tensor parallelism: engine loop, pool and transfers
run there, as in an instance of one rank, but the KV lies in the ranks' processes. What the driver
wants of a link goes to the ranks' agents (`rank_agent.py`) as messages, and `poll` reads what they
have answered: a transfer never keeps the engine loop waiting. Opening and closing a link do, for
the handshake needs the answer and the caller frees memory after `close`; both have a deadline.

A rank that dies ends its transfers with an error, and takes the instance with it (`RankWatch`): the
model cannot be computed without it. So does a rank that does not answer in time, since nobody knows
then what it still reads (RankLostError).

Collaborators: `hosts.py` makes the group before vLLM forks the ranks; `links/choice.py` opens links
through it; `links/ranked.py` makes one link of the lanes; `rank_copies.py` has the DRAM tier's
copies made over the same pipes.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Protocol

from memserve.errors import RankLostError, StartError, TransferError
from memserve.types import BlockId, TransferId
from memserve.workers.links.base import Completion, Link
from memserve.workers.links.heads import Route
from memserve.workers.rank_messages import (
    CancelSend,
    Closed,
    CloseLink,
    Copied,
    DramOpened,
    DramReport,
    Ended,
    Failed,
    Joined,
    Opened,
    OpenLink,
    Order,
    Report,
    Saved,
    SendBlocks,
    get_report,
    put,
)

ANSWER_S = 60.0
"""No copy takes so long, and no opening of a link, however cold."""


class DramListener(Protocol):
    """Who is told what ranks say of the DRAM tier: `rank_copies.RankedCopies`."""

    def heard(self, rank: int, report: DramReport) -> None: ...
    def lost(self, rank: int, reason: str) -> None: ...


class RankLane:
    """A `Link` that is in a rank's process. Made by `RankGroup.open`."""

    def __init__(self, group: RankGroup, rank: int, number: int, kind: str) -> None:
        self._group = group
        self._number = number
        self._kind = kind
        self._under_way: dict[TransferId, float] = {}
        """Transfer → when it was sent."""
        self._ended: list[Completion] = []
        self.rank = rank
        self.is_settled = False
        """Whether the answer to its opening has come."""
        self.is_closed = False
        self.error: str | None = None
        """Why it could not be opened, or why it works no more."""

    @property
    def kind(self) -> str:
        return self._kind

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        self._under_way[transfer_id] = self._group.clock()
        if self.is_closed:
            self.fail(self.error or "the link is closed")
            return
        order = SendBlocks(self._number, transfer_id, list(source_ids), list(target_ids))
        self._group.tell(self.rank, order)

    def poll(self) -> list[Completion]:
        """Raises: RankLostError, if the rank does not say that a transfer has ended."""
        if self._under_way:
            self._group.listen(self.rank)
        ended, self._ended = self._ended, []
        oldest_s = min(self._under_way.values(), default=None)
        if oldest_s is not None and self._group.clock() > oldest_s + self._group.answer_s:
            seconds = self._group.answer_s
            raise RankLostError(f"rank {self.rank} has not ended a transfer in {seconds:g} s")
        return ended

    def cancel(self, transfer_id: TransferId) -> None:
        self._group.tell(self.rank, CancelSend(self._number, transfer_id))

    def close(self, *, is_lost: bool = False) -> None:
        """Raises: RankLostError, if the rank does not say that it has closed the link."""
        self._group.close_lane(self._number, is_lost=is_lost)
        self._under_way.clear()
        self._ended.clear()

    # What the group has heard of it.

    def ended(self, completion: Completion) -> None:
        if self._under_way.pop(completion.transfer_id, None) is not None:
            self._ended.append(completion)

    def fail(self, reason: str) -> None:
        """The rank is gone: nothing reads or writes there any more."""
        self.error = reason
        self.is_settled = self.is_closed = True
        self._ended += [Completion(t, 0, 0.0, reason) for t in self._under_way]
        self._under_way.clear()


class RankGroup:
    """The pipes to all ranks, and the lanes that they have open. One thread makes all calls."""

    def __init__(
        self,
        connections: Sequence[Connection],
        *,
        answer_s: float = ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes over the connections: the driver's ends, in the order of the ranks.

        `answer_s`: how long a rank may take for anything.
        """
        self._connections = list(connections)
        self._lost: dict[int, str] = {}
        self._lanes: dict[int, RankLane] = {}
        self._num_opened = 0
        self._joined: dict[int, Joined] = {}
        self._failure: str | None = None
        self.answer_s = answer_s
        self.clock = clock
        self.dram: DramListener | None = None
        """The instance's DRAM tier, if it has one."""

    def join(self) -> list[Joined]:
        """What each rank says of its KV cache, once the engine is built. Raises: StartError."""
        self.wait(lambda: len(self._joined) == len(self._connections) or bool(self._lost))
        if self._lost or self.failure:
            raise StartError(self.failure or next(iter(self._lost.values())))
        if len(self._joined) < len(self._connections):
            missing = [r for r in range(len(self._connections)) if r not in self._joined]
            raise StartError(
                f"ranks {missing} have no KV cache {self.answer_s:g} s after their start"
            )
        return [self._joined[rank] for rank in range(len(self._connections))]

    @property
    def failure(self) -> str | None:
        """What a rank could say of a start that has failed; None: nothing."""
        self.listen_to_all()
        return self._failure

    def open(self, kind: str, routes: Sequence[Route]) -> list[Link]:
        """A lane for each route, opened by all ranks at the same time. Raises: TransferError."""
        lanes = [self._start_opening(kind, route) for route in routes]
        self.wait(lambda: all(lane.is_settled for lane in lanes))
        for lane in lanes:
            if not lane.is_settled:
                lane.error = f"no answer in {self.answer_s:g} s"
        failed = next((lane for lane in lanes if lane.error is not None), None)
        if failed is not None:
            for lane in lanes:
                lane.close()
            raise TransferError(f"rank {failed.rank}: {failed.error}")
        return list(lanes)

    def close_lane(self, number: int, *, is_lost: bool) -> None:
        """Raises: RankLostError."""
        lane = self._lanes.get(number)
        if lane is None:
            return
        self.tell(lane.rank, CloseLink(number, is_lost))
        self.wait(lambda: lane.is_closed)
        del self._lanes[number]
        if not lane.is_closed:
            raise RankLostError(f"rank {lane.rank} has not closed a link in {self.answer_s:g} s")

    def tell(self, rank: int, order: Order) -> None:
        """Give an order; one to a rank that is gone fails its lanes."""
        if rank in self._lost:
            self._lose(rank, self._lost[rank])
            return
        try:
            put(self._connections[rank], order)
        except OSError:
            self._lose(rank, f"rank {rank} is gone")

    def listen(self, rank: int) -> None:
        """Take what a rank has said; waits for nothing."""
        while rank not in self._lost and self._connections[rank].poll(0):
            self._receive(rank)

    def listen_to_all(self) -> None:
        """As `listen`, to every rank."""
        alive = [c for rank, c in enumerate(self._connections) if rank not in self._lost]
        ready = wait(alive, 0)  # one look at all of them
        for rank, connection in enumerate(self._connections):
            if connection in ready:
                self.listen(rank)

    def wait(self, is_done: Callable[[], bool], patience_s: float | None = None) -> None:
        """Listen until it is done, or so long, `answer_s` by default; the caller looks which."""
        deadline = self.clock() + (self.answer_s if patience_s is None else patience_s)
        self.listen_to_all()
        while not is_done() and (left_s := deadline - self.clock()) > 0:
            alive = [c for rank, c in enumerate(self._connections) if rank not in self._lost]
            if not alive:
                return
            wait(alive, left_s)
            self.listen_to_all()

    def close(self) -> None:
        """The agents end when they see it. All lanes must be closed."""
        for connection in self._connections:
            connection.close()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _start_opening(self, kind: str, route: Route) -> RankLane:
        self._num_opened += 1
        lane = RankLane(self, route.own_rank, self._num_opened, kind)
        self._lanes[self._num_opened] = lane
        self.tell(route.own_rank, OpenLink(self._num_opened, kind, route.peer))
        return lane

    def _receive(self, rank: int) -> None:
        try:
            report = get_report(self._connections[rank])
        except (EOFError, OSError):
            self._lose(rank, f"rank {rank} is gone")
            return
        self._note(rank, report)

    def _note(self, rank: int, report: Report) -> None:
        match report:
            case Joined():
                self._joined[rank] = report
            case Failed():
                self._failure = self._failure or f"rank {rank}: {report.message}"
            case Opened() | Ended() | Closed() if report.link not in self._lanes:
                pass  # given up meanwhile
            case Opened():
                lane = self._lanes[report.link]
                lane.is_settled, lane.error = True, report.error
            case Ended():
                self._lanes[report.link].ended(report.completion)
            case Closed():
                self._lanes[report.link].is_closed = True
            case DramOpened() | Copied() | Saved():
                assert self.dram is not None, "only a tier asks for it"
                self.dram.heard(rank, report)

    def _lose(self, rank: int, reason: str) -> None:
        self._lost[rank] = reason
        for lane in self._lanes.values():
            if lane.rank == rank:
                lane.fail(reason)
        if self.dram is not None:
            self.dram.lost(rank, reason)


class RankWatch:
    """Calls `on_death(rank)` from a thread of its own, once, when the first rank's process ends."""

    def __init__(self, pids: Sequence[int], on_death: Callable[[int], None]) -> None:
        """`pids`: of living children of this process, in the order of the ranks."""
        self._on_death = on_death
        self._ranks = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From now on ranks may end."""
        os.write(self._wake_write, b"x")
        self._thread.join()
        for fd in (*self._ranks, self._wake_read, self._wake_write):
            os.close(fd)

    def _run(self) -> None:
        poller = select.poll()
        for fd in (*self._ranks, self._wake_read):
            poller.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll()}
        if self._wake_read not in ready:
            self._on_death(self._ranks[min(ready)])

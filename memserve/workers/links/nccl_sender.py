"""The sending end of one direction: the thread behind an `NcclLink`.

    send ─▶ inbox ─Announce, chunks─▶ pending ─Done─▶ completed
      └── the thread rests ─────────────▶┘
                                         └ the peer is gone, NCCL fails, nothing moves:
                                           abort, wait for the peer's end, all fail

A failed transfer completes only when the receiver has closed its end, which it does once it writes
no block any more: whoever frees those blocks then, frees them for good. A way that is broken is
made anew by the next transfer, with another communicator.

Collaborators: `nccl.py` owns the thread; `nccl_receiver.py` is the other end.
"""

from __future__ import annotations

import logging
import socket
import threading
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import msgspec

from memserve.errors import TransferError
from memserve.ops.views import BlockView
from memserve.types import TransferId
from memserve.workers.links.base import Completion, Rank, RankPeer
from memserve.workers.links.nccl_pipe import Pipe
from memserve.workers.links.nccl_wire import Announce, Done, Hello, Refusal, Welcome, Wire
from memserve.workers.links.nccl_worker import ClosingError, LinkThread, Machinery

logger = logging.getLogger(__name__)

_LISTEN_S = 0.001
"""Between two looks at the communicator while the peer's `Done` is awaited; that ends the wait."""
_WARM_UP = TransferId("")
"""Nobody else's, and completes for nobody."""


class Job(msgspec.Struct):
    """One transfer, from `send` to its completion."""

    transfer_id: TransferId
    source_ids: array[int]
    target_ids: array[int]
    started_s: float
    size_bytes: int = 0
    error: str | None = None


class Sender(LinkThread):
    """Sends blocks of `view` to one rank of a peer."""

    def __init__(
        self, own: Rank, view: BlockView, peer: RankPeer, path: str, machinery: Machinery
    ) -> None:
        """`path`: of the socket on which the peer accepts."""
        super().__init__(f"nccl to {peer.peer}", machinery)
        self._own = own
        self._view = view
        self._peer = peer
        self._path = path
        self._schedule = self._settings.schedule(view.block_bytes, view.num_blocks)
        self._inbox: deque[Job] = deque()
        self._pending: dict[int, Job] = {}
        self._completed: deque[Job] = deque()
        self._number = 0
        self._is_welcome = False
        self._has_opened = False
        self._problem = "the link was closed"
        self._outcome = threading.Event()
        self._talking = threading.Lock()
        """For what both threads do: announce, listen, and keep jobs. Whoever holds it while the
        thread rests may use the pipe."""
        self._thread_waits = False
        """For the lock: a thread that polls without a pause would take it again and again."""
        self._is_working = False
        """Whether there is a way for both to talk on."""
        self._is_resting = False
        """Whether the thread waits and leaves the pipe to the engine's."""
        self._failure: TransferError | None = None
        """What the engine's thread has met with."""

    # ── the engine's thread ───────────────────────────────────────────────────────────────────

    def open(self) -> None:
        """Start, and wait until the way is warm. Raises: TransferError; `close` it in any case."""
        self.start()
        patience_s = self._settings.open_s + self._settings.quiet_s
        if not self._outcome.wait(patience_s):
            raise TransferError(f"no way to {self._peer.peer} by NCCL in {patience_s:g} s")
        if not self._has_opened:
            raise TransferError(self._problem)

    def put(self, job: Job) -> None:
        """Send it when those before it are queued.

        It is begun here if the thread rests, which would have to wake up first: that takes longer
        than to launch a piece.
        """
        with self._talking:
            is_next = self._is_resting and not self._inbox  # the gate may have turned some away
            if is_next and self._machinery.gate.enter():
                try:
                    self._begin(job)
                finally:
                    self._machinery.gate.leave()
            else:
                self._inbox.append(job)
        self._wake.set()

    def take(self) -> list[Completion]:
        """What has ended since the last call. The peer's word of it is read here, if the thread
        has not done so: it would have to wake up first."""
        if self._pending and not self._thread_waits and self._talking.acquire(blocking=False):
            try:
                if self._is_working:
                    self._listen()
            except TransferError as error:
                self._fail(error)
            finally:
                self._talking.release()
        jobs = [self._completed.popleft() for _ in range(len(self._completed))]
        return [
            Completion(j.transfer_id, j.size_bytes, self._clock() - j.started_s, j.error)
            for j in jobs
        ]

    def _begin(self, job: Job) -> None:
        """The lock is held. The thread goes on with it, and hears if anything has failed."""
        assert self._pipe is not None
        try:
            self._queue(job, self._pipe)
            self._pipe.begin()
        except TransferError as error:
            self._fail(error)

    def _fail(self, error: TransferError) -> None:
        """The lock is held. The thread hears of it; nobody uses the way until it has."""
        self._failure = error
        self._is_working = self._is_resting = False
        self._wake.set()

    # ── the thread ────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            while True:
                try:
                    self._serve()
                except TransferError as error:
                    self._problem = str(error)
                self._fail_all(self._problem)
                if not self._has_opened:
                    return
                logger.warning("the way to %s is broken: %s", self._peer.peer, self._problem)
                self._await_job()
        finally:
            self._fail_all("the link has ended")
            self._outcome.set()

    def _serve(self) -> NoReturn:
        """Make a way and use it until it breaks. Raises: ClosingError, TransferError."""
        self._begin_opening()
        wire = self._wire = self._connect()
        self._failure = None
        try:
            unique_id = self._greet(wire)
            pipe = self._open_passage(
                unique_id, 0, self._view, self._schedule, self._settings.pieces
            )
            self._warm_up(pipe)
            self._work(wire, pipe)
        except (TransferError, ClosingError):
            raise
        except Exception as error:  # a broken way must not end the thread, which has jobs to fail
            logger.exception("the way to %s", self._peer.peer)
            raise TransferError(f"{type(error).__name__}: {error}") from error
        finally:
            with self._talk():
                self._is_working = self._is_resting = False
            wire.end()
            self._end_passage()
            self._await_quiet(wire)
            wire.close()

    def _connect(self) -> Wire:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._settings.quiet_s)
            sock.connect(self._path)
        except OSError as error:
            sock.close()
            reason = error.strerror or str(error)
            raise TransferError(f"{self._peer.peer} does not answer: {reason}") from error
        self._is_welcome = False
        return Wire(sock)

    def _greet(self, wire: Wire) -> bytes:
        """Introduce this end; returns the id of the communicator that both join now."""
        unique_id = self._machinery.fabric.new_id()
        wire.send(
            Hello(
                instance=self._own.instance,
                epoch=self._own.epoch,
                rank=self._own.rank,
                peer=self._peer.peer,
                peer_epoch=self._peer.peer_epoch,
                unique_id=unique_id,
                heads=self._peer.peer_heads,
                block_bytes=self._view.block_bytes,
                schedule=self._schedule,
                pieces=self._settings.pieces,
            )
        )
        self._until(lambda: self._is_welcome, "waiting for an answer")
        return unique_id

    def _warm_up(self, pipe: Pipe) -> None:
        """Shows that the way works."""
        block = array("i", [0])  # vLLM's null block, which nobody reads
        with self._talk():
            self._queue(Job(_WARM_UP, block, block, self._clock()), pipe)

        def has_passed() -> bool:
            self._run_pipe(pipe)
            return not self._pending

        self._until(has_passed, "the first block")
        self._has_opened = True
        self._outcome.set()

    def _work(self, wire: Wire, pipe: Pipe) -> NoReturn:
        """Until the way breaks or the link is closed; either raises."""
        self._is_working = True
        while True:
            self._check()  # a pipe that has failed is run no more
            self._queue_next(pipe)
            if self._pending:
                self._launch_all(pipe)
            self._rest(wire)

    def _rest(self, wire: Wire) -> None:
        """Until there may be something to do. Meanwhile the engine's thread may use the pipe."""
        with self._talk():
            self._is_resting = self._is_working and not self._inbox
        if self._is_resting:
            wire.wait(self._wake, _LISTEN_S if self._pending else None)
            with self._talk():
                self._is_resting = False

    @contextmanager
    def _talk(self) -> Iterator[None]:
        self._thread_waits = True
        with self._talking:
            self._thread_waits = False
            yield

    def _queue_next(self, pipe: Pipe) -> None:
        with self._talk():
            if self._inbox:
                job = self._inbox.popleft()
                if job.error is None:
                    self._queue(job, pipe)
                else:  # cancelled before it began
                    self._complete(job)

    def _queue(self, job: Job, pipe: Pipe) -> None:
        """Both threads; the lock is held. Raises: TransferError."""
        assert self._wire is not None
        self._number += 1
        self._pending[self._number] = job
        self._wire.send(Announce(self._number, job.target_ids.tobytes()))
        self._put(pipe, job.source_ids, self._schedule)

    def _look(self) -> None:
        with self._talk():
            if self._failure is not None:
                raise self._failure
            self._listen()

    def _listen(self) -> None:
        """Both threads; the lock is held. Raises: PeerGoneError, TransferError."""
        assert self._wire is not None
        while (frame := self._wire.receive()) is not None:
            match frame:
                case Welcome():
                    self._is_welcome = True
                case Done() if frame.number in self._pending:
                    job = self._pending.pop(frame.number)
                    job.size_bytes = frame.size_bytes
                    self._progress_at = self._clock()
                    self._complete(job)
                case Refusal():
                    raise TransferError(f"{self._peer.peer}: {frame.reason}")
                case _:
                    raise TransferError(f"{self._peer.peer} says {type(frame).__name__}")

    def _await_quiet(self, wire: Wire) -> None:
        """Until the receiver has closed its end. When closing, not for ever."""
        closing_since: float | None = None
        wire.listen_for_end()
        while not wire.is_ended:
            if self._is_closing:
                closing_since = closing_since or self._clock()
                if self._clock() > closing_since + self._settings.quiet_s:
                    logger.error("%s has not said that it is quiet", self._peer.peer)
                    return
            wire.wait(self._wake, self._settings.quiet_s)
            wire.listen_for_end()

    def _await_job(self) -> None:
        """Raises: ClosingError."""
        while not self._inbox:
            if self._is_closing:
                raise ClosingError
            self._wake.wait()
            self._wake.clear()

    def _fail_all(self, problem: str) -> None:
        """What the way took along, and what waits for it."""
        with self._talk():
            jobs = [*self._pending.values(), *self._inbox]
            self._pending.clear()
            self._inbox.clear()
        for job in jobs:
            job.error = job.error or problem
            self._complete(job)

    def _complete(self, job: Job) -> None:
        if job.transfer_id != _WARM_UP:
            self._completed.append(job)

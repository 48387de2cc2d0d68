"""The receiving end of one direction: the thread that a peer's connection gets.

It posts receives as transfers are announced, scatters what arrives into this rank's blocks, and
says `Done` when that is complete. It ends with its socket, with a failure of NCCL, or by `close`:
in each case the communicator is aborted and the copies have run dry before the socket is closed.

Collaborators: `nccl.py` accepts the connection; `nccl_sender.py` is the other end.
"""

from __future__ import annotations

import logging
import socket
from array import array
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec

from memserve.errors import TransferError
from memserve.ops.views import BlockView
from memserve.types import Heads
from memserve.workers.links.base import require_existing
from memserve.workers.links.nccl_pipe import Pipe
from memserve.workers.links.nccl_wire import (
    Announce,
    Done,
    Hello,
    PeerGoneError,
    Refusal,
    Schedule,
    Welcome,
    Wire,
)
from memserve.workers.links.nccl_worker import LinkThread, Machinery

logger = logging.getLogger(__name__)


class _Arrival(msgspec.Struct):
    number: int
    size_bytes: int
    end: int
    """It is here when so many launches have finished."""


class Receiver(LinkThread):
    """Writes what one rank of a peer sends into blocks of this one."""

    def __init__(
        self,
        sock: socket.socket,
        machinery: Machinery,
        view_of: Callable[[Heads | None], BlockView],
        admit: Callable[[Receiver, Hello], None],
    ) -> None:
        """Takes over the socket.

        `view_of`: this rank's blocks, of those heads alone; raises TransferError. `admit` is asked
        in the thread whether this peer may write; raises TransferError if not.
        """
        super().__init__("nccl from a peer", machinery)
        self._wire: Wire = Wire(sock)
        self._view_of = view_of
        self._admit = admit
        self.hello: Hello | None = None
        """Who writes; None before it is admitted."""
        self._heard: deque[Hello | Announce] = deque()
        self._arriving: deque[_Arrival] = deque()

    @property
    def has_ended(self) -> bool:
        """Whether it touches no memory any more."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        wire = self._wire
        self._begin_opening()
        try:
            hello = self._greeting()
            view = self._view_of(hello.heads)
            _require_same_size(hello, view)
            self._admit(self, hello)
            self.hello = hello
            wire.send(Welcome())
            pipe = self._open_passage(hello.unique_id, 1, view, hello.schedule, hello.pieces)
            self._work(pipe, hello.schedule, view)
        except PeerGoneError:
            logger.debug("%s has ended", self._thread.name)
        except TransferError as error:
            logger.warning("%s: %s", self._thread.name, error)
            wire.send(Refusal(str(error)))
        finally:
            self._end_passage()
            wire.close()

    def _greeting(self) -> Hello:
        self._until(lambda: bool(self._heard), "waiting for a greeting")
        hello = self._heard.popleft()
        if not isinstance(hello, Hello):
            raise TransferError(f"a link begins with Hello, not {type(hello).__name__}")
        self._thread.name = f"nccl from {hello.instance}"
        return hello

    def _work(self, pipe: Pipe, schedule: Schedule, view: BlockView) -> NoReturn:
        """Until the peer or the link ends; either raises."""
        while True:
            self._check()
            if self._heard:
                self._post(self._heard.popleft(), pipe, schedule, view)
            elif self._arriving:
                self._run_pipe(pipe, self._arriving[0].end, self._wire.fileno())
            else:
                self._wire.wait(self._wake)

    def _post(
        self, announced: Hello | Announce, pipe: Pipe, schedule: Schedule, view: BlockView
    ) -> None:
        """Queue the arrival of one transfer."""
        if not isinstance(announced, Announce):
            raise TransferError("the peer greets twice")
        ids = _ids(announced)
        require_existing(ids, view.num_blocks, "receiver")
        end = self._put(pipe, ids, schedule)
        self._launch_all(pipe)
        size_bytes = len(ids) * view.block_bytes
        self._arriving.append(_Arrival(announced.number, size_bytes, end))

    def _look(self) -> None:
        """Also says what has arrived."""
        while self._arriving and self._counts.finished >= self._arriving[0].end:
            arrival = self._arriving.popleft()
            self._wire.send(Done(arrival.number, arrival.size_bytes))
        while (frame := self._wire.receive()) is not None:
            if not isinstance(frame, Hello | Announce):
                raise TransferError(f"a sender may not say {type(frame).__name__}")
            self._heard.append(frame)


def _ids(announced: Announce) -> array[int]:
    ids = array("i")
    try:
        ids.frombytes(announced.block_ids)
    except ValueError as error:
        raise TransferError(f"no block ids: {error}") from error
    return ids


def _require_same_size(hello: Hello, view: BlockView) -> None:
    if hello.block_bytes != view.block_bytes:
        raise TransferError(
            f"{hello.instance} sends {hello.block_bytes} bytes of a block,"
            f" {view.block_bytes} fit here"
        )

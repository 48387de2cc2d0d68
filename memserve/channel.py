"""The orchestrator's end of the control channel: one Unix socket, and a connection per worker.

The first frame of a connection is a `Greeting`, which says whose it is; every later one is an
event. So a life of an instance is addressed exactly, and what is sent to an earlier life goes
nowhere. The socket lies in the run directory, which is private to the user (0700).

Nothing here waits for a worker. What one does not read is kept for it without a limit: what is sent
to an instance is bounded by the requests that the scheduler gives it, and the cluster manager ends
a worker without heartbeats, whose connection ends with it. Why there is no library in between:
docs/adr/0022.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from memserve.core.vocabulary import Seat
from memserve.errors import ProtocolError, StartError
from memserve.frames import FrameSocket
from memserve.messages import AnyCommand, AnyEvent, decode_event, decode_greeting, encode

logger = logging.getLogger(__name__)

_BURST = 8
"""Events of one worker that are taken in one turn of the event loop at most."""
_BACKLOG = 128
_MAX_PATH_BYTES = 107
"""Of a Unix socket's path, by the kernel's `sockaddr_un`."""
_ACCEPT_AGAIN_S = 1.0
"""When no descriptor is left for a worker: until one may be."""


class Hub:
    """Sends commands to workers, and calls `on_event` for each event, in order of arrival."""

    def __init__(self, run_dir: Path, on_event: Callable[[Seat, AnyEvent], None]) -> None:
        self.address = str(run_dir / "hub.sock")
        self._on_event = on_event
        self._listener: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """That watches the socket."""
        self._accept_again: asyncio.TimerHandle | None = None
        self._failure: asyncio.Future[NoReturn] | None = None
        self._connections: set[_Connection] = set()
        self._seats: dict[Seat, _Connection] = {}

    def open(self) -> None:
        """Workers can connect from now on, and are heard by `serve`. Raises: StartError."""
        self._listener = _listen(self.address)

    def send(self, seat: Seat, command: AnyCommand) -> None:
        """Send one command, or keep it until the worker reads.

        A worker that is gone gets nothing: its loss is reported elsewhere.
        """
        connection = self._seats.get(seat)
        if connection is None:
            logger.debug("%s is not connected: dropped %s", seat, type(command).__name__)
        else:
            connection.send(encode(command))

    async def serve(self) -> None:
        """Receive until cancelled; then all workers are disconnected.

        However much comes at once, other tasks have their turns. Raises: what `on_event` raises.
        """
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._watch()
        try:
            await self._failure
        finally:
            self._disconnect()

    def close(self) -> None:
        """Close the socket and forget what was not sent. `serve` receives nothing after that.

        Idempotent. From the loop that serves, if one does.
        """
        self._disconnect()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            Path(self.address).unlink(missing_ok=True)

    def _watch(self) -> None:
        """Accept workers from now on."""
        assert self._loop is not None and self._listener is not None, "open it, then serve"
        self._loop.add_reader(self._listener, self._accept, self._loop, self._listener)

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:  # it went away again
            return
        except OSError as error:  # no descriptors are left, and it stays in the queue
            logger.error("cannot accept a worker's connection: %s", error)
            loop.remove_reader(listener)
            self._accept_again = loop.call_later(_ACCEPT_AGAIN_S, self._watch)
            return
        self._connections.add(_Connection(self, sock, loop))

    def _disconnect(self) -> None:
        """Watch nothing any more. Idempotent."""
        if self._accept_again is not None:
            self._accept_again.cancel()
        if self._loop is not None and self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._loop = None
        for connection in list(self._connections):
            connection.end()

    # ── for the connections ───────────────────────────────────────────────────────────────────

    def greeted(self, connection: _Connection, seat: Seat) -> None:
        """Commands for this seat go there from now on. Raises: ProtocolError."""
        if seat in self._seats:
            raise ProtocolError(f"{seat.instance} epoch {seat.epoch} is connected already")
        self._seats[seat] = connection

    def received(self, seat: Seat, event: AnyEvent) -> None:
        try:
            self._on_event(seat, event)
        except Exception as error:  # noqa: BLE001 (`serve`, whose work this is, raises it)
            if self._failure is not None and not self._failure.done():
                self._failure.set_exception(error)

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if connection.seat is not None and self._seats.get(connection.seat) is connection:
            del self._seats[connection.seat]


class _Connection:
    """One worker's, from its arrival to the end of either side."""

    def __init__(self, hub: Hub, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.seat: Seat | None = None
        """Known once it has greeted."""
        self._hub = hub
        self._socket = FrameSocket(sock)
        self._loop = loop
        self._has_turn = False
        """Frames are left over, and will be taken in the next turn of the loop."""
        self._waits_for_room = False
        self._is_over = False
        loop.add_reader(sock, self._on_readable)

    def send(self, body: bytes) -> None:
        self._socket.send(body)
        self._watch_for_room()

    def end(self) -> None:
        """Close it. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._hub.forget(self)

    def _on_readable(self) -> None:
        if not self._has_turn:  # then what was read before comes first
            self._socket.read()
            self._take()

    def _on_writable(self) -> None:
        self._socket.flush()
        self._watch_for_room()

    def _watch_for_room(self) -> None:
        if self._socket.has_unsent == self._waits_for_room:
            return
        self._waits_for_room = self._socket.has_unsent
        if self._waits_for_room:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)
        else:
            self._loop.remove_writer(self._socket.fileno())

    def _take(self) -> None:
        """Some of the frames that were read."""
        self._has_turn = False
        try:
            for _ in range(_BURST):
                if self._is_over:
                    return
                if (frame := self._socket.next_frame()) is None:
                    break
                self._handle(frame)
            else:
                self._has_turn = True
                self._loop.call_soon(self._take)
                return
            if self._socket.is_ended:
                self.end()
        except ProtocolError as error:
            logger.error("ended the connection of %s: %s", self.seat or "a stranger", error)
            self.end()

    def _handle(self, frame: bytearray) -> None:
        """Raises: ProtocolError if the connection cannot go on."""
        if self.seat is None:
            greeting = decode_greeting(frame)
            seat = Seat(greeting.instance, greeting.epoch)
            self._hub.greeted(self, seat)
            self.seat = seat
            return
        try:
            event = decode_event(frame)
        except ProtocolError as error:
            logger.error("dropped a message from %s: %s", self.seat, error)
            return
        self._hub.received(self.seat, event)


def _listen(address: str) -> socket.socket:
    size = len(os.fsencode(address))
    if size > _MAX_PATH_BYTES:
        raise StartError(
            f"the hub's socket {address} has a path of {size} bytes; the system allows"
            f" {_MAX_PATH_BYTES}: set TMPDIR to a folder with a shorter one"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on the hub's socket {address}: {error}") from error
    listener.setblocking(False)
    return listener

"""The orchestrator's end of the control channel: one ZeroMQ ROUTER for all workers.

Workers connect with a DEALER whose identity is `<instance>/<epoch>`, so that a life of an instance
is addressed exactly, and what is sent to an earlier life goes nowhere. The socket is an `ipc://`
file in the run directory, which is private to the user (0700).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from memserve.core.vocabulary import Seat
from memserve.errors import ProtocolError
from memserve.messages import AnyCommand, AnyEvent, decode_event, encode
from memserve.types import InstanceId

logger = logging.getLogger(__name__)

_BURST = 8
"""Events that are taken in one turn of the event loop at most."""


def identity(seat: Seat) -> bytes:
    """The ZeroMQ routing id of one life of an instance."""
    return f"{seat.instance}/{seat.epoch}".encode()


def parse_identity(frame: bytes) -> Seat:
    """Inverse of `identity`. Raises: ProtocolError."""
    name, _, epoch = frame.decode(errors="replace").rpartition("/")
    if not name or not epoch.isdigit():
        raise ProtocolError(f"not a worker's identity: {frame!r}")
    return Seat(InstanceId(name), int(epoch))


class Hub:
    """Sends commands to workers, and calls `on_event` for each event, in order of arrival.

    The event loop watches ZeroMQ's file descriptor: its own asyncio sockets take a tenth of a
    round trip longer.
    """

    def __init__(self, run_dir: Path, on_event: Callable[[Seat, AnyEvent], None]) -> None:
        self.address = f"ipc://{run_dir}/hub.sock"
        self._on_event = on_event
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A worker that is gone must be noticed here and not block the loop.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._may_have_events = asyncio.Event()
        self._watching: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Bind; workers can connect from now on."""
        self._socket.bind(self.address)

    def send(self, seat: Seat, command: AnyCommand) -> None:
        """Queue one command. A worker that is gone gets nothing: its loss is reported elsewhere."""
        try:
            self._socket.send_multipart([identity(seat), encode(command)], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            logger.debug("%s is not connected: %s", seat, error)
        # Sending may take the signal of what has arrived, which comes but once.
        if not self._socket.closed and int(self._socket.EVENTS) & zmq.POLLIN:
            self._may_have_events.set()

    async def serve(self) -> None:
        """Receive until cancelled. However much comes at once, other tasks have their turns."""
        self._watching = asyncio.get_running_loop()
        self._watching.add_reader(self._socket.FD, self._may_have_events.set)
        try:
            while True:
                self._may_have_events.clear()
                await self._receive_all()
                await self._may_have_events.wait()
        finally:
            self._stop_watching()

    async def close(self) -> None:
        """Close the socket and forget what was not sent. `serve` receives nothing after that."""
        self._stop_watching()
        self._socket.close(linger=0)
        self._context.term()

    async def _receive_all(self) -> None:
        for number in itertools.count(1):
            if self._socket.closed:
                return
            try:
                sender, frame = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._take(sender, frame)
            if number % _BURST == 0:
                await asyncio.sleep(0)

    def _take(self, sender: bytes, frame: bytes) -> None:
        try:
            seat, event = parse_identity(sender), decode_event(frame)
        except ProtocolError as error:
            logger.error("dropped a message from %r: %s", sender, error)
            return
        self._on_event(seat, event)

    def _stop_watching(self) -> None:
        """Before the socket's file descriptor may become another's. Idempotent."""
        if self._watching is not None:
            self._watching.remove_reader(self._socket.FD)
            self._watching = None

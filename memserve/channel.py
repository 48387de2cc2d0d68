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
from typing import Any

import zmq
import zmq.asyncio

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
    """Sends commands to workers, and calls `on_event` for each event, in order of arrival."""

    def __init__(self, run_dir: Path, on_event: Callable[[Seat, AnyEvent], None]) -> None:
        self.address = f"ipc://{run_dir}/hub.sock"
        self._on_event = on_event
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A worker that is gone must be noticed here and not block the loop.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)

    def open(self) -> None:
        """Bind; workers can connect from now on."""
        self._socket.bind(self.address)

    def send(self, seat: Seat, command: AnyCommand) -> None:
        """Queue one command. A worker that is gone gets nothing: its loss is reported elsewhere."""
        # zmq.asyncio sends at once where it can, and it always can: there is no high-water mark.
        sent = asyncio.ensure_future(
            self._socket.send_multipart([identity(seat), encode(command)], zmq.DONTWAIT)
        )
        sent.add_done_callback(lambda done: self._log_failure(seat, done))

    def _log_failure(self, seat: Seat, done: asyncio.Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            logger.debug("%s is not connected: %s", seat, error)

    async def serve(self) -> None:
        """Receive until cancelled. However much comes at once, other tasks have their turns."""
        for number in itertools.count(1):
            sender, frame = await self._socket.recv_multipart()
            try:
                seat, event = parse_identity(sender), decode_event(frame)
            except ProtocolError as error:
                logger.error("dropped a message from %r: %s", sender, error)
                continue
            self._on_event(seat, event)
            if number % _BURST == 0:  # what has arrived already is received without waiting
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the socket and forget what was not sent."""
        self._socket.close(linger=0)
        await asyncio.sleep(0)  # lets the loop drop the socket's file descriptor
        self._context.term()

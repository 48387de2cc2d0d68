"""A worker's end of the control channel: a Unix socket, connected to the hub's.

Collaborators: `channel.py` is the other end; `engine_loop.py` is the only user. One frame is one
message, and the first says which life of which instance speaks.

The hub's end of the connection closes when the orchestrator ends, however it does, and when it has
refused this worker. Nobody can use the worker after that, so it is told to `Stop`. The zygote sees
the orchestrator's death too and kills its workers: whichever comes first, they end.
"""

from __future__ import annotations

import logging
import select
import socket
import time

from memserve.errors import ProtocolError, StartError
from memserve.frames import FrameSocket
from memserve.messages import AnyCommand, AnyEvent, Greeting, Stop, decode_command, encode
from memserve.types import InstanceId

logger = logging.getLogger(__name__)

_CONNECT_S = 10.0
"""How long connecting may wait: the hub listens before any worker is forked."""
_LINGER_S = 1.0
"""How long closing waits for the last events to leave."""


class Port:
    """Sends events and takes commands, in order. Only `wait` and `close` wait. Not thread-safe."""

    def __init__(self, address: str, instance: InstanceId, epoch: int) -> None:
        """Connect to the hub's socket. Raises: StartError."""
        self._epoch = epoch
        self._socket = FrameSocket(_connect(address))
        self._poller = select.epoll()
        self._interest = select.EPOLLIN
        self._poller.register(self._socket, self._interest)
        self._is_orphan = False
        """The hub is gone, and `receive` has said so."""
        self._socket.send(encode(Greeting(instance=instance, epoch=epoch)))

    def wake_on(self, fd: int) -> None:
        """Let `wait` return also when this file descriptor becomes readable."""
        self._poller.register(fd, select.EPOLLIN)

    def send(self, event: AnyEvent) -> None:
        """Send one event. What the hub does not take yet leaves with later calls, or in `wait`."""
        self._socket.send(encode(event))

    def wait(self, timeout_s: float) -> None:
        """Sleep until a command may be there, a watched file descriptor is readable, or the time is
        over. No CPU is used meanwhile."""
        if timeout_s <= 0 or self._socket.has_frame:
            return
        self._watch_for_room()
        # An epoll waits for milliseconds, a select on it to the microsecond.
        select.select([self._poller], [], [], timeout_s)
        self._socket.flush()

    def receive(self) -> AnyCommand | None:
        """The next command, or None. What does not decode is logged and dropped; once the hub is
        gone there is one `Stop`."""
        try:
            while (frame := self._socket.receive()) is not None:
                if (command := _decode(frame)) is not None:
                    return command
        except ProtocolError as error:
            logger.error("the hub's stream is broken: %s", error)
            return self._stop()
        return self._stop() if self._socket.is_ended else None

    def close(self) -> None:
        """Give the last events a moment to leave, then close. Idempotent."""
        if self._poller.closed:
            return
        deadline = time.monotonic() + _LINGER_S
        has_room = select.poll()
        has_room.register(self._socket, select.POLLOUT)
        while self._socket.has_unsent and (left_s := deadline - time.monotonic()) > 0:
            has_room.poll(left_s * 1000)
            self._socket.flush()
        self._poller.close()
        self._socket.close()

    def _watch_for_room(self) -> None:
        interest = select.EPOLLIN | (select.EPOLLOUT if self._socket.has_unsent else 0)
        if interest != self._interest and not self._is_orphan:
            self._interest = interest
            self._poller.modify(self._socket, interest)

    def _stop(self) -> Stop | None:
        if self._is_orphan:
            return None
        logger.warning("the hub is gone: this worker stops")
        self._is_orphan = True
        self._poller.unregister(self._socket)
        return Stop(epoch=self._epoch)


def _connect(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_S)
        sock.connect(address)
    except OSError as error:
        sock.close()
        raise StartError(f"cannot reach the hub at {address}: {error}") from error
    return sock


def _decode(frame: bytearray) -> AnyCommand | None:
    try:
        return decode_command(frame)
    except ProtocolError as error:
        logger.error("dropped a message from the hub: %s", error)
        return None

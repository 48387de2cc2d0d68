"""A worker's end of the control channel: a ZeroMQ DEALER, connected to the hub's ROUTER.

Collaborators: `channel.py` is the other end; `engine_loop.py` is the only user. One frame is one
message. The identity `<instance>/<epoch>` tells the hub which life of which instance speaks.
"""

from __future__ import annotations

import logging
import math
import time

import zmq

from memserve.errors import ProtocolError
from memserve.messages import AnyCommand, AnyEvent, decode_command, encode
from memserve.types import InstanceId

logger = logging.getLogger(__name__)

_LINGER_MS = 1000
"""How long closing waits for the last events to leave."""


class Port:
    """Sends events and takes commands, in order. Not thread-safe."""

    def __init__(self, address: str, instance: InstanceId, epoch: int) -> None:
        """Connect to the hub. A hub that is not there yet is waited for in the background."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{instance}/{epoch}".encode())
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def wake_on(self, fd: int) -> None:
        """Let `wait` return also when this file descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def send(self, event: AnyEvent) -> None:
        """Queue one event; it leaves in the background."""
        self._socket.send(encode(event), zmq.DONTWAIT)

    def wait(self, timeout_s: float) -> None:
        """Sleep until a command is there, a watched file descriptor is readable, or the time is
        over. No CPU is used meanwhile."""
        if timeout_s >= 0.001:
            self._poller.poll(math.ceil(timeout_s * 1000))
        elif not self._poller.poll(0) and timeout_s > 0:  # ZeroMQ counts in milliseconds
            time.sleep(timeout_s)

    def receive(self) -> AnyCommand | None:
        """The next command, or None. What does not decode is logged and dropped."""
        while True:
            try:
                frame = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return None
            try:
                return decode_command(frame)
            except ProtocolError as error:
                logger.error("dropped a message from the hub: %s", error)

    def close(self) -> None:
        """Give the last events a moment to leave, then close."""
        self._socket.close()
        self._context.term()

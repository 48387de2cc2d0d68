"""What the two ends of an NCCL link say to each other, over a Unix socket beside the communicator.

      sender (rank 0)                                receiver (rank 1)
      Hello: who I am, the communicator's id     ──▶
                                                 ◀──  Welcome
      Announce: these blocks of yours, in chunks ──▶  posts their receives
      ═══ the chunks, through the communicator ════▶
                                                 ◀──  Done: so many bytes are in these blocks

NCCL names the other rank alone, not what is meant for where. So the order of a communicator is the
order of the announcements: whoever announces a transfer queues it before anybody announces another.
The receiver's closing of its end is its word that it writes no block any more; the kernel gives it
for one that dies.

A frame's body (`frames.py`) is msgpack. Collaborators: `nccl_sender.py`, `nccl_receiver.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import TypeAlias

import msgspec

from memserve.errors import ProtocolError, TransferError
from memserve.frames import FrameSocket
from memserve.ops.nccl_pipe import Pieces
from memserve.types import Heads, InstanceId


class Schedule(msgspec.Struct, frozen=True):
    """How a transfer is cut into chunks: both ends must do it alike, whatever lies where."""

    edge_blocks: int
    """Of the first and of the last chunk of a long transfer, which nothing overlaps."""
    chunk_blocks: int
    """At most, of the others; not fewer than `edge_blocks`."""

    def sizes(self, num_blocks: int) -> list[int]:
        """Blocks of each chunk, in order; what lies between the edges is cut into equal parts."""
        inner = num_blocks - 2 * self.edge_blocks
        if inner <= 0:
            return _equal_parts(num_blocks, self.edge_blocks)
        edge = [self.edge_blocks]
        return [*edge, *_equal_parts(inner, self.chunk_blocks), *edge]


def _equal_parts(total: int, most: int) -> list[int]:
    count = -(-total // most)
    return [(part + 1) * total // count - part * total // count for part in range(count)]


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Opens a direction. What names the peer tells the receiver that it is the one meant."""

    instance: InstanceId
    epoch: int
    rank: int
    peer: InstanceId
    peer_epoch: int
    unique_id: bytes
    heads: Heads | None
    """Of the receiver's pages; None: all."""
    block_bytes: int
    """Of a block, those heads alone."""
    schedule: Schedule
    pieces: Pieces


class Announce(msgspec.Struct, frozen=True, tag=True):
    """The next transfer: the receiver's blocks, in the order of the sender's."""

    number: int
    block_ids: bytes
    """Integers of 32 bits: the ends share a host."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The receiver joins the communicator now."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """All blocks of a transfer are in the receiver's memory."""

    number: int
    size_bytes: int
    """By the receiver's count."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why the receiver ends the direction; nothing follows."""

    reason: str


Frame: TypeAlias = Hello | Announce | Welcome | Done | Refusal

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class PeerGoneError(TransferError):
    """The other end has closed, or its process has died."""


class Wire:
    """Frames over a connected socket; nothing waits but `wait`.

    Whoever calls sees to it that no two threads do so at once; `wait` may run beside the others.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        self._socket = FrameSocket(sock)

    @property
    def is_ended(self) -> bool:
        """Whether the other end has closed."""
        return self._socket.is_ended

    def send(self, frame: Frame) -> None:
        """Queue a frame; it leaves as the other end reads."""
        self._socket.send(_encoder.encode(frame))

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Frame | None:
        """The next frame, if it is there.

        Raises: PeerGoneError once the other end has closed and all frames are read; TransferError
        for what is no frame.
        """
        try:
            if (body := self._socket.receive()) is not None:
                return _decoder.decode(body)
        except (ProtocolError, msgspec.MsgspecError) as error:
            raise TransferError(f"not a frame of an NCCL link: {error}") from error
        if self.is_ended:
            raise PeerGoneError("the peer is gone")
        return None

    def wait(self, wake: Wake, timeout_s: float | None = None) -> None:
        """Until more has arrived, or `wake` is set, which this clears, or the time is over.

        What has arrived before must be received: it does not end the wait.
        """
        poller = select.poll()
        room = select.POLLOUT if self._socket.has_unsent else 0
        poller.register(self._socket, select.POLLIN | room)
        poller.register(wake, select.POLLIN)
        ready = poller.poll(None if timeout_s is None else timeout_s * 1000)
        if any(fd == wake.fileno() for fd, _ in ready):
            wake.clear()

    def listen_for_end(self) -> None:
        """Take no interest in what else the other end says."""
        self._socket.read_all()
        self._socket.drop_unread()

    def end(self) -> None:
        """Say that nothing more will be sent; the other end can still speak."""
        self._socket.end()

    def close(self) -> None:
        self._socket.close()


class Wake:
    """Ends another thread's `Wire.wait`, now or the next one. Any thread may call."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lock = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with self._lock:  # by another thread's close the number may be somebody else's
            if not self._is_closed:
                os.eventfd_write(self._fd, 1)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it is set, or the time is over."""
        poller = select.poll()
        poller.register(self, select.POLLIN)
        poller.poll(None if timeout_s is None else timeout_s * 1000)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Nobody waits any more. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)

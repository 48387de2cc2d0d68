"""Messages on a stream socket: each is a frame, a big-endian 32-bit length and so many bytes.

The framing of the control channel (`channel.py`, `workers/port.py`), of the zygote's
(`workers/spec.py`) and of NCCL links (`workers/links/nccl_wire.py`), which say what a frame means.
"""

from __future__ import annotations

import contextlib
import socket
import struct

from memserve.errors import ProtocolError

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 << 20
"""Far more than any message takes: a longer frame means that the stream is broken."""

_HEADER = struct.Struct(">I")
_READ_BYTES = 1 << 16


def pack(body: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(len(body)) + body


def body_size(header: bytes | bytearray) -> int:
    """How many bytes follow the first four of a frame. Raises: ProtocolError."""
    size: int = _HEADER.unpack_from(header)[0]
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {size} bytes; the longest allowed: {MAX_FRAME_BYTES}")
    return size


class FrameSocket:
    """Frames over a connected socket, in both directions. No call waits; one thread makes them.

    What the kernel does not take at once is kept, however much it is, and leaves with a later
    `send` or `flush`. What the other end said before it closed can still be read.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes over the socket."""
        sock.setblocking(False)
        self._socket = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.is_ended = False
        """Whether the other end has closed, or has died."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for the other end to read."""
        return bool(self._outgoing)

    @property
    def has_frame(self) -> bool:
        """Whether `next_frame` has an answer: a whole frame was read, or what is none."""
        num_read = len(self._incoming) - HEADER_BYTES
        if num_read < 0:
            return False
        size: int = _HEADER.unpack_from(self._incoming)[0]
        return num_read >= size or size > MAX_FRAME_BYTES

    def send(self, body: bytes) -> None:
        """Send one frame, or keep it. To an end that is closed it goes nowhere."""
        self._outgoing += pack(body)
        self.flush()

    def flush(self) -> None:
        """Send of what is kept as much as the kernel takes."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self._outgoing.clear()  # what it said before it went may still be read

    def receive(self) -> bytearray | None:
        """The body of the next frame that has arrived. Raises: ProtocolError, as `next_frame`."""
        if (body := self.next_frame()) is not None:
            return body
        self.flush()
        self.read_all()
        return self.next_frame()

    def read_all(self) -> None:
        """Take all that has arrived."""
        while self.read():
            pass

    def read(self) -> bool:
        """Take a piece of what has arrived; whether there may be more."""
        if self.is_ended:
            return False
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:  # it died with unread data in its buffer
            data = b""
        self.is_ended = not data
        self._incoming += data
        return len(data) == _READ_BYTES

    def next_frame(self) -> bytearray | None:
        """The body of the next frame that was read.

        Raises: ProtocolError for what is no frame; nothing is read after that.
        """
        if len(self._incoming) < HEADER_BYTES:
            return None
        try:
            end = HEADER_BYTES + body_size(self._incoming)
        except ProtocolError:
            self.is_ended = True
            self._incoming.clear()
            raise
        if len(self._incoming) < end:
            return None
        body = self._incoming[HEADER_BYTES:end]
        del self._incoming[:end]
        return body

    def drop_unread(self) -> None:
        """Forget what was read and not taken."""
        self._incoming.clear()

    def end(self) -> None:
        """Say that nothing more will be sent; the other end can still speak."""
        self._outgoing.clear()
        with contextlib.suppress(OSError):  # it may be gone
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

"""GPU streams and NCCL without either, over ordinary memory and sockets. For tests and rehearsals.

It keeps the contracts of `nccl_pipe.Gpu` and `ops.nccl.Fabric`, within one process and across two.
A stream runs what is queued only when somebody asks an event of its thread, a piece or two per
question, as a GPU that is a little behind. As with NCCL, a piece whose other end is not there, or
has died, keeps its stream waiting until the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memserve.errors import TransferError
from memserve.ops.blocks import BlockOps, Ids, TorchBlockOps
from memserve.ops.nccl import ID_BYTES
from memserve.ops.views import BlockView

_NAME = "memserve-fake-nccl-"


class FakeStream:
    """`torch.cuda.Stream`, as far as a link uses it. One thread makes all calls."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.thread = threading.get_ident()
        self._is_advancing = False
        self._queue: deque[Callable[[], bool]] = deque()
        self.num_put = 0
        self.num_done = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    def put(self, work: Callable[[], bool]) -> None:
        """`work` is called until it returns True."""
        self._queue.append(work)
        self.num_put += 1

    def advance(self) -> None:
        """Run the next piece, if it can."""
        if self._is_advancing or not self._queue or self.gpu.is_stuck:
            return
        self._is_advancing = True
        if self._queue[0]():
            self._queue.popleft()
            self.num_done += 1
        self._is_advancing = False

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, self.num_put)

    def wait_event(self, event: FakeEvent) -> None:
        """What is queued from now on starts after the event."""
        self.put(event.query)


class FakeEvent:
    """A point in a stream's queue."""

    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def query(self) -> bool:
        if self._stream.num_done < self._position:
            self._stream.advance()
            self._stream.gpu.advance_another()
        return self._stream.num_done >= self._position

    def synchronize(self) -> None:
        while not self.query():
            pass


class _QueuedOps(BlockOps):
    """Queues the reference's copies."""

    def __init__(self) -> None:
        self._reference = TorchBlockOps()

    def _require_media(self, source: BlockView, target: BlockView, *, is_swap: bool) -> None:
        pass

    def _run(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Ids,
        target_ids: Ids,
        stream: torch.cuda.Stream | None,
    ) -> None:
        assert isinstance(stream, FakeStream)

        def copy() -> bool:
            self._reference.copy_blocks(source, target, source_ids.tolist(), target_ids.tolist())
            return True

        stream.put(copy)


class FakeGpu:
    """See `nccl_pipe.Gpu`."""

    def __init__(self, seed: int = 0) -> None:
        self.is_stuck = False
        """Whether its streams stand still."""
        self._streams: list[FakeStream] = []
        self._random = random.Random(seed)

    def enter(self) -> None:
        pass

    def stream(self) -> Any:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def advance_another(self) -> None:
        """Streams run beside each other: only events keep an order between them."""
        ours = [one for one in self._streams if one.thread == threading.get_ident()]
        if ours:
            self._random.choice(ours).advance()

    def give_back(self, stream: Any) -> None:
        assert not stream.num_queued
        self._streams.remove(stream)

    @property
    def num_streams(self) -> int:
        """That nobody has given back."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Pieces that have not run."""
        return sum(stream.num_queued for stream in list(self._streams))

    @property
    def num_done(self) -> int:
        """Pieces that have run on streams that nobody has given back."""
        return sum(stream.num_done for stream in list(self._streams))

    def staging(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)  # a GPU does not zero it either

    def ops(self) -> BlockOps:
        return _QueuedOps()


class FakeFabric:
    """See `ops.nccl.Fabric`. What a test does to it holds for all its communicators."""

    def __init__(self) -> None:
        self.is_held = False
        """Whether nothing moves, as with a peer that is stuck."""
        self.error: str | None = None
        """What NCCL would say of its communicators now."""
        self.num_joined = 0
        self.num_aborted = 0
        self._listeners: dict[bytes, socket.socket] = {}

    def new_id(self) -> bytes:
        name = (_NAME + secrets.token_hex(16)).encode()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(b"\0" + name)  # abstract: nothing is left on the disk
        listener.listen(1)
        listener.setblocking(False)
        unique_id = name.ljust(ID_BYTES, b"\0")
        self._listeners[unique_id] = listener
        return unique_id

    def join(self, unique_id: bytes, rank: int) -> FakeCommunicator:
        self.num_joined += 1
        if rank == 0:
            return FakeCommunicator(self, self._listeners.pop(unique_id), None)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(b"\0" + unique_id.rstrip(b"\0"))
        except OSError as error:
            sock.close()
            raise TransferError(f"NCCL makes no communicator: {error}") from error
        sock.setblocking(False)
        return FakeCommunicator(self, None, sock)

    def close(self) -> None:
        """End what was named and never joined."""
        while self._listeners:
            self._listeners.popitem()[1].close()


class FakeCommunicator:
    """See `ops.nccl.Communicator`."""

    def __init__(
        self, fabric: FakeFabric, listener: socket.socket | None, sock: socket.socket | None
    ) -> None:
        """Takes over the sockets."""
        self._fabric = fabric
        self._listener = listener
        self._socket = sock
        self._is_aborted = False
        self._is_launching = False

    def progress(self) -> bool:
        if self._fabric.error is not None:
            raise TransferError(f"NCCL failed: {self._fabric.error}")
        if self._listener is not None:
            try:
                self._socket, _ = self._listener.accept()
            except BlockingIOError:
                return False
            self._socket.setblocking(False)
            self._listener.close()
            self._listener = None
        was_launching, self._is_launching = self._is_launching, False
        return not was_launching

    def send(self, parts: Sequence[torch.Tensor], stream: Any) -> None:
        self._launch(parts, stream, lambda sock, data: sock.send(data))

    def receive(self, parts: Sequence[torch.Tensor], stream: Any) -> None:
        self._launch(parts, stream, lambda sock, data: sock.recv_into(data))

    def abort(self) -> None:
        self._is_aborted = True
        self._fabric.num_aborted += 1
        for sock in (self._listener, self._socket):
            if sock is not None:
                sock.close()

    def _launch(
        self,
        parts: Sequence[torch.Tensor],
        stream: FakeStream,
        move: Callable[[socket.socket, memoryview], int],
    ) -> None:
        if self._is_launching:
            raise TransferError("NCCL failed: invalid argument")
        self._is_launching = True
        for part in parts:
            stream.put(self._piece(memoryview(part.numpy()), move))

    def _piece(
        self, data: memoryview, move: Callable[[socket.socket, memoryview], int]
    ) -> Callable[[], bool]:
        num_moved = 0

        def advance() -> bool:
            nonlocal num_moved
            if self._is_aborted:
                return True
            if not self._fabric.is_held and self._socket is not None:
                with contextlib.suppress(OSError):  # not ready, or gone
                    num_moved += move(self._socket, data[num_moved:])
            return num_moved == len(data)

        return advance

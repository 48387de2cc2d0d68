"""Pipes and NCCL without a GPU, over ordinary memory and sockets. For tests and rehearsals.

It keeps the contracts of `nccl_pipe.Gpu` and `ops.nccl.Fabric`, within one process and across two.
As with NCCL, a piece whose other end is not there, or has died, keeps those behind it waiting until
the communicator is aborted.
"""

from __future__ import annotations

import secrets
import select
import socket
from array import array
from collections import deque
from collections.abc import Sequence

import torch

from memserve.errors import TransferError
from memserve.ops.blocks import TorchBlockOps
from memserve.ops.nccl import ID_BYTES, Communicator
from memserve.ops.nccl_pipe import Counts, Pieces, PipeSpec

_PAUSE_S = 50e-6
"""Between two looks at what has not come."""
_NAME = "memserve-fake-nccl-"


class FakeGpu:
    """See `nccl_pipe.Gpu`."""

    def __init__(self) -> None:
        self.is_stuck = False
        """Whether its copies stand still."""
        self.num_pipes = 0
        """That are not closed."""
        self.num_launched = 0
        """By all pipes so far."""
        self.num_finished = 0

    def enter(self) -> None:
        pass

    def pipe(self, communicator: Communicator, spec: PipeSpec) -> FakePipe:
        assert isinstance(communicator, FakeCommunicator)
        return FakePipe(self, communicator, spec)


class FakePipe:
    """See `nccl_pipe.Pipe`: every piece is staged, and its bytes cross the communicator's socket,
    as far as that goes in each call of `run`."""

    def __init__(self, gpu: FakeGpu, communicator: FakeCommunicator, spec: PipeSpec) -> None:
        self._gpu = gpu
        self._communicator = communicator
        self._spec = spec
        self._ops = TorchBlockOps()
        self._waiting: deque[list[int]] = deque()
        self._launched: deque[_Piece] = deque()
        self._num_put = 0
        self._counts = Counts(0, 0)
        gpu.num_pipes += 1

    def put(self, block_ids: array[int], sizes: Sequence[int]) -> int:
        ids = block_ids.tolist()
        for size in sizes:
            if not 1 <= size <= self._spec.slot_blocks:
                raise TransferError(
                    f"a chunk of {size} blocks; a slot has {self._spec.slot_blocks}"
                )
            part, ids = ids[:size], ids[size:]
            is_apart = self._spec.pieces is Pieces.PAGES
            self._waiting += [[block] for block in part] if is_apart else [part]
        self._num_put = self._counts.launched + len(self._waiting)
        return self._num_put

    def begin(self) -> None:
        self.run()

    def run(self, finished: int = 0, watch: int = -1) -> Counts:
        if not self._communicator.progress():
            return self._counts
        has_moved = True
        while has_moved:
            while self._waiting and len(self._launched) < self._spec.max_ahead:
                self._launch(self._waiting.popleft())
            has_moved = bool(self._launched) and self._launched[0].move() and not self._gpu.is_stuck
            if has_moved:
                self._finish(self._launched.popleft())
        if self._counts.finished < finished:
            select.select([fd for fd in [watch] if fd >= 0], [], [], _PAUSE_S)
        return self._counts

    def close(self) -> None:
        while self._launched:  # what was launched runs dry when the communicator was aborted
            if not self._gpu.is_stuck and self._launched[0].move():
                self._launched.popleft()
        self._gpu.num_pipes -= 1

    def _launch(self, ids: list[int]) -> None:
        # A GPU does not zero its staging memory either.
        staging = torch.full((len(ids) * self._spec.view.block_bytes,), 0xA5, dtype=torch.uint8)
        if self._spec.is_sender:
            self._ops.gather_blocks(self._spec.view, ids, staging)
        self._launched.append(_Piece(self._communicator, ids, staging, self._spec.is_sender))
        self._counts = self._counts._replace(launched=self._counts.launched + 1)
        self._gpu.num_launched += 1

    def _finish(self, piece: _Piece) -> None:
        if not self._spec.is_sender:
            self._ops.scatter_blocks(piece.staging, self._spec.view, piece.ids)
        self._counts = self._counts._replace(finished=self._counts.finished + 1)
        self._gpu.num_finished += 1


class _Piece:
    """One launch's bytes, on their way."""

    def __init__(
        self,
        communicator: FakeCommunicator,
        ids: list[int],
        staging: torch.Tensor,
        is_sender: bool,
    ) -> None:
        self.ids = ids
        self.staging = staging
        self._communicator = communicator
        self._is_sender = is_sender
        self._rest = memoryview(staging.numpy())

    def move(self) -> bool:
        """A step further; whether nothing is left of it."""
        moved = self._communicator.move(self._rest, is_sender=self._is_sender)
        if moved is None:
            return True
        self._rest = self._rest[moved:]
        return not self._rest


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
        self._awaits_peer = False
        """To do as this end has done in `split`."""

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
        if self._awaits_peer and self._socket is not None and not self._fabric.is_held:
            try:
                self._awaits_peer = not self._socket.recv(1)
            except OSError:  # not there yet, or gone
                return False
        return not self._awaits_peer

    def split(self) -> None:
        assert self._socket is not None
        self._awaits_peer = True
        try:
            self._socket.send(b"!")
        except OSError as error:
            raise TransferError(f"NCCL failed: {error}") from error

    def abort(self) -> None:
        self._is_aborted = True
        self._fabric.num_aborted += 1
        for sock in (self._listener, self._socket):
            if sock is not None:
                sock.close()

    def move(self, data: memoryview, *, is_sender: bool) -> int | None:
        """How many bytes have crossed now; None: aborted, so that nothing will."""
        if self._is_aborted:
            return None
        if self._fabric.is_held or self._socket is None:
            return 0
        try:
            return self._socket.send(data) if is_sender else self._socket.recv_into(data)
        except OSError:  # not ready, or gone
            return 0

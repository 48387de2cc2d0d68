"""GPUs without GPUs: streams, copies and mapped memory as CUDA has them, over ordinary memory.

A fake stream runs what is queued only when somebody asks an event of it, one piece per question, as
a GPU that is a little behind. `FakeDevice` is the memory of one process on one GPU; devices that
share a `Host` can map each other's allocations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from memserve.errors import StartError, TransferError
from memserve.ops.blocks import BlockOps, Ids, TorchBlockOps
from memserve.ops.device_memory import HANDLE_BYTES
from memserve.ops.views import BlockView


class FakeStream:
    """`torch.cuda.Stream`, as far as a link uses it."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.num_queued = 0
        self.num_done = 0
        self.is_stuck = False

    def put(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.num_queued += 1

    def advance(self) -> None:
        if self.queue and not self.is_stuck:
            self.queue.popleft()()
            self.num_done += 1

    def wait_stream(self, other: FakeStream) -> None:
        """What follows here runs when all that is queued there has run."""
        position = other.num_queued

        def wait() -> None:
            while other.num_done < position:
                if other.is_stuck:
                    self.queue.appendleft(wait)
                    self.num_done -= 1
                    return
                other.advance()

        self.put(wait)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self, self.num_queued)


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int) -> None:
        self._stream = stream
        self._position = position

    def query(self) -> bool:
        if self._stream.num_done >= self._position:
            return True
        self._stream.advance()
        return False

    def synchronize(self) -> None:
        while self._stream.num_done < self._position:
            self._stream.advance()


class FakeOps(BlockOps):
    """Queues the reference's copies, one block a piece."""

    def __init__(self) -> None:
        self._reference = TorchBlockOps()
        self.fail_at: int | None = None
        """Raise instead of queueing this call, counted from 0."""
        self._num_calls = 0

    def _require_media(self, source: BlockView, target: BlockView, *, is_swap: bool) -> None:
        pass

    def _run(
        self,
        source: BlockView,
        target: BlockView,
        source_ids: Ids,
        target_ids: Ids,
        stream: torch.cuda.Stream | None,
        spares_engine: bool,
    ) -> None:
        assert isinstance(stream, FakeStream)
        number, self._num_calls = self._num_calls, self._num_calls + 1
        if number == self.fail_at:
            raise TransferError("the copy engines are on strike")
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            stream.put(self._piece(source, target, source_id, target_id))

    def _piece(
        self, source: BlockView, target: BlockView, source_id: int, target_id: int
    ) -> Callable[[], None]:
        def run() -> None:
            self._reference.copy_blocks(source, target, [source_id], [target_id])

        return run


class Host:
    """Which allocations exist, by handle."""

    def __init__(self) -> None:
        self.exported: dict[bytes, torch.Tensor] = {}


class FakeDevice:
    """See `ops.device_memory.DeviceMemory`. Counts what is still allocated and mapped."""

    def __init__(self, host: Host, size_bytes: int = 1 << 20) -> None:
        self._host = host
        self._room = size_bytes
        self.can_export = True
        self.allocated: dict[int, torch.Tensor] = {}
        self.mapped: dict[int, torch.Tensor] = {}

    def allocate(self, size_bytes: int) -> int:
        if size_bytes > self._room:
            raise StartError(f"no {size_bytes} bytes")
        memory = torch.full((size_bytes,), 7, dtype=torch.int8)  # CUDA does not zero it
        self.allocated[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int) -> None:
        del self.allocated[address]

    def export(self, address: int) -> bytes:
        if not self.can_export:
            raise StartError("cannot be shared")
        handle = address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")
        self._host.exported[handle] = self.allocated[address]
        return handle

    def open(self, handle: bytes) -> int:
        memory = self._host.exported.get(handle)
        if memory is None:
            raise TransferError("invalid resource handle")
        self.mapped[memory.data_ptr()] = memory
        return memory.data_ptr()

    def close(self, address: int) -> None:
        if self.mapped.pop(address, None) is None:
            raise TransferError("not mapped")

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        memory = self.allocated.get(address, self.mapped.get(address))
        assert memory is not None and memory.numel() == size_bytes
        return memory

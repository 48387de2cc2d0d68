"""KV blocks through a communicator, chunk by chunk, both ends of it.

    OutPipe    scattered blocks ─gather▶ staging ─send▶ communicator      (directly, if neighbours)
    InPipe     communicator ─receive▶ staging ─scatter▶ scattered blocks

Gathering the next chunk, sending this one and scattering the last overlap: each end has a stream
for its copies, one for the communicator, and a few staging buffers in turn; events between the
streams keep the order, and the host only queues. Collaborators: `ops/blocks.py` copies,
`ops/nccl.py` has the communicator; `nccl_sender.py` and `nccl_receiver.py` own one pipe each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import torch

from memserve.errors import TransferError
from memserve.ops.blocks import BlockOps, CudaBlockOps
from memserve.ops.build import BlockCopyLibrary
from memserve.ops.nccl import Communicator
from memserve.ops.views import BlockView
from memserve.types import BlockId
from memserve.workers.links.ipc import Event
from memserve.workers.links.nccl_wire import Pieces, Schedule

CHUNK_BYTES = 384 << 20
"""At most. Few launches: each costs the host 150 µs, and the way 20. `bench/fig11_transfer.py
--sweep` compares."""
EDGE_BYTES = 128 << 20
"""Of the first and the last chunk: their gather and their scatter overlap with nothing. They take
350 µs on the way, in which the host launches the next chunk, and a longer one is gathered."""
NUM_SLOTS = 2
"""Staging buffers of the largest chunk: one is on the way while the other is filled or emptied.
They cost each GPU 768 MiB for each peer and direction, from the opening on."""
COPY_SMS = 48
"""Multiprocessors that gather and scatter, in a small part of the time that sending takes. Copy
engines would leave them to the engine, but a call for them takes the host up to 0.1 ms longer."""


class Gpu(Protocol):
    """What a thread needs of the GPU that its blocks are on."""

    def enter(self) -> None:
        """Make it the calling thread's."""
        ...

    def stream(self) -> torch.cuda.Stream:
        """One that nobody else has, until it is given back. Raises: TransferError."""
        ...

    def give_back(self, stream: torch.cuda.Stream) -> None:
        """It has run dry."""
        ...

    def staging(self, size_bytes: int) -> torch.Tensor:
        """Uninitialised bytes, uint8, shape `[size_bytes]`. Raises: TransferError (no room)."""
        ...

    def ops(self) -> BlockOps:
        """For copies between blocks and staging memory, by the calling thread."""
        ...


class CudaGpu:
    """See `Gpu`.

    Streams are not torch's, which would give some of them out twice, and of the highest priority:
    streams of one priority share hardware queues, and a receive behind one of the engine's kernels
    that waits for another GPU could wait for the very peer that waits for it.
    """

    def __init__(self, device: torch.device, library: BlockCopyLibrary) -> None:
        self._device = device
        self._index = device.index or 0
        self._library = library

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def stream(self) -> torch.cuda.Stream:
        handle = self._library.create_stream(self._index)
        return torch.cuda.ExternalStream(handle, device=self._device)

    def give_back(self, stream: torch.cuda.Stream) -> None:
        self._library.destroy_stream(self._index, stream.cuda_stream)

    def staging(self, size_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise TransferError(f"no {size_bytes >> 20} MiB for staging: {error}") from error

    def ops(self) -> BlockOps:
        return CudaBlockOps(self._library, max_sms=COPY_SMS)


def gpu_identity(device: torch.device) -> str:
    """The same for all processes that use this GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


class Pipe:
    """Streams, staging buffers in turn, and what is under way. One thread makes all calls."""

    def __init__(
        self,
        gpu: Gpu,
        communicator: Communicator,
        view: BlockView,
        schedule: Schedule,
        pieces: Pieces,
    ) -> None:
        """Raises: TransferError (no room for the staging buffers)."""
        self._gpu = gpu
        self._communicator = communicator
        self._view = view
        self._schedule = schedule
        self._pieces = pieces
        self._ops = gpu.ops()
        count = NUM_SLOTS if pieces is Pieces.STAGED else 0
        self._slots = [gpu.staging(schedule.chunk_blocks * view.block_bytes) for _ in range(count)]
        self._free_at: list[Event | None] = [None] * count
        """When the slot's last contents have left it."""
        self._turn = 0
        self._under_way: deque[Event] = deque()
        self._copies, self._passage = gpu.stream(), gpu.stream()

    @property
    def num_under_way(self) -> int:
        """Launches that have not left the communicator."""
        while self._under_way and self._under_way[0].query():
            self._under_way.popleft()
        return len(self._under_way)

    def mark(self) -> list[Event]:
        """All that is queued so far has ended when these have."""
        return [stream.record_event() for stream in (self._passage, self._copies)]

    def close(self) -> None:
        """Give the streams back, which have run dry. Raises: TransferError."""
        for stream in (self._passage, self._copies):
            self._gpu.give_back(stream)

    def _launched(self) -> Event:
        """The last launch is on its stream: a point behind it."""
        event: Event = self._passage.record_event()
        self._under_way.append(event)
        return event

    def _next_slot(self) -> int:
        self._turn = (self._turn + 1) % NUM_SLOTS
        return self._turn

    def _staging(self, slot: int, ids: Sequence[BlockId]) -> torch.Tensor:
        return self._slots[slot][: len(ids) * self._view.block_bytes]

    def _in_place(self, ids: Sequence[BlockId]) -> list[list[torch.Tensor]] | None:
        """The launches, and their parts, that need no staging; None if these blocks need it."""
        match self._pieces:
            case Pieces.STAGED:
                run = _run(self._view, ids)
                return None if run is None else [[run]]
            case Pieces.BLOCKS:
                return [[piece for block in ids for piece in _pieces(self._view, block)]]
            case Pieces.PAGES:
                return [[page] for block in ids for page in _pages(self._view, block)]


class OutPipe(Pipe):
    """The sending end."""

    def transfer(self, ids: Sequence[BlockId]) -> Iterator[None]:
        """Queue these blocks. At each step the communicator must have made its progress.

        A launch takes the host as long as a gather's call: the next one is made meanwhile.
        """
        slot_before: int | None = None
        for part in chunks(ids, self._schedule):
            slot, launches = None, self._in_place(part)
            if launches is None:
                slot = self._next_slot()
                launches = [[self._staging(slot, part)]]
                self._gather(slot, part)
            for parts in launches:
                yield
                self._release(slot_before)
                if slot is not None:
                    self._passage.wait_event(self._copies.record_event())
                self._communicator.send(parts, self._passage)
                slot_before = slot
        yield
        self._release(slot_before)

    def _gather(self, slot: int, ids: Sequence[BlockId]) -> None:
        if (event := self._free_at[slot]) is not None:
            self._copies.wait_event(event)
        self._ops.gather_blocks(self._view, ids, self._slots[slot], stream=self._copies)

    def _release(self, slot: int | None) -> None:
        """The slot's send is on its stream: it is free behind that."""
        event = self._launched()
        if slot is not None:
            self._free_at[slot] = event


class InPipe(Pipe):
    """The receiving end. Transfers that are under way together never share blocks."""

    def transfer(self, ids: Sequence[BlockId]) -> Iterator[None]:
        """Queue the arrival of these blocks: as `OutPipe.transfer`, with the scatter of what came
        before for the gather of what comes next."""
        before: tuple[int, Sequence[BlockId]] | None = None
        for part in chunks(ids, self._schedule):
            slot, launches = None, self._in_place(part)
            if launches is None:
                slot = self._next_slot()
                launches = [[self._staging(slot, part)]]
            for parts in launches:
                yield
                arrived = self._launched()
                if slot is not None and (event := self._free_at[slot]) is not None:
                    self._passage.wait_event(event)
                self._communicator.receive(parts, self._passage)
                self._scatter(before, arrived)
                before = None if slot is None else (slot, part)
        yield
        self._scatter(before, self._launched())

    def _scatter(self, staged: tuple[int, Sequence[BlockId]] | None, arrived: Event) -> None:
        if staged is None:
            return
        slot, ids = staged
        self._copies.wait_event(arrived)
        self._ops.scatter_blocks(self._slots[slot], self._view, ids, stream=self._copies)
        self._free_at[slot] = self._copies.record_event()


def chunks(ids: Sequence[BlockId], schedule: Schedule) -> Iterator[Sequence[BlockId]]:
    """All of them, in order."""
    end = 0
    for size in schedule.sizes(len(ids)):
        start, end = end, end + size
        yield ids[start:end]


def _run(view: BlockView, ids: Sequence[BlockId]) -> torch.Tensor | None:
    """These blocks as one piece of memory, if they are neighbours and leave no gaps."""
    is_gapless = len(ids) == 1 or view.block_stride == view.block_bytes
    is_run = all(after == before + 1 for before, after in pairwise(ids))
    if view.run_bytes != view.block_bytes or not is_gapless or not is_run:
        return None
    start = int(view.row_offsets[0]) + ids[0] * view.block_stride
    return view.memory[start : start + len(ids) * view.block_bytes]


def _pieces(view: BlockView, block: BlockId) -> list[torch.Tensor]:
    """The block as one piece, or as its pages if they lie apart."""
    run = _run(view, [block])
    return _pages(view, block) if run is None else [run]


def _pages(view: BlockView, block: BlockId) -> list[torch.Tensor]:
    rows = view.rows
    if rows.count > 1 and rows.stride != rows.size_bytes:
        raise TransferError("discrete pieces need whole pages")
    starts = [int(offset) + block * view.block_stride for offset in view.row_offsets]
    return [view.memory[start : start + rows.total_bytes] for start in starts]

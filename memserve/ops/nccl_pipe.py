"""KV blocks through an NCCL communicator, by the library of `cuda/`: `cuda/nccl_pipe.h` says how.

One call there does what takes many here, without the interpreter: an engine's thread that keeps it
for milliseconds does not hold a transfer up.

Collaborators: `nccl.py` has the communicators; `workers/links/nccl_worker.py` drives one pipe per
thread.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from memserve.errors import TransferError
from memserve.ops.build import BlockCopyLibrary, PipeConfig, Side
from memserve.ops.nccl import NcclCommunicator
from memserve.ops.views import BlockView

NUM_SLOTS = 2
"""Staging buffers: one is on the way while the other is filled or emptied."""
COPY_SMS = 48
"""Multiprocessors that gather and scatter, in a small part of the time that sending takes. Copy
engines would leave them to the engine, but a call for them takes the host up to 0.1 ms longer."""
_PATIENCE_US = 1000
"""Of one call: its caller has an eye on the peer and on the time between two."""


class Pieces(enum.IntEnum):
    """In which pieces blocks cross: `MemservePieces`. Links use the first; the others are for
    comparison."""

    STAGED = 0
    """Gathered into staging memory, one piece a chunk."""
    BLOCKS = 1
    """From and into the KV memory, a chunk's blocks in one launch."""
    PAGES = 2
    """The same, one launch for each layer of each block."""


class Counts(NamedTuple):
    """Launches of a pipe since it was made."""

    launched: int
    """Given to the communicator."""
    finished: int
    """Of those: sent, or in the receiver's blocks."""


class PipeSpec(msgspec.Struct, frozen=True):
    """What one end of a direction moves, and how."""

    view: BlockView
    """This rank's blocks."""
    is_sender: bool
    slot_blocks: int
    """A chunk has no more."""
    pieces: Pieces
    max_ahead: int
    """Launches that may be under way."""


class CudaPipe:
    """One end of one direction; see `Pipe`."""

    def __init__(
        self,
        library: BlockCopyLibrary,
        device: torch.device,
        communicator: NcclCommunicator,
        spec: PipeSpec,
    ) -> None:
        """Raises: TransferError (no room for staging memory; pieces that do not lie in one run)."""
        view = spec.view
        rows = view.rows
        _require_runs(view, spec.pieces)
        self._library = library
        self._communicator = communicator
        count = NUM_SLOTS if spec.pieces is Pieces.STAGED else 0
        self._slots = [_staging(spec.slot_blocks * view.block_bytes, device) for _ in range(count)]
        self._config = PipeConfig(
            nccl=communicator.addresses,
            communicator=communicator.handle,
            blocks=Side(
                base=view.base,
                block_stride=view.block_stride,
                row_stride=rows.stride,
                layer_offsets=view.offsets_address,
            ),
            row_bytes=rows.size_bytes,
            num_rows=rows.count,
            num_layers=view.num_layers,
            slots=tuple(slot.data_ptr() for slot in self._slots),
            slot_blocks=spec.slot_blocks,
            peer=communicator.peer,
            is_sender=spec.is_sender,
            pieces=spec.pieces,
            max_sms=COPY_SMS,
            max_ahead=spec.max_ahead,
            device=device.index or 0,
        )
        self._pipe = library.open_pipe(self._config)

    def put(self, block_ids: array[int], sizes: Sequence[int]) -> int:
        """See `Pipe`."""
        if sum(sizes) != len(block_ids):
            raise TransferError(f"{len(block_ids)} blocks are no chunks of {list(sizes)}")
        chunks = array("i", sizes)
        (ids, _), (cuts, count) = block_ids.buffer_info(), chunks.buffer_info()
        counts = self._library.put_into_pipe(self._pipe, ids, cuts, count)
        return int(counts.put)

    def begin(self) -> None:
        """See `Pipe`."""
        self._run(0, -1, patience_us=0)

    def run(self, finished: int = 0, watch: int = -1) -> Counts:
        """See `Pipe`."""
        return self._run(finished, watch, _PATIENCE_US)

    def close(self) -> None:
        """See `Pipe`."""
        self._library.close_pipe(self._pipe)

    def _run(self, finished: int, watch: int, patience_us: int) -> Counts:
        counts = self._library.run_pipe(self._pipe, finished, watch, patience_us)
        if counts.nccl_error:
            raise self._communicator.error(counts.nccl_error)
        return Counts(counts.launched, counts.finished)


def _require_runs(view: BlockView, pieces: Pieces) -> None:
    """Whether the pieces lie in one run each. Raises: TransferError."""
    if pieces is Pieces.BLOCKS and view.run_bytes != view.block_bytes:
        raise TransferError("blocks whose pages lie apart are no pieces to send")
    if pieces is Pieces.PAGES and view.run_bytes < view.rows.total_bytes:
        raise TransferError("pages whose heads lie apart are no pieces to send")


def _staging(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise TransferError(f"no {size_bytes >> 20} MiB for staging: {error}") from error

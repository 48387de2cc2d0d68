"""What a link's thread needs of the GPU: pipes, through which KV blocks pass chunk by chunk.

Collaborators: `ops/nccl_pipe.py` has the pipes of real GPUs, `nccl_fake.py` those of none;
`nccl_sender.py` and `nccl_receiver.py` own one each.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

from memserve.ops.build import BlockCopyLibrary
from memserve.ops.nccl import Communicator, NcclCommunicator
from memserve.ops.nccl_pipe import Counts, CudaPipe, PipeSpec

CHUNK_BYTES = 384 << 20
"""At most. Few launches: each costs the host 150 µs, and the way 20. `bench/fig11_transfer.py
--sweep` compares. Two staging buffers of this size cost each GPU 768 MiB for each peer and
direction, from the opening on."""
EDGE_BYTES = 96 << 20
"""Of the first and the last chunk: their gather and their scatter overlap with nothing. They take
270 µs on the way, in which the host launches the next chunk, and a longer one is gathered."""


class Pipe(Protocol):
    """One end of one direction. No two threads call at once.

    The ends must put the same sizes in the same order. Transfers that are under way together never
    share blocks.
    """

    def put(self, block_ids: array[int], sizes: Sequence[int]) -> int:
        """Queue a transfer of existing blocks (32 bits each), in chunks of so many.

        Returns how many launches have finished when it is through. Raises: TransferError.
        """
        ...

    def begin(self) -> None:
        """Launch what can be launched at once. Raises: TransferError."""
        ...

    def run(self, finished: int = 0, watch: int = -1) -> Counts:
        """Go on for about a millisecond, or until all is launched and `finished` launches have
        finished, or the file descriptor `watch` can be read. Raises: TransferError."""
        ...

    def close(self) -> None:
        """Wait until what was launched has run dry: the communicator was aborted before, or has
        nothing more to do. Forgets the rest. Raises: TransferError."""
        ...


class Gpu(Protocol):
    """The one that the blocks are on."""

    def enter(self) -> None:
        """Make it the calling thread's."""
        ...

    def pipe(self, communicator: Communicator, spec: PipeSpec) -> Pipe:
        """See `CudaPipe`. Raises: TransferError."""
        ...


class CudaGpu:
    """See `Gpu`."""

    def __init__(self, device: torch.device, library: BlockCopyLibrary) -> None:
        self._device = device
        self._library = library

    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    def pipe(self, communicator: Communicator, spec: PipeSpec) -> CudaPipe:
        assert isinstance(communicator, NcclCommunicator)
        return CudaPipe(self._library, self._device, communicator, spec)


def gpu_identity(device: torch.device) -> str:
    """The same for all processes that use this GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)

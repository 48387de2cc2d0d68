"""The memory of one rank's KV cache, and the links by which peers reach each other's.

`cpu` lies in shared memory, `cuda` in the HBM of the rank's GPU. Collaborators: `hosts.py` makes
one by `kv_memory` in the rank's process, `kv_layout.place_kv_cache` asks it for the tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from memserve.errors import StartError
from memserve.ops.blocks import BlockOps, CudaBlockOps, TorchBlockOps, library_for
from memserve.ops.build import BlockCopyLibrary
from memserve.ops.device_memory import CudaDeviceMemory, DeviceMemory
from memserve.ops.nccl import NcclFabric
from memserve.ops.nccl_pipe import Pieces
from memserve.types import Geometry, TransferStyle
from memserve.workers import gpu_memory
from memserve.workers.gpu_memory import GpuBuffer
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links import nccl, shm
from memserve.workers.links.base import Link, Rank, RankPeer
from memserve.workers.links.ipc import open_ipc
from memserve.workers.links.nccl import NcclEndpoint
from memserve.workers.links.nccl_pipe import CudaGpu, gpu_identity
from memserve.workers.links.nccl_worker import Machinery, NcclSettings
from memserve.workers.links.shm import open_shm

logger = logging.getLogger(__name__)

Openers = Mapping[str, Callable[[RankPeer], Link]]


class KvMemory(Protocol):
    """One buffer, and what can be done with it."""

    def make(self, size_bytes: int) -> torch.Tensor:
        """Allocate it, zeroed: int8, shape `[size_bytes]`. Once. Raises: StartError."""
        ...

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer; None before `make`."""
        ...

    @property
    def addresses(self) -> dict[str, str]:
        """Kind of link → where peers find the buffer."""
        ...

    def openers(self, geometry: Geometry, style: TransferStyle) -> Openers:
        """Kind of link → how to open one to one rank of a peer; fastest first. Empty before `make`.

        From now on `addresses` has all these kinds, too. `geometry`: of this rank. Each opener
        takes a `RankPeer`, opens what moves the heads that are named there, and may raise
        TransferError.
        """
        ...

    def ops(self) -> BlockOps:
        """Operations on the buffer, for one thread. After `make`."""
        ...

    def close(self) -> None:
        """Give it back, after the engine and all links have ended."""
        ...


class HostKvMemory:
    """In this host's shared memory."""

    def __init__(self) -> None:
        self._buffer: KvBuffer | None = None

    def make(self, size_bytes: int) -> torch.Tensor:
        _require_first(self._buffer)
        self._buffer = KvBuffer.create(size_bytes)
        return self._buffer.tensor

    @property
    def tensor(self) -> torch.Tensor | None:
        return None if self._buffer is None else self._buffer.tensor

    @property
    def addresses(self) -> dict[str, str]:
        return {} if self._buffer is None else {shm.KIND: self._buffer.address}

    def openers(self, geometry: Geometry, style: TransferStyle) -> Openers:
        buffer = self._buffer
        if buffer is None:
            return {}
        is_discrete = style is TransferStyle.DISCRETE
        return {shm.KIND: lambda peer: open_shm(buffer, geometry, peer, is_discrete=is_discrete)}

    def ops(self) -> BlockOps:
        return TorchBlockOps()

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()


class GpuKvMemory:
    """In the HBM of a rank's GPU; the process must see the peers' GPUs as well."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        """The GPU is that of the rank's number, of those the process sees."""
        self._rank = rank
        self._folder = folder
        self._device = torch.device("cuda", rank.rank)
        self._memory: DeviceMemory | None = None
        self._library: BlockCopyLibrary | None = None
        self._buffer: GpuBuffer | None = None
        self._endpoint: NcclEndpoint | None = None

    def make(self, size_bytes: int) -> torch.Tensor:
        _require_first(self._buffer)
        # Only now: before vLLM has chosen its GPU nothing here may initialise CUDA.
        self._memory = CudaDeviceMemory(self._device)
        self._library = library_for(self._device)
        self._buffer = GpuBuffer(self._memory, size_bytes)
        return self._buffer.tensor

    @property
    def tensor(self) -> torch.Tensor | None:
        return None if self._buffer is None else self._buffer.tensor

    @property
    def addresses(self) -> dict[str, str]:
        addresses = {} if self._buffer is None else {gpu_memory.KIND: self._buffer.address}
        if self._endpoint is not None:
            addresses[nccl.KIND] = self._endpoint.address
        return addresses

    def openers(self, geometry: Geometry, style: TransferStyle) -> Openers:
        buffer, memory, library = self._buffer, self._memory, self._library
        if buffer is None or memory is None or library is None:
            return {}

        def open_by_ipc(peer: RankPeer) -> Link:
            return open_ipc(buffer, geometry, peer, memory, self._device, library, style)

        kinds: dict[str, Callable[[RankPeer], Link]] = {gpu_memory.KIND: open_by_ipc}
        if self._endpoint is None:
            self._endpoint = self._make_endpoint(buffer, geometry, library, style)
        if self._endpoint is not None:
            kinds[nccl.KIND] = self._endpoint.open
        return kinds

    def ops(self) -> BlockOps:
        assert self._library is not None
        return CudaBlockOps(self._library)

    def close(self) -> None:
        """Not the buffer: CUDA graphs and tensors still point there, and the process ends soon."""
        if self._endpoint is not None:
            self._endpoint.close()

    def _make_endpoint(
        self, buffer: GpuBuffer, geometry: Geometry, library: BlockCopyLibrary, style: TransferStyle
    ) -> NcclEndpoint | None:
        pieces = Pieces.PAGES if style is TransferStyle.DISCRETE else Pieces.STAGED
        gpu, settings = CudaGpu(self._device, library), NcclSettings(pieces=pieces)
        try:
            return NcclEndpoint(
                self._rank,
                buffer.tensor,
                geometry,
                Machinery(NcclFabric(), gpu, settings),
                folder=self._folder,
                gpu=gpu_identity(self._device),
            )
        except StartError as error:  # peers are still reached by the other kind
            logger.warning("no links of kind nccl: %s", error)
            return None


def kv_memory(device: str, rank: Rank, folder: Path) -> KvMemory:
    """`device`: cpu or cuda. `folder`: where sockets may be, private to the user."""
    return GpuKvMemory(rank, folder) if device == "cuda" else HostKvMemory()


def _require_first(buffer: object) -> None:
    if buffer is not None:
        raise StartError("the KV cache consists of several buffers; supported: one")

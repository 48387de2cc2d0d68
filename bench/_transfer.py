"""What the benches of transfers share: memory and links on a GPU or, for rehearsals, without one.

A `Platform` is one process's part: KV memory that other processes can reach, links of each kind,
and the ends of NCCL links. `cuda:N` is the N-th GPU; `cpu` stands in for it with shared memory, and
with the fake NCCL. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from bench.ops_blocks import BLOCK_SIZE, LLAMA_2_13B, LLAMA_3_1_8B, Shape
from memserve.ops.blocks import BlockOps, CudaBlockOps, Method, TorchBlockOps, library_for
from memserve.ops.device_memory import CudaDeviceMemory
from memserve.ops.nccl import MAX_CTAS, NcclFabric
from memserve.types import Geometry, InstanceId, TransferStyle
from memserve.workers.gpu_memory import GpuBuffer, PeerGpuBuffer
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import Link, Rank, RankPeer
from memserve.workers.links.ipc import open_ipc
from memserve.workers.links.nccl import NcclEndpoint
from memserve.workers.links.nccl_fake import FakeFabric, FakeGpu
from memserve.workers.links.nccl_pipe import CudaGpu, gpu_identity
from memserve.workers.links.nccl_worker import Machinery, NcclSettings
from memserve.workers.links.shm import open_shm

TINY = Shape("tiny", num_layers=4, num_kv_heads=2, head_dim=16)
"""For rehearsals without a GPU."""
SHAPES = {shape.name: shape for shape in (LLAMA_2_13B, LLAMA_3_1_8B, TINY)}


class Buffer(Protocol):
    """KV memory of this process, or another's that is mapped here."""

    @property
    def tensor(self) -> torch.Tensor: ...
    def close(self) -> None: ...


class OwnBuffer(Buffer, Protocol):
    address: str


class Platform(Protocol):
    kind: str
    """Of its one-sided links: ipc or shm."""

    def own(self, size_bytes: int) -> OwnBuffer: ...
    def map(self, address: str) -> Buffer: ...
    def open(self, buffer: OwnBuffer, blocks: Geometry, peer: RankPeer) -> Link:
        """A one-sided link, warm."""
        ...

    def endpoint(
        self,
        own: Rank,
        buffer: OwnBuffer,
        blocks: Geometry,
        folder: Path,
        settings: NcclSettings,
        max_ctas: int = MAX_CTAS,
    ) -> NcclEndpoint: ...
    def ops(self, method: Method) -> BlockOps: ...
    def stream(self) -> torch.cuda.Stream | None: ...
    def finish(self) -> None:
        """Wait for all that is queued on the GPU."""
        ...

    @property
    def device(self) -> torch.device: ...


class CudaPlatform:
    kind = "ipc"

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._memory = CudaDeviceMemory(self.device)
        self._library = library_for(self.device)

    def own(self, size_bytes: int) -> GpuBuffer:
        return GpuBuffer(self._memory, size_bytes)

    def map(self, address: str) -> PeerGpuBuffer:
        return PeerGpuBuffer(self._memory, address)

    def open(self, buffer: OwnBuffer, blocks: Geometry, peer: RankPeer) -> Link:
        assert isinstance(buffer, GpuBuffer)
        return open_ipc(
            buffer, blocks, peer, self._memory, self.device, self._library, TransferStyle.REQUEST
        )

    def endpoint(
        self,
        own: Rank,
        buffer: OwnBuffer,
        blocks: Geometry,
        folder: Path,
        settings: NcclSettings,
        max_ctas: int = MAX_CTAS,
    ) -> NcclEndpoint:
        gpu = CudaGpu(self.device, self._library)
        machinery = Machinery(NcclFabric(max_ctas=max_ctas), gpu, settings)
        name = gpu_identity(self.device)
        return NcclEndpoint(own, buffer.tensor, blocks, machinery, folder=folder, gpu=name)

    def ops(self, method: Method) -> BlockOps:
        return CudaBlockOps(self._library, method=method)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)


class CpuPlatform:
    kind = "shm"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.fabric = FakeFabric()

    def own(self, size_bytes: int) -> KvBuffer:
        return KvBuffer.create(size_bytes)

    def map(self, address: str) -> KvBuffer:
        return KvBuffer.open(address)

    def open(self, buffer: OwnBuffer, blocks: Geometry, peer: RankPeer) -> Link:
        assert isinstance(buffer, KvBuffer)
        return open_shm(buffer, blocks, peer)

    def endpoint(
        self,
        own: Rank,
        buffer: OwnBuffer,
        blocks: Geometry,
        folder: Path,
        settings: NcclSettings,
        max_ctas: int = MAX_CTAS,
    ) -> NcclEndpoint:
        machinery = Machinery(self.fabric, FakeGpu(), settings)
        name = f"{own.instance}/{own.epoch}"  # each has a GPU of its own
        return NcclEndpoint(own, buffer.tensor, blocks, machinery, folder=folder, gpu=name)

    def ops(self, method: Method) -> BlockOps:
        return TorchBlockOps()

    def stream(self) -> None:
        return None

    def finish(self) -> None:
        pass


def platform(name: str) -> CudaPlatform | CpuPlatform:
    """`cpu` or `cuda:N`."""
    return CpuPlatform() if name == "cpu" else CudaPlatform(torch.device(name).index or 0)


def geometry(shape: Shape, pool_bytes: int, *, is_layer_first: bool = False) -> Geometry:
    """As many blocks as the pool holds."""
    page = shape.page_bytes
    count = pool_bytes // (page * shape.num_layers)
    stride, step = page * shape.num_layers, page
    if is_layer_first:
        stride, step = page, page * count
    return Geometry(
        model=shape.name,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=count,
        num_kv_heads=shape.num_kv_heads,
        page_bytes=page,
        block_stride=stride,
        layer_offsets=tuple(layer * step for layer in range(shape.num_layers)),
    )


def peer_of(name: str, blocks: Geometry, address: str, epoch: int = 1) -> RankPeer:
    return RankPeer(InstanceId(name), epoch, blocks, address)


Done = Callable[[], bool]

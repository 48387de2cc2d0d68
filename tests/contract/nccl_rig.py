"""What the tests of the NCCL link share: one end of it, on fakes or on a GPU. Imports no vLLM."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from memserve.ops.blocks import library_for
from memserve.ops.nccl import Fabric, NcclFabric
from memserve.ops.nccl_pipe import Pieces
from memserve.types import Geometry, Heads, InstanceId
from memserve.workers.links.base import Completion, Link, Rank, RankPeer
from memserve.workers.links.nccl import NcclEndpoint, NcclLink
from memserve.workers.links.nccl_fake import FakeFabric, FakeGpu
from memserve.workers.links.nccl_pipe import CudaGpu, Gpu, gpu_identity
from memserve.workers.links.nccl_worker import Machinery, NcclSettings
from tests.contract.link_rig import (
    NUM_LAYERS,
    PAGE_BYTES,
    buffer_bytes,
    fill_random,
    geometry,
    read_block,
)

DEADLINE_S = 30.0
SHAPE = geometry()
CHUNK_BLOCKS = 2
NUM_OPENING = 2
"""Launches of an opening: what connects the GPUs, and the warm-up."""
_BLOCK_BYTES = NUM_LAYERS * PAGE_BYTES
SETTINGS = NcclSettings(
    chunk_bytes=CHUNK_BLOCKS * _BLOCK_BYTES + 1, edge_bytes=_BLOCK_BYTES, chunks_ahead=8
)


class End:
    """One rank's end of NCCL links."""

    def __init__(
        self,
        name: str,
        memory: torch.Tensor,
        shape: Geometry,
        folder: Path,
        *,
        epoch: int = 1,
        fabric: Fabric | None = None,
        gpu: Gpu | None = None,
        where: str | None = None,
        settings: NcclSettings = SETTINGS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """On fakes by default; `where` is the GPU's name."""
        self.fake = FakeFabric()
        self.gpu = FakeGpu()
        self.name, self.epoch, self.shape = InstanceId(name), epoch, shape
        self.memory = memory
        machinery = Machinery(fabric or self.fake, gpu or self.gpu, settings, clock)
        self.endpoint = NcclEndpoint(
            Rank(self.name, epoch, shape.tp_rank),
            memory,
            shape,
            machinery,
            folder=folder,
            gpu=where or f"gpu-of-{name}",
        )

    def peer(self, own_heads: Heads | None = None, peer_heads: Heads | None = None) -> RankPeer:
        """This end, as the others see it; the heads are a sender's and this end's."""
        address = self.endpoint.address
        return RankPeer(self.name, self.epoch, self.shape, address, own_heads, peer_heads)

    def blocks(self, *block_ids: int) -> list[bytes]:
        """What they hold."""
        return [read_block(self.memory.numpy(), self.shape, block) for block in block_ids]

    def close(self) -> None:
        self.endpoint.close()
        self.fake.close()


class EndMaker:
    """Makes ends of links on fakes, in one run directory; a context.

    At its end they and their links are closed, and must leave no thread and no socket.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ends: list[End] = []
        self._links: list[NcclLink] = []

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self._folder.name)

    def __call__(self, name: str, shape: Geometry = SHAPE, *, seed: int = 0, **options: Any) -> End:
        """`seed`: of the memory's contents, which are zeros without one; `options`: of `End`."""
        memory = torch.zeros(buffer_bytes(shape), dtype=torch.int8)
        if seed:
            fill_random(memory.numpy(), seed)
        end = End(name, memory, shape, self.folder, **options)
        self._ends.append(end)
        open_link = end.endpoint.open

        def open_and_keep(peer: RankPeer) -> NcclLink:
            self._links.append(open_link(peer))
            return self._links[-1]

        end.endpoint.open = open_and_keep  # type: ignore[method-assign]
        return end

    def __enter__(self) -> EndMaker:
        return self

    def __exit__(self, *error: object) -> None:
        with self._folder:
            for link in self._links:
                link.close()
            for end in self._ends:
                end.close()
                assert end.fake.num_joined == end.fake.num_aborted
                assert end.gpu.num_pipes == 0
            assert [t.name for t in threading.enumerate() if t.name.startswith("nccl")] == []
            assert list(self.folder.iterdir()) == []


def cuda_end(
    name: str,
    index: int,
    memory: torch.Tensor,
    shape: Geometry,
    folder: Path,
    *,
    epoch: int = 1,
    settings: NcclSettings = SETTINGS,
) -> End:
    """On the GPU of that number, by the real NCCL."""
    device = torch.device("cuda", index)
    return End(
        name,
        memory,
        shape,
        folder,
        epoch=epoch,
        fabric=NcclFabric(),
        gpu=CudaGpu(device, library_for(device)),
        where=gpu_identity(device),
        settings=settings,
    )


def with_pieces(pieces: Pieces) -> NcclSettings:
    """The settings of the tests, in other pieces."""
    return msgspec.structs.replace(SETTINGS, pieces=pieces)


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for another thread or process."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(50e-6)  # as an engine does, which leaves the interpreter to the others


def completions(link: Link, count: int) -> list[Completion]:
    """The next so many."""
    done: list[Completion] = []

    def are_there() -> bool:
        done.extend(link.poll())
        return len(done) >= count

    until(are_there, f"{count} transfers should have ended")
    assert len(done) == count
    return done

"""Instances of several ranks in one process: real links, agents in threads, memory real or a GPU's
that is a fake.

The model's KV is one random array over all heads; each rank's buffer holds its part of it, laid out
as its geometry says. So what has arrived is compared with the array and not with a sender. No vLLM.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from memserve.core.head_split import heads_of_rank
from memserve.messages import PeerJoined
from memserve.ops.blocks import BlockOps, TorchBlockOps
from memserve.types import BlockId, Geometry, InstanceId
from memserve.workers.gpu_memory import GpuBuffer, PeerGpuBuffer
from memserve.workers.kv_memory import Openers
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import Link, RankPeer
from memserve.workers.links.choice import LinkChoice, open_here
from memserve.workers.links.heads import Route, rows_of
from memserve.workers.links.ipc import NUM_STREAMS, IpcLink
from memserve.workers.links.shm import KIND, open_shm
from memserve.workers.rank_agent import RankAgent
from memserve.workers.rank_dram import RankDram
from memserve.workers.rank_group import RankGroup
from tests.contract.gpu_rig import FakeDevice, FakeOps, FakeStream, Host
from tests.contract.link_rig import BLOCK_SIZE, NUM_LAYERS, buffer_bytes, geometry

HEAD_BYTES = 4
"""Of one head and token."""
DEADLINE_S = 20.0

Bytes = npt.NDArray[np.uint8]


def model_kv(num_blocks: int, total_heads: int, seed: int = 1) -> Bytes:
    """Shape `[num_blocks, NUM_LAYERS, total_heads, BLOCK_SIZE, HEAD_BYTES]`, without zeros."""
    shape = (num_blocks, NUM_LAYERS, total_heads, BLOCK_SIZE, HEAD_BYTES)
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


class Ranks:
    """The memory of one instance. Close it."""

    def __init__(
        self,
        total_heads: int,
        tp: int,
        *,
        layout: str = "block_first",
        page_order: str = "HNC",
        num_blocks: int = 17,
        host: Host | None = None,
    ) -> None:
        """`host`: whose fake GPUs have the memory; None: it is shared memory, and real."""
        self.total_heads = total_heads
        self.tp = tp
        heads = len(heads_of_rank(total_heads, tp, 0))
        self._order = page_order
        rank_0 = geometry(layout, num_blocks)
        page_bytes = heads * BLOCK_SIZE * HEAD_BYTES
        scale = page_bytes / rank_0.page_bytes
        self.geometries = [
            geometry(
                layout,
                num_blocks,
                num_kv_heads=heads,
                page_bytes=page_bytes,
                block_stride=int(rank_0.block_stride * scale),
                layer_offsets=tuple(int(o * scale) for o in rank_0.layer_offsets),
                page_order=page_order if heads > 1 else "HNC",
                tp_rank=rank,
                tp_size=tp,
                total_kv_heads=total_heads,
            )
            for rank in range(tp)
        ]
        sizes = [buffer_bytes(one) for one in self.geometries]
        self._host = host
        self._buffers: list[KvBuffer | GpuBuffer] = [
            KvBuffer.create(size) if host is None else GpuBuffer(FakeDevice(host), size)
            for size in sizes
        ]
        self.make_ops: Callable[[int], BlockOps] = lambda rank: TorchBlockOps()
        """Of a rank's part of the DRAM tier."""
        self.drams: list[RankDram] = []
        self._agents: list[threading.Thread] = []
        self._groups: list[RankGroup] = []

    def pages(self, rank: int) -> Bytes:
        """A rank's KV, `[blocks, layers, heads, tokens, bytes]`; shares its memory."""
        of = self.geometries[rank]
        heads = of.num_kv_heads
        (layer_step,) = {
            b - a for a, b in zip(of.layer_offsets, of.layer_offsets[1:], strict=False)
        }
        by_token = (HEAD_BYTES, heads * HEAD_BYTES)
        by_head = (BLOCK_SIZE * HEAD_BYTES, HEAD_BYTES)
        view: Bytes = np.lib.stride_tricks.as_strided(
            self._buffers[rank].tensor.view(torch.uint8).numpy(),
            (of.num_blocks, NUM_LAYERS, heads, BLOCK_SIZE, HEAD_BYTES),
            (of.block_stride, layer_step, *(by_token if self._order == "NHC" else by_head), 1),
        )
        return view

    def fill(self, kv: Bytes) -> None:
        """Give each rank its part of the model's KV."""
        for rank in range(self.tp):
            self.pages(rank)[:] = kv[:, :, self._heads(rank)]

    def require_blocks(self, block_ids: Sequence[BlockId], expected: Bytes) -> None:
        """On every rank, its part of `expected` (`[len(block_ids), …]`); zeros everywhere else."""
        for rank in range(self.tp):
            pages = self.pages(rank)
            assert np.array_equal(pages[block_ids], expected[:, :, self._heads(rank)])
            others = np.setdiff1d(np.arange(len(pages)), block_ids)
            assert not pages[others].any()

    def _heads(self, rank: int) -> slice:
        held = heads_of_rank(self.total_heads, self.tp, rank)
        return slice(held.start, held.stop)

    # ── links ─────────────────────────────────────────────────────────────────────────────────

    def joined(self) -> PeerJoined:
        """How it is introduced."""
        return PeerJoined(
            epoch=1,
            peer=InstanceId("D0"),
            peer_epoch=1,
            geometry=self.geometries[0],
            addresses={KIND: tuple(buffer.address for buffer in self._buffers)},
        )

    def link_to(self, peer: Ranks) -> Link:
        """As a worker opens it: in its own thread, or by the ranks' agents."""
        if self.tp > 1:
            return LinkChoice(self.geometries[0], [KIND], self.group().open)(peer.joined())

        def open_lanes(kind: str, routes: Sequence[Route]) -> list[Link]:
            return open_here(self._openers(0)[kind], routes)

        return LinkChoice(self.geometries[0], [KIND], open_lanes)(peer.joined())

    def group(self) -> RankGroup:
        """A driver's view of the ranks, each with an agent."""
        pairs = [Pipe() for _ in range(self.tp)]
        for rank, (_, end) in enumerate(pairs):
            buffer = self._buffers[rank].tensor.view(torch.uint8)
            dram = RankDram(self.geometries[rank], buffer, partial(self.make_ops, rank))
            self.drams.append(dram)
            self._agents.append(start_agent(end, self._openers(rank), dram))
        self._groups.append(RankGroup([driver for driver, _ in pairs]))
        return self._groups[-1]

    def _openers(self, rank: int) -> Openers:
        buffer, of = self._buffers[rank], self.geometries[rank]
        if isinstance(buffer, KvBuffer):
            return {KIND: lambda peer: open_shm(buffer, of, peer)}
        assert self._host is not None
        device = FakeDevice(self._host)

        def open_on_fakes(peer: RankPeer) -> Link:
            streams: list[Any] = [FakeStream() for _ in range(NUM_STREAMS)]
            return IpcLink(
                buffer.tensor,
                of,
                PeerGpuBuffer(device, peer.address),
                peer.geometry,
                ops=FakeOps(),
                streams=streams,
                rows=rows_of(of, peer),
            )

        return {KIND: open_on_fakes}

    def close(self) -> None:
        for group in self._groups:
            group.close()
        for agent in self._agents:
            agent.join(DEADLINE_S)
            assert not agent.is_alive(), "an agent has not ended with its driver"
        for buffer in self._buffers:
            buffer.close()


def start_agent(
    end: Connection, openers: Openers, dram: RankDram | None = None
) -> threading.Thread:
    """A rank's agent in a thread; it ends when the driver's end of the pipe is closed."""
    dram = dram or RankDram(geometry(), torch.empty(0), TorchBlockOps)
    thread = threading.Thread(target=RankAgent(end, openers, dram).serve)
    thread.start()
    return thread


def rank_geometry(rank: int, tp: int) -> Geometry:
    """Of one head on each rank."""
    return geometry(tp_rank=rank, tp_size=tp, total_kv_heads=tp)

"""What the contract of links is run on: links of every kind, with both memories in sight."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from memserve.ops.blocks import library_for
from memserve.ops.device_memory import CudaDeviceMemory
from memserve.types import BlockId, Geometry, InstanceId, TransferId, TransferStyle
from memserve.workers.gpu_memory import GpuBuffer, PeerGpuBuffer
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import Completion, LayerLink, Link, RankPeer
from memserve.workers.links.fake import FakeLink
from memserve.workers.links.heads import Route
from memserve.workers.links.ipc import NUM_STREAMS, IpcLink, ipc_ops
from memserve.workers.links.ranked import RankedLink
from memserve.workers.links.shm import ShmLink
from memserve.workers.rank_group import RankGroup
from tests.contract.gpu_rig import FakeDevice, FakeOps, FakeStream, Host
from tests.contract.link_rig import (
    NUM_BLOCKS,
    PeerProcess,
    buffer_bytes,
    fill_random,
    geometry,
    read_block,
)
from tests.contract.nccl_rig import End, cuda_end
from tests.contract.rank_rig import start_agent

LAYOUTS = [
    ("block_first", "block_first"),
    ("layer_first", "layer_first"),
    ("block_first", "layer_first"),
    ("layer_first", "block_first"),
    ("padded", "padded"),
    ("padded", "block_first"),
]
PEER_LAYOUTS = ("block_first", "layer_first", "padded")
DISCRETE = ", page by page"
"""After a kind's name: blocks travel page by page."""
DEADLINE_S = 30.0


class Counted:
    """A link that knows how many transfers have not ended."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.num_open = 0

    def send(
        self,
        transfer_id: TransferId,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        self.num_open += 1
        self._link.send(transfer_id, source_ids, target_ids)

    def send_layer(
        self,
        transfer_id: TransferId,
        layer: int,
        source_ids: Sequence[BlockId],
        target_ids: Sequence[BlockId],
    ) -> None:
        assert isinstance(self._link, LayerLink)
        self.num_open += 1
        self._link.send_layer(transfer_id, layer, source_ids, target_ids)

    def poll(self) -> list[Completion]:
        done = self._link.poll()
        self.num_open -= len(done)
        return done

    def cancel(self, transfer_id: TransferId) -> None:
        self._link.cancel(transfer_id)

    def close(self, *, is_lost: bool = False) -> None:
        self._link.close(is_lost=is_lost)


class Wire:
    """A link with both memories in sight."""

    def __init__(
        self, link: Link, source: object, target: object, source_of: Geometry, target_of: Geometry
    ) -> None:
        self.link = Counted(link)
        self.source = source
        self.target = target
        self.source_of = source_of
        self.target_of = target_of

    def run(self) -> list[Completion]:
        """Poll until all that was sent has ended, and a while longer: nothing ends twice."""
        done: list[Completion] = []
        deadline = time.monotonic() + DEADLINE_S
        while self.link.num_open:
            assert time.monotonic() < deadline, "a transfer does not end"
            done += self.link.poll()
        for _ in range(100):
            done += self.link.poll()
        return done

    def source_block(self, block_id: int) -> bytes:
        return read_block(as_bytes(self.source), self.source_of, block_id)

    def target_block(self, block_id: int) -> bytes:
        return read_block(self.target_bytes(), self.target_of, block_id)

    def target_bytes(self) -> bytes:
        return as_bytes(self.target)


def as_bytes(memory: object) -> bytes:
    """All of a memory, wherever it is."""
    if isinstance(memory, torch.Tensor):
        return bytes(memory.cpu().numpy())
    return bytes(memoryview(memory))  # type: ignore[arg-type]


class Maker:
    """Makes links between layouts; the source is random, the target is zero."""

    def __init__(self, kind: str, peer: Callable[[], PeerProcess]) -> None:
        self._kind = kind
        self._is_discrete = kind.endswith(DISCRETE)
        self._peer = peer
        self._buffers: list[KvBuffer | GpuBuffer | PeerGpuBuffer] = []
        self._links: list[Link] = []
        self._groups: list[RankGroup] = []
        self._agents: list[threading.Thread] = []
        self._ends: list[End] = []
        self._numbers = itertools.count()
        self._folder = tempfile.TemporaryDirectory()

    def __call__(self, source_layout: str, target_layout: str) -> Wire:
        source_of, target_of = geometry(source_layout), geometry(target_layout, NUM_BLOCKS + 4)
        make = {
            "fake": self._fake,
            "ipc": self._ipc,
            "ipc on a fake GPU": self._ipc_on_fakes,
            "by a rank's agent": self._by_agent,
            "nccl": self._nccl,
            "nccl on fakes": self._nccl_on_fakes,
            "nccl on fakes across processes": self._nccl_on_fakes,
        }
        wire = make.get(self._kind.removesuffix(DISCRETE), self._shm)(source_of, target_of)
        self._links.append(wire.link)
        return wire

    def close(self) -> None:
        for link in self._links:
            link.close()
        for group in self._groups:
            group.close()
        for agent in self._agents:
            agent.join(20)
            assert not agent.is_alive()
        for end in self._ends:
            end.close()
        for buffer in self._buffers:
            buffer.close()
        self._folder.cleanup()

    def _by_agent(self, source_of: Geometry, target_of: Geometry) -> Wire:
        inner = self._shm(source_of, target_of)
        driver, end = multiprocessing.Pipe()
        self._agents.append(start_agent(end, {"shm": lambda peer: inner.link}))
        group = RankGroup([driver])
        self._groups.append(group)
        peer = RankPeer(InstanceId("D0"), 1, target_of, "there")
        link = RankedLink(group.open("shm", [Route(0, peer)]))
        return Wire(link, inner.source, inner.target, source_of, target_of)

    def _fake(self, source_of: Geometry, target_of: Geometry) -> Wire:
        source, target = bytearray(buffer_bytes(source_of)), bytearray(buffer_bytes(target_of))
        fill_random(source, seed=1)
        link = FakeLink(source, source_of, target, target_of)
        return Wire(link, source, target, source_of, target_of)

    def _shm(self, source_of: Geometry, target_of: Geometry) -> Wire:
        buffer = KvBuffer.create(buffer_bytes(source_of))
        self._buffers.append(buffer)
        fill_random(buffer.array, seed=1)
        if "across" not in self._kind:
            owned = KvBuffer.create(buffer_bytes(target_of))
            self._buffers.append(owned)
            mapped = KvBuffer.open(owned.address)
        else:
            mapped = KvBuffer.open(self._peer().ask("own", buffer_bytes(target_of)))
        link = ShmLink(buffer, source_of, mapped, target_of, is_discrete=self._is_discrete)
        return Wire(link, buffer.array, mapped.array, source_of, target_of)

    def _ipc(self, source_of: Geometry, target_of: Geometry) -> Wire:
        device = torch.device("cuda", 0)
        memory = CudaDeviceMemory(device)
        buffer = GpuBuffer(memory, buffer_bytes(source_of))
        self._buffers.append(buffer)
        contents = bytearray(buffer_bytes(source_of))
        fill_random(contents, seed=1)
        buffer.tensor.copy_(torch.frombuffer(contents, dtype=torch.int8))
        address = self._peer().ask("own_gpu", buffer_bytes(target_of))
        target, kept = PeerGpuBuffer(memory, address), PeerGpuBuffer(memory, address)
        self._buffers.append(kept)  # the tests look at the memory after the link has closed its own
        streams = [torch.cuda.Stream(device) for _ in range(NUM_STREAMS)]
        style = TransferStyle.DISCRETE if self._is_discrete else TransferStyle.REQUEST
        link = IpcLink(
            buffer.tensor,
            source_of,
            target,
            target_of,
            ops=ipc_ops(library_for(device), source_of, target_of, None, style),
            streams=streams,
            is_discrete=self._is_discrete,
        )
        torch.cuda.synchronize(device)
        return Wire(link, buffer.tensor, kept.tensor, source_of, target_of)

    def _ipc_on_fakes(self, source_of: Geometry, target_of: Geometry) -> Wire:
        host = Host()
        device = FakeDevice(host)
        buffer = GpuBuffer(device, buffer_bytes(source_of))
        fill_random(buffer.tensor.numpy(), seed=1)
        target = PeerGpuBuffer(device, GpuBuffer(FakeDevice(host), buffer_bytes(target_of)).address)
        streams: list[Any] = [FakeStream() for _ in range(NUM_STREAMS + 1)]
        link = IpcLink(
            buffer.tensor,
            source_of,
            target,
            target_of,
            ops=FakeOps(),
            streams=streams[1:],
            compute_stream=lambda: streams[0],
            is_discrete=self._is_discrete,
        )
        return Wire(link, buffer.tensor, target.tensor, source_of, target_of)

    def _nccl_on_fakes(self, source_of: Geometry, target_of: Geometry) -> Wire:
        source = torch.zeros(buffer_bytes(source_of), dtype=torch.int8)
        fill_random(source.numpy(), seed=1)
        self._ends.append(sender := End("P0", source, source_of, Path(self._folder.name)))
        if self._kind == "nccl on fakes":
            target = torch.zeros(buffer_bytes(target_of), dtype=torch.int8)
            self._ends.append(receiver := End("D0", target, target_of, Path(self._folder.name)))
            peer = receiver.peer()
        else:
            address, peer = self._nccl_peer("cpu", target_of)
            self._buffers.append(mapped := KvBuffer.open(address))
            target = mapped.tensor
        link = sender.endpoint.open(peer)
        target.zero_()  # the warm-up has written the null block
        return Wire(link, source, target, source_of, target_of)

    def _nccl(self, source_of: Geometry, target_of: Geometry) -> Wire:
        if torch.cuda.device_count() < 2:
            pytest.skip("NCCL joins two GPUs, and there is one")
        memory = CudaDeviceMemory(torch.device("cuda", 0))
        self._buffers.append(buffer := GpuBuffer(memory, buffer_bytes(source_of)))
        contents = bytearray(buffer_bytes(source_of))
        fill_random(contents, seed=1)
        buffer.tensor.copy_(torch.frombuffer(contents, dtype=torch.int8))
        sender = cuda_end("P0", 0, buffer.tensor, source_of, Path(self._folder.name))
        self._ends.append(sender)
        address, peer = self._nccl_peer("cuda", target_of)
        self._buffers.append(kept := PeerGpuBuffer(memory, address))
        link = sender.endpoint.open(peer)
        kept.tensor.zero_()
        torch.cuda.synchronize()
        return Wire(link, buffer.tensor, kept.tensor, source_of, target_of)

    def _nccl_peer(self, device: str, target_of: Geometry) -> tuple[str, RankPeer]:
        layout = next(n for n in PEER_LAYOUTS if geometry(n, NUM_BLOCKS + 4) == target_of)
        name = f"D{next(self._numbers)}"
        answer = self._peer().ask(
            "own_nccl", device, layout, target_of.num_blocks, name, 1, self._folder.name
        )
        address, endpoint = answer.split()
        return address, RankPeer(InstanceId(name), 1, target_of, endpoint)

"""What every link must do: on the fake, on shared memory within one process and across two, on GPU
memory of another process, and on a GPU that is itself a fake."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memserve.errors import GeometryMismatchError, StartError, TransferError
from memserve.messages import PeerJoined
from memserve.ops.blocks import library_for
from memserve.ops.device_memory import CudaDeviceMemory
from memserve.types import BlockId, Geometry, InstanceId, TransferId, TransferStyle
from memserve.workers.gpu_memory import GpuBuffer, PeerGpuBuffer
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import (
    Completion,
    LayerLink,
    Link,
    RankPeer,
    plan_pieces,
    rank_peer,
    require_compatible,
)
from memserve.workers.links.fake import FakeLink
from memserve.workers.links.heads import Route
from memserve.workers.links.ipc import NUM_STREAMS, IpcLink, ipc_ops
from memserve.workers.links.ranked import RankedLink
from memserve.workers.links.shm import ShmLink, open_shm
from memserve.workers.rank_group import RankGroup
from tests.contract.gpu_rig import FakeDevice, FakeOps, FakeStream, Host
from tests.contract.link_rig import (
    NUM_BLOCKS,
    NUM_LAYERS,
    PAGE_BYTES,
    PeerProcess,
    buffer_bytes,
    fill_random,
    geometry,
    peer_process,
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
DEADLINE_S = 30.0
T1, T2, T3 = TransferId("t1"), TransferId("t2"), TransferId("t3")


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


WireMaker = Callable[[str, str], Wire]
DISCRETE = ", page by page"


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    """Owns the targets of the links across processes."""
    with peer_process() as process:
        yield process


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


SENDS_LAYERS = [
    "fake",
    "shm",
    "shm across processes",
    "shm" + DISCRETE,
    "ipc on a fake GPU",
    "ipc on a fake GPU" + DISCRETE,
    pytest.param("ipc", marks=pytest.mark.gpu),
    pytest.param("ipc" + DISCRETE, marks=pytest.mark.gpu),
]
KINDS = [
    *SENDS_LAYERS,
    "by a rank's agent",
    "nccl on fakes",
    "nccl on fakes across processes",
    pytest.param("nccl", marks=pytest.mark.gpu),
]


@pytest.fixture(params=KINDS)
def make_wire(request: pytest.FixtureRequest) -> Iterator[WireMaker]:
    maker = Maker(request.param, lambda: request.getfixturevalue("peer"))
    yield maker
    maker.close()


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(n) for n in numbers]


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_blocks_arrive_whole_and_nothing_else_is_written(
    make_wire: WireMaker, layouts: tuple[str, str]
) -> None:
    wire = make_wire(*layouts)
    source_ids, target_ids = ids(3, 4, 5, 9, 1, 16), ids(7, 8, 9, 2, 20, 1)
    before = wire.target_bytes()
    wire.link.send(T1, source_ids, target_ids)
    (done,) = wire.run()
    assert (done.transfer_id, done.error) == (T1, None)
    assert done.size_bytes == 6 * wire.source_of.block_bytes
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        assert wire.target_block(target_id) == wire.source_block(source_id)
    expected, after = bytearray(before), wire.target_bytes()
    for target_id in target_ids:
        for offset in wire.target_of.layer_offsets:
            start = offset + target_id * wire.target_of.block_stride
            expected[start : start + PAGE_BYTES] = after[start : start + PAGE_BYTES]
    assert after == bytes(expected)


@pytest.mark.parametrize("make_wire", SENDS_LAYERS, indirect=True)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layers_arrive_one_by_one_and_each_ends_once(
    make_wire: WireMaker, layouts: tuple[str, str]
) -> None:
    wire = make_wire(*layouts)
    source_ids, target_ids = ids(3, 4, 9), ids(7, 8, 2)
    for layer in (2, 0, 1):
        offset, stride = wire.target_of.layer_offsets[layer], wire.target_of.block_stride
        starts = [offset + block_id * stride for block_id in target_ids]
        expected = bytearray(wire.target_bytes())
        for source_id, start in zip(source_ids, starts, strict=True):
            page = wire.source_block(source_id)[layer * PAGE_BYTES : (layer + 1) * PAGE_BYTES]
            expected[start : start + PAGE_BYTES] = page
        wire.link.send_layer(T1, layer, source_ids, target_ids)
        (done,) = wire.run()
        assert (done.transfer_id, done.error) == (T1, None)
        assert done.size_bytes == 3 * PAGE_BYTES
        assert wire.target_bytes() == bytes(expected)
    for layer in range(3):
        wire.link.send_layer(T1, layer, source_ids, target_ids)
    assert [done.transfer_id for done in wire.run()] == [T1] * 3


@pytest.mark.parametrize("make_wire", SENDS_LAYERS, indirect=True)
def test_a_layer_of_blocks_that_do_not_exist_fails_and_writes_nothing(make_wire: WireMaker) -> None:
    wire = make_wire("block_first", "block_first")
    before = wire.target_bytes()
    wire.link.send_layer(T1, 1, ids(0, 99), ids(1, 2))
    (done,) = wire.run()
    assert done.error is not None
    assert wire.target_bytes() == before


def test_each_transfer_ends_once(make_wire: WireMaker) -> None:
    wire = make_wire("block_first", "block_first")
    wire.link.send(T1, ids(1, 2), ids(3, 4))
    wire.link.send(T2, ids(5), ids(6))
    wire.link.send(T3, ids(1), ids(9))
    done = wire.run()
    assert sorted(c.transfer_id for c in done) == [T1, T2, T3]
    assert all(c.error is None for c in done)
    assert wire.run() == []


@pytest.mark.parametrize(
    ("source_ids", "target_ids"),
    [
        (ids(NUM_BLOCKS), ids(1)),
        (ids(1), ids(NUM_BLOCKS + 4)),
        (ids(-1), ids(1)),
        (ids(1, 2), ids(3)),
    ],
)
def test_blocks_that_do_not_exist_fail_and_write_nothing(
    make_wire: WireMaker, source_ids: list[BlockId], target_ids: list[BlockId]
) -> None:
    wire = make_wire("block_first", "block_first")
    wire.link.send(T1, source_ids, target_ids)
    (done,) = wire.run()
    assert done.error is not None and done.size_bytes == 0
    assert not any(wire.target_bytes())


def test_a_cancelled_transfer_ends_with_an_error_and_others_go_on(make_wire: WireMaker) -> None:
    wire = make_wire("block_first", "block_first")
    wire.link.send(T1, ids(1, 2, 3, 4), ids(5, 6, 7, 8))
    wire.link.send(T2, ids(9), ids(9))
    wire.link.cancel(T1)
    wire.link.cancel(T3)  # unknown
    done = {c.transfer_id: c for c in wire.run()}
    assert done.keys() == {T1, T2}
    assert done[T1].error is not None
    assert done[T2].error is None and wire.target_block(9) == wire.source_block(9)


def test_nothing_is_written_after_close(make_wire: WireMaker) -> None:
    wire = make_wire("block_first", "block_first")
    wire.link.send(T1, ids(1, 2), ids(5, 6))
    wire.link.close()
    after = wire.target_bytes()
    assert wire.link.poll() == []
    assert wire.target_bytes() == after


# ── shared memory alone ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def shm_pair() -> Iterator[tuple[KvBuffer, KvBuffer, Geometry]]:
    shape = geometry()
    with (
        KvBuffer.create(buffer_bytes(shape)) as source,
        KvBuffer.create(buffer_bytes(shape)) as target,
    ):
        fill_random(source.array, seed=2)
        yield source, target, shape


def test_a_poll_copies_a_bounded_number_of_bytes(
    shm_pair: tuple[KvBuffer, KvBuffer, Geometry],
) -> None:
    source, target, shape = shm_pair
    link = ShmLink(source, shape, target, shape, poll_bytes=100)
    source_ids, target_ids = ids(1, 2, 3, 7), ids(4, 5, 6, 2)
    link.send(T1, source_ids, target_ids)
    total = 4 * shape.block_bytes
    polls = 0
    while not (done := link.poll()):
        polls += 1
        assert np.count_nonzero(target.array) <= polls * 100
    assert polls == -(-total // 100) - 1
    assert done[0].size_bytes == total
    assert [read_block(target.array, shape, b) for b in target_ids] == [
        read_block(source.array, shape, b) for b in source_ids
    ]


def test_a_cancel_in_the_middle_stops_the_copy(
    shm_pair: tuple[KvBuffer, KvBuffer, Geometry],
) -> None:
    source, target, shape = shm_pair
    link = ShmLink(source, shape, target, shape, poll_bytes=shape.block_bytes)
    link.send(T1, ids(1, 2, 3), ids(1, 2, 3))
    assert link.poll() == []
    link.cancel(T1)
    (done,) = link.poll()
    assert done.error == "cancelled" and done.size_bytes == shape.block_bytes
    assert not any(read_block(target.array, shape, 2))


def test_the_owner_sees_what_a_peer_wrote_and_keeps_it_after_the_peers_death() -> None:
    shape = geometry()
    with KvBuffer.create(buffer_bytes(shape)) as target:
        half = 2 * shape.block_bytes
        with peer_process() as process:
            assert process.ask("send", target.address, half, "1,2,3,4", "5,6,7,8") == "0"
            process.kill()
        expected = bytearray(buffer_bytes(shape))
        fill_random(expected, seed=7)
        for source_id, target_id in ((1, 5), (2, 6)):
            assert read_block(target.array, shape, target_id) == read_block(
                expected, shape, source_id
            )
        assert not any(read_block(target.array, shape, 7))


def test_writing_to_a_dead_peer_is_harmless_and_opening_one_fails() -> None:
    shape = geometry()
    with KvBuffer.create(buffer_bytes(shape)) as source, peer_process() as process:
        address = process.ask("own", buffer_bytes(shape))
        link = open_shm(source, shape, rank_of(shape, address))
        process.kill()
        link.send(T1, ids(1), ids(2))
        (done,) = link.poll()
        assert done.error is None
        with pytest.raises(TransferError, match="cannot map"):
            KvBuffer.open(address)
        link.close()


def rank_of(of: Geometry, address: str) -> RankPeer:
    return RankPeer(InstanceId("D0"), 1, of, address)


def test_a_peers_rank_is_known_by_its_address_and_number() -> None:
    peer = PeerJoined(
        epoch=1,
        peer=InstanceId("D0"),
        peer_epoch=3,
        geometry=geometry(),
        addresses={"tcp": ("host:1", "host:2")},
    )
    second = rank_peer("tcp", peer, 1)
    assert (second.peer, second.peer_epoch, second.address) == ("D0", 3, "host:2")
    assert second.geometry.tp_rank == 1
    with pytest.raises(TransferError, match=r"rank 2 of D0 has no .* tcp; D0 offers: tcp$"):
        rank_peer("tcp", peer, 2)
    with pytest.raises(TransferError, match=r"rank 0 of D0 has no .* shm; D0 offers: tcp$"):
        rank_peer("shm", peer, 0)


def test_a_geometry_larger_than_the_buffer_is_refused() -> None:
    shape = geometry()
    size_bytes = buffer_bytes(shape)
    with KvBuffer.create(size_bytes) as source, KvBuffer.create(size_bytes - 1) as target:
        with pytest.raises(TransferError, match=f"covers {size_bytes} bytes"):
            open_shm(source, shape, rank_of(shape, target.address))
        target.array[:] = 1  # the owner's mapping is not touched by the failed opening


def test_only_kv_buffers_can_be_opened(tmp_path: object) -> None:
    with (
        open(f"{tmp_path}/other", "wb+") as other,
        pytest.raises(TransferError, match="not a KV buffer"),
    ):
        KvBuffer.open(f"/proc/{os.getpid()}/fd/{other.fileno()}")


def test_a_kv_buffer_needs_a_size() -> None:
    with pytest.raises(StartError, match="not 0"):
        KvBuffer.create(0)


def test_a_kv_buffer_shows_its_bytes_as_a_tensor_and_cannot_shrink() -> None:
    with KvBuffer.create(8192) as buffer:
        tensor = buffer.tensor
        tensor[4096] = 7
        assert buffer.array[4096] == 7
        fd = int(buffer.address.rsplit("/", 1)[1])
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
        buffer.close()
        assert tensor[4096] == 7  # what vLLM holds stays valid
        with pytest.raises(ValueError, match="closed"):
            _ = buffer.array
        del tensor


# ── the planning of pieces, and the handshake ─────────────────────────────────────────────────


def test_aggregated_blocks_travel_as_one_piece_per_run() -> None:
    shape = geometry()
    size = shape.block_bytes
    pieces = plan_pieces(shape, shape, ids(3, 4, 5, 9), ids(7, 8, 9, 10))
    assert pieces == [(3 * size, 7 * size, 3 * size), (9 * size, 10 * size, size)]
    assert plan_pieces(shape, shape, [], []) == []


def test_discrete_blocks_travel_page_by_page_in_every_layout() -> None:
    for layout in ("block_first", "layer_first", "padded"):
        shape = geometry(layout)
        pieces = plan_pieces(shape, shape, ids(1, 2, 3), ids(5, 6, 7), is_discrete=True)
        assert len(pieces) == 3 * NUM_LAYERS and {length for *_, length in pieces} == {PAGE_BYTES}


def test_layer_first_blocks_travel_as_one_piece_per_layer_and_run() -> None:
    shape = geometry("layer_first")
    pieces = plan_pieces(shape, shape, ids(3, 4), ids(7, 8))
    layer = NUM_BLOCKS * PAGE_BYTES
    assert pieces == [
        (layer * i + 3 * PAGE_BYTES, layer * i + 7 * PAGE_BYTES, 2 * PAGE_BYTES) for i in range(3)
    ]


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_pieces_cover_random_blocks_exactly_once(layouts: tuple[str, str]) -> None:
    rng = random.Random(5)
    source_of, target_of = geometry(layouts[0]), geometry(layouts[1])
    for _ in range(50):
        num = rng.randrange(1, NUM_BLOCKS)
        source_ids = ids(*rng.sample(range(NUM_BLOCKS), num))
        target_ids = ids(*rng.sample(range(NUM_BLOCKS), num))
        pieces = plan_pieces(source_of, target_of, source_ids, target_ids)
        written = [b for _, start, size in pieces for b in range(start, start + size)]
        assert len(written) == len(set(written)) == num * source_of.block_bytes


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "other"}, "model is 'tiny' on P0 and 'other' on D1"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' on P0 and 'bfloat16' on D1"),
        ({"block_size": 8}, "block_size is 4 on P0 and 8 on D1"),
        ({"num_kv_heads": 4}, "KV heads of the model is 2 on P0 and 4 on D1"),
        ({"tp_size": 2}, "KV heads of the model is 2 on P0 and 4 on D1"),
        ({"page_bytes": 32}, "bytes of a head in a page is 32.0 on P0 and 16.0 on D1"),
        ({"page_order": "NHC"}, "page_order is 'HNC' on P0 and 'NHC' on D1"),
        ({"layer_offsets": (0, 64)}, "num_layers is 3 on P0 and 2 on D1"),
    ],
)
def test_a_mismatch_names_both_values(changes: dict[str, object], text: str) -> None:
    own, peer = geometry(num_kv_heads=2), geometry(**{"num_kv_heads": 2, **changes})
    with pytest.raises(GeometryMismatchError) as caught:
        require_compatible(own, peer, InstanceId("P0"), InstanceId("D1"))
    assert text in str(caught.value)


def test_ranks_may_differ_where_heads_can_be_split() -> None:
    whole = geometry(num_kv_heads=3, page_bytes=96)
    third = geometry(page_bytes=32, tp_size=3, tp_rank=1, page_order="NHC")
    require_compatible(whole, third, InstanceId("P0"), InstanceId("D1"))
    require_compatible(third, whole, InstanceId("D1"), InstanceId("P0"))


def test_heads_that_cannot_be_split_are_refused_with_both_degrees() -> None:
    whole = geometry(num_kv_heads=3, page_bytes=96)
    other = geometry(page_bytes=32, tp_size=2, total_kv_heads=3)
    words = r"P0 and D1 cannot .* 3 KV heads .* 2 ranks \(TP 1 on P0, TP 2 on D1\)"
    with pytest.raises(GeometryMismatchError, match=words):
        require_compatible(whole, other, InstanceId("P0"), InstanceId("D1"))


def test_layout_and_size_may_differ() -> None:
    require_compatible(geometry(), geometry("layer_first", 40), InstanceId("P0"), InstanceId("D1"))

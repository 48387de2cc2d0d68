"""The ipc link and its memory over a GPU that is a fake: what the shared contract does not ask.

`test_links.py` runs the contract itself on this link, on fakes everywhere and on GPUs where there
are some.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import pytest
import torch

from memserve.errors import StartError, TransferError
from memserve.messages import PeerJoined
from memserve.ops.build import BlockCopyLibrary
from memserve.types import Geometry, InstanceId, TransferStyle
from memserve.workers.gpu_memory import GpuBuffer, PeerGpuBuffer
from memserve.workers.links import ipc
from memserve.workers.links.base import Link, RankPeer
from memserve.workers.links.choice import LinkChoice
from memserve.workers.links.fake import FakeLink
from memserve.workers.links.heads import Route
from memserve.workers.links.ipc import IpcLink, open_ipc
from tests.contract.gpu_rig import FakeDevice, FakeOps, FakeStream, Host
from tests.contract.link_rig import T1, T2, buffer_bytes, fill_random, geometry, ids, read_block

SHAPE = geometry()


class Pair:
    """Two processes on one host, and the link from the first one's memory into the second's."""

    def __init__(self, num_streams: int = 2, shape: Geometry = SHAPE) -> None:
        host = Host()
        self.sender, self.receiver = FakeDevice(host), FakeDevice(host)
        self.source = GpuBuffer(self.sender, buffer_bytes(shape))
        self.target = GpuBuffer(self.receiver, buffer_bytes(shape))
        fill_random(self.source.tensor.numpy(), seed=3)
        self.streams = [FakeStream() for _ in range(num_streams)]
        self.compute = FakeStream()
        self.ops = FakeOps()
        self.clock_s = 100.0
        self.link = IpcLink(
            self.source.tensor,
            shape,
            PeerGpuBuffer(self.sender, self.target.address),
            shape,
            ops=self.ops,
            streams=self.streams,  # type: ignore[arg-type]
            split_bytes=0,
            compute_stream=lambda: self.compute,  # type: ignore[arg-type,return-value]
            clock=lambda: self.clock_s,
        )

    def has_arrived(self, source_id: int, target_id: int) -> bool:
        source, target = self.source.tensor.numpy(), self.target.tensor.numpy()
        return read_block(source, SHAPE, source_id) == read_block(target, SHAPE, target_id)


def _fill(memory: torch.Tensor, value: int) -> None:
    memory.fill_(value)


# ── the link ──────────────────────────────────────────────────────────────────────────────────


def test_a_short_transfer_keeps_to_one_stream() -> None:
    pair = Pair(num_streams=3)
    pair.link._split_bytes = 4 * SHAPE.block_bytes
    pair.link.send(T1, ids(1, 2, 3), ids(4, 5, 6))
    assert [stream.num_queued for stream in pair.streams] == [3, 0, 0]
    pair.link.send(T2, ids(1, 2, 3, 7), ids(8, 9, 10, 11))
    assert [stream.num_queued for stream in pair.streams] == [5, 2, 0]
    done = [completion for _ in range(20) for completion in pair.link.poll()]
    assert [completion.transfer_id for completion in done] == [T1, T2]
    assert all(pair.has_arrived(source, target) for source, target in ((1, 8), (7, 11)))


def test_a_transfer_is_done_when_all_its_streams_are() -> None:
    pair = Pair()
    pair.link.send(T1, ids(1, 2, 3, 4, 5), ids(9, 8, 7, 6, 5))
    assert [len(stream.queue) for stream in pair.streams] == [3, 2]
    pair.streams[1].is_stuck = True
    for _ in range(20):
        assert pair.link.poll() == []
    assert pair.has_arrived(1, 9) and not pair.has_arrived(5, 5)
    pair.streams[1].is_stuck = False
    pair.clock_s += 0.25
    done = [c for _ in range(20) for c in pair.link.poll()]
    assert [(c.transfer_id, c.error, c.seconds) for c in done] == [(T1, None, 0.25)]
    assert done[0].size_bytes == 5 * SHAPE.block_bytes
    assert all(pair.has_arrived(b, 10 - b) for b in range(1, 6))


def test_nothing_waits_for_the_gpu_but_close() -> None:
    pair = Pair()
    for stream in pair.streams:
        stream.is_stuck = True
    pair.link.send(T1, ids(1, 2), ids(3, 4))
    pair.link.cancel(T1)
    assert pair.link.poll() == []
    for stream in pair.streams:
        stream.is_stuck = False
    pair.link.close()
    assert pair.has_arrived(1, 3) and pair.has_arrived(2, 4)  # it was queued, and has ended
    assert pair.sender.mapped == {} and pair.link.poll() == []
    assert not any(stream.queue for stream in pair.streams)


def test_a_layer_is_read_behind_what_the_engine_has_queued_by_then() -> None:
    pair = Pair()
    source = pair.source.tensor
    pair.compute.put(lambda: _fill(source, 5))
    pair.compute.is_stuck = True
    pair.link.send_layer(T1, 1, ids(1), ids(9))
    pair.compute.put(lambda: _fill(source, 6))  # a later layer's work
    assert [pair.link.poll() for _ in range(5)] == [[]] * 5
    pair.compute.is_stuck = False
    done = [c for _ in range(5) for c in pair.link.poll()]
    assert [(c.transfer_id, c.error, c.size_bytes) for c in done] == [(T1, None, SHAPE.page_bytes)]
    target = read_block(pair.target.tensor.numpy(), SHAPE, 9)
    assert target == bytes(SHAPE.page_bytes) + bytes([5]) * SHAPE.page_bytes + bytes(
        SHAPE.page_bytes
    )


def test_transfers_overtake_each_other() -> None:
    pair = Pair()
    pair.link.send(T1, ids(1, 2, 3, 4), ids(1, 2, 3, 4))
    pair.streams[1].is_stuck = True  # the first one's second half
    pair.link.send(T2, ids(5), ids(5))
    done = [c.transfer_id for _ in range(20) for c in pair.link.poll()]
    assert done == [T2]


def test_a_fault_in_the_middle_ends_after_what_was_queued() -> None:
    pair = Pair()
    pair.ops.fail_at = 1
    pair.link.send(T1, ids(1, 2, 3, 4), ids(1, 2, 3, 4))
    assert pair.link.poll() == []  # the first half is still being written
    done = [c for _ in range(20) for c in pair.link.poll()]
    assert [(c.error, c.size_bytes) for c in done] == [
        ("the copy engines are on strike", 2 * SHAPE.block_bytes)
    ]
    assert not pair.streams[0].queue


def test_the_warm_up_writes_the_null_block_alone_on_each_stream() -> None:
    pair = Pair(num_streams=3)
    pair.link.warm_up()
    assert [stream.num_done for stream in pair.streams] == [1, 1, 1]
    assert pair.has_arrived(0, 0)
    target = pair.target.tensor.numpy()
    assert all(not any(read_block(target, SHAPE, b)) for b in range(1, SHAPE.num_blocks))


def test_a_geometry_larger_than_the_peers_memory_is_refused() -> None:
    pair = Pair()
    target = PeerGpuBuffer(pair.sender, pair.target.address)
    with pytest.raises(TransferError, match="the blocks cover bytes"):
        IpcLink(
            pair.source.tensor,
            SHAPE,
            target,
            geometry(num_blocks=SHAPE.num_blocks + 1),
            ops=pair.ops,
            streams=[],
        )


def test_a_closed_link_takes_no_transfer() -> None:
    pair = Pair()
    pair.link.close()
    pair.link.send(T1, ids(1), ids(1))
    (done,) = pair.link.poll()
    assert done.error == "the link is closed"


# ── memory ────────────────────────────────────────────────────────────────────────────────────


def test_memory_is_zeroed_and_given_back_once() -> None:
    device = FakeDevice(Host())
    buffer = GpuBuffer(device, 512)
    assert not buffer.tensor.any()
    assert len(device.allocated) == 1
    buffer.close()
    buffer.close()
    assert device.allocated == {}
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.tensor


def test_memory_that_cannot_be_shared_is_not_kept() -> None:
    device = FakeDevice(Host())
    device.can_export = False
    with pytest.raises(StartError, match="cannot be shared"):
        GpuBuffer(device, 512)
    assert device.allocated == {}
    with pytest.raises(StartError, match="not 0"):
        GpuBuffer(device, 0)


def test_a_mapping_shows_the_owners_bytes_and_ends_once() -> None:
    host = Host()
    owner, peer = FakeDevice(host), FakeDevice(host)
    buffer = GpuBuffer(owner, 64)
    mapped = PeerGpuBuffer(peer, buffer.address)
    mapped.tensor[3] = 5
    assert buffer.tensor[3] == 5 and mapped.size_bytes == 64
    mapped.close()
    mapped.close()
    assert peer.mapped == {}
    with pytest.raises(ValueError, match="closed"):
        _ = mapped.tensor


@pytest.mark.parametrize(
    "address",
    ["", "/proc/1/fd/3", "{}", json.dumps({"handle": "no base64!", "size_bytes": 4})],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(TransferError, match="not the address of GPU memory"):
        PeerGpuBuffer(FakeDevice(Host()), address)


def test_memory_whose_owner_is_gone_cannot_be_mapped() -> None:
    buffer = GpuBuffer(FakeDevice(Host()), 64)
    with pytest.raises(TransferError, match="invalid resource handle"):
        PeerGpuBuffer(FakeDevice(Host()), buffer.address)


def test_a_link_that_cannot_be_built_leaves_no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ops(*_: object) -> None:
        raise TransferError("no way")

    monkeypatch.setattr(ipc, "ipc_ops", no_ops)
    host = Host()
    owner, device = FakeDevice(host), FakeDevice(host)
    theirs, ours = (GpuBuffer(one, buffer_bytes(SHAPE)) for one in (owner, device))
    peer = RankPeer(InstanceId("D0"), 1, SHAPE, theirs.address)
    library = cast(BlockCopyLibrary, None)  # nothing gets as far as that
    with pytest.raises(TransferError, match="no way"):
        open_ipc(ours, SHAPE, peer, device, torch.device("cuda", 0), library, TransferStyle.REQUEST)
    assert device.mapped == {}


# ── which link ────────────────────────────────────────────────────────────────────────────────


def _peer(*kinds: str) -> PeerJoined:
    return PeerJoined(
        epoch=1,
        peer=InstanceId("D0"),
        peer_epoch=1,
        geometry=SHAPE,
        addresses=dict.fromkeys(kinds, ("there",)),
    )


class _Named(FakeLink):
    def __init__(self, name: str) -> None:
        super().__init__(bytearray(), SHAPE, bytearray(), SHAPE)
        self._name = name

    @property
    def kind(self) -> str:
        return self._name


def _choice(*kinds: str, wanted: str = "auto", broken: Sequence[str] = ()) -> LinkChoice:
    def open_lanes(kind: str, routes: Sequence[Route]) -> list[Link]:
        if kind in broken:
            raise TransferError(f"{kind} is on strike")
        return [_Named(kind) for _ in routes]

    return LinkChoice(SHAPE, kinds, open_lanes, wanted)


@pytest.mark.parametrize(
    ("own", "offered", "wanted", "chosen"),
    [
        (("ipc", "shm"), ("shm", "ipc"), "auto", "ipc"),
        (("ipc", "shm"), ("shm",), "auto", "shm"),
        (("ipc", "shm"), ("shm", "ipc"), "shm", "shm"),
        (("shm",), ("shm", "other"), "auto", "shm"),
    ],
)
def test_the_fastest_link_that_both_have_is_chosen(
    own: tuple[str, ...], offered: tuple[str, ...], wanted: str, chosen: str
) -> None:
    assert _choice(*own, wanted=wanted)(_peer(*offered)).kind == chosen


@pytest.mark.parametrize(
    ("own", "offered", "wanted", "words"),
    [
        (("ipc",), ("shm",), "auto", "D0: it offers shm; this instance has ipc$"),
        (("shm",), (), "auto", "it offers none; this instance has shm$"),
        ((), ("shm",), "auto", "it offers shm; this instance has none$"),
        (("shm",), ("shm",), "ipc", r"has shm \(transfer.link is 'ipc'\)$"),
    ],
)
def test_no_link_in_common_says_what_there_is(
    own: tuple[str, ...], offered: tuple[str, ...], wanted: str, words: str
) -> None:
    with pytest.raises(TransferError, match=words):
        _choice(*own, wanted=wanted)(_peer(*offered))


def test_a_link_that_cannot_be_opened_leaves_the_way_to_the_next_kind() -> None:
    peer = _peer("ipc", "nccl")
    assert _choice("ipc", "nccl", broken=["ipc"])(peer).kind == "nccl"
    with pytest.raises(TransferError, match=r"^no link to D0: ipc: ipc is on strike; nccl: .*ke$"):
        _choice("ipc", "nccl", broken=["ipc", "nccl"])(peer)
    with pytest.raises(TransferError, match=r"^no link to D0: ipc: ipc is on strike$"):
        _choice("ipc", "nccl", broken=["ipc"], wanted="ipc")(peer)

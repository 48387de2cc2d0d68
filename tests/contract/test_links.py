"""What every link must do: on the fake, on shared memory within one process and across two, on GPU
memory of another process, and on a GPU that is itself a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from memserve.types import BlockId
from tests.contract.link_rig import (
    NUM_BLOCKS,
    PAGE_BYTES,
    T1,
    T2,
    T3,
    PeerProcess,
    ids,
    peer_process,
)
from tests.contract.wire_rig import DISCRETE, LAYOUTS, Maker, Wire

WireMaker = Callable[[str, str], Wire]


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    """Owns the targets of the links across processes."""
    with peer_process() as process:
        yield process


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

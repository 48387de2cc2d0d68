"""Links over shared memory, and the buffers under them: what the shared contract does not ask."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from memserve.errors import StartError, TransferError
from memserve.types import Geometry, InstanceId
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import RankPeer
from memserve.workers.links.shm import ShmLink, open_shm
from tests.contract.link_rig import (
    T1,
    buffer_bytes,
    fill_random,
    geometry,
    ids,
    peer_process,
    read_block,
)


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

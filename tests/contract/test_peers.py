"""Two pools without a cluster: the example, and peers that are short of room, wrong, or gone."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import numpy as np
import pytest

from memserve.errors import (
    GeometryMismatchError,
    OutOfBlocksError,
    ProtocolError,
    TransferError,
)
from memserve.messages import Allocate, Allocated, Audit, Commit, decode_event, encode
from memserve.types import Geometry, Namespace, RequestId, TransferId
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.mempool import MemPool
from memserve.workers.peers import RemotePool, SharedPool, block_first_geometry
from memserve.workers.pools import BlockCounts, PlainPool
from tests.contract.link_rig import ROOT, FakeClock, fill_random, read_block

BLOCK_SIZE, NUM_BLOCKS = 4, 12
SHAPE = block_first_geometry(NUM_BLOCKS, BLOCK_SIZE, num_layers=2, page_bytes=64, model="tiny")
TIMEOUT_S = 20.0
TOKENS = list(range(20))


class Side:
    def __init__(self, shape: Geometry = SHAPE) -> None:
        self.shape = shape
        self.clock = FakeClock()
        self.buffer = KvBuffer.create(shape.num_blocks * shape.block_stride)
        self.mempool = MemPool(PlainPool(shape.num_blocks), shape.block_size, clock=self.clock)


@pytest.fixture
def sides() -> Iterator[tuple[Side, Side]]:
    pair = Side(), Side()
    fill_random(pair[0].buffer.array, seed=1)
    yield pair
    for side in pair:
        assert side.mempool.check_integrity({}) == []
        side.buffer.close()


@contextmanager
def served(side: Side) -> Iterator[Connection]:
    """A thread serves this side until the connection that comes out is closed."""
    ours, theirs = Pipe()
    pool = SharedPool(side.mempool, side.buffer, side.shape, theirs)

    def serve() -> None:
        while pool.serve(TIMEOUT_S):
            pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ours
    finally:
        ours.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert side.mempool.holders() == []


def read(side: Side, block_ids: list[int]) -> list[bytes]:
    return [read_block(side.buffer.array, side.shape, block_id) for block_id in block_ids]


def test_the_example() -> None:
    done = subprocess.run(
        [sys.executable, "examples/two_pools.py"],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "150 tokens: 9 blocks, 9 sent",
        "210 tokens: 13 blocks, 4 sent",
        "received: 13 blocks, equal: True, problems: []",
    ]


def test_it_needs_no_vllm() -> None:
    script = (
        "import sys, memserve.workers.mempool, memserve.workers.peers; print('vllm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True,
        timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def test_only_what_the_peer_lacks_travels_under_its_namespace(sides: tuple[Side, Side]) -> None:
    here, there = sides
    space = Namespace("tenant")
    blocks = here.mempool.alloc_mem(5, "w")[::-1]
    with served(there) as connection, RemotePool(connection, here.buffer, SHAPE) as peer:
        send = here.mempool.transfer_with_insert
        assert send(peer, TOKENS[:9], blocks[:2], space) == 2
        assert send(peer, TOKENS, blocks, space) == 3
        assert send(peer, TOKENS, blocks, space) == 0
        assert send(peer, TOKENS[:3], [], space) == 0
        assert send(peer, TOKENS, blocks) == 5
    for found in there.mempool.match(TOKENS, space), there.mempool.match(TOKENS):
        assert read(there, found) == read(here, blocks)
    assert there.mempool.stats() == BlockCounts(NUM_BLOCKS, NUM_BLOCKS - 10, 10, 0)
    assert here.mempool.holders() == ["w: 5 blocks"]


def test_blocks_can_be_copied_without_an_index(sides: tuple[Side, Side]) -> None:
    here, there = sides
    sources, targets = here.mempool.alloc_mem(3, "w"), there.mempool.alloc_mem(3, "r")
    targets.reverse()
    ours, theirs = Pipe()
    pool = SharedPool(there.mempool, there.buffer, SHAPE, theirs)
    thread = threading.Thread(target=pool.serve, args=(TIMEOUT_S,))
    thread.start()
    with RemotePool(ours, here.buffer, SHAPE) as peer:
        thread.join(TIMEOUT_S)
        assert here.mempool.transfer(peer, sources, targets) == 3 * SHAPE.block_bytes
        assert here.mempool.transfer(peer, [], []) == 0
        with pytest.raises(TransferError, match="3 blocks cannot fill 2 blocks"):
            here.mempool.transfer(peer, sources, targets[:2])
    assert read(there, targets) == read(here, sources)
    assert not pool.serve(TIMEOUT_S)
    assert there.mempool.held("r") == targets[::-1]


def test_a_peer_without_room_refuses_and_keeps_nothing(sides: tuple[Side, Side]) -> None:
    here, there = sides
    there.mempool.alloc_mem(NUM_BLOCKS - 3, "busy")
    blocks = here.mempool.alloc_mem(5, "w")
    ours, theirs = Pipe()
    pool = SharedPool(there.mempool, there.buffer, SHAPE, theirs)
    thread = threading.Thread(target=lambda: [None for _ in range(2) if pool.serve(TIMEOUT_S)])
    thread.start()
    with RemotePool(ours, here.buffer, SHAPE) as peer:
        with pytest.raises(OutOfBlocksError, match="5 blocks asked for, 3 of 12 available"):
            here.mempool.transfer_with_insert(peer, TOKENS, blocks)
        thread.join(TIMEOUT_S)
    assert there.mempool.holders() == [f"busy: {NUM_BLOCKS - 3} blocks"]
    pool.close()


def test_the_number_of_blocks_has_to_fit(sides: tuple[Side, Side]) -> None:
    here, there = sides
    blocks = here.mempool.alloc_mem(4, "w")
    with (
        served(there) as connection,
        RemotePool(connection, here.buffer, SHAPE) as peer,
        pytest.raises(ValueError, match="4 blocks for 20 tokens in blocks of 4"),
    ):
        here.mempool.transfer_with_insert(peer, TOKENS, blocks)


def test_pools_that_do_not_fit_together_say_in_what(sides: tuple[Side, Side]) -> None:
    here, there = sides
    other = block_first_geometry(NUM_BLOCKS, BLOCK_SIZE, num_layers=2, page_bytes=64, model="big")
    with (
        served(there) as connection,
        pytest.raises(GeometryMismatchError, match="model is 'big' on remote and 'tiny' on shared"),
    ):
        RemotePool(connection, here.buffer, other)


def test_a_peer_that_does_not_answer_is_given_up(sides: tuple[Side, Side]) -> None:
    ours, theirs = Pipe()
    with pytest.raises(TransferError, match=r"no answer from the peer of remote in 0\.01 s"):
        RemotePool(ours, sides[0].buffer, SHAPE, timeout_s=0.01)
    theirs.recv_bytes()  # what it had asked
    with theirs, pytest.raises(EOFError):
        theirs.recv_bytes()


def test_a_peer_that_has_gone_is_an_error(sides: tuple[Side, Side]) -> None:
    here, there = sides
    with served(there) as connection:
        peer = RemotePool(connection, here.buffer, SHAPE)
    with pytest.raises(TransferError, match="the peer of remote is gone"):
        here.mempool.transfer_with_insert(peer, TOKENS, here.mempool.alloc_mem(5, "w"))
    peer.close()


# ── the receiver, told by a peer that goes wrong ──────────────────────────────────────────────


def reserved(there: Side, ours: Connection, pool: SharedPool, lease_s: float = 5.0) -> TransferId:
    """The peer has asked for 20 tokens, and may be writing."""
    transfer_id = TransferId("t")
    allocate = Allocate(
        epoch=0,
        transfer_id=transfer_id,
        request_id=RequestId("r"),
        known_tokens=0,
        token_ids=TOKENS,
        namespace=Namespace(),
        is_private=False,
        deadline_s=lease_s,
    )
    ours.send_bytes(encode(allocate))
    assert pool.serve(0.0)
    assert isinstance(decode_event(ours.recv_bytes()), Allocated)
    assert there.mempool.stats().active == 5
    return transfer_id


def _dies(ours: Connection, there: Side, pool: SharedPool, transfer_id: TransferId) -> None:
    ours.close()
    assert not pool.serve(0.0)


def _loses_bytes(ours: Connection, there: Side, pool: SharedPool, transfer_id: TransferId) -> None:
    size_bytes = 5 * SHAPE.block_bytes - 1
    ours.send_bytes(
        encode(Commit(epoch=0, transfer_id=transfer_id, size_bytes=size_bytes, pin=False))
    )
    assert pool.serve(0.0)
    assert "bytes were written" in str(decode_event(ours.recv_bytes()))


def _is_late_and_dies(
    ours: Connection, there: Side, pool: SharedPool, transfer_id: TransferId
) -> None:
    there.clock.now_s += 5.0
    assert pool.serve(0.0)
    (owner,) = [holder.rpartition(":")[0] for holder in there.mempool.holders()]
    assert there.mempool.is_quarantined(owner)
    with pytest.raises(ValueError, match="is in quarantine"):
        there.mempool.free_all(owner)
    _dies(ours, there, pool, transfer_id)


@pytest.mark.parametrize("go_wrong", [_dies, _loses_bytes, _is_late_and_dies])
def test_a_reservation_ends_however_its_peer_does(
    sides: tuple[Side, Side],
    go_wrong: Callable[[Connection, Side, SharedPool, TransferId], None],
) -> None:
    there = sides[1]
    ours, theirs = Pipe()
    pool = SharedPool(there.mempool, there.buffer, SHAPE, theirs)
    go_wrong(ours, there, pool, reserved(there, ours, pool))
    assert there.mempool.stats() == BlockCounts(NUM_BLOCKS, NUM_BLOCKS, 0, 0)
    assert there.mempool.match(TOKENS) == []
    pool.close()


@pytest.mark.parametrize(
    ("frame", "problem"),
    [(b"\x00", "not a command"), (encode(Audit(epoch=0, audit_id=1)), "may not send Audit")],
)
def test_what_no_peer_says_is_refused(sides: tuple[Side, Side], frame: bytes, problem: str) -> None:
    ours, theirs = Pipe()
    pool = SharedPool(sides[1].mempool, sides[1].buffer, SHAPE, theirs)
    ours.send_bytes(frame)
    with pytest.raises(ProtocolError, match=problem):
        pool.serve(0.0)
    pool.close()


def test_a_geometry_describes_a_plain_tensor() -> None:
    tensor = np.arange(NUM_BLOCKS * 2 * 16, dtype=np.float32).reshape(NUM_BLOCKS, 2, 16)
    assert SHAPE.is_aggregated and SHAPE.block_bytes == 128
    for block_id in range(NUM_BLOCKS):
        assert (
            read_block(tensor.view(np.uint8).ravel(), SHAPE, block_id) == tensor[block_id].tobytes()
        )

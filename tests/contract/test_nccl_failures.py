"""The NCCL link on fakes: what fails, stalls or dies, and what that leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest

from memserve.errors import TransferError
from memserve.ops.nccl_pipe import Counts, Pieces
from memserve.types import InstanceId
from memserve.workers.links.base import RankPeer
from memserve.workers.links.nccl_fake import FakeCommunicator, FakePipe
from tests.contract.link_rig import NUM_BLOCKS, T1, T2, T3, FakeClock, ids, peer_process
from tests.contract.nccl_rig import (
    DEADLINE_S,
    NUM_OPENING,
    SETTINGS,
    SHAPE,
    EndMaker,
    completions,
    until,
    with_pieces,
)


@pytest.fixture
def make_end() -> Iterator[EndMaker]:
    with EndMaker() as ends:
        yield ends


# ── what can go wrong ─────────────────────────────────────────────────────────────────────────


def test_a_failure_of_nccl_fails_the_transfer_and_the_next_gets_a_new_communicator(
    make_end: EndMaker,
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    p.fake.is_held = True
    link.send(T1, ids(1), ids(2))
    until(lambda: d.fake.num_joined == 1, "the receiver")
    p.fake.error = "remote process exited"
    (done,) = completions(link, 1)
    assert done.error == "NCCL failed: remote process exited"
    p.fake.error, p.fake.is_held = None, False
    link.send(T2, ids(3), ids(4))
    assert completions(link, 1)[0].error is None
    assert d.blocks(4) == p.blocks(3)
    assert (p.fake.num_joined, d.fake.num_joined, p.fake.num_aborted) == (2, 2, 1)


def test_a_failure_at_the_receiver_is_told_by_name(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    p.fake.is_held = True
    link.send(T1, ids(1), ids(2))
    d.fake.error = "unhandled cuda error"
    (done,) = completions(link, 1)
    assert done.error == "D0: NCCL failed: unhandled cuda error"
    d.fake.error = None


@pytest.mark.parametrize("where", ["P0", "D0"])
def test_a_transfer_ends_though_the_pipe_cannot_be_ended_well(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """CUDA has failed for good: nothing runs there any more, but the other end must hear of it."""
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    end = p if where == "P0" else d
    close = FakePipe.close

    def fail(pipe: FakePipe) -> None:
        close(pipe)
        if pipe._gpu is end.gpu:
            raise TransferError("an illegal memory access was encountered")

    monkeypatch.setattr(FakePipe, "close", fail)
    end.fake.error = "unhandled cuda error"
    link.send(T1, ids(1), ids(2))
    assert completions(link, 1)[0].error is not None
    end.fake.error = None


def test_a_transfer_that_does_not_move_is_given_up(make_end: EndMaker) -> None:
    clock = FakeClock()
    p, d = make_end("P0", seed=1, clock=clock), make_end("D0", clock=clock)
    link = p.endpoint.open(d.peer())
    p.fake.is_held = True
    link.send(T1, ids(1, 3, 5, 7, 9), ids(1, 3, 5, 7, 9))
    until(lambda: bool(_advance(clock) or link.poll()), "it should be given up")
    assert (p.fake.num_aborted, d.fake.num_aborted) == (1, 1)


def test_a_transfer_that_moves_slowly_is_not_given_up(make_end: EndMaker) -> None:
    """Two seconds pass at the receiver with each block that arrives, and none without."""
    far_ahead = msgspec.structs.replace(SETTINGS, chunks_ahead=100)
    p = make_end("P0", seed=1, settings=with_pieces(Pieces.PAGES))
    d = make_end("D0", settings=far_ahead, clock=lambda: 2.0 * d.gpu.num_finished)
    link = p.endpoint.open(d.peer())
    everything = ids(*range(1, NUM_BLOCKS))
    d.fake.is_held = True
    link.send(T1, everything, everything)
    posted = NUM_OPENING + len(everything)
    until(lambda: d.gpu.num_launched == posted, "all receives should be posted")
    d.fake.is_held = False
    (done,) = completions(link, 1)
    assert done.error is None
    assert 2.0 * len(everything) > 2 * SETTINGS.stall_s


def _advance(clock: FakeClock) -> None:
    clock.now_s += 0.01


def test_a_failed_transfer_has_ended_only_when_the_receiver_writes_nothing_more(
    make_end: EndMaker,
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    d.gpu.is_stuck = True  # what has arrived is still to be scattered
    link.send(T1, ids(1), ids(2))
    until(lambda: d.gpu.num_launched > NUM_OPENING, "the receiver should expect it")
    p.fake.error = "unhandled cuda error"
    try:
        until(lambda: d.fake.num_aborted == 1, "the receiver should have given up")
        until(lambda: p.gpu.num_pipes == 0, "the sender should wait for nothing else")
        for _ in range(20_000):
            assert link.poll() == []
    finally:
        d.gpu.is_stuck = False
    assert completions(link, 1)[0].error is not None


def test_nothing_is_written_after_a_peer_was_dropped(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0", seed=2)
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    p.fake.is_held = True
    there.send(T1, ids(1, 3, 5, 7, 9), ids(1, 3, 5, 7, 9))
    until(lambda: d.gpu.num_launched > NUM_OPENING, "the receiver should expect it")
    back.close(is_lost=True)  # D0 frees what P0 was writing
    before = bytes(d.memory.numpy())
    p.fake.is_held = False
    assert completions(there, 1)[0].error is not None
    assert bytes(d.memory.numpy()) == before


def test_two_passages_to_a_lost_peer_are_given_up_though_one_waits_for_the_other(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA has it: a communicator's memory is freed when no other's kernel waits any more, and
    nobody's calls come through until then."""
    p, d = make_end("P0", seed=1), make_end("D0", seed=2)
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    is_freeing, may_free = threading.Event(), threading.Event()
    abort, run, stuck = FakeCommunicator.abort, FakePipe.run, []

    def free(communicator: FakeCommunicator) -> None:
        abort(communicator)
        if communicator._fabric is not p.fake:
            return
        if communicator is there._sender._communicator or is_freeing.is_set():
            may_free.set()
        else:
            is_freeing.set()
            if not may_free.wait(DEADLINE_S):
                stuck.append("free")
            is_freeing.clear()

    def call(pipe: FakePipe, finished: int = 0, watch: int = -1) -> Counts:
        if pipe._gpu is p.gpu and is_freeing.is_set():
            stuck.append("call")
        return run(pipe, finished, watch)

    monkeypatch.setattr(FakeCommunicator, "abort", free)
    monkeypatch.setattr(FakePipe, "run", call)
    p.fake.is_held = True
    there.send(T1, ids(1), ids(2))
    back.close()  # P0's receiver gives up, while its sender waits for D0
    assert is_freeing.wait(DEADLINE_S)
    d.endpoint.close()
    assert completions(there, 1)[0].error is not None
    assert stuck == []


def test_a_closed_link_leaves_the_other_direction(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    back.close()
    there.send(T1, ids(1, 3), ids(2, 4))
    assert completions(there, 1)[0].error is None
    assert d.blocks(2, 4) == p.blocks(1, 3)


def test_a_closed_link_takes_no_transfer(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    link.close()
    link.send(T1, ids(1), ids(1))
    assert completions(link, 1)[0].error == "the link is closed"


# ── lives ─────────────────────────────────────────────────────────────────────────────────────


def test_a_dead_receiver_fails_what_was_on_the_way_and_its_next_life_is_served(
    make_end: EndMaker,
) -> None:
    p = make_end("P0", seed=1)
    with peer_process() as process:
        _, where = process.ask(
            "own_nccl", "cpu", "block_first", NUM_BLOCKS, "D0", 1, make_end.folder
        ).split()
        first = p.endpoint.open(RankPeer(InstanceId("D0"), 1, SHAPE, where))
        process.ask("nccl_hold")
        first.send(T1, ids(1, 3, 5, 7, 9, 11, 13), ids(1, 3, 5, 7, 9, 11, 13))
        first.send(T2, ids(2), ids(2))
        process.kill()
        assert [c.error is None for c in completions(first, 2)] == [False, False]
        first.send(T3, ids(2), ids(2))
        (done,) = completions(first, 1)
        assert done.error == "D0 does not answer: Connection refused"
        first.close()
    (make_end.folder / "nccl-D0-1-0.sock").unlink()  # the run directory goes with the orchestrator
    d = make_end("D0", epoch=2)
    second = p.endpoint.open(d.peer())
    second.send(T1, ids(1, 3, 5), ids(2, 4, 6))
    assert completions(second, 1)[0].error is None
    assert d.blocks(2, 4, 6) == p.blocks(1, 3, 5)


def test_a_dead_sender_is_dropped_and_its_next_life_is_served(make_end: EndMaker) -> None:
    d = make_end("D0", seed=1)
    with peer_process() as process:
        process.ask("own_nccl", "cpu", "block_first", NUM_BLOCKS, "P0", 1, make_end.folder)
        process.ask("nccl_open", "block_first", NUM_BLOCKS, "D0", 1, d.endpoint.address)
        process.ask("nccl_hold")
        process.ask("nccl_send", "1,3,5,7,9,11,13", "1,3,5,7,9,11,13")
        process.kill()
    d.endpoint.drop(InstanceId("P0"), 1)
    assert d.fake.num_aborted == 1
    (make_end.folder / "nccl-P0-1-0.sock").unlink()
    p = make_end("P0", seed=3, epoch=2)
    link = p.endpoint.open(d.peer())
    link.send(T1, ids(1, 3, 5), ids(2, 4, 6))
    assert completions(link, 1)[0].error is None
    assert d.blocks(2, 4, 6) == p.blocks(1, 3, 5)


def test_a_later_life_replaces_an_earlier_one_and_not_the_other_way_round(
    make_end: EndMaker,
) -> None:
    d = make_end("D0")
    first, second = make_end("P0", seed=1), make_end("P0", seed=2, epoch=2)
    early = first.endpoint.open(d.peer())
    late = second.endpoint.open(d.peer())
    assert d.fake.num_aborted == 1
    early.send(T1, ids(1), ids(2))
    (done,) = completions(early, 1)
    assert done.error is not None
    with pytest.raises(TransferError, match="D0: a later life of P0 is connected"):
        first.endpoint.open(d.peer())
    late.send(T1, ids(1), ids(2))
    assert completions(late, 1)[0].error is None
    d.endpoint.drop(InstanceId("P0"), 1)  # late news
    late.send(T2, ids(3), ids(4))
    assert completions(late, 1)[0].error is None


def test_a_life_that_is_over_writes_no_more(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0", seed=2)
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    back.close(is_lost=True)
    before = bytes(d.memory.numpy())
    for transfer in (T1, T2):  # the first may find a communicator that has just been aborted
        there.send(transfer, ids(1), ids(2))
        assert completions(there, 1)[0].error is not None
    with pytest.raises(TransferError, match="D0: epoch 1 of P0 is over"):
        p.endpoint.open(d.peer())
    assert bytes(d.memory.numpy()) == before
    second = make_end("P0", seed=3, epoch=2)
    d.endpoint.drop(InstanceId("P0"), 0)  # late news
    link = second.endpoint.open(d.peer())
    link.send(T1, ids(1), ids(2))
    assert completions(link, 1)[0].error is None


def test_an_address_of_an_earlier_life_is_refused(make_end: EndMaker) -> None:
    p, d = make_end("P0"), make_end("D0", epoch=2)
    peer = msgspec.structs.replace(d.peer(), peer_epoch=1)
    with pytest.raises(TransferError, match="looks for epoch 1 of D0, and found epoch 2 of D0"):
        p.endpoint.open(peer)

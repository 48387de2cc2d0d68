"""The NCCL link on fakes: who begins a transfer, the caller or the thread, and what if it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from memserve.errors import TransferError
from memserve.ops.nccl_pipe import Counts
from memserve.workers.links.nccl import NcclLink
from memserve.workers.links.nccl_fake import FakePipe
from memserve.workers.links.nccl_pipe import Pipe
from memserve.workers.links.nccl_wire import Wake
from tests.contract.link_rig import T1, T2, T3, FakeClock, ids
from tests.contract.nccl_rig import DEADLINE_S, SETTINGS, EndMaker, completions, until


@pytest.fixture
def make_end() -> Iterator[EndMaker]:
    with EndMaker() as ends:
        yield ends


def rested(link: NcclLink) -> NcclLink:
    """When its thread rests."""
    until(lambda: link._sender._is_resting, "the thread should rest")
    return link


class _Barrier:
    """Holds a link's thread up before it queues its next job, and tells when it has."""

    def __init__(self, link: NcclLink, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue_next = link._sender._queue_next
        self._is_open = threading.Event()
        self.then: Callable[[], None] = lambda: None
        self.breaks = False
        monkeypatch.setattr(link._sender, "_queue_next", self._look)

    def open(self) -> None:
        self._is_open.set()

    def _look(self, pipe: Pipe) -> None:
        assert self._is_open.wait(DEADLINE_S)
        if self.breaks:
            raise TransferError("the way is broken")
        self._queue_next(pipe)
        self.then()


def test_a_transfer_is_begun_by_the_caller_if_the_thread_rests(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those behind it are launched in their order, whoever does it."""
    p, d = make_end("P0", seed=1), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))
    barrier = _Barrier(link, monkeypatch)
    link.send(T1, ids(1), ids(4))
    until(lambda: d.blocks(4) == p.blocks(1), "it should arrive, though the thread is held up")
    until(lambda: not link._sender._is_resting, "the thread should be awake")
    link.send(T2, ids(2), ids(5))
    assert [job.transfer_id for job in link._sender._inbox] == [T2]

    def send_before_it_is_launched() -> None:
        if not link._sender._inbox and T3 not in link._jobs:
            link.send(T3, ids(3), ids(6))

    barrier.then = send_before_it_is_launched
    barrier.open()
    done = completions(link, 3)
    assert [(c.transfer_id, c.error) for c in done] == [(T1, None), (T2, None), (T3, None)]
    assert d.blocks(4, 5, 6) == p.blocks(1, 2, 3)


def test_what_the_gate_has_turned_away_is_not_overtaken(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))
    with monkeypatch.context() as patch:
        patch.setattr(Wake, "set", lambda wake: None)  # it is slow to wake up
        with p.endpoint.machinery.gate.closed():
            link.send(T1, ids(1), ids(4))
        assert link._sender._is_resting
        link.send(T2, ids(2), ids(5))
    link.send(T3, ids(3), ids(6))
    done = completions(link, 3)
    assert [(c.transfer_id, c.error) for c in done] == [(T1, None), (T2, None), (T3, None)]


def test_what_was_begun_on_a_way_that_breaks_fails_once(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))
    barrier = _Barrier(link, monkeypatch)
    p.fake.is_held = True
    link.send(T1, ids(1), ids(4))
    barrier.breaks = True
    barrier.open()
    (done,) = completions(link, 1)
    assert done.error == "the way is broken"
    barrier.breaks = p.fake.is_held = False
    link.send(T2, ids(2), ids(5))
    assert [c.error for c in completions(link, 1)] == [None]


def test_what_the_caller_cannot_begin_fails_once_and_the_next_gets_a_new_communicator(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))

    def fail(pipe: FakePipe) -> None:
        raise TransferError("no launch")

    with monkeypatch.context() as patch:
        patch.setattr(FakePipe, "begin", fail)
        link.send(T1, ids(1), ids(4))
    assert [c.error for c in completions(link, 1)] == ["no launch"]
    link.send(T2, ids(2), ids(5))
    assert [c.error for c in completions(link, 1)] == [None]
    assert p.fake.num_joined == 2


def test_a_pipe_that_has_failed_is_not_run_again(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller met with is known: nothing more may be launched on that communicator."""
    p, d = make_end("P0", seed=1), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))
    run, failed, again = FakePipe.run, [], []

    def fail(pipe: FakePipe) -> None:
        failed.append(pipe)
        raise TransferError("no launch")

    def watched(pipe: FakePipe, finished: int = 0, watch: int = -1) -> Counts:
        if pipe in failed:
            again.append(pipe)
        return run(pipe, finished, watch)

    with monkeypatch.context() as patch:
        patch.setattr(FakePipe, "begin", fail)
        patch.setattr(FakePipe, "run", watched)
        link.send(T1, ids(1), ids(4))
        link.send(T2, ids(2), ids(5))
        assert {c.error for c in completions(link, 2)} == {"no launch"}
    assert again == []


def test_the_failure_that_is_told_is_the_first(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what the thread meets with when it goes on with a communicator known to be bad."""
    p, d = make_end("P0", seed=1), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))

    def fail(pipe: FakePipe, *ignored: int) -> None:
        raise TransferError("no launch")

    def fail_otherwise(pipe: FakePipe, *ignored: int) -> Counts:
        raise TransferError("another error")

    with monkeypatch.context() as patch:
        patch.setattr(FakePipe, "begin", fail)
        patch.setattr(FakePipe, "run", fail_otherwise)
        link.send(T1, ids(1), ids(4))
        done = completions(link, 1)
    assert [c.error for c in done] == ["no launch"]


def test_nothing_is_begun_on_a_way_that_the_caller_knows_to_be_broken(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    sender = link._sender
    until(lambda: sender._is_resting, "the thread should rest")
    num_begun = 0

    def fail(pipe: FakePipe) -> None:
        nonlocal num_begun
        num_begun += 1
        raise TransferError("no launch")

    wire, has_come, may_go = sender._wire, threading.Event(), threading.Event()
    assert wire is not None
    wait = wire.wait

    def wait_long(wake: Wake, timeout_s: float | None = None) -> None:  # it hears of nothing
        has_come.set()
        wait(wake, timeout_s)
        assert may_go.wait(DEADLINE_S)

    with monkeypatch.context() as patch:
        patch.setattr(wire, "wait", wait_long)
        sender._wake.set()
        assert has_come.wait(DEADLINE_S)
        patch.setattr(FakePipe, "begin", fail)
        link.send(T1, ids(1), ids(4))
        link.send(T2, ids(2), ids(5))
        assert num_begun == 1
        may_go.set()
        assert [c.error for c in completions(link, 2)] == ["no launch"] * 2


def test_a_way_that_has_rested_for_long_and_launches_late_is_not_given_up(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time begins with the transfer, not with its first launch."""
    clock = FakeClock()
    p, d = make_end("P0", seed=1, clock=clock), make_end("D0")
    link = rested(p.endpoint.open(d.peer()))
    clock.now_s += 10 * SETTINGS.stall_s
    run, left = FakePipe.run, 3

    def late(pipe: FakePipe, finished: int = 0, watch: int = -1) -> Counts:
        nonlocal left
        if pipe._gpu is p.gpu and left:
            left -= 1
            return pipe._counts
        return run(pipe, finished, watch)

    with monkeypatch.context() as patch:
        patch.setattr(FakePipe, "begin", lambda pipe: None)
        patch.setattr(FakePipe, "run", late)
        link.send(T1, ids(1), ids(2))
        assert completions(link, 1)[0].error is None
    assert left == 0

"""Links between instances of several ranks: KV arrives whole whatever the degrees, and a rank that
fails, dies or hangs is seen. The contract of all links is in `test_links.py`, for this one too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from memserve.errors import RankLostError, StartError, TransferError
from memserve.types import BlockId, InstanceId, TransferId
from memserve.workers.links.base import Completion, Link, RankPeer
from memserve.workers.links.fake import FakeLink
from memserve.workers.links.heads import Route
from memserve.workers.links.ranked import RankedLink
from memserve.workers.rank_group import RankGroup, RankWatch
from memserve.workers.rank_messages import Failed, Joined, put
from tests.contract.gpu_rig import Host
from tests.contract.link_rig import FakeClock, buffer_bytes, geometry
from tests.contract.rank_rig import DEADLINE_S, Ranks, model_kv, rank_geometry, start_agent

T1, T2 = TransferId("t1"), TransferId("t2")
SOURCES, TARGETS = [BlockId(b) for b in (3, 4, 9)], [BlockId(b) for b in (7, 2, 16)]

MakeRanks = Callable[..., Ranks]


@pytest.fixture
def make_ranks() -> Iterator[MakeRanks]:
    with ExitStack() as stack:

        def make(*args: object, **kwargs: object) -> Ranks:
            ranks = Ranks(*args, **kwargs)  # type: ignore[arg-type]
            stack.callback(ranks.close)
            return ranks

        yield make


def ended(link: Link, count: int = 1) -> list[Completion]:
    """Poll until so many transfers have ended."""
    done: list[Completion] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(done) < count:
        assert time.monotonic() < deadline, f"{len(done)} of {count} transfers have ended"
        done += link.poll()
    return done


# ── what arrives ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("is_on_gpus", [False, True], ids=["shm", "ipc on fake GPUs"])
@pytest.mark.parametrize("page_order", ["HNC", "NHC"])
@pytest.mark.parametrize(
    "layouts",
    [("block_first", "block_first"), ("layer_first", "padded"), ("padded", "layer_first")],
)
@pytest.mark.parametrize(
    ("total", "sender_tp", "receiver_tp"),
    [(3, 1, 3), (3, 3, 1), (3, 3, 3), (6, 2, 3), (2, 4, 1), (2, 1, 4), (2, 4, 8), (1, 2, 1)],
)
def test_every_rank_gets_its_heads_and_nothing_else_is_written(
    make_ranks: MakeRanks,
    total: int,
    sender_tp: int,
    receiver_tp: int,
    layouts: tuple[str, str],
    page_order: str,
    is_on_gpus: bool,
) -> None:
    common = {"page_order": page_order, "host": Host() if is_on_gpus else None}
    sender = make_ranks(total, sender_tp, layout=layouts[0], **common)
    receiver = make_ranks(total, receiver_tp, layout=layouts[1], **common)
    kv = model_kv(17, total)
    sender.fill(kv)
    link = sender.link_to(receiver)
    link.send(T1, SOURCES, TARGETS)
    (done,) = ended(link)
    assert (done.transfer_id, done.error) == (T1, None)
    assert done.size_bytes == len(TARGETS) * receiver.geometries[0].block_bytes * receiver_tp
    receiver.require_blocks(TARGETS, kv[SOURCES])
    link.close()


def test_transfers_run_side_by_side_and_end_once_each(make_ranks: MakeRanks) -> None:
    sender, receiver = make_ranks(3, 3), make_ranks(3, 1)
    kv = model_kv(17, 3)
    sender.fill(kv)
    link = sender.link_to(receiver)
    names = [TransferId(f"t{number}") for number in range(10)]
    for number, name in enumerate(names):
        link.send(name, [BlockId(number)], [BlockId(16 - number)])
    done = ended(link, len(names))
    assert sorted(c.transfer_id for c in done) == sorted(names)
    assert all(c.error is None for c in done) and link.poll() == []
    receiver.require_blocks([BlockId(16 - n) for n in range(10)], kv[:10])
    link.close()


# ── lanes ─────────────────────────────────────────────────────────────────────────────────────


def lane() -> FakeLink:
    shape = geometry()
    size = buffer_bytes(shape)
    return FakeLink(bytearray(size), shape, bytearray(size), shape)


def test_a_transfer_has_ended_when_it_has_on_all_lanes() -> None:
    lanes = [lane(), lane()]
    link = RankedLink(lanes)
    lanes[1].hold()
    link.send(T1, SOURCES, TARGETS)
    assert link.poll() == []
    lanes[1].release()
    (done,) = link.poll()
    assert done.size_bytes == 2 * len(SOURCES) * geometry().block_bytes
    assert link.poll() == []


def test_one_lanes_error_is_the_transfers_and_stops_the_others() -> None:
    lanes = [lane(), lane(), lane()]
    link = RankedLink(lanes)
    lanes[1].fail_next("no way")
    for other in (lanes[0], lanes[2]):
        other.hold()
    link.send(T1, SOURCES, TARGETS)
    link.send(T2, SOURCES, TARGETS)
    assert link.poll() == []
    for other in (lanes[0], lanes[2]):
        other.release()
    done = {c.transfer_id: c for c in link.poll()}
    assert done[T1].error == "no way" and done[T2].error is None
    assert done[T1].size_bytes < done[T2].size_bytes


def test_missing_bytes_of_one_lane_are_missing_in_all() -> None:
    lanes = [lane(), lane()]
    link = RankedLink(lanes)
    lanes[0].lose_bytes(8)
    link.send(T1, SOURCES, TARGETS)
    (done,) = link.poll()
    assert done.size_bytes == 2 * len(SOURCES) * geometry().block_bytes - 8


def test_closing_closes_all_lanes() -> None:
    lanes = [lane(), lane()]
    link = RankedLink(lanes)
    link.send(T1, SOURCES, TARGETS)
    link.close()
    assert [one.is_closed for one in lanes] == [True, True] and link.poll() == []
    assert not any(one.is_lost for one in lanes)
    link.close(is_lost=True)
    assert all(one.is_lost for one in lanes)


# ── ranks that fail, die or hang ──────────────────────────────────────────────────────────────


class Driver:
    """A group of two ranks whose agents open the links given; `None`: nobody serves that rank."""

    def __init__(self, *openers: Callable[[RankPeer], Link] | None, **options: object) -> None:
        pairs = [multiprocessing.Pipe() for _ in openers]
        self.rank_ends = [end for _, end in pairs]
        self.group = RankGroup([driver for driver, _ in pairs], **options)  # type: ignore[arg-type]
        self._agents = [
            start_agent(end, {"fake": opener})
            for end, opener in zip(self.rank_ends, openers, strict=True)
            if opener is not None
        ]

    def open(self) -> RankedLink:
        peers = [RankPeer(InstanceId("D0"), 1, rank_geometry(r, 2), "there") for r in range(2)]
        routes = [Route(rank, peer) for rank, peer in enumerate(peers)]
        return RankedLink(self.group.open("fake", routes))

    def kill(self, rank: int) -> None:
        """End both directions of its pipe, as the kernel does for a process that dies."""
        with socket.socket(fileno=os.dup(self.rank_ends[rank].fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.group.close()
        for agent in self._agents:
            agent.join(DEADLINE_S)
            assert not agent.is_alive()
        for end in self.rank_ends:
            end.close()


@pytest.fixture
def make_driver() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def make(*openers: Callable[[RankPeer], Link] | None, **options: object) -> Driver:
        drivers.append(Driver(*openers, **options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.close()


def cannot_open(peer: RankPeer) -> Link:
    raise TransferError(f"no memory at {peer.address}")


def test_a_link_that_one_rank_cannot_open_is_open_on_none(
    make_driver: Callable[..., Driver],
) -> None:
    opened: list[FakeLink] = []

    def can_open(peer: RankPeer) -> Link:
        opened.append(lane())
        return opened[-1]

    driver = make_driver(can_open, cannot_open)
    with pytest.raises(TransferError, match=r"^rank 1: no memory at there$"):
        driver.open()
    assert [one.is_closed for one in opened] == [True]


@pytest.mark.parametrize("is_lost", [False, True])
def test_ranks_hear_whether_the_peer_was_lost(
    make_driver: Callable[..., Driver], is_lost: bool
) -> None:
    lanes = [lane(), lane()]
    driver = make_driver(lambda peer: lanes[0], lambda peer: lanes[1])
    driver.open().close(is_lost=is_lost)
    assert [(one.is_closed, one.is_lost) for one in lanes] == [(True, is_lost)] * 2


def test_a_rank_that_dies_ends_its_transfers_with_an_error(
    make_driver: Callable[..., Driver],
) -> None:
    held = lane()
    driver = make_driver(lambda peer: held, lambda peer: lane())
    link = driver.open()
    held.hold()
    link.send(T1, SOURCES, TARGETS)
    driver.kill(0)
    (done,) = ended(link)
    assert done.error == "rank 0 is gone"
    link.send(T2, SOURCES, TARGETS)
    (done,) = ended(link)
    assert done.error == "rank 0 is gone"
    link.close()
    with pytest.raises(TransferError, match="rank 0: rank 0 is gone"):
        driver.open()


def test_a_transfer_that_a_rank_does_not_end_breaks_the_instance(
    make_driver: Callable[..., Driver],
) -> None:
    clock, held = FakeClock(), lane()
    driver = make_driver(lambda peer: held, lambda peer: lane(), clock=clock, answer_s=30.0)
    link = driver.open()
    held.hold()
    link.send(T1, SOURCES, TARGETS)
    clock.now_s += 30.0
    assert link.poll() == []
    clock.now_s += 0.1
    with pytest.raises(RankLostError, match="rank 0 has not ended a transfer in 30 s"):
        link.poll()
    held.release()
    (done,) = ended_late(link, clock)
    assert done.error is None


def ended_late(link: Link, clock: FakeClock) -> list[Completion]:
    """What ends after all, if time stands still again."""
    clock.now_s -= 30.1
    return ended(link)


def test_ranks_that_do_not_answer_are_not_waited_for_forever(
    make_driver: Callable[..., Driver],
) -> None:
    driver = make_driver(lambda peer: lane(), None, answer_s=0.05)
    with pytest.raises(RankLostError, match=r"rank 1 has not closed a link in 0.05 s"):
        driver.open()
    with pytest.raises(StartError, match=r"ranks \[0, 1\] have no KV cache 0.05 s after"):
        driver.group.join()


# ── the start ─────────────────────────────────────────────────────────────────────────────────


def joined(rank: int) -> Joined:
    return Joined(1000 + rank, rank_geometry(rank, 2), {"fake": f"at {rank}"}, 5.0)


def test_the_ranks_introduce_themselves_in_any_order(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(None, None)
    for rank in (1, 0):
        put(driver.rank_ends[rank], joined(rank))
    assert driver.group.join() == [joined(0), joined(1)]
    assert driver.group.failure is None


def test_a_ranks_own_words_tell_why_a_start_has_failed(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver(None, None)
    put(driver.rank_ends[0], joined(0))
    put(driver.rank_ends[1], Failed("no 400 MiB for the KV"))
    driver.rank_ends[1].close()
    with pytest.raises(StartError, match=r"^rank 1: no 400 MiB for the KV$"):
        driver.group.join()


# ── their processes ───────────────────────────────────────────────────────────────────────────


def test_the_death_of_a_ranks_process_is_told_once() -> None:
    ranks = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    deaths: list[int] = []
    told = threading.Event()
    watch = RankWatch([rank.pid for rank in ranks], lambda rank: (deaths.append(rank), told.set()))  # type: ignore[func-returns-value]
    try:
        os.kill(ranks[1].pid, signal.SIGKILL)
        assert told.wait(DEADLINE_S)
    finally:
        for rank in ranks:
            rank.communicate(timeout=DEADLINE_S)
        watch.close()
    assert deaths == [1]


def test_ranks_that_end_after_the_watch_are_nobodys_concern() -> None:
    rank = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    deaths: list[int] = []
    watch = RankWatch([rank.pid], deaths.append)
    watch.close()
    rank.communicate(timeout=DEADLINE_S)
    assert deaths == []

"""The NCCL link on fakes: what the shared contract does not ask, and what a peer's death leaves.

`test_links.py` runs the contract itself on this link, on fakes everywhere and on two GPUs where
there are some.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.errors import StartError, TransferError
from memserve.ops.nccl import ID_BYTES, NcclFabric
from memserve.ops.nccl_pipe import Pieces
from memserve.ops.views import PageOrder, head_rows
from memserve.types import Geometry, Heads, InstanceId, TransferId
from memserve.workers.links import nccl
from memserve.workers.links.base import Rank, RankPeer
from memserve.workers.links.nccl import NcclEndpoint, NcclLink
from memserve.workers.links.nccl_wire import (
    Announce,
    Done,
    Schedule,
    Wake,
    Welcome,
    Wire,
)
from memserve.workers.links.nccl_worker import Machinery, NcclSettings
from tests.contract.link_rig import (
    NUM_BLOCKS,
    PAGE_BYTES,
    FakeClock,
    buffer_bytes,
    fill_random,
    geometry,
    peer_process,
    read_block,
)
from tests.contract.nccl_rig import (
    DEADLINE_S,
    SETTINGS,
    End,
    completions,
    ids,
    until,
    with_pieces,
)

SHAPE = geometry()
T1, T2, T3 = TransferId("t1"), TransferId("t2"), TransferId("t3")
EndMaker = Callable[..., End]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def make_end(folder: Path) -> Iterator[EndMaker]:
    """Ends of links; at the test's end they are closed, and must leave no thread and no socket."""
    ends: list[End] = []
    links: list[NcclLink] = []

    def make(name: str, shape: Geometry = SHAPE, *, seed: int = 0, **options: object) -> End:
        memory = torch.zeros(buffer_bytes(shape), dtype=torch.int8)
        if seed:
            fill_random(memory.numpy(), seed)
        end = End(name, memory, shape, folder, **options)  # type: ignore[arg-type]
        open_link = end.endpoint.open

        def open_and_keep(peer: RankPeer) -> NcclLink:
            links.append(open_link(peer))
            return links[-1]

        end.endpoint.open = open_and_keep  # type: ignore[method-assign]
        ends.append(end)
        return end

    yield make
    for link in links:
        link.close()
    for end in ends:
        end.close()
        assert end.fake.num_joined == end.fake.num_aborted
        assert end.gpu.num_pipes == 0
    assert [t.name for t in threading.enumerate() if t.name.startswith("nccl")] == []
    assert list(folder.iterdir()) == []


def blocks(end: End, *block_ids: int) -> list[bytes]:
    return [read_block(end.memory.numpy(), end.shape, block) for block in block_ids]


# ── transfers ─────────────────────────────────────────────────────────────────────────────────


def test_both_directions_at_once(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0", seed=2)
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    sent = {"there": blocks(p, 1, 3, 5, 7, 9), "back": blocks(d, 10, 12, 14)}
    there.send(T1, ids(1, 3, 5, 7, 9), ids(2, 4, 6, 8, 1))
    back.send(T1, ids(10, 12, 14), ids(11, 13, 15))
    assert [c.error for c in completions(there, 1) + completions(back, 1)] == [None, None]
    assert blocks(d, 2, 4, 6, 8, 1) == sent["there"]
    assert blocks(p, 11, 13, 15) == sent["back"]


def test_transfers_of_one_direction_arrive_in_the_order_in_which_they_were_sent(
    make_end: EndMaker,
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    for number in range(1, 8):
        link.send(TransferId(str(number)), ids(number, 16 - number), ids(16 - number, number))
    assert [c.transfer_id for c in completions(link, 7)] == [str(n) for n in range(1, 8)]
    for number in range(1, 8):
        assert blocks(d, number, 16 - number) == blocks(p, 16 - number, number)


def test_a_staging_buffer_is_not_filled_again_before_it_was_sent(make_end: EndMaker) -> None:
    shape = geometry(num_blocks=40)
    p, d = make_end("P0", shape, seed=1), make_end("D0", shape)
    link = p.endpoint.open(d.peer())
    source_ids, target_ids = range(1, 33, 2), range(2, 34, 2)  # scattered: twice as many chunks
    p.fake.is_held = True  # as there are buffers, and nothing is sent meanwhile
    link.send(T1, ids(*source_ids), ids(*target_ids))
    for _ in range(20_000):
        assert link.poll() == []
    p.fake.is_held = False
    assert completions(link, 1)[0].error is None
    assert blocks(d, *target_ids) == blocks(p, *source_ids)


def test_a_slice_of_the_heads_fills_all_heads_of_the_other_rank(make_end: EndMaker) -> None:
    """Rank 1 of two, whose heads are the second half of the sender's."""
    whole = geometry(num_kv_heads=4)
    half = geometry(
        num_kv_heads=2,
        page_bytes=PAGE_BYTES // 2,
        block_stride=3 * PAGE_BYTES // 2,
        layer_offsets=(0, PAGE_BYTES // 2, PAGE_BYTES),
        tp_rank=1,
        tp_size=2,
    )
    p, d = make_end("P0", whole, seed=1), make_end("D0", half)
    link = p.endpoint.open(d.peer(own_heads=Heads(2, 2)))
    link.send(T1, ids(4, 1, 6), ids(2, 3, 5))
    (done,) = completions(link, 1)
    assert (done.error, done.size_bytes) == (None, 3 * half.block_bytes)
    rows = head_rows(whole, 2, 2, PageOrder.HEADS_FIRST)
    for source, target in ((4, 2), (1, 3), (6, 5)):
        (sent,), (arrived,) = blocks(p, source), blocks(d, target)
        pages = [sent[start : start + PAGE_BYTES] for start in range(0, len(sent), PAGE_BYTES)]
        assert arrived == b"".join(page[rows.offset :] for page in pages)

    back = d.endpoint.open(p.peer(peer_heads=Heads(2, 2)))
    (before,) = blocks(p, 9)
    back.send(T2, ids(2), ids(9))
    assert completions(back, 1)[0].error is None
    (after,), (sent,) = blocks(p, 9), blocks(d, 2)
    for layer in range(3):
        start = layer * PAGE_BYTES
        assert after[start : start + rows.offset] == before[start : start + rows.offset]
        page = after[start + rows.offset : start + PAGE_BYTES]
        assert page == sent[layer * half.page_bytes : (layer + 1) * half.page_bytes]


def test_a_cancelled_transfer_that_has_not_begun_writes_nothing(make_end: EndMaker) -> None:
    narrow = msgspec.structs.replace(SETTINGS, chunks_ahead=1)
    p, d = make_end("P0", seed=1, settings=narrow), make_end("D0")
    link = p.endpoint.open(d.peer())
    p.fake.is_held = True
    # More chunks than may be queued: the second waits in the inbox until the first has moved.
    link.send(T1, ids(*range(1, 15)), ids(*range(1, 15)))
    link.send(T2, ids(15), ids(15))
    link.cancel(T2)
    p.fake.is_held = False
    done = {c.transfer_id: c.error for c in completions(link, 2)}
    assert done == {T1: None, T2: "cancelled"}
    assert blocks(d, 15) == [bytes(SHAPE.block_bytes)]


def test_a_block_that_is_named_twice_is_refused_before_the_peer_hears_of_it(
    make_end: EndMaker,
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    link.send(T1, ids(1, 2), ids(3, 3))
    assert completions(link, 1)[0].error == "a target block is named twice"
    link.send(T2, ids(1), ids(3))
    assert completions(link, 1)[0].error is None
    assert p.fake.num_joined == 1


class _Planned(msgspec.Struct):
    """A transfer of the property test."""

    side: int
    source_ids: list[int]
    is_cancelled: bool


_PLANS = st.lists(
    st.builds(
        _Planned,
        st.integers(0, 1),
        st.lists(st.integers(1, NUM_BLOCKS - 1), min_size=1, max_size=9, unique=True),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)
_TARGETS = st.permutations(range(NUM_BLOCKS, 5 * NUM_BLOCKS))
_LAYOUT = st.sampled_from(["block_first", "layer_first", "padded"])


@settings(max_examples=20, deadline=None)
@given(plans=_PLANS, targets=_TARGETS, layouts=st.tuples(_LAYOUT, _LAYOUT))
def test_any_transfers_leave_what_was_sent(
    plans: list[_Planned], targets: list[int], layouts: tuple[str, str]
) -> None:
    """Both ways at once, some cancelled: what the peer has counted is there."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ends = []
        for number, layout in enumerate(layouts):
            shape = geometry(layout, 5 * NUM_BLOCKS)
            memory = torch.zeros(buffer_bytes(shape), dtype=torch.int8)
            fill_random(memory.numpy(), seed=number + 1)
            ends.append(End(f"PD{number}", memory, shape, folder))
            stack.callback(ends[-1].close)
        links = [ends[0].endpoint.open(ends[1].peer()), ends[1].endpoint.open(ends[0].peer())]
        for link in links:
            stack.callback(link.close)
        target_ids = []
        for number, plan in enumerate(plans):
            link, transfer = links[plan.side], TransferId(str(number))
            target_ids.append([targets.pop() for _ in plan.source_ids])
            link.send(transfer, ids(*plan.source_ids), ids(*target_ids[-1]))
            if plan.is_cancelled:
                link.cancel(transfer)
        for side, link in enumerate(links):
            count = sum(plan.side == side for plan in plans)
            for done in completions(link, count):
                plan = plans[int(done.transfer_id)]
                assert done.error == ("cancelled" if plan.is_cancelled else None)
                if done.size_bytes:  # a cancelled one may have been on its way
                    arrived = blocks(ends[1 - side], *target_ids[int(done.transfer_id)])
                    assert arrived == blocks(ends[side], *plan.source_ids)


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
    assert blocks(d, 4) == blocks(p, 3)
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
    posted = len(everything) + 1  # and the warm-up
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
    until(lambda: d.gpu.num_launched > 1, "the receiver should expect it")
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
    until(lambda: d.gpu.num_launched > 1, "the receiver should expect it")
    back.close(is_lost=True)  # D0 frees what P0 was writing
    before = bytes(d.memory.numpy())
    p.fake.is_held = False
    assert completions(there, 1)[0].error is not None
    assert bytes(d.memory.numpy()) == before


def test_a_closed_link_leaves_the_other_direction(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    back.close()
    there.send(T1, ids(1, 3), ids(2, 4))
    assert completions(there, 1)[0].error is None
    assert blocks(d, 2, 4) == blocks(p, 1, 3)


def test_a_closed_link_takes_no_transfer(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    link.close()
    link.send(T1, ids(1), ids(1))
    assert completions(link, 1)[0].error == "the link is closed"


# ── lives ─────────────────────────────────────────────────────────────────────────────────────


def test_a_dead_receiver_fails_what_was_on_the_way_and_its_next_life_is_served(
    make_end: EndMaker, folder: Path
) -> None:
    p = make_end("P0", seed=1)
    with peer_process() as process:
        _, where = process.ask(
            "own_nccl", "cpu", "block_first", NUM_BLOCKS, "D0", 1, folder
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
    (folder / "nccl-D0-1-0.sock").unlink()  # the run directory goes with the orchestrator
    d = make_end("D0", epoch=2)
    second = p.endpoint.open(d.peer())
    second.send(T1, ids(1, 3, 5), ids(2, 4, 6))
    assert completions(second, 1)[0].error is None
    assert blocks(d, 2, 4, 6) == blocks(p, 1, 3, 5)


def test_a_dead_sender_is_dropped_and_its_next_life_is_served(
    make_end: EndMaker, folder: Path
) -> None:
    d = make_end("D0", seed=1)
    with peer_process() as process:
        process.ask("own_nccl", "cpu", "block_first", NUM_BLOCKS, "P0", 1, folder)
        process.ask("nccl_open", "block_first", NUM_BLOCKS, "D0", 1, d.endpoint.address)
        process.ask("nccl_hold")
        process.ask("nccl_send", "1,3,5,7,9,11,13", "1,3,5,7,9,11,13")
        process.kill()
    d.endpoint.drop(InstanceId("P0"), 1)
    assert d.fake.num_aborted == 1
    (folder / "nccl-P0-1-0.sock").unlink()
    p = make_end("P0", seed=3, epoch=2)
    link = p.endpoint.open(d.peer())
    link.send(T1, ids(1, 3, 5), ids(2, 4, 6))
    assert completions(link, 1)[0].error is None
    assert blocks(d, 2, 4, 6) == blocks(p, 1, 3, 5)


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


# ── opening ───────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_on_one_gpu_are_refused(make_end: EndMaker) -> None:
    p, d = make_end("P0", where="GPU-7"), make_end("D0", where="GPU-7")
    with pytest.raises(TransferError, match=r"^NCCL cannot join P0 and D0: both are on GPU GPU-7$"):
        p.endpoint.open(d.peer())


def test_ranks_whose_blocks_differ_in_size_are_refused(make_end: EndMaker) -> None:
    p = make_end("P0", geometry(num_kv_heads=4))
    d = make_end("D0", geometry(num_kv_heads=4))
    with pytest.raises(TransferError, match="D0: P0 sends 96 bytes of a block, 192 fit here"):
        p.endpoint.open(d.peer(own_heads=Heads(0, 2)))
    with pytest.raises(TransferError, match="D0: 9 heads from head 0 on are asked for"):
        p.endpoint.open(d.peer(peer_heads=Heads(0, 9)))


def test_what_is_no_address_is_refused(make_end: EndMaker) -> None:
    p = make_end("P0")
    with pytest.raises(TransferError, match="not the address of an NCCL endpoint"):
        p.endpoint.open(RankPeer(InstanceId("D0"), 1, SHAPE, "/tmp/there"))
    nobody = '{"socket": "/nonexistent.sock", "gpu": "other"}'
    with pytest.raises(TransferError, match="D0 does not answer: No such file"):
        p.endpoint.open(RankPeer(InstanceId("D0"), 1, SHAPE, nobody))


def test_a_receiver_that_cannot_join_is_told_by_name(make_end: EndMaker) -> None:
    p, d = make_end("P0"), make_end("D0")
    d.fake.error = "unhandled system error"
    with pytest.raises(TransferError, match="D0: NCCL failed: unhandled system error"):
        p.endpoint.open(d.peer())


def test_a_socket_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    end = End("P0", torch.zeros(buffer_bytes(SHAPE), dtype=torch.int8), SHAPE, tmp_path)
    machinery = Machinery(end.fake, end.gpu, SETTINGS)
    try:
        with pytest.raises(StartError, match=r"cannot listen on .*P0-1-0\.sock"):
            NcclEndpoint(
                Rank(InstanceId("P0"), 1, 0),
                end.memory,
                SHAPE,
                machinery,
                folder=tmp_path,
                gpu="other",
            )
    finally:
        end.close()


@pytest.mark.parametrize("greeting", [b"", b"\0\0\0\1\xc1", b"\xff\xff\xff\xff"])
def test_a_stranger_harms_nobody(make_end: EndMaker, greeting: bytes) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    where = msgspec.json.decode(d.endpoint.address)["socket"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(where)
        stranger.sendall(greeting)
        link = p.endpoint.open(d.peer())
        link.send(T1, ids(1), ids(2))
        assert completions(link, 1)[0].error is None


class _NoDescriptors:
    """A listener whose `accept` fails so many times."""

    def __init__(self, listener: socket.socket, num_failures: int) -> None:
        self._listener = listener
        self._num_failures = num_failures
        self.num_asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_asked += 1
        if self.num_asked <= self._num_failures:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._listener.accept()

    def close(self) -> None:
        self._listener.close()


def _run_out(end: End, num_failures: int) -> _NoDescriptors:
    listener = _NoDescriptors(end.endpoint._listener, num_failures)
    end.endpoint._listener = listener  # type: ignore[assignment]
    return listener


def test_a_peer_that_comes_while_there_are_no_descriptors_is_accepted_later(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ACCEPT_AGAIN_S", 0.001)
    p, d = make_end("P0", seed=1), make_end("D0")
    listener = _run_out(d, num_failures=3)
    link = p.endpoint.open(d.peer())
    assert listener.num_asked == 4
    link.send(T1, ids(1), ids(2))
    assert completions(link, 1)[0].error is None


def test_without_descriptors_it_is_not_tried_all_the_time_and_can_be_closed(
    make_end: EndMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_ACCEPT_AGAIN_S", 10 * DEADLINE_S)
    d = make_end("D0")
    listener = _run_out(d, num_failures=1_000_000)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(msgspec.json.decode(d.endpoint.address)["socket"])
        until(lambda: listener.num_asked > 0, "the endpoint should try")
        d.endpoint.close()
    assert listener.num_asked == 1


# ── the schedule ──────────────────────────────────────────────────────────────────────────────


@given(num_blocks=st.integers(0, 300), edge=st.integers(1, 9), more=st.integers(0, 40))
def test_both_ends_cut_any_transfer_alike_into_all_its_blocks(
    num_blocks: int, edge: int, more: int
) -> None:
    told = Schedule(edge, edge + more)
    heard = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Schedule)
    sizes = told.sizes(num_blocks)
    assert heard.sizes(num_blocks) == sizes
    assert sum(sizes) == num_blocks
    assert all(1 <= size <= told.chunk_blocks for size in sizes)
    if sizes:
        assert max(sizes[0], sizes[-1]) <= edge


_SIZE = st.integers(1, 1 << 30)


@given(edge=_SIZE, chunk=_SIZE, block=_SIZE, num_blocks=_SIZE)
def test_a_schedule_keeps_within_its_bytes_if_a_block_does(
    edge: int, chunk: int, block: int, num_blocks: int
) -> None:
    schedule = NcclSettings(edge_bytes=edge, chunk_bytes=chunk).schedule(block, num_blocks)
    assert 1 <= schedule.edge_blocks <= schedule.chunk_blocks <= num_blocks
    assert schedule.edge_blocks == 1 or schedule.edge_blocks * block <= edge
    assert schedule.chunk_blocks * block <= max(edge, chunk, block)


def test_2048_tokens_of_llama_2_13b_go_in_six_chunks() -> None:
    assert NcclSettings().schedule(160 * 5120 * 16, 700).sizes(128) == [7, 28, 29, 28, 29, 7]


# ── the wire ──────────────────────────────────────────────────────────────────────────────────


def test_frames_arrive_whole_and_in_order_however_they_are_cut() -> None:
    left, right = socket.socketpair()
    sender, receiver, wake = Wire(left), Wire(right), Wake()
    many = bytes(800_000)  # more than the socket takes at once
    sent = [Welcome(), Announce(1, many), Done(1, 7)]
    for frame in sent:
        sender.send(frame)
    found = []
    while len(found) < len(sent):
        if (frame_found := receiver.receive()) is not None:
            found.append(frame_found)
            continue
        assert sender.receive() is None  # it leaves as the other end reads
        receiver.wait(wake, 1.0)
    assert found == sent
    sender.end()
    receiver.wait(wake, 1.0)
    with pytest.raises(TransferError, match="the peer is gone"):
        receiver.receive()
    receiver.send(Done(2, 8))  # it may still speak
    assert sender.receive() == Done(2, 8)
    for wire in (sender, receiver):
        wire.close()
    wake.close()
    wake.set()  # by whoever has not heard of it


# ── NCCL itself, where it is installed ────────────────────────────────────────────────────────


@pytest.mark.gpu
def test_the_library_is_there_and_gives_ids() -> None:
    fabric = NcclFabric()
    assert fabric.version >= 21800
    assert len({fabric.new_id() for _ in range(3)}) == 3
    assert len(fabric.new_id()) == ID_BYTES
    with pytest.raises(TransferError, match="an id of 3 bytes, not 128"):
        fabric.join(b"abc", 0)

"""The NCCL link on fakes: what the shared contract does not ask.

`test_links.py` runs the contract itself on this link, on fakes everywhere and on two GPUs where
there are some.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.errors import TransferError
from memserve.ops.nccl import ID_BYTES, NcclFabric
from memserve.ops.views import PageOrder, head_rows
from memserve.types import Heads, TransferId
from memserve.workers.links.nccl_wire import Announce, Done, Schedule, Wake, Welcome, Wire
from memserve.workers.links.nccl_worker import NcclSettings
from tests.contract.link_rig import NUM_BLOCKS, PAGE_BYTES, T1, T2, geometry, ids
from tests.contract.nccl_rig import SETTINGS, SHAPE, EndMaker, completions, until


@pytest.fixture
def make_end() -> Iterator[EndMaker]:
    with EndMaker() as ends:
        yield ends


# ── transfers ─────────────────────────────────────────────────────────────────────────────────


def test_both_directions_at_once(make_end: EndMaker) -> None:
    p, d = make_end("P0", seed=1), make_end("D0", seed=2)
    there, back = p.endpoint.open(d.peer()), d.endpoint.open(p.peer())
    sent = {"there": p.blocks(1, 3, 5, 7, 9), "back": d.blocks(10, 12, 14)}
    there.send(T1, ids(1, 3, 5, 7, 9), ids(2, 4, 6, 8, 1))
    back.send(T1, ids(10, 12, 14), ids(11, 13, 15))
    assert [c.error for c in completions(there, 1) + completions(back, 1)] == [None, None]
    assert d.blocks(2, 4, 6, 8, 1) == sent["there"]
    assert p.blocks(11, 13, 15) == sent["back"]


def test_transfers_of_one_direction_arrive_in_the_order_in_which_they_were_sent(
    make_end: EndMaker,
) -> None:
    p, d = make_end("P0", seed=1), make_end("D0")
    link = p.endpoint.open(d.peer())
    for number in range(1, 8):
        link.send(TransferId(str(number)), ids(number, 16 - number), ids(16 - number, number))
    assert [c.transfer_id for c in completions(link, 7)] == [str(n) for n in range(1, 8)]
    for number in range(1, 8):
        assert d.blocks(number, 16 - number) == p.blocks(16 - number, number)


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
    assert d.blocks(*target_ids) == p.blocks(*source_ids)


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
        (sent,), (arrived,) = p.blocks(source), d.blocks(target)
        pages = [sent[start : start + PAGE_BYTES] for start in range(0, len(sent), PAGE_BYTES)]
        assert arrived == b"".join(page[rows.offset :] for page in pages)

    back = d.endpoint.open(p.peer(peer_heads=Heads(2, 2)))
    (before,) = p.blocks(9)
    back.send(T2, ids(2), ids(9))
    assert completions(back, 1)[0].error is None
    (after,), (sent,) = p.blocks(9), d.blocks(2)
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
    until(lambda: not link._sender._is_resting, "the thread should go on with it")
    link.send(T2, ids(15), ids(15))
    link.cancel(T2)
    p.fake.is_held = False
    done = {c.transfer_id: c.error for c in completions(link, 2)}
    assert done == {T1: None, T2: "cancelled"}
    assert d.blocks(15) == [bytes(SHAPE.block_bytes)]


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
    with EndMaker() as make_end:
        ends = [
            make_end(f"PD{number}", geometry(layout, 5 * NUM_BLOCKS), seed=number + 1)
            for number, layout in enumerate(layouts)
        ]
        links = [ends[0].endpoint.open(ends[1].peer()), ends[1].endpoint.open(ends[0].peer())]
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
                    arrived = ends[1 - side].blocks(*target_ids[int(done.transfer_id)])
                    assert arrived == ends[side].blocks(*plan.source_ids)


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

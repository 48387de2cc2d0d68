"""A transfer in parts, while its request is being computed: the sender over a fake link."""

from __future__ import annotations

import pytest

from memserve.messages import (
    Allocated,
    Cancel,
    Commit,
    Inserted,
    LinkReady,
    PeerJoined,
    Sent,
    Transmit,
    TransmitFailed,
)
from memserve.types import InstanceId, RequestId, TransferId, TransferStyle
from memserve.workers.links.base import Completion
from memserve.workers.links.fake import FakeLink
from memserve.workers.transfer import Transfers
from tests.contract.link_rig import BLOCK_SIZE, NUM_LAYERS, PAGE_BYTES, geometry, read_block
from tests.contract.transfer_rig import Node, allocate, kv_of, prompt

R = RequestId("r")
T = TransferId("r/forward/1")
BLOCK_BYTES = geometry().block_bytes
TOKENS = prompt(30)
NUM_BLOCKS = len(TOKENS) // BLOCK_SIZE


class Pair:
    """P, which computes TOKENS in chunks, and D, which has room for them."""

    def __init__(self, layout: str = "block_first") -> None:
        self.p, self.d = Node("P0", layout=layout), Node("D0", layout=layout)
        self.p.join(self.d)
        self.p.only(LinkReady)
        self.link: FakeLink = self.p.links[self.d.id]
        self.d.transfers.allocate(allocate(R), TOKENS)
        self.allocated = self.d.only(Allocated)
        self.sender = self.p.transfers.sender

    def transmit(self) -> None:
        self.p.transfers.transmit(
            Transmit(
                epoch=1,
                transfer_id=T,
                request_id=R,
                peer=self.d.id,
                first_block=self.allocated.hit_blocks,
                block_ids=self.allocated.block_ids,
            )
        )

    def begin(self, num_tokens: int) -> None:
        """The first chunk is computed; the order is there."""
        self.p.compute(R, TOKENS[:num_tokens])
        self.transmit()

    def end(self) -> None:
        """The request ends, with all its tokens computed."""
        self.p.end_step()
        self.p.end(R, TOKENS, hold=True)
        self.p.transfers.source_ready(R)

    def arrived(self) -> list[int]:
        """Which of the prompt's blocks D has, whole."""
        return [
            index
            for index, block_id in enumerate(self.allocated.block_ids)
            if read_block(self.d.memory, self.d.geometry, block_id)
            == kv_of(TOKENS[: (index + 1) * BLOCK_SIZE], NUM_LAYERS)
        ]

    def check(self) -> None:
        assert self.p.mempool.check_integrity(self.p.engine.running) == []
        assert self.p.transfers.check_integrity() == []


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ── chunks ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
def test_only_the_last_chunk_is_missing_when_the_prefill_ends(layout: str) -> None:
    pair = Pair(layout)
    pair.begin(10)
    pair.p.tell(R)
    pair.p.transfers.poll()
    assert pair.arrived() == [0, 1]
    assert pair.p.mempool.holders() == []  # they were sent: the request alone holds them
    pair.p.extend(R, TOKENS[:25])
    pair.p.tell(R)
    pair.p.end_step()
    pair.p.transfers.poll()
    assert pair.arrived() == [0, 1, 2, 3, 4, 5]
    pair.p.extend(R, TOKENS)
    assert pair.p.take() == []  # nothing is said before the end
    pair.end()
    sent = pair.p.only(Sent)
    assert (sent.num_blocks, sent.size_bytes) == (NUM_BLOCKS, NUM_BLOCKS * BLOCK_BYTES)
    assert pair.p.is_idle() and not pair.p.transfers.is_active
    commit = Commit(epoch=1, transfer_id=T, size_bytes=sent.size_bytes, pin=True)
    pair.d.transfers.commit(commit)
    assert pair.d.only(Inserted).num_tokens == NUM_BLOCKS * BLOCK_SIZE
    pair.d.check(TOKENS)


def test_blocks_of_a_step_in_flight_are_pinned_at_once_and_read_after_it(pair: Pair) -> None:
    pair.begin(10)
    pair.p.extend(R, TOKENS[:18])
    pair.p.tell(R)
    for _ in range(3):
        pair.p.transfers.poll()
    assert pair.arrived() == []
    assert pair.p.mempool.held(f"sending of {T}") == pair.p.engine.running[R][:4]
    assert pair.p.transfers.is_active
    pair.p.end_step()
    pair.p.transfers.poll()
    assert pair.arrived() == [0, 1, 2, 3]


def test_the_end_of_the_request_ends_the_wait_for_its_steps(pair: Pair) -> None:
    """A step that is in flight after it belongs to others."""
    pair.begin(10)
    pair.p.extend(R, TOKENS)
    pair.sender.computed(R, pair.p.engine.running[R], len(TOKENS), lambda: False)
    pair.end()
    assert pair.p.only(Sent).size_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_nothing_new_is_no_part(pair: Pair) -> None:
    pair.begin(10)
    for _ in range(3):
        pair.p.tell(R)
        pair.p.transfers.poll()
    assert not pair.p.transfers.is_active
    pair.p.extend(R, TOKENS)
    pair.end()
    assert pair.p.only(Sent).size_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_what_the_receiver_has_is_not_sent() -> None:
    pair = Pair()
    pair.d.transfers.cancel(Cancel(epoch=1, transfer_id=T))
    pair.d.compute(RequestId("earlier"), TOKENS[:17])
    pair.d.transfers.allocate(allocate(R), TOKENS)
    pair.allocated = pair.d.only(Allocated)
    assert pair.allocated.hit_blocks == 4
    pair.begin(10)
    pair.p.tell(R)
    assert not pair.p.transfers.is_active
    pair.p.extend(R, TOKENS)
    pair.p.tell(R)
    pair.end()
    assert pair.p.only(Sent).size_bytes == 3 * BLOCK_BYTES


def test_a_preempted_request_goes_on_where_it_was(pair: Pair) -> None:
    """What was sent was computed; what is being read stays pinned."""
    pair.begin(14)
    pair.link.hold()
    pair.p.tell(R)
    pair.p.transfers.poll()
    held = pair.p.mempool.held(f"sending of {T}")
    pair.p.engine.preempt(R)
    assert pair.p.mempool.held(f"sending of {T}") == held and len(held) == 3
    assert pair.p.engine.start("greedy", prompt(12 * BLOCK_SIZE, seed=9)) == 0
    assert not set(held) & set(pair.p.engine.running["greedy"])
    pair.p.engine.finish("greedy")
    pair.link.release()
    pair.p.transfers.poll()
    assert pair.arrived() == [0, 1, 2] and pair.p.mempool.holders() == []
    assert pair.p.compute(R, TOKENS[:6]) == 1  # fewer than before
    pair.p.tell(R)
    assert not pair.p.transfers.is_active
    pair.p.extend(R, TOKENS)
    pair.end()
    assert pair.p.only(Sent).size_bytes == NUM_BLOCKS * BLOCK_BYTES
    assert pair.arrived() == [*range(NUM_BLOCKS)]
    pair.check()


@pytest.mark.parametrize("how", ["cancel", "abort", "lost"])
@pytest.mark.parametrize("stage", ["in flight", "at the link", "sent"])
def test_an_end_in_the_midst_is_said_once_when_the_link_is_quiet(
    pair: Pair, stage: str, how: str
) -> None:
    pair.begin(10)
    pair.link.hold()
    if stage == "in flight":
        pair.p.extend(R, TOKENS[:14])
    elif stage == "sent":
        pair.link.release()
    pair.p.tell(R)
    pair.p.transfers.poll()
    match how:
        case "cancel":
            pair.p.transfers.cancel(Cancel(epoch=1, transfer_id=T))
        case "abort":
            pair.p.transfers.drop_source(R)
        case "lost":
            pair.p.transfers.peer_lost(pair.d.id, 1)
    if stage == "at the link" and how != "lost":
        assert pair.p.take() == [] and len(pair.p.mempool.held(f"sending of {T}")) == 2
        pair.link.release()
        pair.p.transfers.poll()
    reason = {"cancel": "cancelled", "abort": "the request was aborted", "lost": "D0 was lost"}
    assert pair.p.only(TransmitFailed).reason == reason[how]
    assert pair.p.mempool.holders() == [] and not pair.p.transfers.is_active
    assert pair.sender.awaited() == []
    pair.p.end_step()
    pair.p.end(R, TOKENS, hold=how != "abort")
    pair.p.transfers.source_ready(R)
    assert pair.p.take() == []
    pair.p.transfers.drop_source(R)
    assert pair.p.is_idle()


def test_a_part_that_fails_ends_the_others(pair: Pair) -> None:
    pair.begin(10)
    pair.link.fail_next("no wire")
    pair.link.hold()
    pair.p.tell(R)
    pair.p.transfers.poll()
    pair.p.extend(R, TOKENS[:18])
    pair.p.tell(R)
    pair.p.transfers.poll()  # the step is in flight: this part waits
    pair.link.release()
    pair.p.transfers.poll()
    assert pair.p.only(TransmitFailed).reason == "no wire"
    assert pair.p.mempool.holders() == [] and not pair.p.transfers.is_active


def test_lost_bytes_of_one_part_are_missing_in_the_sum(pair: Pair) -> None:
    pair.begin(10)
    pair.link.lose_bytes(1)
    pair.p.tell(R)
    pair.p.extend(R, TOKENS)
    pair.end()
    assert pair.p.only(Sent).size_bytes == NUM_BLOCKS * BLOCK_BYTES - 1


def test_parts_for_a_peer_without_a_link_fail_at_once(pair: Pair) -> None:
    pair.begin(10)
    pair.p.transfers.peer_lost(pair.d.id, 1)
    pair.p.only(TransmitFailed)
    pair.transmit()
    pair.p.tell(R)
    assert pair.p.only(TransmitFailed).reason == "no link to D0"
    assert pair.sender.awaited() == []


def test_close_drops_the_parts(pair: Pair) -> None:
    pair.begin(10)
    pair.p.extend(R, TOKENS)
    pair.p.tell(R)
    pair.p.transfers.close()
    assert pair.p.mempool.holders() == [] and pair.p.take() == []


# ── layers ────────────────────────────────────────────────────────────────────────────────────


def test_layers_are_sent_one_by_one(pair: Pair) -> None:
    pair.begin(10)
    part = pair.sender.open_layers(R, pair.p.engine.running[R], 10)
    assert part == T
    first = pair.allocated.block_ids[0]
    for layer in (1, 0, 2):
        assert pair.arrived() == []
        pair.sender.send_layer(part, layer)
        pair.p.transfers.poll()
        page = read_block(pair.d.memory, pair.d.geometry, first)[layer * PAGE_BYTES :][:PAGE_BYTES]
        assert page == kv_of(TOKENS[:BLOCK_SIZE], NUM_LAYERS)[layer * PAGE_BYTES :][:PAGE_BYTES]
    assert pair.arrived() == [0, 1]
    assert pair.p.mempool.holders() == []
    pair.p.extend(R, TOKENS)
    pair.end()
    assert pair.p.only(Sent).size_bytes == NUM_BLOCKS * BLOCK_BYTES


def test_a_layer_that_fails_ends_the_part(pair: Pair) -> None:
    pair.begin(10)
    part = pair.sender.open_layers(R, pair.p.engine.running[R], 10)
    assert part is not None
    for layer in range(NUM_LAYERS):
        if layer == 1:
            pair.link.fail_next("no wire")
        pair.sender.send_layer(part, layer)
    pair.p.transfers.poll()
    assert pair.p.only(TransmitFailed).reason == "no wire"
    assert pair.p.mempool.holders() == [] and not pair.p.transfers.is_active


class WholeBlocksLink:
    """A link without `send_layer`."""

    kind = "whole"

    def __init__(self) -> None:
        self.is_closed = False

    def send(self, *words: object) -> None: ...
    def poll(self) -> list[Completion]:
        return []

    def cancel(self, transfer_id: TransferId) -> None: ...
    def close(self, *, is_lost: bool = False) -> None:
        self.is_closed = True


def test_a_link_that_cannot_send_layers_is_refused_in_that_style() -> None:
    p = Node("P0")
    links: list[WholeBlocksLink] = []

    def open_link(peer: PeerJoined) -> WholeBlocksLink:
        links.append(WholeBlocksLink())
        return links[-1]

    for style in TransferStyle:
        events: list[LinkReady] = []
        transfers = Transfers(
            p.mempool,
            p.geometry,
            open_link,
            p.id,
            1,
            events.append,  # type: ignore[arg-type]
            style,
        )
        transfers.peer_joined(
            PeerJoined(
                epoch=1, peer=InstanceId("D0"), peer_epoch=1, geometry=p.geometry, addresses={}
            )
        )
        is_refused = style is TransferStyle.LAYER
        expected = "transfer.style is 'layer', which no whole link can do" if is_refused else None
        assert [event.error for event in events] == [expected]
        assert links[-1].is_closed == is_refused

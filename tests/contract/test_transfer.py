"""Both halves of a transfer over a fake link: whatever happens, each reference ends, and no block
is found by the index unless it holds the right KV."""

from __future__ import annotations

import pytest

from memserve.messages import (
    Allocated,
    Cancel,
    Commit,
    Expired,
    History,
    Inserted,
    InsertFailed,
    LinkReady,
    PeerJoined,
    Refused,
    Sent,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, Direction, InstanceId, Namespace, RequestId, TransferId
from memserve.workers.transfer import private_namespace
from tests.contract.link_rig import BLOCK_SIZE, geometry
from tests.contract.transfer_rig import DEADLINE_S, NO_NAMESPACE, NUM_BLOCKS, Node, allocate, prompt

R = RequestId("r")
T = TransferId("r/forward/1")
BLOCK_BYTES = geometry().block_bytes


class Pair:
    """P and D with links both ways."""

    def __init__(self, p_layout: str = "block_first", d_layout: str = "block_first") -> None:
        self.p = Node("P0", layout=p_layout)
        self.d = Node("D0", layout=d_layout)
        self.p.join(self.d)
        self.d.join(self.p)
        assert self.p.only(LinkReady).error is None and self.d.only(LinkReady).error is None

    def prefill(self, tokens: list[int]) -> None:
        """P computes the prompt and holds it; it may be sent."""
        assert self.p.compute(R, tokens) is not None
        self.p.end(R, tokens, hold=True)
        self.p.transfers.source_ready(R)

    def allocate(self, tokens: list[int], *, is_private: bool = False) -> Allocated:
        self.d.transfers.allocate(allocate(R, is_private=is_private), tokens)
        return self.d.only(Allocated)

    def transmit(self, allocated: Allocated) -> None:
        self.p.transfers.transmit(order(allocated))

    def commit(self, sent: Sent, *, pin: bool = True) -> None:
        self.d.transfers.commit(
            Commit(epoch=1, transfer_id=sent.transfer_id, size_bytes=sent.size_bytes, pin=pin)
        )

    @property
    def link(self):  # type: ignore[no-untyped-def]
        """P's fake link to D."""
        return self.p.links[self.d.id]

    def check(self, *prompts: list[int]) -> None:
        self.p.check(*prompts)
        self.d.check(*prompts, namespaces=(NO_NAMESPACE, private(R)))


def private(request_id: RequestId, salt: str | None = None) -> Namespace:
    return private_namespace(request_id, Namespace(salt))


def order(allocated: Allocated) -> Transmit:
    return Transmit(
        epoch=1,
        transfer_id=allocated.transfer_id,
        request_id=R,
        peer=InstanceId("D0"),
        first_block=allocated.hit_blocks,
        block_ids=allocated.block_ids,
    )


def cancel(transfer_id: TransferId = T) -> Cancel:
    return Cancel(epoch=1, transfer_id=transfer_id)


@pytest.fixture
def pair() -> Pair:
    return Pair()


# ── the whole way ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 15, 16, 17, 30])
@pytest.mark.parametrize(
    "layouts",
    [("block_first",) * 2, ("layer_first",) * 2, ("block_first", "layer_first"), ("padded",) * 2],
)
def test_a_prompt_goes_over_and_is_hit(num_tokens: int, layouts: tuple[str, str]) -> None:
    pair = Pair(*layouts)
    tokens = prompt(num_tokens)
    num_blocks = num_tokens // BLOCK_SIZE
    allocated = pair.allocate(tokens)
    assert (allocated.hit_blocks, len(allocated.block_ids)) == (0, num_blocks)
    pair.prefill(tokens)
    assert pair.p.take() == []  # nothing to say before it is told to send
    pair.transmit(allocated)
    sent = pair.p.only(Sent)
    assert (sent.num_blocks, sent.size_bytes) == (num_blocks, num_blocks * BLOCK_BYTES)
    assert pair.p.is_idle() and not pair.p.transfers.is_active
    pair.commit(sent)
    assert pair.d.only(Inserted).num_tokens == num_blocks * BLOCK_SIZE
    assert pair.d.mempool.stats().active == num_blocks  # pinned for the request
    pair.check(tokens)
    assert pair.d.compute(R, [*tokens, 1]) == num_blocks
    pair.d.transfers.scheduled(R)
    assert pair.d.transfers.pinned_requests == 0
    pair.d.end(R, tokens, hold=False)
    assert pair.d.is_idle()
    pair.check(tokens)


def test_only_what_the_receiver_lacks_is_sent(pair: Pair) -> None:
    tokens = prompt(30)
    pair.d.compute(RequestId("earlier"), tokens[:13])
    pair.d.end(RequestId("earlier"), tokens[:13], hold=False)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    assert (allocated.hit_blocks, len(allocated.block_ids)) == (3, 4)
    pair.transmit(allocated)
    sent = pair.p.only(Sent)
    assert sent.size_bytes == 4 * BLOCK_BYTES
    pair.commit(sent)
    assert pair.d.only(Inserted).num_tokens == 28
    pair.check(tokens)


def test_a_full_hit_sends_nothing_and_is_acknowledged(pair: Pair) -> None:
    tokens = prompt(16)
    pair.d.compute(RequestId("earlier"), tokens)
    pair.d.end(RequestId("earlier"), tokens, hold=False)
    allocated = pair.allocate(tokens)
    assert (allocated.hit_blocks, allocated.block_ids) == (4, [])
    pair.transmit(allocated)
    pair.prefill(tokens)
    sent = pair.p.only(Sent)
    assert (sent.num_blocks, sent.size_bytes) == (0, 0)
    assert pair.p.is_idle()
    pair.commit(sent)
    assert pair.d.only(Inserted).num_tokens == 16
    assert pair.d.compute(R, tokens) == 3  # the last token has to be computed
    pair.d.transfers.scheduled(R)
    pair.check(tokens)


def test_an_order_that_comes_early_waits_for_the_finished_prefill(pair: Pair) -> None:
    tokens = prompt(16)
    pair.transmit(pair.allocate(tokens))
    pair.p.compute(R, tokens)
    assert pair.p.take() == []
    pair.p.end(R, tokens, hold=True)
    assert pair.p.take() == [] and pair.p.mempool.stats().active == 4
    pair.p.transfers.source_ready(R)
    assert pair.p.only(Sent).num_blocks == 4


def test_the_kv_comes_back_and_makes_the_next_turn_a_hit(pair: Pair) -> None:
    turn = prompt(29)
    first = prompt(10)
    pair.prefill(first)
    pair.transmit(pair.allocate(first))
    pair.commit(pair.p.only(Sent))
    pair.d.take()
    pair.d.compute(R, turn)
    pair.d.transfers.scheduled(R)
    pair.d.end(R, turn, hold=True)
    pair.d.transfers.source_ready(R)
    pair.p.transfers.allocate(allocate(R, Direction.BACK), turn[:28])
    back = pair.p.only(Allocated)
    assert back.hit_blocks == 2
    pair.d.transfers.transmit(
        Transmit(
            epoch=1,
            transfer_id=back.transfer_id,
            request_id=R,
            peer=pair.p.id,
            first_block=back.hit_blocks,
            block_ids=back.block_ids,
        )
    )
    sent = pair.d.only(Sent)
    pair.p.transfers.commit(
        Commit(epoch=1, transfer_id=sent.transfer_id, size_bytes=sent.size_bytes, pin=False)
    )
    assert pair.p.only(Inserted).num_tokens == 28
    assert pair.p.is_idle() and pair.d.is_idle()
    assert pair.p.compute(RequestId("next"), prompt(40)) == 7
    pair.check(prompt(40))


def test_private_kv_is_found_by_its_request_alone_and_deleted_with_it(pair: Pair) -> None:
    tokens = prompt(16)
    namespace = private(R)
    pair.prefill(tokens)
    pair.transmit(pair.allocate(tokens, is_private=True))
    pair.commit(pair.p.only(Sent))
    pair.check(tokens)
    assert pair.d.mempool.match(tokens) == []
    assert pair.d.mempool.match(tokens, private(RequestId("other"))) == []
    assert pair.d.mempool.match(tokens, private(R, "salt")) == []
    assert len(pair.d.mempool.match(tokens, namespace)) == 4
    pair.d.abort(R)
    assert pair.d.mempool.match(tokens, namespace) == []
    stats = pair.d.mempool.stats()
    assert stats.free == stats.total


def test_private_kv_that_nobody_waits_for_is_not_kept(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    pair.transmit(pair.allocate(tokens, is_private=True))
    pair.commit(pair.p.only(Sent), pin=False)
    assert pair.d.only(Inserted).num_tokens == 0
    stats = pair.d.mempool.stats()
    assert stats.free == stats.total


def test_a_block_computed_meanwhile_is_not_kept_twice(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    other = RequestId("other")
    assert pair.d.compute(other, tokens[:10]) == 0
    pair.transmit(allocated)
    pair.commit(pair.p.only(Sent))
    pair.check(tokens)
    pair.d.end(other, tokens[:10], hold=False)
    pair.d.abort(R)
    assert pair.d.mempool.stats().historical == 4
    assert pair.d.is_idle()


# ── the receiver ──────────────────────────────────────────────────────────────────────────────


def test_without_room_it_refuses_and_holds_nothing(pair: Pair) -> None:
    busy = prompt(56, seed=5)
    pair.d.compute(RequestId("busy"), busy)  # 14 of 16 blocks
    pair.d.transfers.allocate(allocate(R), prompt(12))
    assert pair.d.only(Refused).reason == "3 blocks asked for, 1 of 16 available"
    assert pair.d.mempool.holders() == []
    pair.check(busy)


def test_a_refusal_lets_go_of_the_hits(pair: Pair) -> None:
    tokens = prompt(20)
    pair.d.compute(RequestId("earlier"), tokens[:8])
    pair.d.end(RequestId("earlier"), tokens[:8], hold=False)
    pair.d.compute(RequestId("busy"), prompt(52, seed=5))  # leaves the two hits and one more
    pair.d.transfers.allocate(allocate(R), tokens)
    assert "3 blocks asked for" in pair.d.only(Refused).reason
    assert pair.d.mempool.holders() == [] and pair.d.mempool.stats().historical == 2
    pair.check(tokens)


def test_a_reservation_does_not_evict_its_own_hits(pair: Pair) -> None:
    tokens = prompt(40)
    for request_id, earlier in ((RequestId("old"), tokens[:8]), (RequestId("new"), prompt(24, 7))):
        pair.d.compute(request_id, earlier)
        pair.d.end(request_id, earlier, hold=False)
    hits = pair.d.mempool.match(tokens)  # the oldest history there is
    long = prompt(60)
    assert long[: len(tokens)] == tokens
    allocated = pair.allocate(long)  # more than the empty blocks
    assert (allocated.hit_blocks, len(allocated.block_ids)) == (2, 13)
    assert not set(allocated.block_ids) & set(hits)
    assert pair.d.mempool.match(tokens) == hits
    pair.d.transfers.cancel(cancel())
    assert pair.d.is_idle()
    pair.check(long)


def test_a_second_reservation_of_one_transfer_is_refused(pair: Pair) -> None:
    pair.allocate(prompt(8))
    pair.d.transfers.allocate(allocate(R), prompt(8))
    assert "already" in pair.d.only(Refused).reason
    pair.d.transfers.cancel(cancel())
    assert pair.d.is_idle()


@pytest.mark.parametrize("difference", [-BLOCK_BYTES, -1, 1, BLOCK_BYTES])
def test_a_wrong_byte_count_inserts_nothing(pair: Pair, difference: int) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.link.lose_bytes(-difference)
    pair.transmit(allocated)
    sent = pair.p.only(Sent)
    pair.commit(sent)
    expected = 4 * BLOCK_BYTES
    reason = f"{expected + difference} bytes were written, {expected} promised"
    assert pair.d.only(InsertFailed).reason == reason
    stats = pair.d.mempool.stats()
    assert stats.free == stats.total and pair.d.is_idle()


def test_a_commit_of_an_unknown_transfer_fails(pair: Pair) -> None:
    pair.d.transfers.commit(Commit(epoch=1, transfer_id=T, size_bytes=0, pin=True))
    assert pair.d.only(InsertFailed).reason == "no such reservation"
    assert pair.d.transfers.pinned_requests == 0


def test_past_its_deadline_a_reservation_is_quarantined_not_freed(pair: Pair) -> None:
    transfers = pair.d.transfers
    assert transfers.next_deadline() is None
    allocated = pair.allocate(prompt(16))
    start = pair.d.clock.now_s
    assert transfers.next_deadline() == start + DEADLINE_S
    pair.d.clock.now_s = start + DEADLINE_S - 0.001
    transfers.expire()
    assert pair.d.take() == [] and transfers.quarantined_blocks == 0
    pair.d.clock.now_s = start + DEADLINE_S
    transfers.expire()
    assert pair.d.only(Expired).transfer_id == T
    assert transfers.quarantined_blocks == transfers.reserved_blocks == 4
    assert set(allocated.block_ids) <= set(pair.d.mempool.held(f"reservation of {T}"))
    transfers.expire()
    assert pair.d.take() == []
    pair.d.clock.now_s += DEADLINE_S
    transfers.expire()  # said again
    assert pair.d.only(Expired).transfer_id == T
    transfers.cancel(cancel())
    assert pair.d.is_idle() and transfers.next_deadline() is None
    assert transfers.quarantined_blocks == transfers.reserved_blocks == 0


def test_a_late_commit_ends_the_quarantine(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.d.clock.now_s += DEADLINE_S
    pair.d.transfers.expire()
    assert pair.d.only(Expired)
    pair.transmit(allocated)
    pair.commit(pair.p.only(Sent))
    assert pair.d.only(Inserted).num_tokens == 16
    assert pair.d.transfers.quarantined_blocks == 0
    pair.check(tokens)


def test_arrivals_can_be_let_go_when_the_engine_starves(pair: Pair) -> None:
    tokens = prompt(40)
    pair.prefill(tokens)
    pair.transmit(pair.allocate(tokens))
    pair.commit(pair.p.only(Sent))
    assert pair.d.compute(RequestId("big"), prompt(50, seed=3)) is None
    assert pair.d.transfers.pinned_requests == 1
    assert pair.d.transfers.relax() == 10
    assert pair.d.transfers.relax() == 0 == pair.d.transfers.pinned_requests
    assert pair.d.compute(RequestId("big"), prompt(50, seed=3)) is not None
    pair.d.transfers.scheduled(R)  # late: nothing to drop any more
    pair.check(tokens, prompt(50, seed=3))


# ── the sender ────────────────────────────────────────────────────────────────────────────────


def test_a_failed_transfer_says_so_and_drops_the_pin(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.link.fail_next("no wire")
    pair.transmit(allocated)
    assert pair.p.only(TransmitFailed).reason == "no wire"
    assert pair.p.is_idle()
    pair.d.transfers.cancel(cancel())
    stats = pair.d.mempool.stats()
    assert stats.free == stats.total  # the half that was written is found by nobody
    pair.check(tokens)


def test_blocks_stay_pinned_while_a_link_reads_them(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.link.hold()
    pair.transmit(allocated)
    assert pair.p.take() == [] and pair.p.transfers.is_active
    pair.p.abort(R)  # cancelled, but the link is not quiet
    pair.p.transfers.poll()
    assert pair.p.take() == [] and pair.p.transfers.is_active
    assert pair.p.mempool.stats().active == 4
    assert pair.p.compute(RequestId("other"), prompt(56, seed=4)) is None  # they are not reused
    pair.link.release()
    pair.p.transfers.poll()
    assert pair.p.only(TransmitFailed).reason == "the request was aborted"
    assert pair.p.is_idle() and not pair.p.transfers.is_active


def test_the_next_attempt_of_a_request_does_not_touch_the_last_ones_blocks(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.link.hold()
    pair.transmit(allocated)
    pair.p.abort(R)
    again = prompt(12, seed=6)
    pair.prefill(again)
    pair.p.abort(R)
    assert pair.p.mempool.holders() == [f"sending of {T}: 4 blocks"]
    pair.link.release()
    pair.p.transfers.poll()
    assert pair.p.only(TransmitFailed).transfer_id == T
    assert pair.p.is_idle()


@pytest.mark.parametrize("is_held", [False, True])
def test_a_cancelled_order_is_answered(pair: Pair, is_held: bool) -> None:
    tokens = prompt(16)
    allocated = pair.allocate(tokens)
    if is_held:
        pair.link.hold()
        pair.prefill(tokens)
    pair.transmit(allocated)
    pair.p.transfers.cancel(cancel())
    if is_held:
        assert pair.p.take() == []
        pair.link.release()
        pair.p.transfers.poll()
    assert pair.p.only(TransmitFailed).reason == "cancelled"
    pair.p.transfers.cancel(cancel())  # once
    assert pair.p.take() == []
    pair.p.abort(R)
    assert pair.p.is_idle()


def test_an_abort_before_the_end_of_the_prefill_is_answered(pair: Pair) -> None:
    tokens = prompt(16)
    pair.transmit(pair.allocate(tokens))
    pair.p.compute(R, tokens)
    pair.p.abort(R)
    assert pair.p.only(TransmitFailed).reason == "the request was aborted"
    assert pair.p.is_idle()


def test_an_abort_drops_a_source_that_nobody_asked_for(pair: Pair) -> None:
    pair.prefill(prompt(16))
    assert pair.p.transfers.pinned_requests == 1
    pair.p.abort(R)
    assert pair.p.is_idle() and pair.p.transfers.pinned_requests == 0
    pair.p.abort(R)
    pair.p.transfers.source_ready(R)
    assert pair.p.take() == []


def test_more_than_the_full_blocks_that_are_held_is_never_sent(pair: Pair) -> None:
    tokens = prompt(19)
    pair.p.compute(R, tokens)
    pair.p.end(R, tokens[:15], hold=True)  # the KV of 15 tokens only
    pair.p.transfers.source_ready(R)
    pair.transmit(pair.allocate(tokens))
    failed = pair.p.only(TransmitFailed)
    assert failed.reason == "blocks up to 4 asked for, 3 full ones are held"
    assert pair.p.is_idle()


def test_a_second_order_for_a_waiting_request_fails(pair: Pair) -> None:
    allocated = pair.allocate(prompt(16))
    pair.transmit(allocated)
    second = TransferId("second")
    pair.p.transfers.transmit(
        Transmit(
            epoch=1,
            transfer_id=second,
            request_id=R,
            peer=pair.d.id,
            first_block=0,
            block_ids=allocated.block_ids,
        )
    )
    assert pair.p.only(TransmitFailed).transfer_id == second


# ── peers come and go ─────────────────────────────────────────────────────────────────────────


def test_without_a_link_it_fails() -> None:
    pair = Pair()
    pair.p.transfers.peer_lost(pair.d.id, 1)
    tokens = prompt(16)
    pair.prefill(tokens)
    pair.transmit(pair.allocate(tokens))
    assert pair.p.only(TransmitFailed).reason == "no link to D0"
    assert pair.p.is_idle()


def test_a_lost_receiver_ends_what_was_meant_for_it(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.link.hold()
    pair.transmit(allocated)
    waiting = RequestId("waiting")
    pair.p.transfers.transmit(
        Transmit(
            epoch=1,
            transfer_id=TransferId("w"),
            request_id=waiting,
            peer=pair.d.id,
            first_block=0,
            block_ids=[BlockId(1)],
        )
    )
    link = pair.link
    pair.p.transfers.peer_lost(pair.d.id, 2)  # another life
    assert pair.p.take() == [] and not link.is_closed
    pair.p.transfers.peer_lost(pair.d.id, 1)
    assert link.is_closed and link.is_lost
    events = pair.p.take()
    assert all(isinstance(e, TransmitFailed) and e.reason == "D0 was lost" for e in events)
    assert sorted(e.transfer_id for e in events) == [T, "w"]  # type: ignore[union-attr]
    assert pair.p.is_idle() and not pair.p.transfers.is_active


def test_a_dead_sender_leaves_a_reservation_that_a_cancel_frees(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    allocated = pair.allocate(tokens)
    pair.link.hold()
    pair.transmit(allocated)  # half is written
    pair.link.die()
    pair.d.transfers.peer_lost(pair.p.id, 1)
    assert pair.d.transfers.reserved_blocks == 4
    pair.d.transfers.cancel(cancel())
    assert pair.d.is_idle()
    assert pair.d.compute(R, tokens) == 0  # recomputed: nothing of the half is found
    pair.d.check(tokens)


def test_a_new_life_of_a_peer_replaces_its_link(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    former = pair.link
    pair.p.join(pair.d, epoch=2)
    ready = pair.p.only(LinkReady)
    assert (ready.peer_epoch, ready.kind, ready.error) == (2, "fake", None)
    assert former.is_closed and not pair.link.is_closed
    pair.p.transfers.peer_lost(pair.d.id, 1)  # late news about the first life
    pair.transmit(pair.allocate(tokens))
    assert pair.p.only(Sent).num_blocks == 4


def test_peers_that_do_not_fit_or_cannot_be_reached_are_reported(pair: Pair) -> None:
    def join(**fields: object) -> LinkReady:
        command = {"peer": "D1", "peer_epoch": 3, "geometry": geometry(), "addresses": {}} | fields
        pair.p.transfers.peer_joined(PeerJoined(epoch=1, **command))  # type: ignore[arg-type]
        return pair.p.only(LinkReady)

    mismatch = join(geometry=geometry(block_size=8))
    assert mismatch.error is not None and mismatch.peer_epoch == 3
    assert "block_size is 4 on P0 and 8 on D1" in mismatch.error
    assert join().error == "D1 offers nothing"


def test_close_lets_go_of_everything(pair: Pair) -> None:
    tokens = prompt(16)
    pair.prefill(tokens)
    pair.link.hold()
    pair.transmit(pair.allocate(tokens))
    pair.p.transfers.close()
    pair.d.transfers.close()
    assert pair.link.is_closed and not pair.link.is_lost
    assert pair.p.is_idle() and pair.d.is_idle()
    assert pair.p.take() == []


# ── history ───────────────────────────────────────────────────────────────────────────────────


class Fetch:
    """D fetches 16 tokens that P computed for somebody else; P is told nothing of the request."""

    def __init__(self, num_computed: int = 16) -> None:
        self.pair = Pair()
        self.tokens = prompt(16)
        self.pair.p.compute("other", prompt(num_computed))
        self.pair.p.engine.finish("other")
        self.is_computed = True
        self.pair.d.transfers.allocate(allocate(R, Direction.FETCH), self.tokens)
        self.allocated = self.pair.d.only(Allocated)

    def order(self) -> None:
        self.pair.p.transfers.transmit_history(
            order(self.allocated), History(Namespace(), self.tokens), lambda: self.is_computed
        )


def test_history_is_sent_for_a_request_that_the_sender_does_not_know() -> None:
    fetch = Fetch()
    fetch.order()
    sent = fetch.pair.p.only(Sent)
    assert sent.num_blocks == 4
    assert fetch.pair.p.is_idle()
    fetch.pair.commit(sent)
    assert fetch.pair.d.only(Inserted).num_tokens == 16
    fetch.pair.check(fetch.tokens)
    assert len(fetch.pair.d.mempool.match(fetch.tokens)) == 4


def test_history_that_was_evicted_meanwhile_is_a_failure_that_says_so() -> None:
    fetch = Fetch(num_computed=12)
    fetch.order()
    failed = fetch.pair.p.only(TransmitFailed)
    assert failed.reason == "blocks up to 4 asked for, 3 are in the index"
    assert fetch.pair.p.is_idle()


def test_history_of_another_namespace_is_not_found() -> None:
    fetch = Fetch()
    fetch.pair.p.transfers.transmit_history(
        order(fetch.allocated), History(Namespace("salt"), fetch.tokens), lambda: True
    )
    assert "0 are in the index" in fetch.pair.p.only(TransmitFailed).reason


def test_history_is_read_only_after_the_steps_in_flight() -> None:
    fetch = Fetch()
    fetch.is_computed = False
    before = bytes(fetch.pair.d.memory)
    fetch.order()
    fetch.pair.p.transfers.poll()
    assert fetch.pair.p.take() == [] and fetch.pair.p.transfers.is_active
    assert bytes(fetch.pair.d.memory) == before
    transfer_id = fetch.allocated.transfer_id
    assert len(fetch.pair.p.mempool.held(f"sending of {transfer_id}")) == 4
    # Held meanwhile: the engine may take every block but these.
    assert fetch.pair.p.compute("greedy", prompt(4 * (NUM_BLOCKS - 5), seed=1)) is not None
    fetch.is_computed = True
    fetch.pair.p.transfers.poll()
    fetch.pair.commit(fetch.pair.p.only(Sent))
    fetch.pair.check(fetch.tokens)


@pytest.mark.parametrize("is_computed", [False, True])
def test_cancelled_history_is_answered_once_and_let_go(is_computed: bool) -> None:
    fetch = Fetch()
    fetch.pair.link.hold()
    fetch.is_computed = is_computed
    fetch.order()
    fetch.pair.p.transfers.cancel(Cancel(epoch=1, transfer_id=fetch.allocated.transfer_id))
    fetch.pair.link.release()
    fetch.pair.p.transfers.poll()
    assert fetch.pair.p.only(TransmitFailed).reason == "cancelled"
    fetch.is_computed = True
    fetch.pair.p.transfers.poll()
    assert fetch.pair.p.take() == [] and fetch.pair.p.is_idle()


@pytest.mark.parametrize("is_computed", [False, True])
def test_history_for_a_peer_that_dies_is_let_go(is_computed: bool) -> None:
    fetch = Fetch()
    fetch.pair.link.hold()
    fetch.is_computed = is_computed
    fetch.order()
    fetch.pair.p.transfers.peer_lost(fetch.pair.d.id, 1)
    assert fetch.pair.p.only(TransmitFailed).reason == "D0 was lost"
    assert fetch.pair.p.is_idle()


def test_history_without_a_link_is_a_failure() -> None:
    fetch = Fetch()
    fetch.pair.p.transfers.peer_lost(fetch.pair.d.id, 1)
    fetch.order()
    assert fetch.pair.p.only(TransmitFailed).reason == "no link to D0"
    assert fetch.pair.p.is_idle()

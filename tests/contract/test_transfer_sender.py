"""The sender's half of a transfer: sources that finish, fail or are cancelled, and history."""

from __future__ import annotations

import pytest

from memserve.messages import Allocated, Cancel, History, Inserted, Sent, Transmit, TransmitFailed
from memserve.types import Direction, Namespace, RequestId, TransferId
from tests.contract.pair_rig import Pair, R, T, cancel, order
from tests.contract.transfer_rig import NUM_BLOCKS, allocate, prompt


@pytest.fixture
def pair() -> Pair:
    return Pair()


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


# ── history ───────────────────────────────────────────────────────────────────────────────────


class Fetch:
    """D fetches 16 tokens that P computed for somebody else; P is told nothing of the request."""

    def __init__(self, num_computed: int = 16, num_in_flight: int = 0) -> None:
        """So many of the tokens that P's index has are computed by a step in flight."""
        self.pair = Pair()
        self.tokens = prompt(16)
        self.pair.p.compute("other", prompt(num_computed - num_in_flight))
        if num_in_flight:
            assert self.pair.p.extend("other", prompt(num_computed))
        self.pair.p.engine.finish("other")
        self.pair.d.transfers.allocate(allocate(R, Direction.FETCH), self.tokens)
        self.allocated = self.pair.d.only(Allocated)

    def order(self) -> None:
        self.pair.p.transfers.transmit_history(
            order(self.allocated), History(Namespace(), self.tokens)
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
        order(fetch.allocated), History(Namespace("salt"), fetch.tokens)
    )
    assert "0 are in the index" in fetch.pair.p.only(TransmitFailed).reason


def test_history_is_read_only_after_the_step_that_writes_it() -> None:
    fetch = Fetch(num_in_flight=4)
    before = bytes(fetch.pair.d.memory)
    fetch.order()
    fetch.pair.p.transfers.poll()
    assert fetch.pair.p.take() == [] and fetch.pair.p.transfers.is_active
    assert bytes(fetch.pair.d.memory) == before
    transfer_id = fetch.allocated.transfer_id
    assert len(fetch.pair.p.mempool.held(f"sending of {transfer_id}")) == 4
    # Held meanwhile: the engine may take every block but these.
    assert fetch.pair.p.compute("greedy", prompt(4 * (NUM_BLOCKS - 5), seed=1)) is not None
    fetch.pair.p.end_step()
    fetch.pair.p.transfers.poll()
    fetch.pair.commit(fetch.pair.p.only(Sent))
    fetch.pair.check(fetch.tokens)


def test_history_waits_for_the_last_of_the_steps_that_write_it() -> None:
    fetch = Fetch(num_computed=12, num_in_flight=4)
    p = fetch.pair.p
    p.compute("more", prompt(12))
    assert p.extend("more", prompt(16))
    p.engine.finish("more")
    fetch.order()
    while p.steps.num_ended < p.steps.num_launched:
        p.transfers.poll()
        assert p.take() == []
        p.steps.num_ended += 1
    p.end_step()
    p.transfers.poll()
    fetch.pair.commit(p.only(Sent))
    fetch.pair.check(fetch.tokens)


def test_history_does_not_wait_for_the_steps_of_others() -> None:
    fetch = Fetch()
    fetch.pair.p.compute("busy", prompt(8, seed=1))
    assert fetch.pair.p.extend("busy", prompt(16, seed=1))
    fetch.order()
    fetch.pair.commit(fetch.pair.p.only(Sent))
    fetch.pair.check(fetch.tokens)


def test_what_is_published_with_a_step_s_output_is_written() -> None:
    """As vLLM does with generated tokens under asynchronous scheduling: another step runs then."""
    fetch = Fetch(num_computed=12)
    p = fetch.pair.p
    p.compute("known", prompt(12))
    p.compute("busy", prompt(8, seed=1))
    assert p.extend("busy", prompt(16, seed=1))
    assert p.engine.generate("known", fetch.tokens[12:])
    fetch.order()
    assert p.only(Sent).num_blocks == 4


def test_what_the_receiver_holds_already_is_not_waited_for() -> None:
    fetch = Fetch(num_in_flight=4)
    fetch.pair.d.compute("known", fetch.tokens)
    fetch.pair.d.transfers.allocate(allocate(R, Direction.BACK), fetch.tokens)
    fetch.allocated = fetch.pair.d.only(Allocated)
    assert fetch.allocated.hit_blocks == 4
    fetch.order()
    assert fetch.pair.p.only(Sent).num_blocks == 0


@pytest.mark.parametrize("num_in_flight", [0, 4])
def test_cancelled_history_is_answered_once_and_let_go(num_in_flight: int) -> None:
    fetch = Fetch(num_in_flight=num_in_flight)
    fetch.pair.link.hold()
    fetch.order()
    fetch.pair.p.transfers.cancel(Cancel(epoch=1, transfer_id=fetch.allocated.transfer_id))
    fetch.pair.link.release()
    fetch.pair.p.transfers.poll()
    assert fetch.pair.p.only(TransmitFailed).reason == "cancelled"
    fetch.pair.p.end_step()
    fetch.pair.p.transfers.poll()
    assert fetch.pair.p.take() == [] and fetch.pair.p.is_idle()


@pytest.mark.parametrize("num_in_flight", [0, 4])
def test_history_for_a_peer_that_dies_is_let_go(num_in_flight: int) -> None:
    fetch = Fetch(num_in_flight=num_in_flight)
    fetch.pair.link.hold()
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

"""Both halves of a transfer over a fake link: whatever happens, each reference ends, and no block
is found by the index unless it holds the right KV."""

from __future__ import annotations

import pytest

from memserve.messages import (
    Allocated,
    Commit,
    Expired,
    Inserted,
    InsertFailed,
    LinkReady,
    PeerJoined,
    Refused,
    Sent,
    Transmit,
    TransmitFailed,
)
from memserve.types import BlockId, Direction, RequestId, TransferId
from tests.contract.link_rig import BLOCK_SIZE, geometry
from tests.contract.pair_rig import BLOCK_BYTES, Pair, R, T, cancel, private
from tests.contract.transfer_rig import DEADLINE_S, allocate, prompt


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

"""Swapping out over a real BlockPool: what is copied when, what makes room for it, what is lost."""

from __future__ import annotations

from memserve.changes import Swapped
from memserve.core.swap import SwapLimits
from memserve.types import Medium
from tests.contract.swap_rig import (
    TOTAL,
    A,
    B,
    C,
    FaultyOps,
    ManualQueues,
    SwapNode,
    manual,
    swapped_out,
)
from tests.contract.transfer_rig import prompt

# ── out ───────────────────────────────────────────────────────────────────────────────────────


def test_the_oldest_history_goes_out_and_stays_in_hbm() -> None:
    node = SwapNode()
    node.remember(A)
    node.remember(B)
    assert node.swapper.swap_out(5) == 5
    node.swap()
    assert node.where(A) == "BBBB", "the first one that ended"
    assert node.where(B) == "HHHB", "of a prompt the end goes first"
    assert node.swapper.stats().swapped_out == 5
    assert node.swapper.swap_out(99) == 3, "what is in DRAM already is passed over"
    node.swap()
    node.check_all(A, B)
    assert node.is_idle()


def test_what_the_engine_evicts_is_found_in_dram_whether_it_was_copied_before_or_not() -> None:
    node = SwapNode()
    node.remember(A)
    node.remember(B)
    node.swapper.swap_out(4)
    node.swap()
    node.mempool.take_changes()
    node.forget_hbm()
    assert (node.where(A), node.where(B)) == ("DDDD", "DDDD")
    changes = node.mempool.take_changes()
    assert all(isinstance(c, Swapped) and c.medium is Medium.DRAM for c in changes)
    assert node.swapper.stats().swapped_out == 8
    node.check_all(A, B)


def test_copying_is_not_in_the_engines_way() -> None:
    """No block is taken from the engine for a copy, and the order of eviction stays."""
    node, _ = manual()
    node.remember(A)
    node.remember(B)
    order = list(node.mempool.history())
    assert node.swapper.swap_out(8) == 8
    node.swapper.poll()
    assert node.mempool.num_available == TOTAL and list(node.mempool.history()) == order


def test_a_copy_of_a_block_that_changed_hands_is_thrown_away() -> None:
    node, queues = manual()
    node.remember(A)
    victims = list(node.mempool.history())
    assert node.swapper.swap_out(4) == 4
    node.swapper.poll()
    node.forget_hbm()
    other = prompt(4 * TOTAL, 7)
    node.remember(other)
    assert set(victims) <= set(node.mempool.match(other)), "published again, as something else"
    queues.out.finish(4)
    node.swapper.poll()
    assert not node.tier.is_active and node.tier.num_used == 4, "saved when they were taken"
    assert node.swapper.stats().swapped_out == 4 and node.where(A) == "DDDD"
    node.check_all(A, other)


def test_a_copy_of_a_block_that_came_back_is_thrown_away() -> None:
    """Its key is the same as when the copy began, but not what it held in between."""
    node, queues = manual(num_blocks=5)
    node.remember(A)
    keys = {b: node.mempool.index.key_of(b, Medium.HBM) for b in node.mempool.history()}
    assert node.swapper.swap_out(4) == 4
    node.swapper.poll()
    node.remember(B)
    assert node.where(A) == "DDDD", "saved when B took its blocks"
    queues.out.finish(4)
    node.remember(A)
    index = node.mempool.index
    assert any(index.key_of(block, Medium.HBM) == key for block, key in keys.items())
    node.mempool.drop_slots(node.mempool.find(node.mempool.path(A)).dram.tolist())
    node.swapper.poll()
    assert node.where(A) == "HHHH" and not node.tier.is_active
    node.check_all(A, B)


def test_a_failed_copy_leaves_everything_as_it_was() -> None:
    node = SwapNode(ops=FaultyOps(2))
    node.remember(A)
    assert node.swapper.swap_out(4) == 4
    node.swap()
    assert node.where(A) == "HHHH" and node.tier.num_used == 0
    node.check_all(A)


def test_nothing_goes_out_twice_even_if_asked_for_at_once() -> None:
    node, queues = manual()
    node.remember(A)
    assert [node.swapper.swap_out(3), node.swapper.swap_out(4)] == [3, 1]
    node.swapper.poll()
    queues.out.finish(8)
    node.swapper.poll()
    assert node.where(A) == "BBBB" and node.swapper.stats().swapped_out == 4
    node.check_all(A)


# ── saved when it is taken ────────────────────────────────────────────────────────────────────


def test_a_prefill_saves_all_that_it_evicts() -> None:
    """However many prompts come without a poll between them."""
    node, queues = manual(batch_blocks=1)
    prompts = [prompt(16, seed) for seed in range(8)]
    for tokens in prompts:
        node.remember(tokens)
    assert [node.where(tokens) for tokens in prompts] == ["DDDD"] * 4 + ["HHHH"] * 4
    assert not queues.out.pieces and not node.swapper.is_active, "nothing is left to be done"
    node.check_all(*prompts)


def test_decoding_saves_so_much_between_two_polls() -> None:
    node = SwapNode(batch_blocks=3)
    node.remember(prompt(4 * TOTAL, 1))
    taken = [node.pool.get_new_blocks(1) for _ in range(4)]
    assert node.swapper.stats().swapped_out == 3
    node.swapper.poll()
    taken.append(node.pool.get_new_blocks(1))
    assert node.swapper.stats().swapped_out == 4
    for blocks in taken:
        node.pool.free_blocks(blocks)


def test_a_reservation_saves_the_beginnings_of_what_is_too_much() -> None:
    node = SwapNode(batch_blocks=4)
    for tokens in (A, B):
        node.remember(tokens)
    node.mempool.alloc_mem(TOTAL - 1, "others")
    assert (node.where(A), node.where(B)) == ("DDD", "HD"), "not the ends: they are no use alone"
    node.mempool.free_all("others")
    node.check_all(A, B)


def test_what_is_in_dram_already_is_not_saved_again() -> None:
    node = swapped_out(num_slots=4)
    assert node.swapper.stats().swapped_out == 4
    node.check_all(A)


def test_without_slots_the_beginnings_are_saved() -> None:
    node, _ = manual(num_slots=6)
    node.remember(A)
    node.swapper.swap_out(4)
    node.swapper.poll()  # four slots are being written, and cannot make room
    node.remember(B)
    node.forget_hbm()
    assert (node.where(A), node.where(B)) == ("D", "D")
    node.check_all(A, B)


def test_what_cannot_be_saved_is_lost_and_nothing_else() -> None:
    node = SwapNode(ops=FaultyOps(0))
    node.remember(A)
    node.forget_hbm()
    assert node.where(A) == "" and node.tier.num_used == 0
    node.check_all(A)


def test_what_is_forgotten_on_purpose_is_not_saved() -> None:
    node = SwapNode()
    node.remember(A)
    node.mempool.delete(A)
    node.remember(B)
    node.mempool.reset()
    node.forget_hbm()
    assert node.tier.num_used == 0 and node.swapper.stats().swapped_out == 0
    node.check_all(A, B)


# ── room in DRAM ──────────────────────────────────────────────────────────────────────────────


def test_the_oldest_prompts_end_makes_room() -> None:
    node = SwapNode(num_slots=6)
    node.remember(A)
    node.swapper.swap_out(4)
    node.swap()
    node.forget_hbm()
    node.clock.now_s += 1
    node.remember(B)
    assert node.swapper.swap_out(4) == 4
    node.swap()
    assert (node.where(A), node.where(B)) == ("DD", "BBBB")
    node.check_all(A, B)


def test_what_was_swapped_in_makes_room_first() -> None:
    """Those blocks are in HBM, where they were used last: nothing is lost."""
    node = SwapNode(num_slots=8)
    for tokens in (A, B):
        node.remember(tokens)
        node.clock.now_s += 1
    node.swapper.swap_out(8)
    node.swap()
    node.forget_hbm()
    assert node.swapper.swap_in("r", node.mempool.path(B)) == 4
    node.swap()
    node.remember(C)
    assert node.swapper.swap_out(99) == 4, "B is in use"
    node.swap()
    assert (node.where(A), node.where(B), node.where(C)) == ("DDDD", "HHHH", "BBBB")
    node.mempool.free_all("r")
    node.check_all(A, B, C)


def test_only_what_hbm_still_has_is_dropped_for_having_been_swapped_in() -> None:
    node = SwapNode(num_slots=8)
    for tokens in (A, B):
        node.remember(tokens)
        node.clock.now_s += 1
    node.swapper.swap_out(8)
    node.swap()
    node.forget_hbm()
    node.swapper.swap_in("r", node.mempool.path(B))
    node.swap()
    node.mempool.free_all("r")
    node.forget_hbm()
    node.clock.now_s += 1
    node.remember(C)
    node.swapper.swap_out(4)
    node.swap()
    assert (node.where(A), node.where(B), node.where(C)) == ("", "DDDD", "BBBB")
    node.check_all(A, B, C)


def test_without_room_fewer_blocks_go_out() -> None:
    node, _ = manual(num_slots=3)
    node.remember(A)
    assert node.swapper.swap_out(4) == 3
    assert node.swapper.swap_out(4) == 0, "all slots are being written"
    assert node.swapper.stats().used_slots == 3


def test_what_nobody_asked_for_leaves_in_time() -> None:
    node = SwapNode(limits=SwapLimits(margin_blocks=0, pinned_blocks=8, ttl_s=100.0))
    node.remember(A)
    node.swapper.swap_out(4)
    node.swap()
    node.forget_hbm()
    node.clock.now_s += 99
    node.swapper.poll()
    assert node.where(A) == "DDDD"
    assert node.swapper.next_deadline() == node.clock.now_s + 10
    node.clock.now_s += 10
    node.swapper.poll()
    assert node.where(A) == "" and node.tier.num_used == 0
    node.check_all(A)


# ── backing up ────────────────────────────────────────────────────────────────────────────────


def margin(num_blocks: int) -> SwapLimits:
    return SwapLimits(margin_blocks=num_blocks, pinned_blocks=8)


def test_history_is_backed_up_when_free_blocks_are_fewer_than_the_margin() -> None:
    node = SwapNode(limits=margin(10))
    node.remember(A)  # 4 of 16 blocks
    node.swap()
    assert node.where(A) == "HHHH" and not node.swapper.is_active
    node.clock.now_s += 1
    node.remember(B)  # 8 free: 2 more must be safe
    node.swap()
    assert (node.where(A), node.where(B)) == ("HHBB", "HHHH")
    node.clock.now_s += 1
    node.swap()
    assert node.swapper.stats().swapped_out == 2, "that is enough"
    node.check_all(A, B)


def test_what_a_burst_takes_within_the_margin_is_not_lost() -> None:
    node = SwapNode(limits=margin(8))
    for seed in range(12):
        tokens = prompt(16, seed)
        node.remember(tokens)
        node.clock.now_s += 1
        node.swap()
        node.clock.now_s += 1
    found = [node.where(prompt(16, seed)) for seed in range(12)]
    assert all(len(places) == 4 for places in found[4:]), found
    node.check_all(*(prompt(16, seed) for seed in range(12)))


def test_backing_up_goes_in_batches_and_says_when_there_is_more() -> None:
    node, queues = manual(limits=margin(16), batch_blocks=2)
    for tokens in (A, B):
        node.remember(tokens)
    node.clock.now_s += 1
    for num_pieces in (2, 4, 4):
        node.swapper.poll()
        assert len(queues.out.pieces) == num_pieces, "two batches at a time"
    assert node.swapper.is_active
    queues.out.finish(2)
    node.swapper.poll()
    assert len(queues.out.pieces) == 2, "the first has ended"
    node.swapper.poll()
    assert len(queues.out.pieces) == 4
    queues.out.finish(4)
    node.swapper.poll()
    node.clock.now_s += 1
    node.swapper.poll()
    assert (node.where(A), node.where(B)) == ("BBBH", "BBBH")
    queues.out.finish(9)
    for _ in range(4):
        node.swapper.poll()
        queues.out.finish(9)
        node.clock.now_s += 1
    assert node.where(B) == "BBBB" and not node.swapper.is_active
    node.check_all(A, B)


def test_a_burst_that_overtakes_the_copies_leaves_the_beginnings() -> None:
    node, queues = manual(limits=margin(16), batch_blocks=2)
    for tokens in (A, B):
        node.remember(tokens)
    node.clock.now_s += 1
    for _ in range(2):
        node.swapper.poll()
    queues.out.finish(4)
    node.swapper.poll()
    node.mempool.alloc_mem(TOTAL - 1, "others")
    assert (node.where(A), node.where(B)) == ("DDD", "BDD"), "two each before, one when taken"
    node.mempool.free_all("others")
    for _ in range(4):
        queues.out.finish(9)
        node.swapper.poll()
    node.check_all(A, B)


def test_a_settled_pool_is_not_looked_at_again() -> None:
    node = SwapNode(limits=margin(16))
    node.remember(A)
    assert node.swapper.next_deadline() == 0.0, "something has changed"
    node.swap()
    node.clock.now_s += 1
    node.swap()
    assert node.where(A) == "BBBB"
    assert not node.swapper.is_active
    later = node.swapper.next_deadline()
    assert later is not None and later > node.clock.now_s + 100
    node.remember(B)
    at = node.swapper.next_deadline()
    assert at is not None and at <= node.clock.now_s + 0.01
    node.swap()
    assert node.where(B) == "HHHH", "looked at too short a time ago"
    node.clock.now_s = at
    node.swap()
    assert node.where(B) == "BBBB"


def test_a_full_tier_does_not_keep_the_loop_awake() -> None:
    queues = ManualQueues()
    node = SwapNode(2, limits=margin(16), ops=queues.ops, make_queue=queues)
    node.remember(A)
    node.swapper.poll()
    queues.out.finish(2)
    node.swapper.swap_out(0)
    for _ in range(3):
        node.clock.now_s += 1
        queues.out.finish(9)
        node.swapper.poll()
    assert node.tier.num_used == 2

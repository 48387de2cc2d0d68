"""Swapping over a real BlockPool: what is copied when, and that no copy is ever of the wrong KV."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from memserve.changes import Evicted, Inserted, Swapped
from memserve.core.swap import SwapLimits
from memserve.errors import OutOfBlocksError
from memserve.types import BlockId, Medium, SlotId
from tests.contract.link_rig import BLOCK_SIZE, NUM_BLOCKS
from tests.contract.swap_rig import FaultyOps, ManualQueues, SwapNode
from tests.contract.transfer_rig import prompt

TOTAL = NUM_BLOCKS - 1
A, B, C = (prompt(16, seed) for seed in (1, 2, 3))
"""Four blocks each."""


def manual(**options: object) -> tuple[SwapNode, ManualQueues]:
    queues = ManualQueues()
    return SwapNode(ops=queues.ops, make_queue=queues, **options), queues  # type: ignore[arg-type]


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
    node = SwapNode(num_slots=4)
    node.remember(A)
    node.swapper.swap_out(4)
    node.swap()
    node.forget_hbm()
    assert node.where(A) == "DDDD" and node.swapper.stats().swapped_out == 4
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


# ── in ────────────────────────────────────────────────────────────────────────────────────────


def swapped_out(**options: object) -> SwapNode:
    """A (four blocks) in DRAM alone."""
    node = SwapNode(**options)  # type: ignore[arg-type]
    put_out(node)
    return node


def put_out(node: SwapNode, queues: ManualQueues | None = None) -> None:
    node.remember(A)
    node.swapper.swap_out(4)
    node.swapper.poll()
    if queues is not None:
        queues.out.finish(4)
        node.swapper.poll()
    node.forget_hbm()
    assert node.where(A) == "DDDD"


@pytest.mark.parametrize("layout", ["block_first", "layer_first", "padded"])
def test_what_comes_in_is_a_plain_hit(layout: str) -> None:
    node = swapped_out(layout=layout)
    node.mempool.take_changes()
    assert node.swapper.swap_in("r", node.mempool.path(prompt(30, 1))) == 4
    (end,) = [end for _ in range(9) for end in node.swapper.poll()]
    assert (end.owner, end.error) == ("r", None)
    assert node.where(A) == "BBBB" and len(node.mempool.held("r")) == 4
    (change,) = node.mempool.take_changes()
    assert isinstance(change, Swapped) and change.medium is Medium.HBM
    node.check_all(A)
    assert node.compute("next", prompt(30, 1)) == 4
    node.mempool.free_all("r")
    node.engine.finish("next")
    node.check_all(A, prompt(30, 1))
    assert node.is_idle() and node.swapper.stats().swapped_in == 4


def test_only_what_is_missing_is_copied() -> None:
    node = SwapNode()
    node.remember(A)
    node.swapper.swap_out(4)
    node.swap()
    node.forget_hbm()
    node.remember(A[:9])  # two blocks computed again
    assert node.where(A) == "BBDD"
    assert node.swapper.swap_in("r", node.mempool.path(A)) == 2
    node.swap()
    assert node.where(A) == "BBBB"
    node.mempool.free_all("r")
    node.check_all(A)


def test_a_gap_is_filled() -> None:
    node = SwapNode()
    node.remember(A)
    node.swapper.swap_out(4)
    node.swap()
    tail = node.mempool.match(A)[1]
    node.pool.evict_blocks({tail})
    assert node.where(A) == "BDBB" and len(node.mempool.match(A)) == 1
    assert node.swapper.swap_in("r", node.mempool.path(A)) == 1
    node.swap()
    node.mempool.free_all("r")
    assert node.where(A) == "BBBB"
    node.check_all(A)


def test_nothing_to_bring_holds_nothing() -> None:
    node = SwapNode()
    node.remember(A)
    for tokens in (A, B):
        assert node.swapper.swap_in("r", node.mempool.path(tokens)) == 0
    assert node.is_idle() and not node.swapper.is_active


def test_without_blocks_nothing_is_held() -> None:
    node = swapped_out()
    node.mempool.alloc_mem(TOTAL - 4, "others")
    with pytest.raises(OutOfBlocksError, match="4 blocks asked for, 3 of 16 available"):
        node.swapper.swap_in("r", node.mempool.path(A))
    assert not node.mempool.holds("r") and not node.swapper.is_active
    node.mempool.free_all("others")
    node.check_all(A)


def test_a_failed_copy_holds_nothing_and_keeps_dram() -> None:
    node = swapped_out(ops=FaultyOps(5))  # four out, one in
    node.swapper.swap_in("r", node.mempool.path(A))
    (end,) = [end for _ in range(9) for end in node.swapper.poll()]
    assert end.error == "the copy engine is on fire"
    assert node.where(A) == "DDDD" and node.is_idle()
    node.check_all(A)


def test_blocks_that_are_being_filled_are_nobody_elses() -> None:
    node, queues = manual()
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    node.swapper.poll()
    held = node.mempool.held("r")
    assert node.mempool.match(A) == []
    node.mempool.alloc_mem(node.mempool.num_available - 1, "others")
    assert not set(held) & set(node.mempool.held("others"))
    node.mempool.free_all("others")
    queues.into.finish(4)
    node.swapper.poll()
    assert node.mempool.match(A) == held
    node.check_all(A)


def test_what_the_engine_computes_meanwhile_wins() -> None:
    node, queues = manual()
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    node.swapper.poll()
    node.remember(A)
    computed = node.mempool.match(A)
    queues.into.finish(4)
    node.swapper.poll()
    assert node.mempool.match(A) == computed == node.mempool.held("r")
    node.mempool.free_all("r")
    node.check_all(A)
    assert node.is_idle()


def test_a_slot_that_is_read_is_not_chosen_for_eviction() -> None:
    node, queues = manual(num_slots=4)
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    node.swapper.poll()
    node.remember(B)
    assert node.swapper.swap_out(4) == 0
    queues.into.finish(4)
    node.swapper.poll()
    assert node.swapper.swap_out(4) == 4, "now they are in HBM"
    node.check_all(A, B)


@pytest.mark.parametrize(
    "forget",
    [
        lambda node: node.mempool.delete(A),
        lambda node: node.mempool.on_reset(),
        lambda node: node.mempool.drop_slots(node.mempool.find(node.mempool.path(A)).dram.tolist()),
    ],
)
def test_what_is_forgotten_while_it_comes_in_does_not_come_back(
    forget: Callable[[SwapNode], object],
) -> None:
    node, queues = manual()
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    node.swapper.poll()
    forget(node)
    queues.into.finish(4)
    (end,) = node.swapper.poll()
    assert end.error == "cancelled"
    assert node.where(A) == "" and node.is_idle() and node.tier.num_used == 0
    node.check_all(A)


def test_cancelling_frees_the_blocks_when_the_copy_has_ended() -> None:
    node, queues = manual()
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    node.swapper.poll()
    node.swapper.cancel("r")
    assert node.swapper.poll() == [] and len(node.mempool.held("r")) == 4
    queues.into.finish(4)
    assert [end.error for end in node.swapper.poll()] == ["cancelled"]
    assert node.where(A) == "DDDD" and node.is_idle()
    node.check_all(A)


def test_closing_drops_what_is_held() -> None:
    node, queues = manual()
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    node.swapper.swap_out(1)
    node.swapper.poll()
    node.swapper.close()
    assert node.is_idle() and not queues.into.pieces


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda n: n.tier.free([next(iter(n.tier.held()))]), "the index knows 4 DRAM slots, 3"),
        (lambda n: n.tier._free.append(SlotId(0)), "in two states"),
        (lambda n: n.mempool.free_mem("r", [BlockId(n.mempool.held("r")[0])]), "r does not hold"),
    ],
)
def test_the_check_sees_each_fault(breaks: Callable[[SwapNode], object], says: str) -> None:
    node, queues = manual()
    put_out(node, queues)
    node.swapper.swap_in("r", node.mempool.path(A))
    assert node.swapper.check_integrity() == []
    breaks(node)
    assert any(says in problem for problem in node.swapper.check_integrity())


def test_what_comes_in_does_not_leave_to_save_what_it_displaces() -> None:
    """DRAM is full of it, and the blocks that it gets are of history that DRAM lacks."""
    node = SwapNode(num_slots=4, num_blocks=6)
    node.remember(A)
    node.forget_hbm()
    assert node.where(A) == "DDDD"
    node.remember(B)
    assert node.swapper.swap_in("in", node.mempool.path(A)) == 4
    node.swap()
    assert (node.where(A), node.where(B)) == ("BBBB", "H")
    node.check_all(A)


def test_without_blocks_nothing_is_held_for_what_comes_in() -> None:
    node = SwapNode(num_blocks=5)
    node.remember(A)
    node.forget_hbm()
    node.compute("running", B)
    with pytest.raises(OutOfBlocksError):
        node.swapper.swap_in("in", node.mempool.path(A))
    node.mempool.evict_slots(99)
    assert node.where(A) == "", "nobody refers to it"


# ── everything at once ────────────────────────────────────────────────────────────────────────

STREAMS = [prompt(44, seed) for seed in range(3)] + [prompt(12, 0) + prompt(32, 9)]
"""Four prompts, of which two share three blocks."""


class Machine(RuleBasedStateMachine):
    """An engine, swapping and deletions in any order: what the index names is always right."""

    @initialize(num_slots=st.sampled_from([3, 6, 10]), num_blocks=st.sampled_from([8, 13, 24]))
    def make(self, num_slots: int, num_blocks: int) -> None:
        self.queues = ManualQueues()
        self.node = SwapNode(
            num_slots,
            num_blocks=num_blocks,
            limits=SwapLimits(num_blocks // 4, pinned_blocks=num_blocks // 2, ttl_s=1000.0),
            ops=self.queues.ops,
            make_queue=self.queues,
            batch_blocks=2,
        )
        self.count = 0
        self.ins: set[str] = set()
        self.seen: dict[int, str] = {}
        """What a follower of the changes believes: key → medium."""

    @rule(stream=st.sampled_from(STREAMS), length=st.integers(1, 44))
    def start(self, stream: list[int], length: int) -> None:
        self.count += 1
        self.node.compute(f"r{self.count}", stream[:length])

    @precondition(lambda self: self.node.engine.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.node.engine.finish(data.draw(st.sampled_from(sorted(self.node.engine.running))))

    @rule(num_blocks=st.integers(0, 4))
    def swap_out(self, num_blocks: int) -> None:
        assert self.node.swapper.swap_out(num_blocks) <= num_blocks

    @rule(stream=st.sampled_from(STREAMS), length=st.integers(1, 44))
    def swap_in(self, stream: list[int], length: int) -> None:
        self.count += 1
        owner = f"in {self.count}"
        try:
            if self.node.swapper.swap_in(owner, self.node.mempool.path(stream[:length])):
                self.ins.add(owner)
        except OutOfBlocksError:
            assert not self.node.mempool.holds(owner)

    @precondition(lambda self: self.ins)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.node.swapper.cancel(data.draw(st.sampled_from(sorted(self.ins))))

    @rule(into=st.integers(0, 5), out=st.integers(0, 5), passed_s=st.sampled_from([0, 0.1, 300]))
    def poll(self, into: int, out: int, passed_s: float) -> None:
        self.node.clock.now_s += passed_s
        self.queues.into.finish(into)
        self.queues.out.finish(out)
        for end in self.node.swapper.poll():
            self.ins.remove(end.owner)
            assert end.error in (None, "cancelled")
            self.node.mempool.free_all(end.owner)

    @rule(stream=st.sampled_from(STREAMS), length=st.integers(1, 44))
    def delete(self, stream: list[int], length: int) -> None:
        self.node.mempool.delete(stream[:length])

    @rule(num_blocks=st.integers(1, 23))
    def evict(self, num_blocks: int) -> None:
        num_blocks = min(num_blocks, self.node.mempool.num_available - 1)
        if num_blocks > 0:
            self.node.mempool.alloc_mem(num_blocks, "others")
            self.node.mempool.free_all("others")

    @rule()
    def reset(self) -> None:
        self.node.mempool.reset()

    @invariant()
    def is_sound(self) -> None:
        self.node.check_all(*STREAMS)
        self._follow()

    def _follow(self) -> None:
        """Who applies the changes knows the same blocks, in the same medium."""
        for change in self.node.mempool.take_changes():
            match change:
                case Inserted():
                    num_blocks = len(change.token_ids) // (4 * BLOCK_SIZE)
                    for key in range(change.first_key, change.first_key + num_blocks):
                        self.seen[key] = change.medium.value
                case Evicted():
                    for first, count in change.keys:
                        for key in range(first, first + count):
                            del self.seen[key]
                case Swapped():
                    for first, count in change.keys:
                        for key in range(first, first + count):
                            assert key in self.seen
                            self.seen[key] = change.medium.value
                case _:
                    self.seen.clear()
        index = self.node.mempool.index
        truth = {
            key: medium.value
            for medium in (Medium.DRAM, Medium.HBM)
            for place in range(24)
            if (key := index.key_of(place, medium)) is not None
        }
        assert self.seen == truth

    def teardown(self) -> None:
        for _ in range(100):
            self.poll(9, 9, 0)
        assert not self.ins and not self.node.tier.is_active, "a copy never ended"
        for request_id in list(self.node.engine.running):
            self.node.engine.finish(request_id)
        assert self.node.is_idle()
        self.node.mempool.reset()
        assert self.node.tier.num_used == 0
        self.node.check_all(*STREAMS)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

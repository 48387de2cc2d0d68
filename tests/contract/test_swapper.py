"""Swapping in over a real BlockPool, and everything at once: no copy is ever of the wrong KV."""

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
from tests.contract.link_rig import BLOCK_SIZE
from tests.contract.swap_rig import (
    TOTAL,
    A,
    B,
    FaultyOps,
    ManualQueues,
    SwapNode,
    manual,
    put_out,
    swapped_out,
)
from tests.contract.transfer_rig import prompt

# ── in ────────────────────────────────────────────────────────────────────────────────────────


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

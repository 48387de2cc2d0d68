"""Requests that wait for DRAM: each is called back once, and nothing stays held for it."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memserve.core.swap import SwapCosts, SwapDecision, SwapLimits
from memserve.workers.swap_queue import NoSwaps, SwapQueue, swap_owner
from tests.contract.link_rig import BLOCK_SIZE
from tests.contract.swap_rig import BLOCK_BYTES, CheapSwaps, DearSwaps, ManualQueues, SwapNode
from tests.contract.transfer_rig import NO_NAMESPACE, prompt

A, B, C = (prompt(16, seed) for seed in (1, 2, 3))


class Rig:
    """A node, its queue, and who was called."""

    def __init__(self, *, pinned: int = 8, costs: SwapCosts | None = None, slots: int = 32) -> None:
        self.queues = ManualQueues()
        limits = SwapLimits(margin_blocks=0, pinned_blocks=pinned, deadline_s=5.0)
        self.node = SwapNode(slots, limits=limits, ops=self.queues.ops, make_queue=self.queues)
        decision = SwapDecision(costs or CheapSwaps(), BLOCK_SIZE, BLOCK_BYTES)
        self.queue = SwapQueue(
            self.node.mempool, self.node.swapper, decision, limits, self.node.clock
        )
        self.called: list[str] = []
        """`key:n`, where n blocks of its tokens were in HBM when it was called."""

    def put_out(self, *prompts: list[int]) -> None:
        """They are in DRAM, and nowhere else."""
        for tokens in prompts:
            self.node.remember(tokens)
            self.node.swapper.swap_out(99)
            self.node.swapper.poll()
            self.queues.out.finish(99)
            self.node.swapper.poll()
            self.node.forget_hbm()
            assert self.node.where(tokens) == "DDDD"

    def bring(
        self, key: str, tokens: list[int], *, keeps: bool = True, is_prompt: bool = True
    ) -> None:
        def then() -> None:
            hits = len(self.node.mempool.match(tokens))
            self.called.append(f"{key}:{hits}")

        self.queue.bring(key, tokens, NO_NAMESPACE, then, keeps=keeps, is_prompt=is_prompt)

    def copy(self, count: int = 99) -> None:
        """Let copies inwards happen, and the queue see it."""
        for _ in range(4):
            self.queue.poll()
            done = min(count, len(self.queues.into.pieces))
            self.queues.into.finish(done)
            count -= done

    def take(self) -> list[str]:
        called, self.called = self.called, []
        return called

    def check(self) -> None:
        self.node.check_all(A, B, C)
        assert self.queue.check_integrity() == []


def test_who_needs_nothing_of_dram_is_called_at_once() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.node.remember(B)
    rig.bring("unknown", C)
    rig.bring("in HBM", B)
    rig.bring("empty", [])
    assert rig.take() == ["unknown:0", "in HBM:4", "empty:0"]
    assert rig.node.is_idle() and not rig.queue.is_active


def test_who_would_wait_longer_than_compute_is_called_at_once() -> None:
    rig = Rig(costs=DearSwaps())
    rig.put_out(A)
    rig.bring("r", A)
    assert rig.take() == ["r:0"]
    rig.bring("what cannot be computed", A, is_prompt=False)
    assert rig.take() == []
    rig.copy()
    assert rig.take() == ["what cannot be computed:4"]


def test_a_request_is_called_when_its_blocks_are_there_and_holds_them_until_scheduled() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.bring("r", A)
    assert rig.queue.is_waiting("r") and rig.queue.is_active
    rig.copy(3)
    assert rig.take() == []
    rig.copy(1)
    assert rig.take() == ["r:4"] and not rig.queue.is_waiting("r")
    assert len(rig.node.mempool.held(swap_owner("r"))) == 4
    rig.check()
    rig.queue.scheduled("r")
    assert rig.node.is_idle()
    rig.check()


def test_what_only_passes_by_holds_its_blocks_while_it_is_called() -> None:
    rig = Rig()
    rig.put_out(A)
    seen: list[int] = []

    def then() -> None:
        seen.append(len(rig.node.mempool.held(swap_owner("t"))))

    rig.queue.bring("t", A, NO_NAMESPACE, then, keeps=False)
    rig.copy()
    assert seen == [4] and rig.node.is_idle()


def test_a_key_waits_once() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.bring("r", A)
    with pytest.raises(ValueError, match="r waits for DRAM already"):
        rig.bring("r", A)


def test_who_comes_again_while_the_dropped_copy_runs_does_not_wait() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.bring("r", A)
    rig.queue.poll()
    assert rig.queue.drop("r")
    rig.bring("r", A)
    assert rig.take() == ["r:0"]
    rig.copy()
    assert rig.take() == [] and rig.node.is_idle()
    rig.check()


def test_two_that_need_the_same_blocks_copy_them_once() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.bring("first", A)
    rig.bring("second", A + B)
    rig.copy()
    assert rig.take() == ["first:4", "second:4"]
    assert rig.node.swapper.stats().swapped_in == 4
    rig.queue.scheduled("first")
    rig.queue.scheduled("second")
    assert rig.node.is_idle()


def test_only_some_blocks_are_held_and_the_others_keep_their_turn() -> None:
    rig = Rig(pinned=6)
    rig.put_out(A, B, C)
    for key, tokens in (("a", A), ("b", B), ("c", C[:8])):
        rig.bring(key, tokens)
    rig.copy()
    assert rig.take() == ["a:4"], "c would fit, but it is b's turn"
    rig.copy()
    assert rig.take() == []
    rig.queue.scheduled("a")
    rig.copy()
    assert rig.take() == ["b:4", "c:2"]
    rig.queue.scheduled("b")
    rig.queue.scheduled("c")
    assert rig.node.is_idle()
    rig.check()


def test_the_first_one_gets_what_it_needs_whatever_the_limit_is() -> None:
    rig = Rig(pinned=1)
    rig.put_out(A)
    rig.bring("r", A)
    rig.copy()
    assert rig.take() == ["r:4"]


def test_without_room_for_anybody_the_engine_computes() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.node.mempool.alloc_mem(14, "others")
    rig.bring("r", A)
    assert rig.take() == ["r:0"]
    assert not rig.queue.is_active and not rig.queue.is_waiting("r")
    rig.node.mempool.free_all("others")
    rig.check()


def test_without_room_beside_another_it_waits_for_that_one() -> None:
    rig = Rig(pinned=16)
    rig.put_out(A, B)
    rig.node.mempool.alloc_mem(9, "others")
    rig.bring("a", A)
    rig.bring("b", B)
    rig.copy()
    assert rig.take() == ["a:4"] and rig.queue.is_waiting("b")
    rig.queue.scheduled("a")
    rig.copy()
    assert rig.take() == ["b:4"]


@pytest.mark.parametrize("is_copying", [True, False])
def test_after_the_deadline_it_goes_on_without(is_copying: bool) -> None:
    rig = Rig(pinned=1)
    rig.put_out(A, B)
    rig.bring("a", A)
    rig.bring("b", B)
    rig.queue.poll()
    key = "a" if is_copying else "b"
    if not is_copying:
        rig.copy()
        assert rig.take() == ["a:4"]
    rig.node.clock.now_s += 4.9
    rig.queue.poll()
    assert rig.take() == [] and rig.queue.next_deadline() == pytest.approx(105.0)
    rig.node.clock.now_s += 0.1
    rig.queue.poll()
    assert f"{key}:0" in rig.take() and not rig.queue.is_waiting(key)
    rig.copy()
    rig.copy()
    rig.queue.drop("a")
    rig.queue.drop("b")
    assert rig.node.is_idle()
    rig.check()


def test_a_failed_copy_calls_too() -> None:
    rig = Rig()
    rig.put_out(A)
    rig.queues.ops.num_good = 2
    rig.bring("r", A)
    rig.copy()
    assert rig.take() == ["r:0"] and rig.node.is_idle()
    assert rig.node.where(A) == "DDDD"
    rig.check()


def test_who_is_dropped_is_not_called() -> None:
    rig = Rig(pinned=1)
    rig.put_out(A, B)
    rig.bring("copying", A)
    rig.bring("waiting", B)
    rig.queue.poll()
    assert rig.queue.drop("waiting") and rig.queue.drop("copying")
    assert not rig.queue.drop("copying") and not rig.queue.drop("nobody")
    assert len(rig.node.mempool.held(swap_owner("copying"))) == 4, "they are being written"
    rig.copy()
    assert rig.take() == [] and rig.node.is_idle()
    rig.check()


def test_a_starving_engine_gets_what_is_held_for_requests_that_it_has() -> None:
    rig = Rig()
    rig.put_out(A, B)
    rig.bring("a", A)
    rig.copy()
    rig.bring("b", B)
    rig.queue.poll()
    assert rig.queue.relax() == 4, "not those that are being written"
    assert not rig.node.mempool.holds(swap_owner("a"))
    assert rig.node.where(A) == "BBBB", "history now"
    rig.copy()
    assert rig.take() == ["a:4", "b:4"]
    assert rig.queue.relax() == 4 and rig.node.is_idle()
    rig.queue.scheduled("a")
    rig.check()


def test_closing_drops_everything_and_calls_nobody() -> None:
    rig = Rig(pinned=4)
    rig.put_out(A, B)
    rig.bring("a", A)
    rig.copy()
    rig.take()
    rig.bring("b", B)
    rig.bring("c", B)
    rig.queue.poll()
    rig.queue.close()
    assert rig.take() == [] and rig.node.is_idle()


def test_without_a_tier_nobody_waits() -> None:
    swaps, called = NoSwaps(), []
    swaps.bring("r", A, NO_NAMESPACE, lambda: called.append("r"), keeps=True)
    swaps.poll()
    swaps.scheduled("r")
    assert called == ["r"] and not swaps.drop("r") and swaps.relax() == 0
    assert not swaps.is_active and swaps.next_deadline() is None
    assert swaps.stats().slots == 0 and swaps.check_integrity() == []
    swaps.close()


class Machine(RuleBasedStateMachine):
    """Whoever is brought is called or dropped, once; in the end nobody holds anything."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(pinned=6, slots=10)
        self.waiting: set[str] = set()
        self.count = 0

    @rule(tokens=st.sampled_from([A, B, C]), length=st.integers(1, 16))
    def run(self, tokens: list[int], length: int) -> None:
        self.count += 1
        if self.rig.node.compute(f"r{self.count}", tokens[:length]) is not None:
            self.rig.node.engine.finish(f"r{self.count}")

    @rule(num_blocks=st.integers(1, 8))
    def swap_out(self, num_blocks: int) -> None:
        self.rig.node.swapper.swap_out(num_blocks)

    @rule()
    def forget_hbm(self) -> None:
        self.rig.node.forget_hbm()

    @rule(tokens=st.sampled_from([A, B, C]), keeps=st.booleans(), is_prompt=st.booleans())
    def bring(self, tokens: list[int], keeps: bool, is_prompt: bool) -> None:
        self.count += 1
        self.rig.bring(f"k{self.count}", tokens, keeps=keeps, is_prompt=is_prompt)
        self.waiting.add(f"k{self.count}")
        self._take()

    @precondition(lambda self: self.count)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = f"k{data.draw(st.integers(1, self.count))}"
        assert self.rig.queue.drop(key) == (key in self.waiting)
        self.waiting.discard(key)

    @rule()
    def relax(self) -> None:
        self.rig.queue.relax()

    @rule(into=st.integers(0, 4), out=st.integers(0, 9), passed_s=st.sampled_from([0, 1, 6]))
    def poll(self, into: int, out: int, passed_s: float) -> None:
        self.rig.node.clock.now_s += passed_s
        self.rig.queues.into.finish(into)
        self.rig.queues.out.finish(out)
        self.rig.queue.poll()
        self._take()

    def _take(self) -> None:
        for called in self.rig.take():
            self.waiting.remove(called.partition(":")[0])

    @invariant()
    def is_sound(self) -> None:
        self.rig.check()
        for key in self.waiting:
            assert self.rig.queue.is_waiting(key)

    def teardown(self) -> None:
        for _ in range(30):
            self.poll(9, 9, 6)
        assert not self.waiting and not self.rig.queue.is_active
        for number in range(self.count + 1):
            self.rig.queue.drop(f"k{number}")
        assert self.rig.node.is_idle()
        self.rig.check()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

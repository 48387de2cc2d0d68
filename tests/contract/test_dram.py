"""The DRAM tier: slots, copies that end exactly once, and memory that is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memserve.errors import OutOfBlocksError, StartError, TransferError
from memserve.ops.blocks import TorchBlockOps
from memserve.types import BlockId, SlotId
from memserve.workers.copies import BlockCopies, CopyEnd, Pace
from memserve.workers.dram import DramTier
from memserve.workers.hostmemory import HostMemory, memory_available
from tests.contract.link_rig import NUM_BLOCKS, buffer_bytes, fill_random, geometry, read_block
from tests.contract.swap_rig import BLOCK_BYTES, FaultyOps, ManualQueues
from tests.contract.transfer_rig import FakeClock

LAYOUTS = ["block_first", "layer_first", "padded"]
NUM_SLOTS = 8


class Rig:
    """A tier of eight slots over a small pool of random contents."""

    def __init__(
        self,
        layout: str = "block_first",
        *,
        num_slots: int = NUM_SLOTS,
        poll_blocks: int | None = None,
        busy_blocks: int = 0,
        busy_blocks_per_s: float = 0.0,
        num_good: int = 1 << 30,
        is_manual: bool = False,
    ) -> None:
        self.geometry = geometry(layout)
        self.hbm = bytearray(buffer_bytes(self.geometry))
        fill_random(self.hbm, seed=1)
        self.clock = FakeClock()
        self.memory = HostMemory(num_slots * BLOCK_BYTES + 5, pin=False)
        self.queues = ManualQueues(num_good)
        options: dict[str, object] = {
            "piece_bytes": BLOCK_BYTES,
            "busy_bytes": busy_blocks * BLOCK_BYTES,
            "busy_bytes_per_s": busy_blocks_per_s * BLOCK_BYTES,
        }
        if poll_blocks is not None:
            options["poll_bytes"] = poll_blocks * BLOCK_BYTES
        if is_manual:
            options["make_queue"] = self.queues
        ops = self.queues.ops if is_manual else FaultyOps(num_good)
        copies = BlockCopies(
            self.geometry,
            torch.frombuffer(self.hbm, dtype=torch.uint8),
            self.memory,
            ops,
            self.clock,
            **options,  # type: ignore[arg-type]
        )
        self.tier = DramTier(copies)

    def block(self, block_id: int) -> bytes:
        return read_block(self.hbm, self.geometry, block_id)

    def out(self, owner: str, *block_ids: int) -> list[SlotId]:
        return self.tier.copy_out(owner, [BlockId(b) for b in block_ids])

    def into(self, owner: str, slot_ids: Sequence[SlotId], *block_ids: int) -> None:
        self.tier.copy_in(owner, slot_ids, [BlockId(b) for b in block_ids])

    def finish(self) -> list[CopyEnd]:
        """Poll until nothing is under way."""
        ended: list[CopyEnd] = []
        for _ in range(1000):
            ended += self.tier.poll()
            if not self.tier.is_active:
                return ended
        raise AssertionError("the copies do not end")

    def save(self, *block_ids: int, for_engine: bool = True) -> list[SlotId]:
        return self.tier.save([BlockId(b) for b in block_ids], for_engine=for_engine)

    def check(self) -> None:
        assert self.tier.check_integrity() == []


# ── copies ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_go_out_and_come_back_into_others(layout: str) -> None:
    rig = Rig(layout)
    before = {block_id: rig.block(block_id) for block_id in range(NUM_BLOCKS)}
    slots = rig.out("a", 3, 16, 0)
    (end,) = rig.finish()
    assert (end.owner, end.size_bytes, end.error) == ("a", 3 * BLOCK_BYTES, None)
    assert rig.tier.held() == set(slots) and rig.tier.num_free == NUM_SLOTS - 3
    rig.into("b", slots, 7, 8, 2)
    assert [end.error for end in rig.finish()] == [None]
    moved = {7: 3, 8: 16, 2: 0}
    for block_id in range(NUM_BLOCKS):
        assert rig.block(block_id) == before[moved.get(block_id, block_id)]
    rig.check()


def test_a_slot_holds_its_block_in_one_piece() -> None:
    """What the GPU copies as one run per block must lie so on both sides."""
    for layout in LAYOUTS:
        rig = Rig(layout)
        (slot,) = rig.out("a", 5)
        rig.finish()
        start = slot * BLOCK_BYTES
        assert bytes(rig.memory.tensor[start : start + BLOCK_BYTES].numpy()) == rig.block(5)


def test_one_poll_copies_a_bounded_number_of_blocks_inwards_first() -> None:
    rig = Rig(poll_blocks=2)
    slots = rig.out("first", 0, 1, 2)
    assert [len(rig.tier.poll()) for _ in range(2)] == [0, 1]
    rig.out("out", 3, 4, 5)
    rig.into("in", slots, 10, 11, 12)
    ends = [[end.owner for end in rig.tier.poll()] for _ in range(3)]
    assert ends == [[], ["in"], ["out"]]


def test_between_steps_no_more_is_begun_than_their_length_allows() -> None:
    rig = Rig(is_manual=True, busy_blocks=2, busy_blocks_per_s=1.0)
    rig.out("a", *range(8))
    out = rig.queues.out
    for passed_s, num_begun in ((0.5, 1), (0.4, 0), (0.6, 1), (60.0, 2), (0.0, 0)):
        rig.clock.now_s += passed_s
        rig.tier.poll(Pace.BETWEEN_STEPS)
        assert len(out.pieces) == num_begun
        out.finish(num_begun)
    rig.tier.poll()
    assert len(out.pieces) == 4, "while the engine rests, all that is left"


def test_between_steps_half_as_much_goes_out_while_something_comes_in() -> None:
    rig = Rig(is_manual=True, num_slots=16, busy_blocks=2, busy_blocks_per_s=1.0)
    slots = rig.out("kept", *range(4))
    rig.tier.poll()
    out, into = rig.queues.out, rig.queues.into
    out.finish(4)
    rig.tier.poll()
    rig.out("a", *range(4, 10))
    rig.into("b", slots, *range(10, 14))
    for passed_s, begun in ((0.0, (2, 2)), (2.0, (1, 2)), (2.0, (2, 0))):
        rig.clock.now_s += passed_s
        rig.tier.poll(Pace.BETWEEN_STEPS)
        assert (len(out.pieces), len(into.pieces)) == begun
        out.finish(begun[0])
        into.finish(begun[1])
        rig.tier.poll(Pace.BETWEEN_STEPS)


def test_inside_a_step_one_piece_is_in_flight_at_a_time() -> None:
    rig = Rig(is_manual=True, busy_blocks=8, busy_blocks_per_s=1.0)
    slots = rig.out("kept", 7)
    rig.tier.poll()
    rig.queues.out.finish()
    rig.tier.poll()
    rig.out("a", *range(4))
    rig.into("b", slots, 9)
    rig.clock.now_s += 3.0
    for _ in range(3):
        rig.tier.poll(Pace.INSIDE_STEP)
        assert (len(rig.queues.out.pieces), len(rig.queues.into.pieces)) == (1, 1)
    rig.queues.out.finish()
    rig.tier.poll(Pace.INSIDE_STEP)
    assert len(rig.queues.out.pieces) == 1, "the next one"


def test_only_a_resting_engine_is_not_spared() -> None:
    rig = Rig(is_manual=True, busy_blocks=8, busy_blocks_per_s=8.0)
    for number, pace in enumerate(Pace):
        rig.clock.now_s += 1.0
        rig.out(pace.value, number)
        rig.tier.poll(pace)
        rig.queues.out.finish()
        rig.tier.poll(pace)
    assert rig.queues.ops.spared == [pace is not Pace.FREE for pace in Pace]


def test_a_piece_too_large_for_the_pace_is_a_debt() -> None:
    rig = Rig(is_manual=True, busy_blocks=8, busy_blocks_per_s=0.25)
    rig.out("a", *range(4))
    out, begun = rig.queues.out, []
    for _ in range(9):
        rig.clock.now_s += 1.0
        rig.tier.poll(Pace.BETWEEN_STEPS)
        begun.append(len(out.pieces))
        out.finish(len(out.pieces))
    assert begun == [1, 0, 0, 0, 1, 0, 0, 0, 1]


def test_a_copy_ends_when_its_last_piece_is_done() -> None:
    rig = Rig(is_manual=True, poll_blocks=2)
    slots = rig.out("a", 0, 1, 2)
    out = rig.queues.out
    assert rig.tier.poll() == [] and len(out.pieces) == 2, "two blocks may be in flight"
    assert rig.tier.poll() == [] and len(out.pieces) == 2
    assert rig.tier.held() == set(), "nobody sees the slots yet"
    out.finish()
    assert rig.tier.poll() == [] and len(out.pieces) == 2
    out.finish(2)
    rig.clock.now_s += 0.5
    (end,) = rig.tier.poll()
    assert end == CopyEnd("a", 3 * BLOCK_BYTES, 0.5)
    assert rig.tier.held() == set(slots)
    assert out.num_follows == 3, "each piece waits for what the engine had queued"
    rig.check()


def test_both_directions_go_on_at_once() -> None:
    rig = Rig(is_manual=True)
    slots = rig.out("a", 0)
    into, out = rig.queues.into, rig.queues.out
    rig.tier.poll()
    out.finish()
    rig.tier.poll()
    rig.out("b", 1)
    rig.into("c", slots, 2)
    rig.tier.poll()
    assert len(into.pieces) == len(out.pieces) == 1
    into.finish()
    assert [end.owner for end in rig.tier.poll()] == ["c"]
    out.finish()
    assert [end.owner for end in rig.tier.poll()] == ["b"]


@pytest.mark.parametrize("num_good", [0, 1])
def test_a_copy_that_fails_frees_its_slots_and_says_so(num_good: int) -> None:
    rig = Rig(num_good=num_good)
    rig.out("a", 0, 1)
    (end,) = rig.finish()
    assert end.error == "the copy engine is on fire"
    assert (rig.tier.num_free, rig.tier.held()) == (NUM_SLOTS, set())
    rig.check()


def test_a_failed_piece_waits_for_those_before_it() -> None:
    """The slots must not be given out again while an earlier piece is still being written."""
    rig = Rig(num_good=1, is_manual=True)
    rig.out("a", 0, 1)
    assert rig.tier.poll() == [] and rig.tier.num_free == NUM_SLOTS - 2
    rig.queues.out.finish()
    assert [end.error for end in rig.tier.poll()] == ["the copy engine is on fire"]
    assert rig.tier.num_free == NUM_SLOTS


def test_a_copy_of_a_block_that_does_not_exist_fails_alone() -> None:
    rig = Rig()
    rig.out("bad", NUM_BLOCKS)
    good = rig.out("good", 1)
    ends = {end.owner: end.error for end in rig.finish()}
    assert ends["good"] is None and "no block 17" in (ends["bad"] or "")
    assert rig.tier.held() == set(good)
    rig.check()


def test_a_cancelled_copy_ends_when_nothing_is_in_flight() -> None:
    rig = Rig(is_manual=True)
    rig.out("a", 0, 1)
    rig.tier.poll()
    rig.tier.cancel("a")
    rig.tier.cancel("nobody")
    assert rig.tier.poll() == [] and rig.tier.num_free == NUM_SLOTS - 2
    rig.queues.out.finish()
    assert rig.tier.poll() == [], "one of its two pieces is still being copied"
    rig.queues.out.finish()
    assert [(end.owner, end.error) for end in rig.tier.poll()] == [("a", "cancelled")]
    assert rig.tier.poll() == [] and rig.tier.num_free == NUM_SLOTS
    rig.check()


def test_an_owner_has_one_copy_at_a_time() -> None:
    rig = Rig()
    slots = rig.out("a", 0)
    with pytest.raises(ValueError, match="a has a copy"):
        rig.out("a", 1)
    rig.finish()
    rig.into("a", slots, 2)
    with pytest.raises(ValueError, match="a has a copy"):
        rig.into("a", slots, 3)
    rig.finish()
    assert rig.out("a") == [] and [end.error for end in rig.finish()] == [None]


# ── saving ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_is_held_at_once_and_comes_back(layout: str) -> None:
    rig = Rig(layout)
    before = [rig.block(block_id) for block_id in (1, 5)]
    slots = rig.save(1, 5)
    assert rig.tier.held() == set(slots) and not rig.tier.is_active
    fill_random(rig.hbm, seed=2)
    rig.into("b", slots, 7, 3)
    rig.finish()
    assert [rig.block(7), rig.block(3)] == before
    rig.check()


def test_the_engine_waits_for_what_is_saved_for_it_and_nobody_for_other_copies() -> None:
    rig = Rig(is_manual=True)
    urgent = rig.queues.urgent
    rig.out("a", 1)
    rig.tier.poll()
    rig.save(2)
    assert (urgent.num_follows, urgent.num_holds) == (1, 1)
    assert rig.queues.out.num_holds == 0 and len(rig.queues.out.pieces) == 1
    contents = rig.block(3)
    (slot,) = rig.save(3, for_engine=False)
    assert (urgent.num_follows, urgent.num_holds) == (1, 1), "this process has waited"
    start = slot * BLOCK_BYTES
    assert rig.memory.tensor[start : start + BLOCK_BYTES].numpy().tobytes() == contents
    rig.queues.out.finish()
    rig.tier.poll()
    rig.check()


def test_saving_without_slots_or_copies_holds_nothing() -> None:
    rig = Rig(num_slots=2, num_good=0)
    with pytest.raises(OutOfBlocksError, match="3 DRAM slots asked for, 2 of 2 free"):
        rig.save(1, 2, 3)
    with pytest.raises(TransferError, match="on fire"):
        rig.save(1, 2)
    assert rig.tier.num_free == 2 and rig.tier.held() == set()
    rig.check()


# ── slots ─────────────────────────────────────────────────────────────────────────────────────


def test_slots_run_out() -> None:
    rig = Rig(num_slots=2)
    slots = rig.out("a", 0, 1)
    with pytest.raises(OutOfBlocksError, match="1 DRAM slots asked for, 0 of 2 free"):
        rig.out("b", 2)
    rig.finish()
    rig.tier.free(slots[:1])
    assert rig.tier.num_used == 1
    assert rig.out("b", 2) == slots[:1]


def test_only_held_slots_can_be_read_or_freed() -> None:
    rig = Rig(is_manual=True)
    (slot,) = rig.out("a", 0)
    for do in (lambda: rig.tier.free([slot]), lambda: rig.into("b", [slot], 3)):
        with pytest.raises(ValueError, match=f"DRAM slots \\[{slot}\\]"):
            do()
    rig.tier.poll()
    rig.queues.out.finish()
    rig.tier.poll()
    with pytest.raises(ValueError, match="not all held"):
        rig.tier.free([slot, slot])
    rig.tier.free([slot])
    with pytest.raises(ValueError, match="not all held"):
        rig.tier.free([slot])
    rig.check()


def test_a_slot_that_is_freed_while_it_is_read_keeps_its_contents() -> None:
    rig = Rig(is_manual=True, num_slots=1)
    slots = rig.out("a", 0)
    into, out = rig.queues.into, rig.queues.out
    rig.tier.poll()
    out.finish()
    rig.tier.poll()
    rig.into("b", slots, 3)
    rig.into("c", slots, 4)
    rig.tier.free(slots)
    with pytest.raises(OutOfBlocksError):
        rig.out("d", 5)
    rig.tier.poll()
    into.finish()
    assert len(rig.tier.poll()) == 1 and rig.tier.num_free == 0
    rig.check()
    into.finish()
    assert len(rig.tier.poll()) == 1 and rig.tier.num_free == 1
    assert rig.block(3) == rig.block(4) == rig.block(0)
    rig.check()


def test_closing_waits_for_what_is_in_flight() -> None:
    rig = Rig(is_manual=True)
    rig.out("a", 0)
    rig.tier.poll()
    rig.tier.close()
    assert not rig.queues.out.pieces and not rig.tier.is_active
    assert rig.memory.tensor.numel() == 0


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda tier: tier._free.append(tier._free[0]), "in two states"),
        (lambda tier: tier._free.pop(), "in none"),
        (lambda tier: tier._readers.update([3]), "counted"),
        (lambda tier: (tier._written.add(0), tier._free.remove(0)), "no copy fills"),
        (lambda tier: (tier._doomed.add(0), tier._free.remove(0)), "nobody reads"),
    ],
)
def test_the_check_sees_each_fault(breaks: Callable[[DramTier], object], says: str) -> None:
    rig = Rig()
    rig.check()
    breaks(rig.tier)
    assert any(says in problem for problem in rig.tier.check_integrity())


class Machine(RuleBasedStateMachine):
    """Any order of copies, ends, frees and cancels against a dictionary of what slots hold."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[SlotId, bytes] = {}
        self.writing: dict[str, dict[SlotId, bytes]] = {}
        self.reading: dict[str, dict[int, bytes]] = {}
        self.cancelled: set[str] = set()
        self.count = 0

    @initialize(layout=st.sampled_from(LAYOUTS), poll_blocks=st.integers(1, 3))
    def build(self, layout: str, poll_blocks: int) -> None:
        self.rig = Rig(layout, is_manual=True, poll_blocks=poll_blocks)
        # Blocks from 8 on are written by copies inwards, one at a time each.
        self.targets = set(range(8, NUM_BLOCKS))

    @rule(blocks=st.lists(st.integers(0, 7), max_size=4, unique=True))
    def copy_out(self, blocks: list[int]) -> None:
        owner = f"out {self.count}"
        self.count += 1
        if len(blocks) > self.rig.tier.num_free:
            with pytest.raises(OutOfBlocksError):
                self.rig.out(owner, *blocks)
            return
        slots = self.rig.out(owner, *blocks)
        assert not set(slots) & self.held.keys()
        self.writing[owner] = {s: self.rig.block(b) for s, b in zip(slots, blocks, strict=True)}

    @precondition(lambda self: self.held and self.targets)
    @rule(data=st.data())
    def copy_in(self, data: st.DataObject) -> None:
        owner = f"in {self.count}"
        self.count += 1
        most = min(len(self.held), len(self.targets), 3)
        slots = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=most, unique=True))
        blocks = sorted(self.targets)[: len(slots)]
        self.targets.difference_update(blocks)
        self.rig.into(owner, slots, *blocks)
        self.reading[owner] = {b: self.held[s] for s, b in zip(slots, blocks, strict=True)}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.held)), min_size=1, unique=True))
        self.rig.tier.free(slots)
        for slot in slots:
            del self.held[slot]

    @precondition(lambda self: self.writing or self.reading)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([*self.writing, *self.reading]))
        self.rig.tier.cancel(owner)
        self.cancelled.add(owner)

    @rule(queue=st.integers(0, 1), count=st.integers(1, 4))
    def finish(self, queue: int, count: int) -> None:
        self.rig.queues.made[queue].finish(count)

    @rule()
    def poll(self) -> None:
        for end in self.rig.tier.poll():
            assert (end.error is None) or end.owner in self.cancelled
            if end.owner in self.writing:
                written = self.writing.pop(end.owner)
                if end.error is None:
                    self.held |= written
            else:
                read = self.reading.pop(end.owner)
                for block, contents in read.items():
                    assert end.error is not None or self.rig.block(block) == contents
                self.targets.update(read)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()
            assert self.rig.tier.held() == self.held.keys()
            assert self.rig.tier.is_active == bool(self.writing or self.reading)

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for _ in range(200):
            for queue in self.rig.queues.made:
                queue.finish(10)
            self.poll()
        assert not self.writing and not self.reading, "a copy never ended"
        self.rig.tier.free(list(self.held))
        assert self.rig.tier.num_free == NUM_SLOTS


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, deadline=None)


# ── memory ────────────────────────────────────────────────────────────────────────────────────


def test_memory_that_is_not_there_is_refused_in_one_line() -> None:
    with pytest.raises(StartError) as caught:
        HostMemory(3 << 30, pin=False, available_bytes=1 << 30)
    assert str(caught.value) == (
        "mempool.dram_gb: 3.00 GiB of host memory asked for, 1.00 GiB are available"
    )
    with pytest.raises(StartError, match=r"mempool\.dram_gb: "):
        HostMemory(1 << 62, pin=False, available_bytes=1 << 63)


def test_a_tier_holds_at_least_one_block() -> None:
    memory = HostMemory(BLOCK_BYTES - 1, pin=False)
    shape = geometry()
    hbm = torch.zeros(buffer_bytes(shape), dtype=torch.uint8)
    with pytest.raises(StartError, match=f"mempool.dram_gb: {BLOCK_BYTES - 1} bytes do not hold"):
        BlockCopies(shape, hbm, memory, TorchBlockOps(), FakeClock())


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    machine = memory_available(tmp_path)
    assert machine > 0
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\nactive_file 30\n")
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_available(tmp_path) == 1000 - 700 + 180
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_available(tmp_path) > 1000

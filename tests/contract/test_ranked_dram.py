"""The DRAM tier of several ranks, in one process: real agents in threads, steps made by the test.

What the ranks hold is compared with the model's KV over all heads, as in `test_ranked_link.py`;
what a tier has to do whoever copies is in `test_dram.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from typing import cast

import pytest
import torch

from memserve.errors import OutOfBlocksError, RankLostError, StartError, TransferError
from memserve.ops.blocks import TorchBlockOps
from memserve.types import BlockId, SlotId
from memserve.workers.copies import CopyEnd, Pace
from memserve.workers.dram import DramTier
from memserve.workers.rank_copies import RankedCopies
from memserve.workers.rank_dram import RankDram
from memserve.workers.rank_group import RankGroup
from memserve.workers.rank_messages import (
    CancelCopy,
    Copied,
    CopyBlocks,
    DramOpened,
    OpenDram,
    SaveBlocks,
    get_order,
    put,
)
from tests.contract.link_rig import FakeClock
from tests.contract.rank_rig import DEADLINE_S, Ranks, model_kv, rank_geometry
from tests.contract.swap_rig import FaultyOps

TP, NUM_BLOCKS, NUM_SLOTS = 3, 17, 6
HEADS = 2 * TP


class Rig:
    """Three ranks with real memory, and a tier of six slots."""

    def __init__(self, layout: str = "block_first", *, num_good: Sequence[int] = ()) -> None:
        """`num_good`: how many copies go well on each rank; empty: all."""
        self.ranks = Ranks(HEADS, TP, layout=layout, num_blocks=NUM_BLOCKS)
        self.kv = model_kv(NUM_BLOCKS, HEADS)
        self.ranks.fill(self.kv)
        if num_good:
            self.ranks.make_ops = lambda rank: FaultyOps(num_good[rank])
        self.geometry = self.ranks.geometries[0]
        size = NUM_SLOTS * TP * self.geometry.block_bytes + 7
        self.copies = RankedCopies(self.ranks.group(), self.geometry, size)
        self.tier = DramTier(self.copies)

    def out(self, owner: str, *block_ids: int) -> list[SlotId]:
        return self.tier.copy_out(owner, [BlockId(b) for b in block_ids])

    def into(self, owner: str, slot_ids: Sequence[SlotId], *block_ids: int) -> None:
        self.tier.copy_in(owner, slot_ids, [BlockId(b) for b in block_ids])

    def save(self, *block_ids: int, for_engine: bool = True) -> list[SlotId]:
        return self.tier.save([BlockId(b) for b in block_ids], for_engine=for_engine)

    def step(
        self, *ranks: int, computes: Callable[[int], None] = lambda rank: None
    ) -> Callable[[int], None]:
        """The engine has begun a step; `ranks` have come to its end, and others do so when told.

        `computes`: what the step does on a rank.
        """
        orders = self.copies.step()

        def run(rank: int) -> None:
            self.ranks.drams[rank].before_step(orders)
            computes(rank)
            self.ranks.drams[rank].after_step(orders)

        for rank in ranks:
            run(rank)
        return run

    def until_held_back(self, rank: int, count: int) -> None:
        """Until this rank alone has not begun so many copies, and the others have ended theirs."""
        deadline = time.monotonic() + DEADLINE_S
        drams = self.ranks.drams
        others = [dram for dram in drams if dram is not drams[rank]]
        while len(drams[rank]._held_back) < count or any(dram.is_active for dram in others):
            assert time.monotonic() < deadline, f"rank {rank} does not hold {count} copies back"

    def ended(self, count: int = 1) -> list[CopyEnd]:
        """Poll until so many copies have ended."""
        ends: list[CopyEnd] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(ends) < count:
            assert time.monotonic() < deadline, f"{len(ends)} of {count} copies have ended"
            ends += self.tier.poll()
        return ends

    def require(self, moved: dict[int, int]) -> None:
        """Block → the block whose first contents it has now; all others have their own."""
        expected = self.kv.copy()
        for block, source in moved.items():
            expected[block] = self.kv[source]
        self.ranks.require_blocks([BlockId(b) for b in range(NUM_BLOCKS)], expected)
        assert self.tier.check_integrity() == []

    def close(self) -> None:
        self.tier.close()
        self.ranks.close()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    with ExitStack() as stack:

        def make(*args: object, **kwargs: object) -> Rig:
            rig = Rig(*args, **kwargs)  # type: ignore[arg-type]
            stack.callback(rig.close)
            return rig

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


# ── copies ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layout", ["block_first", "layer_first", "padded"])
def test_every_rank_copies_its_part_out_and_back(make_rig: Callable[..., Rig], layout: str) -> None:
    rig = make_rig(layout)
    slots = rig.out("a", 3, 16, 0)
    (end,) = rig.ended()
    whole_block = TP * rig.geometry.block_bytes
    assert (end.owner, end.size_bytes, end.error) == ("a", 3 * whole_block, None)
    assert rig.tier.held() == set(slots) and rig.tier.num_free == NUM_SLOTS - 3
    rig.into("b", slots, 7, 8, 2)
    assert [end.error for end in rig.ended()] == [None]
    rig.require({7: 3, 8: 16, 2: 0})


def test_a_copy_waits_on_every_rank_for_the_steps_before_it(rig: Rig) -> None:
    (slot,) = rig.out("a", 1)
    rig.ended()
    run = rig.step(0, 2)
    rig.into("b", [slot], 5)
    rig.out("c", 2)
    rig.until_held_back(rank=1, count=2)
    assert rig.tier.poll() == []
    run(1)
    assert {end.owner for end in rig.ended(2)} == {"b", "c"}
    rig.require({5: 1})


def test_a_step_saves_what_it_overwrites_before_it_computes(rig: Rig) -> None:
    slots = rig.save(4, 9)
    assert rig.tier.held() == set(slots) and not rig.tier.is_active, "nobody waits for it"

    def overwrite(rank: int) -> None:
        rig.ranks.pages(rank)[[4, 9]] = 0

    run = rig.step(computes=overwrite)
    rig.into("b", slots, 7, 3)  # asked for before any rank has begun the step
    for rank in range(TP):
        run(rank)
    assert [end.error for end in rig.ended()] == [None]
    expected = rig.kv.copy()
    expected[[4, 9]] = 0
    expected[[7, 3]] = rig.kv[[4, 9]]
    rig.ranks.require_blocks([BlockId(b) for b in range(NUM_BLOCKS)], expected)


def test_what_one_step_saves_is_saved_in_order(rig: Rig) -> None:
    """A slot is given up and filled again while one step is made."""
    slots = rig.save(*range(NUM_SLOTS))
    rig.tier.free(slots[:1])
    assert rig.save(9) == slots[:1]
    rig.step(0, 1, 2)
    rig.into("b", slots[:1], 12)
    rig.ended()
    rig.require({12: 9})


def test_a_slot_that_is_filled_by_a_step_is_not_filled_by_a_later_copy_before_it(rig: Rig) -> None:
    slots = rig.save(*range(NUM_SLOTS))
    run = rig.step()
    rig.tier.free(slots)
    assert set(rig.out("later", 9, 10)) < set(slots)
    run(0)
    run(2)
    rig.until_held_back(rank=1, count=1)
    run(1)
    (end,) = rig.ended()
    assert end.error is None
    rig.into("b", sorted(rig.tier.held(), key=slots.index, reverse=True), 11, 12)
    rig.ended()
    rig.require({11: 9, 12: 10})


def test_whoever_overwrites_from_outside_the_engine_waits_for_all_ranks(rig: Rig) -> None:
    slots = rig.save(2, 6, for_engine=False)
    for rank in range(TP):
        rig.ranks.pages(rank)[[2, 6]] = rig.ranks.pages(rank)[[6, 2]]
    rig.into("b", slots, 10, 11)
    rig.ended()
    rig.require({2: 6, 6: 2, 10: 2, 11: 6})


def test_slots_run_out(rig: Rig) -> None:
    rig.out("a", *range(NUM_SLOTS))
    with pytest.raises(OutOfBlocksError, match=f"0 of {NUM_SLOTS} free"):
        rig.save(9)
    rig.ended()


# ── faults ────────────────────────────────────────────────────────────────────────────────────


def test_a_copy_that_fails_on_one_rank_has_failed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(num_good=(99, 0, 99))
    rig.out("a", 1, 2)
    (end,) = rig.ended()
    assert end.error == "rank 1: the copy engine is on fire"
    assert (rig.tier.num_free, rig.tier.held()) == (NUM_SLOTS, set())
    with pytest.raises(TransferError, match="rank 1: the copy engine is on fire"):
        rig.save(3, for_engine=False)
    assert rig.tier.num_free == NUM_SLOTS
    rig.require({})


def test_a_step_that_cannot_save_fails(make_rig: Callable[..., Rig]) -> None:
    """So the rank ends, and the instance: the index has what the rank has not."""
    rig = make_rig(num_good=(99, 0, 99))
    rig.save(3)
    with pytest.raises(TransferError, match="on fire"):
        rig.step(0, 1)


def test_a_copy_is_cancelled_while_it_waits_for_a_step(rig: Rig) -> None:
    run = rig.step(0)
    slots = rig.out("a", 1, 2)
    rig.tier.cancel("a")
    (end,) = rig.ended()
    assert end.error == "cancelled" and rig.tier.num_free == NUM_SLOTS
    assert set(rig.out("a", 3)) < set(slots), "its name and its slots can be used at once"
    run(1)
    run(2)
    assert [end.error for end in rig.ended()] == [None]
    rig.require({})


class Scripted:
    """Three ranks whose agents are the test itself."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        pairs = [Pipe() for _ in range(TP)]
        self.ends = [theirs for _, theirs in pairs]
        self.group = RankGroup([ours for ours, _ in pairs], answer_s=30.0, clock=self.clock)
        for end in self.ends:
            put(end, DramOpened(None))  # lies in the pipe until it is asked for
        geometry = rank_geometry(0, TP)
        self.share = NUM_SLOTS * geometry.block_bytes
        self.tier = DramTier(RankedCopies(self.group, geometry, TP * self.share))
        for end in self.ends:
            assert get_order(end) == OpenDram(self.share)

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.tier.close()
        self.group.close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


def test_a_copy_has_ended_when_the_last_rank_says_so(scripted: Scripted) -> None:
    tier, ends = scripted.tier, scripted.ends
    slots = tier.copy_out("a", [BlockId(4)])
    order = CopyBlocks("a", False, [BlockId(4)], slots, 0)
    assert [get_order(end) for end in ends] == [order] * TP
    for rank in (2, 0):
        put(ends[rank], Copied(CopyEnd("a", 10, 0.1)))
        assert tier.poll() == [] and tier.held() == set()
    scripted.clock.now_s += 2.0
    put(ends[1], Copied(CopyEnd("a", 12, 0.1)))
    assert tier.poll() == [CopyEnd("a", 32, 2.0)] and tier.held() == set(slots)


def test_the_first_error_stops_those_who_are_still_at_it(scripted: Scripted) -> None:
    tier, ends = scripted.tier, scripted.ends
    tier.copy_out("a", [BlockId(4)])
    assert all(isinstance(get_order(end), CopyBlocks) for end in ends)
    put(ends[0], Copied(CopyEnd("a", 10, 0.1)))
    put(ends[1], Copied(CopyEnd("a", 0, 0.1, "broken")))
    assert tier.poll() == []
    assert get_order(ends[2]) == CancelCopy("a")
    assert not ends[0].poll(0) and not ends[1].poll(0)
    assert tier.num_free == NUM_SLOTS - 1, "the third rank may still write"
    put(ends[2], Copied(CopyEnd("a", 3, 0.1, "cancelled")))
    assert tier.poll() == [CopyEnd("a", 13, 0.0, "rank 1: broken")]
    assert tier.num_free == NUM_SLOTS


def test_a_rank_that_is_gone_ends_its_copies_and_answers(scripted: Scripted) -> None:
    tier, ends = scripted.tier, scripted.ends
    tier.copy_out("a", [BlockId(4)])
    ends[1].close()
    assert tier.poll() == []
    for rank in (0, 2):
        assert isinstance(get_order(ends[rank]), CopyBlocks)
        assert get_order(ends[rank]) == CancelCopy("a")
        put(ends[rank], Copied(CopyEnd("a", 0, 0.1, "cancelled")))
    assert [end.error for end in tier.poll()] == ["rank 1 is gone"]


def test_a_rank_that_does_not_end_a_copy_ends_the_instance(scripted: Scripted) -> None:
    scripted.tier.copy_out("a", [BlockId(4)])
    scripted.clock.now_s += 30.0
    assert scripted.tier.poll() == []
    scripted.clock.now_s += 0.1
    with pytest.raises(RankLostError, match=r"ranks \[0, 1, 2\] have not ended a copy in 30 s"):
        scripted.tier.poll()


def test_a_rank_that_does_not_save_ends_the_instance() -> None:
    pairs = [Pipe() for _ in range(2)]
    for _, theirs in pairs:
        put(theirs, DramOpened(None))
    group = RankGroup([ours for ours, _ in pairs], answer_s=0.2)
    geometry = rank_geometry(0, 2)
    tier = DramTier(RankedCopies(group, geometry, 4 * geometry.block_bytes))
    with pytest.raises(RankLostError, match=r"ranks \[0, 1\] have not saved blocks in 0.2 s"):
        tier.save([BlockId(1)], for_engine=False)
    for _, theirs in pairs:
        assert isinstance(get_order(theirs), OpenDram) and isinstance(get_order(theirs), SaveBlocks)
        theirs.close()
    group.close()


@pytest.mark.parametrize(
    ("size_bytes", "error", "says"),
    [
        (100, None, "mempool.dram_gb: 100 bytes do not hold one block of "),
        (1 << 60, None, "mempool.dram_gb: 1073741824.00 GiB of host memory asked for"),
        (1 << 20, "mempool.dram_gb: cannot be pinned", "mempool.dram_gb: cannot be pinned"),
    ],
)
def test_memory_that_cannot_be_had_is_refused(
    size_bytes: int, error: str | None, says: str
) -> None:
    ours, theirs = Pipe()
    put(theirs, DramOpened(error))
    group = RankGroup([ours])
    with pytest.raises(StartError, match=says):
        RankedCopies(group, rank_geometry(0, 1), size_bytes)
    group.close()
    theirs.close()


class Step:
    """In place of a CUDA event behind a step."""

    has_ended = False

    def query(self) -> bool:
        return self.has_ended


def test_a_rank_s_engine_does_not_rest_between_two_steps() -> None:
    clock = FakeClock()
    dram = RankDram(rank_geometry(0, 1), torch.empty(0), TorchBlockOps, clock=clock)
    assert dram._pace() is Pace.FREE
    step = Step()
    dram._step = cast(torch.cuda.Event, step)
    clock.now_s = 1.0
    assert dram._pace() is Pace.INSIDE_STEP
    step.has_ended = True
    clock.now_s += 0.005
    assert dram._pace() is Pace.INSIDE_STEP, "the next one may come at any moment"
    clock.now_s += 1.0
    assert dram._pace() is Pace.FREE

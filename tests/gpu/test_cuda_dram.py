"""The DRAM tier of a GPU: pinned memory, both layouts, and copies behind what the engine queued."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from memserve.ops.blocks import block_ops
from memserve.types import BlockId, Geometry, SlotId
from memserve.workers.copies import BlockCopies, CopyEnd
from memserve.workers.dram import DramTier
from memserve.workers.hostmemory import HostMemory
from memserve.workers.rank_dram import RankDram
from memserve.workers.rank_messages import (
    Copied,
    CopyBlocks,
    DramOpened,
    OpenDram,
    SaveBlocks,
    Saved,
    Saving,
    StepOrders,
)

pytestmark = pytest.mark.gpu

BLOCKS, LAYERS, PAGE_BYTES = 24, 8, 64 << 10
DEADLINE_S = 30.0


def geometry(layout: str) -> Geometry:
    is_block_first = layout == "block_first"
    return Geometry(
        model="test",
        dtype="uint8",
        block_size=16,
        num_blocks=BLOCKS,
        num_kv_heads=1,
        page_bytes=PAGE_BYTES,
        block_stride=PAGE_BYTES * (LAYERS if is_block_first else 1),
        layer_offsets=tuple(
            layer * PAGE_BYTES * (1 if is_block_first else BLOCKS) for layer in range(LAYERS)
        ),
    )


class Rig:
    """A tier over random contents on GPU 0."""

    def __init__(self, layout: str) -> None:
        self.geometry = geometry(layout)
        size = BLOCKS * LAYERS * PAGE_BYTES
        self.hbm = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0")
        self.memory = HostMemory(16 * self.geometry.block_bytes, pin=True)
        ops = block_ops(self.hbm.device)
        self.tier = DramTier(BlockCopies(self.geometry, self.hbm, self.memory, ops, time.monotonic))

    def block(self, block_id: int) -> torch.Tensor:
        """Its pages, on the CPU."""
        pages = [
            self.hbm[start : start + PAGE_BYTES]
            for offset in self.geometry.layer_offsets
            for start in [offset + block_id * self.geometry.block_stride]
        ]
        return torch.cat(pages).cpu()

    def finish(self) -> list[CopyEnd]:
        """Poll until nothing is under way."""
        until = time.monotonic() + DEADLINE_S
        ended: list[CopyEnd] = []
        while self.tier.is_active:
            ended += self.tier.poll()
            assert time.monotonic() < until, "the copies do not end"
        return ended


@pytest.fixture(params=["block_first", "layer_first"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.tier.close()


def ids(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


def test_the_memory_is_pinned_as_it_is_and_no_longer_when_it_is_closed() -> None:
    size = 3 << 20  # torch's own allocator would make four of it
    memory = HostMemory(size, pin=True)
    assert memory.tensor.is_pinned() and memory.tensor.numel() == size
    tensor = memory.tensor
    memory.close()
    assert not tensor.is_pinned()


def test_blocks_go_out_and_come_back_into_others(rig: Rig) -> None:
    sources, targets = (0, 23, 7, 8), (1, 2, 20, 19)
    before = [rig.block(block_id) for block_id in sources]
    slots = rig.tier.copy_out("a", ids(*sources))
    assert [end.error for end in rig.finish()] == [None]
    for slot, contents in zip(slots, before, strict=True):
        start = slot * rig.geometry.block_bytes
        assert torch.equal(rig.memory.tensor[start : start + rig.geometry.block_bytes], contents)
    rig.tier.copy_in("b", slots, ids(*targets))
    assert [end.error for end in rig.finish()] == [None]
    for block_id, contents in zip(targets, before, strict=True):
        assert torch.equal(rig.block(block_id), contents)
    assert rig.tier.check_integrity() == []


def test_a_copy_waits_for_what_the_engine_has_queued(rig: Rig) -> None:
    """A block's KV may still be being computed when its copy begins."""
    rig.tier.copy_out("warm-up", ids(1))
    rig.finish()
    torch.cuda._sleep(200_000_000)  # about a tenth of a second
    rig.hbm.fill_(7)
    (slot,) = rig.tier.copy_out("a", ids(3))
    assert rig.tier.poll() == [], "nobody waits for it"
    assert [end.error for end in rig.finish()] == [None]
    start = slot * rig.geometry.block_bytes
    assert bool((rig.memory.tensor[start : start + rig.geometry.block_bytes] == 7).all())


def test_the_engine_writes_only_when_a_block_is_saved(rig: Rig) -> None:
    """Its next work waits on the GPU, while this process goes on."""
    rig.tier.save(ids(1), for_engine=True)  # warm
    torch.cuda._sleep(200_000_000)
    rig.hbm.fill_(7)
    slots = rig.tier.save(ids(3, 9), for_engine=True)
    rig.hbm.fill_(9)
    assert not torch.cuda.current_stream().query(), "the engine's work is still to be done"
    torch.cuda.synchronize()
    for slot in slots:
        start = slot * rig.geometry.block_bytes
        assert bool((rig.memory.tensor[start : start + rig.geometry.block_bytes] == 7).all())


def test_others_find_a_block_saved_when_the_call_returns(rig: Rig) -> None:
    contents = rig.block(5)
    (slot,) = rig.tier.save(ids(5), for_engine=False)
    start = slot * rig.geometry.block_bytes
    assert torch.equal(rig.memory.tensor[start : start + rig.geometry.block_bytes], contents)


# ── one of several ranks ──────────────────────────────────────────────────────────────────────


class RankRig:
    """A rank's part of a tier. Its engine has a stream of its own; the agent's thread is this."""

    def __init__(self, layout: str) -> None:
        self.geometry = geometry(layout)
        size = BLOCKS * LAYERS * PAGE_BYTES
        self.hbm = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0")
        self.dram = RankDram(self.geometry, self.hbm, lambda: block_ops(self.hbm.device))
        self.dram.handle(OpenDram(16 * self.geometry.block_bytes))
        assert self.dram.poll() == [DramOpened(None)]
        torch.cuda.synchronize()
        self.engine = torch.cuda.Stream()

    def copy(self, owner: str, *pairs: tuple[int, int], is_inwards: bool, after_step: int) -> None:
        """`pairs`: a block and a slot each."""
        block_ids, slot_ids = ids(*(b for b, _ in pairs)), [SlotId(s) for _, s in pairs]
        self.dram.handle(CopyBlocks(owner, is_inwards, block_ids, slot_ids, after_step))

    def finish(self) -> list[str | None]:
        """The errors of all copies, when nothing is under way."""
        until = time.monotonic() + DEADLINE_S
        errors: list[str | None] = []
        while self.dram.is_active:
            errors += [r.end.error for r in self.dram.poll() if isinstance(r, Copied)]
            assert time.monotonic() < until, "the copies do not end"
        return errors

    def pages(self, block_id: int) -> list[torch.Tensor]:
        """They share the memory."""
        starts = [o + block_id * self.geometry.block_stride for o in self.geometry.layer_offsets]
        return [self.hbm[start : start + PAGE_BYTES] for start in starts]

    def values(self, block_id: int) -> set[int]:
        """That its bytes have."""
        return {int(value) for page in self.pages(block_id) for value in page.unique()}


@pytest.fixture(params=["block_first", "layer_first"])
def rank(request: pytest.FixtureRequest) -> Iterator[RankRig]:
    made = RankRig(request.param)
    yield made
    made.dram.close()


def test_a_rank_copies_behind_the_step_that_an_order_names(rank: RankRig) -> None:
    rank.copy("warm-up", (1, 1), is_inwards=False, after_step=0)
    assert rank.finish() == [None]
    step = StepOrders(1, [])
    with torch.cuda.stream(rank.engine):
        rank.dram.before_step(step)
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        rank.hbm.fill_(7)
    rank.copy("a", (3, 0), is_inwards=False, after_step=1)
    assert rank.dram.poll() == [] and rank.dram.is_active, "the step is not queued as a whole"
    with torch.cuda.stream(rank.engine):
        rank.dram.after_step(step)
    assert rank.finish() == [None]
    torch.cuda.synchronize()
    rank.hbm.fill_(1)
    torch.cuda.synchronize()
    rank.copy("b", (5, 0), is_inwards=True, after_step=1)
    assert rank.finish() == [None]
    assert rank.values(5) == {7} and rank.values(3) == {1}


def test_a_rank_saves_what_a_step_overwrites(rank: RankRig) -> None:
    step = StepOrders(1, [Saving(ids(3, 9), [SlotId(4), SlotId(2)])])
    with torch.cuda.stream(rank.engine):
        rank.dram.before_step(StepOrders(0, [Saving(ids(1), [SlotId(0)])]))  # warm
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        rank.hbm.fill_(7)
        rank.dram.before_step(step)
        rank.hbm.fill_(9)
        rank.dram.after_step(step)
    assert not rank.engine.query(), "the rank's thread has not waited"
    rank.copy("a", (5, 4), (6, 2), is_inwards=True, after_step=1)
    assert rank.finish() == [None]
    assert rank.values(5) == rank.values(6) == {7} and rank.values(3) == {9}


def test_a_slot_that_a_step_fills_is_filled_anew_behind_it(rank: RankRig) -> None:
    """The step's own saving still waits on the GPU when the slot is given to another block."""
    for block_id, value in ((3, 5), (9, 8)):
        for page in rank.pages(block_id):
            page.fill_(value)
    torch.cuda.synchronize()
    step = StepOrders(1, [Saving(ids(3), [SlotId(4)])])
    with torch.cuda.stream(rank.engine):
        torch.cuda._sleep(200_000_000)
        rank.dram.before_step(step)
        rank.dram.after_step(step)
    rank.dram.handle(SaveBlocks(ids(9), [SlotId(4)], 1))
    assert Saved(None) in rank.dram.poll()
    torch.cuda.synchronize()
    rank.copy("a", (12, 4), is_inwards=True, after_step=1)
    assert rank.finish() == [None]
    assert rank.values(12) == {8}

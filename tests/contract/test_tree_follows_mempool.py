"""The scheduler's tree over a worker's MemPool and vLLM's block pool, through the wire's codec.

Requests come, generate, are preempted and resumed; blocks are evicted, lost and reset. Reports go
out as a worker sends them; some get lost. No engine, no process: `mempool_fuzz.py` drives the pool.
"""

from __future__ import annotations

import pytest

from memserve.caches import Caches
from memserve.core.vocabulary import Seat
from memserve.messages import (
    AnyCommand,
    AnyEvent,
    CacheChanged,
    CacheSnapshot,
    SendSnapshot,
    decode_event,
    encode,
)
from memserve.types import InstanceId
from memserve.workers.index_reports import IndexReports
from tests.contract.link_rig import BLOCK_SIZE
from tests.contract.mempool_fuzz import Fuzz

SEAT = Seat(InstanceId("P0"), 1)
STEPS = 300


class Followed(Fuzz):
    """The same random life; after each step the worker reports, and the scheduler hears it.

    Whether the pool itself is in order is `Fuzz`'s own business.
    """

    def __init__(self, seed: int, *, loses: bool) -> None:
        super().__init__(seed, with_engine=True)
        self.loses = loses
        self.num_changes = self.num_lost = self.num_asked = 0
        self.reports = IndexReports(self.mempool, SEAT.instance, SEAT.epoch, self.hear)
        self.caches = Caches(
            "events",
            BLOCK_SIZE,
            [SEAT.instance],
            max_blocks=10_000,
            ttl_s=3600.0,
            send=self.command,
            clock=lambda: 0.0,
        )

    def hear(self, event: AnyEvent) -> None:
        event = decode_event(encode(event))
        assert isinstance(event, CacheChanged | CacheSnapshot)
        self.num_changes += isinstance(event, CacheChanged)
        if self.loses and isinstance(event, CacheChanged) and self.random.random() < 0.05:
            self.num_lost += 1
            return
        self.caches.on_event(SEAT, event)

    def command(self, seat: Seat, command: AnyCommand) -> None:
        assert (seat, command) == (SEAT, SendSnapshot(epoch=SEAT.epoch))
        self.num_asked += 1

    def check(self) -> None:
        self.reports.flush()
        if self.num_asked and self.random.random() < 0.5:  # the answer takes its time
            self.answer()

    def answer(self) -> None:
        while self.num_asked:
            self.num_asked -= 1
            self.reports.send_snapshot()

    async def problems(self) -> list[str]:
        """What an audit finds. An event that was lost at last is noticed by it, and mended."""
        checks = self.caches.check([SEAT])
        while not checks[SEAT.instance].done():
            assert self.num_asked, "nobody waits for an answer"
            self.answer()
        return checks[SEAT.instance].result()


@pytest.mark.parametrize("loses", [False, True])
@pytest.mark.parametrize("seed", range(4))
async def test_the_tree_is_true_at_every_audit(seed: int, loses: bool) -> None:
    fuzz = Followed(seed, loses=loses)
    num_blocks = 0
    for number in range(STEPS):
        fuzz.step()
        if number % 10 == 0:
            assert await fuzz.problems() == []
            num_blocks = max(num_blocks, sum(1 for _ in fuzz.mempool.snapshot()))
    assert await fuzz.problems() == []
    assert num_blocks > 5
    assert fuzz.num_changes > 30
    assert bool(fuzz.num_lost) == loses

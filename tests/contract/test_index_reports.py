"""What a worker tells of its index: complete, numbered, and before what it is needed for."""

from __future__ import annotations

import pytest

from memserve.core.tokens import pack
from memserve.messages import (
    AnyEvent,
    CacheChanged,
    CacheSnapshot,
    Finished,
    Inserted,
    LinkReady,
    decode_event,
    encode,
)
from memserve.types import InstanceId, Medium, Namespace, RequestId, TransferId
from memserve.workers.index_reports import IndexReports
from memserve.workers.mempool import MemPool
from memserve.workers.transfer import private_namespace
from tests.contract.link_rig import BLOCK_SIZE
from tests.contract.mempool_fuzz import Follower
from tests.contract.transfer_rig import make_pool, prompt

P0 = InstanceId("P0")
BLOCK_BYTES = len(pack(prompt(BLOCK_SIZE)))


class Rig:
    def __init__(self, part_bytes: int = 1 << 20) -> None:
        self.mempool, _ = make_pool(num_blocks=41)
        self.events: list[AnyEvent] = []
        self.reports = IndexReports(self.mempool, P0, 3, self.events.append, part_bytes=part_bytes)

    def snapshot(self) -> list[CacheSnapshot]:
        self.events.clear()
        self.reports.send_snapshot()
        parts = [decode_event(encode(event)) for event in self.events]
        assert all(isinstance(part, CacheSnapshot) for part in parts)
        return parts  # type: ignore[return-value]


def insert(mempool: MemPool, tokens: list[int], namespace: Namespace = Namespace()) -> None:  # noqa: B008
    block_ids = mempool.alloc_mem(len(tokens) // BLOCK_SIZE, "w")
    mempool.insert(tokens, block_ids, "w", namespace)
    mempool.free_all("w")


def test_reports_are_numbered_and_silent_when_nothing_changed() -> None:
    rig = Rig()
    rig.reports.flush()
    assert rig.events == []
    insert(rig.mempool, prompt(8, seed=1))
    insert(rig.mempool, prompt(8, seed=2))
    rig.reports.flush()
    rig.reports.flush()
    rig.mempool.delete(prompt(8, seed=1))
    rig.reports.flush()
    changed = [event for event in rig.events if isinstance(event, CacheChanged)]
    assert changed == rig.events
    assert [event.sequence for event in changed] == [1, 2]
    assert {(event.instance, event.epoch) for event in changed} == {(P0, 3)}
    assert len(changed[0].changes) == 2


@pytest.mark.parametrize("event", [
    Finished(instance=P0, epoch=3, request_id=RequestId("r"), attempt=1, held_tokens=8),
    Inserted(instance=P0, epoch=3, transfer_id=TransferId("t"), num_tokens=8),
])  # fmt: skip
def test_changes_leave_before_what_says_that_kv_is_there(event: AnyEvent) -> None:
    rig = Rig()
    insert(rig.mempool, prompt(8))
    rig.reports.send(event)
    assert [type(e) for e in rig.events] == [CacheChanged, type(event)]


def test_other_events_do_not_wait() -> None:
    rig = Rig()
    insert(rig.mempool, prompt(8))
    event = LinkReady(instance=P0, epoch=3, peer=InstanceId("D0"), peer_epoch=1, kind="shm")
    rig.reports.send(event)
    assert rig.events == [event]


def test_private_kv_is_nobodys_business() -> None:
    rig = Rig()
    space = private_namespace(RequestId("r"), Namespace("salt", "adapter"))
    insert(rig.mempool, prompt(8), space)
    rig.reports.flush()
    rig.mempool.delete(prompt(8), space)
    rig.reports.flush()
    assert rig.events == []
    insert(rig.mempool, prompt(8), space)
    assert [part.changes for part in rig.snapshot()] == [[]]


@pytest.mark.parametrize("blocks_per_part", [1, 3, 7, 1000])
def test_a_snapshot_comes_in_parts_of_bounded_size(blocks_per_part: int) -> None:
    rig = Rig(part_bytes=blocks_per_part * BLOCK_BYTES)
    follower = Follower()
    for seed in range(6):
        insert(rig.mempool, prompt(12, seed))
        insert(rig.mempool, [*prompt(8, seed), *prompt(8, seed + 10)])
    rig.reports.flush()
    for event in rig.events:
        assert isinstance(event, CacheChanged)
        follower.apply(event.changes)
    parts = rig.snapshot()
    described = Follower()
    for part in parts:
        num_blocks = sum(len(c.token_ids) for c in part.changes) // BLOCK_BYTES
        assert num_blocks <= blocks_per_part or len(part.changes) == 1
        described.apply(part.changes)
    assert described.blocks == follower.blocks and len(follower.blocks) == 30
    assert [part.is_last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {part.sequence for part in parts} == {1}
    assert (len(parts) == 1) == (blocks_per_part == 1000)


def test_a_snapshot_follows_the_changes_that_it_contains() -> None:
    rig = Rig()
    insert(rig.mempool, prompt(8))
    rig.reports.send_snapshot()
    changed, snapshot = rig.events
    assert isinstance(changed, CacheChanged) and isinstance(snapshot, CacheSnapshot)
    assert changed.sequence == snapshot.sequence == 1
    assert snapshot.changes == changed.changes
    assert snapshot.changes[0].medium is Medium.HBM


def test_an_empty_index_has_a_snapshot_too() -> None:
    (part,) = Rig().snapshot()
    assert (part.changes, part.is_last, part.sequence) == ([], True, 0)

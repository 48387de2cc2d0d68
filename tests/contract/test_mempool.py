"""MemPool over a real BlockPool: the paper's verbs, owners, and an audit that finds each fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from vllm.v1.core.block_pool import BlockPool

from memserve.changes import Cleared
from memserve.errors import OutOfBlocksError
from memserve.types import BlockId, Namespace
from memserve.workers.engine_pool import EnginePool, RequestMaker
from memserve.workers.mempool import MemPool
from memserve.workers.pools import BlockCounts, RunningRequest
from tests.contract.link_rig import BLOCK_SIZE, NUM_BLOCKS
from tests.contract.transfer_rig import (
    NO_NAMESPACE,
    EngineStandIn,
    make_hasher,
    make_pool,
    prompt,
)

TOTAL = NUM_BLOCKS - 1


def insert(
    mempool: MemPool, tokens: list[int], namespace: Namespace = NO_NAMESPACE
) -> list[BlockId]:
    """Index these tokens in fresh blocks, held by nobody afterwards."""
    block_ids = mempool.alloc_mem(len(tokens) // BLOCK_SIZE, "w")
    block_ids = mempool.insert(tokens, block_ids, "w", namespace)
    mempool.free_all("w")
    return block_ids


def test_blocks_have_an_owner_until_they_are_freed() -> None:
    mempool, _ = make_pool()
    block_ids = mempool.alloc_mem(3, "a")
    assert mempool.held("a") == block_ids and mempool.holds("a")
    assert mempool.holders() == ["a: 3 blocks"]
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL - 3, 0, 3)
    mempool.free_mem("a", block_ids[:1])
    assert mempool.held("a") == block_ids[1:]
    assert mempool.free_all("a") == 2
    assert mempool.free_all("a") == 0
    assert mempool.holders() == [] and mempool.stats() == BlockCounts(TOTAL, TOTAL, 0, 0)
    assert mempool.check_integrity({}) == []


def test_only_what_is_held_can_be_freed() -> None:
    mempool, _ = make_pool()
    (block_id,) = mempool.alloc_mem(1, "a")
    with pytest.raises(KeyError, match="b does not hold"):
        mempool.free_mem("b", [block_id])
    with pytest.raises(KeyError, match="a does not hold"):
        mempool.free_mem("a", [block_id, block_id])
    assert mempool.held("a") == [block_id]


def test_a_reserve_is_left_to_the_engine() -> None:
    mempool, _ = make_pool(reserve_blocks=2)
    mempool.alloc_mem(TOTAL - 2, "a")
    with pytest.raises(OutOfBlocksError, match=f"1 blocks asked for, 0 of {TOTAL} available"):
        mempool.alloc_mem(1, "b")
    assert mempool.alloc_mem(0, "b") == []
    assert mempool.holders() == [f"a: {TOTAL - 2} blocks"]


@pytest.mark.parametrize(
    "num_tokens", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 11, 12, 13]
)
def test_what_was_inserted_is_found_by_full_blocks(num_tokens: int) -> None:
    mempool, _ = make_pool()
    tokens = prompt(num_tokens)
    block_ids = insert(mempool, tokens)
    num_blocks = num_tokens // BLOCK_SIZE
    assert mempool.path(tokens).num_blocks == num_blocks == len(block_ids)
    assert mempool.match(tokens) == block_ids
    assert mempool.match(prompt(num_tokens + 9)) == block_ids
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL - num_blocks, num_blocks, 0)
    assert mempool.check_integrity({}) == []


def test_match_changes_nothing() -> None:
    mempool, pool = make_pool()
    insert(mempool, prompt(12))

    def state() -> object:
        return [(b.block_id, b.ref_cnt) for b in pool.free_block_queue.get_all_free_blocks()]

    before = state()
    assert len(mempool.match(prompt(12))) == 3
    assert state() == before


def test_namespaces_do_not_see_each_other() -> None:
    mempool, pool = make_pool()
    tokens = prompt(8)
    spaces = [
        NO_NAMESPACE,
        Namespace("a"),
        Namespace("b"),
        Namespace(None, "a"),
        Namespace("a", "a"),
    ]
    found = {space: insert(mempool, tokens, space) for space in spaces}
    assert len({b for ids in found.values() for b in ids}) == 10
    engine = EngineStandIn(mempool, pool)
    assert all(mempool.match(tokens, s) == engine.find(tokens, s) == found[s] for s in spaces)
    assert mempool.match(tokens, Namespace("c")) == []
    assert (
        mempool.match(tokens, Namespace("")) == found[NO_NAMESPACE]
    )  # vLLM: an empty salt is none
    assert mempool.check_integrity({}) == []


def test_insert_wants_one_block_for_each_full_block() -> None:
    mempool, _ = make_pool()
    block_ids = mempool.alloc_mem(2, "a")
    with pytest.raises(ValueError, match="2 blocks for a prefix of 3"):
        mempool.insert(prompt(12), block_ids, "a")


def test_an_equal_block_that_came_first_takes_the_place_of_ours() -> None:
    mempool, pool = make_pool()
    engine = EngineStandIn(mempool, pool)
    ours = mempool.alloc_mem(3, "arrival")
    assert engine.start("r", prompt(9)) == 0  # meanwhile computed here: two full blocks
    theirs = engine.running["r"][:2]
    held = mempool.insert(prompt(12), ours, "arrival")
    assert held == [*theirs, ours[2]] == mempool.held("arrival") == mempool.match(prompt(12))
    assert mempool.check_integrity(engine.running) == []
    engine.finish("r")
    mempool.alloc_mem(TOTAL - 3 - 1, "other")  # would evict what is not pinned
    assert mempool.match(prompt(12)) == held
    mempool.free_all("arrival")
    assert mempool.stats().historical == 3
    assert mempool.check_integrity(engine.running) == []


def test_what_cannot_be_inserted_changes_nothing() -> None:
    mempool, _ = make_pool()
    insert(mempool, prompt(8, seed=1))
    indexed = mempool.match(prompt(8, seed=1))
    mempool.pin("a", indexed)
    new = mempool.alloc_mem(1, "a", lease_s=1.0)
    with pytest.raises(KeyError, match="b does not hold"):
        mempool.insert(prompt(4), new, "b")
    with pytest.raises(ValueError, match="holds another block"):
        mempool.insert(prompt(12), [*new, *indexed], "a")
    mempool.pin("a", new)
    with pytest.raises(ValueError, match="named twice"):
        mempool.insert(prompt(8), new * 2, "a")
    mempool.quarantine("a")
    with pytest.raises(ValueError, match="in quarantine"):
        mempool.insert(prompt(4), new, "a")
    assert mempool.match(prompt(12)) == []
    assert mempool.check_integrity({}) == []


def test_a_block_that_is_held_twice_gives_way_once() -> None:
    mempool, _ = make_pool()
    (ours,) = mempool.alloc_mem(1, "a")
    mempool.pin("a", [ours])
    (theirs,) = insert(mempool, prompt(4))
    assert mempool.insert(prompt(4), [ours], "a") == [theirs]
    assert mempool.held("a") == [theirs, ours]
    assert mempool.check_integrity({}) == []


def test_a_hit_that_was_deleted_meanwhile_is_indexed_again() -> None:
    mempool, _ = make_pool()
    hits = insert(mempool, prompt(8))
    mempool.pin("a", hits)
    new = mempool.alloc_mem(1, "a")
    assert mempool.delete(prompt(8)) == 2
    assert mempool.insert(prompt(12), hits + new, "a") == hits + new
    assert mempool.match(prompt(12)) == hits + new


def test_pinned_history_survives_and_the_tail_of_the_rest_goes_first() -> None:
    mempool, _ = make_pool(reserve_blocks=0)
    pinned = insert(mempool, prompt(16, seed=1))
    mempool.pin("a", pinned)
    loose = insert(mempool, prompt(16, seed=2))
    mempool.alloc_mem(TOTAL - 6, "b")  # two blocks of history have to go
    assert mempool.match(prompt(16, seed=1)) == pinned
    assert mempool.match(prompt(16, seed=2)) == loose[:2]
    mempool.unpin("a")
    assert mempool.stats() == BlockCounts(TOTAL, 0, 6, TOTAL - 6)


def test_two_owners_of_a_block_are_counted() -> None:
    mempool, _ = make_pool()
    block_ids = insert(mempool, prompt(8))
    mempool.pin("a", block_ids)
    mempool.pin("b", block_ids)
    mempool.hand_over("a", "b")
    assert mempool.held("b") == block_ids * 2 and not mempool.holds("a")
    assert mempool.stats().active == 2
    assert mempool.check_integrity({}) == []
    assert mempool.unpin("b") == 4
    assert mempool.stats().historical == 2


def test_delete_forgets_and_spares_the_users() -> None:
    mempool, pool = make_pool()
    engine = EngineStandIn(mempool, pool)
    tokens = prompt(8)
    assert engine.start("r", tokens) == 0
    assert mempool.delete(tokens) == 2
    assert mempool.match(tokens) == []
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL - 2, 0, 2)
    assert mempool.check_integrity(engine.running) == []
    engine.finish("r")
    assert mempool.delete(tokens) == 0
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL, 0, 0)


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_deleted_blocks_are_reused_before_any_history_goes(deleted: int) -> None:
    mempool, _ = make_pool(reserve_blocks=0)
    for seed in range(3):
        insert(mempool, prompt(16, seed))
    freed = mempool.match(prompt(16, deleted))
    mempool.delete(prompt(16, deleted))
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL - 8, 8, 0)
    assert mempool.check_integrity({}) == []
    assert set(freed) <= set(mempool.alloc_mem(TOTAL - 8, "a"))
    assert mempool.stats() == BlockCounts(TOTAL, 0, 8, TOTAL - 8)


def test_delete_forgets_what_continues_the_tokens() -> None:
    mempool, _ = make_pool()
    insert(mempool, prompt(16))
    assert mempool.delete(prompt(8)) == 4
    assert mempool.match(prompt(16)) == []
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL, 0, 0)


def test_reset_spares_what_is_held() -> None:
    mempool, _ = make_pool()
    kept = insert(mempool, prompt(8, seed=1))
    insert(mempool, prompt(12, seed=2))
    mempool.pin("a", kept)
    assert mempool.reset() == 3
    assert mempool.match(prompt(8, seed=1)) == kept
    assert mempool.match(prompt(12, seed=2)) == []
    assert mempool.stats() == BlockCounts(TOTAL, TOTAL - 2, 0, 2)
    assert mempool.check_integrity({}) == []


# ── the engine, and what the index makes of it ────────────────────────────────────────────────


@pytest.fixture
def engine() -> EngineStandIn:
    mempool, pool = make_pool(reserve_blocks=0)
    return EngineStandIn(mempool, pool)


def test_a_running_request_is_found_block_by_block(engine: EngineStandIn) -> None:
    mempool, tokens = engine.mempool, prompt(20)
    engine.start("r", tokens[:6])
    for end in range(7, 21):
        assert engine.generate("r", tokens[end - 1 : end])
        assert mempool.match(tokens) == engine.running["r"][: end // BLOCK_SIZE]
        assert mempool.check_integrity(engine.running) == []
    assert mempool.index.num_nodes == 1


def test_a_growing_request_is_not_walked_again(engine: EngineStandIn) -> None:
    engine.start("r", prompt(24))
    asked: list[tuple[int, int]] = []
    on_cached = engine.mempool.on_cached

    class Recorder:
        """A running request that notes for which tokens it was asked."""

        def __init__(self, request: RunningRequest) -> None:
            self._request = request

        def __getattr__(self, name: str) -> object:
            return getattr(self._request, name)

        def token_ids(self, first_block: int, end_block: int) -> list[int]:
            asked.append((first_block, end_block))
            return self._request.token_ids(first_block, end_block)

    def observed(request: RunningRequest, first_block: int, end_block: int) -> None:
        on_cached(cast(RunningRequest, Recorder(request)), first_block, end_block)

    engine.mempool.on_cached = observed  # type: ignore[method-assign]
    for _ in range(3):
        engine.generate("r", prompt(BLOCK_SIZE, seed=3))
    assert asked == [(6, 7), (7, 8), (8, 9)]


def test_a_copy_is_not_kept(engine: EngineStandIn) -> None:
    mempool, tokens = engine.mempool, prompt(8)
    engine.start("first", tokens)
    assert engine.start("second", tokens) == 1  # the last block has to be computed
    (kept, copy) = engine.running["first"][1], engine.running["second"][1]
    assert mempool.match(tokens)[1] == kept
    engine.finish("second")
    assert mempool.stats().historical == 0
    engine.finish("first")
    assert mempool.stats().historical == 2
    assert engine.start("third", prompt(4, seed=5)) == 0
    assert engine.running["third"] == [copy]


def test_a_request_outlives_the_beginning_that_it_had_a_copy_of(engine: EngineStandIn) -> None:
    """The index has the first request's block; it goes, and the second one's own take its place."""
    mempool, tokens = engine.mempool, prompt(16)
    engine.start("first", tokens[:8])
    engine.start("second", tokens[:8])
    engine.finish("first")
    first, copy = engine.running["second"]
    engine.generate("second", tokens[8:12])
    assert mempool.match(tokens)[0] == first
    kept = mempool.match(tokens)[1]
    assert kept != copy
    mempool.delete(tokens[:8])
    assert mempool.match(tokens) == []
    engine.generate("second", tokens[12:])
    assert mempool.match(tokens) == engine.running["second"] == engine.find(tokens, NO_NAMESPACE)
    assert mempool.check_integrity(engine.running) == []


def test_what_lies_below_an_evicted_block_goes_with_it(engine: EngineStandIn) -> None:
    mempool, tokens = engine.mempool, prompt(16)
    block_ids = insert(mempool, tokens)
    mempool.pin("tail", block_ids[2:])
    mempool.alloc_mem(TOTAL - 4, "a")
    assert mempool.match(tokens) == block_ids
    mempool.alloc_mem(1, "a")  # the second block
    assert mempool.match(tokens) == block_ids[:1]
    assert mempool.check_integrity({}) == []
    mempool.unpin("tail")
    assert mempool.stats() == BlockCounts(TOTAL, 2, 1, TOTAL - 3)


def test_a_preempted_request_finds_its_blocks_again(engine: EngineStandIn) -> None:
    mempool, tokens = engine.mempool, prompt(12)
    engine.start("r", tokens)
    block_ids = engine.running["r"]
    engine.preempt("r")
    assert mempool.stats().historical == 3
    assert engine.start("r", tokens) == 2
    assert engine.running["r"][:2] == block_ids[:2]
    assert engine.generate("r", prompt(4, seed=2))
    longer = engine.tokens("r")
    assert mempool.match(longer)[:3] == block_ids and len(mempool.match(longer)) == 4
    assert mempool.check_integrity(engine.running) == []


def test_a_reset_of_the_engines_cache_empties_the_index(engine: EngineStandIn) -> None:
    mempool = engine.mempool
    engine.start("r", prompt(12))
    assert not engine.pool.reset_prefix_cache()
    assert len(mempool.match(prompt(12))) == 3
    engine.finish("r")
    assert engine.pool.reset_prefix_cache()
    assert mempool.match(prompt(12)) == [] and mempool.index.num_blocks == 0
    assert mempool.take_changes()[-1] == Cleared()
    assert mempool.check_integrity({}) == []


def test_an_insert_hashes_only_what_is_new(engine: EngineStandIn) -> None:
    mempool, tokens = engine.mempool, prompt(20)
    hits = insert(mempool, tokens[:12], Namespace("salt"))
    asked: list[tuple[int, int]] = []
    make_request = make_hasher()

    def counted(token_ids: list[int], namespace: Namespace, known: list[bytes]) -> object:
        request = make_request(token_ids, namespace, known)
        asked.append((len(known), len(request.block_hashes)))
        return request

    engine_pool = cast(EnginePool, mempool._pool)
    engine_pool._make_request = cast(RequestMaker, counted)
    mempool.pin("a", hits)
    new = mempool.alloc_mem(2, "a")
    mempool.insert(tokens, hits + new, "a", Namespace("salt"))
    assert asked == [(3, 5)]
    assert engine.find(tokens, Namespace("salt")) == hits + new
    mempool.insert(tokens, hits + new, "a", Namespace("salt"))
    assert len(asked) == 1


# ── the audit ─────────────────────────────────────────────────────────────────────────────────


def _leak(mempool: MemPool, pool: BlockPool) -> None:
    pool.get_new_blocks(1)


def _double_free(mempool: MemPool, pool: BlockPool) -> None:
    block_id = mempool.held("a")[0]
    pool.free_blocks([pool.blocks[block_id]])


def _lost_from_queue(mempool: MemPool, pool: BlockPool) -> None:
    pool.free_block_queue.popleft()


def _wrong_count(mempool: MemPool, pool: BlockPool) -> None:
    pool.free_block_queue.num_free_blocks += 1


def _hole_in_queue(mempool: MemPool, pool: BlockPool) -> None:
    (block_id,) = insert(mempool, prompt(4, seed=8))
    insert(mempool, prompt(4, seed=9))
    mempool.pin("b", mempool.match(prompt(4, seed=8)))
    mempool.unpin("b")
    BlockPool.evict_blocks(pool, {block_id})


def _unknown_hash(mempool: MemPool, pool: BlockPool) -> None:
    (block_id,) = insert(mempool, prompt(4, seed=8))
    block_hash = pool.blocks[block_id].block_hash
    assert block_hash is not None
    pool.cached_block_hash_to_block.pop(block_hash, block_id)


def _dangling_hash(mempool: MemPool, pool: BlockPool) -> None:
    (block_id,) = insert(mempool, prompt(4, seed=8))
    pool.blocks[block_id].reset_hash()


def _unindexed(mempool: MemPool, pool: BlockPool) -> None:
    request = make_hasher()(prompt(4, seed=8), NO_NAMESPACE)
    blocks = pool.get_new_blocks(1)
    BlockPool.cache_full_blocks(pool, request, blocks, 0, 1, BLOCK_SIZE, 0)


def _copy(mempool: MemPool, pool: BlockPool) -> None:
    (block_id,) = insert(mempool, prompt(4, seed=8))
    block_hash = pool.blocks[block_id].block_hash
    assert block_hash is not None
    pool._insert_block_hash(block_hash, pool.get_new_blocks(1)[0], num_tokens=BLOCK_SIZE)


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (_leak, "1 references, known: nobody"),
        (_double_free, "0 references, known: a"),
        (_lost_from_queue, "not free with 0 references"),
        (_wrong_count, "in the free queue of"),
        (_hole_in_queue, "empty blocks behind historical ones"),
        (_unknown_hash, "a hash that the pool does not know"),
        (_dangling_hash, "the pool has 1 hashes, the blocks have 0"),
        (_unindexed, "is published, but not in the index"),
        (_dangling_hash, "is in the index, but not published"),
        (_copy, "blocks share"),
    ],
)
def test_the_audit_finds(corrupt: Callable[[MemPool, BlockPool], None], problem: str) -> None:
    mempool, pool = make_pool()
    mempool.alloc_mem(2, "a")
    assert mempool.check_integrity({}) == []
    corrupt(mempool, pool)
    assert any(problem in text for text in mempool.check_integrity({}))


def test_the_audit_finds_blocks_of_a_request_that_nobody_names() -> None:
    mempool, pool = make_pool()
    engine = EngineStandIn(mempool, pool)
    engine.start("r", prompt(6))
    assert mempool.check_integrity(engine.running) == []
    assert len(mempool.check_integrity({})) == 2

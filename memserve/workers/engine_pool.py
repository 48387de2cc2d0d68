"""vLLM's BlockPool as one of MemPool's pools: it owns the blocks that the engine computes with.

    take      get_new_blocks              publish   cache_full_blocks
    share     touch                       retract   evict_blocks
    release   free_blocks                 observe   observe_pool

A published block is one that carries a hash there. Hashes are made by vLLM itself, for a request
that is never scheduled, and only when blocks are published: look-ups use MemPool's index.

What this module knows of the BlockPool's inside: the order of its free queue, its table of hashes,
and which of its calls change hashes. The engine publishes a block when it schedules the step that
writes it, so the pool remembers which blocks wait for which step.

Collaborators: `mempool.py` calls, while vLLM's core does not, or from inside the pool's own calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash

from memserve.core.tokens import Path, unpack
from memserve.types import BlockId, Namespace
from memserve.workers.pools import BlockCounts, PoolObserver, count_problem

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock
    from vllm.v1.request import Request

_GROUP = 0  # models with several KV cache groups are refused at the start


class RequestMaker(Protocol):
    """Makes vLLM hash tokens: `compat.Engine.hash_request`."""

    def __call__(
        self, token_ids: Sequence[int], namespace: Namespace, known_hashes: Sequence[BlockHash]
    ) -> Request:
        """A request with the hashes of all its full blocks; those of the first ones are known."""
        ...


class Steps(Protocol):
    """The engine's steps, which end in the order in which they were launched:
    `step_outputs.StepOutputs`."""

    @property
    def composed(self) -> int | None:
        """Number of the step that is being scheduled; None outside of that."""
        ...

    @property
    def num_ended(self) -> int:
        """The steps up to this number have ended."""
        ...


class EnginePool:
    """The engine's blocks, without vLLM's null block."""

    def __init__(self, pool: BlockPool, make_request: RequestMaker, steps: Steps) -> None:
        """`make_request`: see there; its requests are never scheduled."""
        self._pool = pool
        self._make_request = make_request
        self._steps = steps
        self._unwritten: dict[int, set[BlockId]] = {}
        """Number of a step that may not have ended → blocks that hold their KV when it has."""

    @property
    def num_blocks(self) -> int:
        return len(self._pool.blocks) - 1

    @property
    def num_available(self) -> int:
        num_free: int = self._pool.get_num_free_blocks()
        return num_free

    def observe(self, observer: PoolObserver) -> None:
        observe_pool(self._pool, observer, self._note_unwritten)

    def take(self, num_blocks: int) -> list[BlockId]:
        return [BlockId(b.block_id) for b in self._pool.get_new_blocks(num_blocks)]

    def share(self, block_ids: Sequence[BlockId]) -> None:
        self._pool.touch(self._blocks(block_ids))

    def release(self, block_ids: Sequence[BlockId]) -> None:
        self._pool.free_blocks(reversed(self._blocks(block_ids)))

    def publish(self, path: Path, block_ids: Sequence[BlockId]) -> None:
        """Costs about 2 µs for each block from the first new one on."""
        blocks = self._blocks(block_ids)
        known = [get_block_hash(b.block_hash) for b in takewhile(_has_hash, blocks)]
        if len(known) == len(blocks):
            return
        # The class's method: the instance's one would report to the observer, who calls this.
        BlockPool.cache_full_blocks(
            self._pool,
            request=self._make_request(unpack(path.packed), path.namespace, known),
            blocks=blocks,
            num_cached_blocks=len(known),
            num_full_blocks=len(blocks),
            block_size=path.block_size,
            kv_cache_group_id=_GROUP,
            block_mask=[not _has_hash(block) for block in blocks[len(known) :]],
        )

    def retract(self, block_ids: Sequence[BlockId]) -> None:
        BlockPool.evict_blocks(self._pool, set(block_ids))
        self._to_front(block_ids)

    def when_written(self, block_ids: Sequence[BlockId]) -> Callable[[], bool]:
        wanted = set(block_ids)
        numbers = [n for n, written in self._unwritten.items() if not wanted.isdisjoint(written)]
        last = max(numbers, default=0)
        return lambda: self._steps.num_ended >= last

    def counts(self) -> BlockCounts:
        """The cost grows with the smaller one of free and historical."""
        num_free = self._pool.get_num_free_blocks()
        historical = self._count_historical(num_free)
        return BlockCounts(
            total=self.num_blocks,
            free=num_free - historical,
            historical=historical,
            active=self.num_blocks - num_free,
        )

    def history(self) -> Iterator[BlockId]:
        """Walks over the free blocks first."""
        queue = self._pool.free_block_queue
        block = queue.fake_free_list_head.next_free_block
        while block is not None and block is not queue.fake_free_list_tail:
            if block.block_hash is not None:
                yield BlockId(block.block_id)
            block = block.next_free_block

    def published(self) -> set[BlockId]:
        return {BlockId(b.block_id) for b in self._pool.blocks if b.block_hash is not None}

    def check(self, owners: Mapping[BlockId, Sequence[str]]) -> list[str]:
        return [*self._check_references(owners), *self._check_free_queue(), *self._check_hashes()]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _note_unwritten(self, block_ids: Iterable[BlockId]) -> None:
        """The engine has published these: the step that it is scheduling writes them.

        What it publishes outside of that, with the output of a step, is written.
        """
        if (composed := self._steps.composed) is None:
            return
        ended = self._steps.num_ended
        for number in [number for number in self._unwritten if number <= ended]:
            del self._unwritten[number]
        self._unwritten.setdefault(composed, set()).update(block_ids)

    def _blocks(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        blocks = self._pool.blocks
        return [blocks[block_id] for block_id in block_ids]

    def _to_front(self, block_ids: Iterable[int]) -> None:
        """Let blocks that have lost their hash be reused first, if nobody uses them.

        This keeps the free queue in the order that `_count_historical` relies on.
        """
        unused = [b for b in self._blocks(block_ids) if b.ref_cnt == 0]
        self._pool.touch(unused)
        self._pool.free_blocks(unused)

    def _count_historical(self, num_free: int) -> int:
        """Blocks in the free queue that carry a hash.

        The pool puts blocks without a hash at the queue's front and others at its back, so that
        walking from both ends at once finds the border after the shorter part.
        """
        queue = self._pool.free_block_queue
        front = queue.fake_free_list_head.next_free_block
        back = queue.fake_free_list_tail.prev_free_block
        for steps in range(num_free):
            assert front is not None and back is not None
            if front.block_hash is not None:
                return num_free - steps
            if back.block_hash is None:
                return steps
            front, back = front.next_free_block, back.prev_free_block
        return 0

    def _check_references(self, owners: Mapping[BlockId, Sequence[str]]) -> list[str]:
        return [
            count_problem(block.block_id, block.ref_cnt, known)
            for block in self._pool.blocks
            if not block.is_null
            and block.ref_cnt != len(known := owners.get(BlockId(block.block_id), ()))
        ]

    def _check_free_queue(self) -> list[str]:
        queue = self._pool.free_block_queue
        free = queue.get_all_free_blocks()
        problems: list[str] = []
        if len(free) != queue.num_free_blocks:
            problems.append(f"{len(free)} blocks are in the free queue of {queue.num_free_blocks}")
        listed = Counter(b.block_id for b in free)
        problems += [f"block {b} is free {n} times" for b, n in listed.items() if n > 1]
        for block in self._pool.blocks:
            if not block.is_null and (block.ref_cnt == 0) != (block.block_id in listed):
                state = "free" if block.block_id in listed else "not free"
                problems.append(
                    f"block {block.block_id} is {state} with {block.ref_cnt} references"
                )
        has_hash = [b.block_hash is not None for b in free]
        if has_hash != sorted(has_hash):
            problems.append("the free queue has empty blocks behind historical ones")
        return problems

    def _check_hashes(self) -> list[str]:
        """vLLM's own table against the blocks; and no hash twice, since MemPool retracts copies."""
        table = self._pool.cached_block_hash_to_block
        problems: list[str] = []
        blocks = [b for b in self._pool.blocks if b.block_hash is not None]
        for block in blocks:
            assert block.block_hash is not None
            if not table.contain(block.block_hash, block.block_id):
                problems.append(f"block {block.block_id} has a hash that the pool does not know")
        num_hashes = len({b.block_hash for b in blocks})
        if len(table) != num_hashes:
            problems.append(f"the pool has {len(table)} hashes, the blocks have {num_hashes}")
        if len(blocks) != num_hashes:
            problems.append(f"{len(blocks)} blocks share {num_hashes} hashes")
        return problems


def resume_hashing(
    hasher: Callable[[Request], list[BlockHash]], known_hashes: Sequence[BlockHash]
) -> Callable[[Request], list[BlockHash]]:
    """vLLM's block hasher for a new request the hashes of whose first blocks are known."""

    def resumed(request: Request) -> list[BlockHash]:
        if not request.block_hashes:
            request.block_hashes.extend(known_hashes)
        hashes: list[BlockHash] = hasher(request)
        return hashes

    return resumed


def namespace_of(request: Request) -> Namespace:
    """Who may share the request's KV, by vLLM's own rules (an empty salt is none)."""
    lora = request.lora_request
    return Namespace(request.cache_salt or None, None if lora is None else lora.lora_name)


def _has_hash(block: KVCacheBlock) -> bool:
    return block.block_hash is not None


class _Running:
    """A request of the engine as `pools.RunningRequest`, for one call of the pool."""

    def __init__(self, pool: BlockPool, request: Request, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool = pool
        self._request = request
        self._blocks = blocks

    @property
    def id(self) -> str:
        request_id: str = self._request.request_id
        return request_id

    @property
    def namespace(self) -> Namespace:
        return namespace_of(self._request)

    def token_ids(self, first_block: int, end_block: int) -> list[int]:
        size = self._pool.hash_block_size
        token_ids: list[int] = self._request.all_token_ids[first_block * size : end_block * size]
        return token_ids

    def block_ids(self, first_block: int, end_block: int) -> list[BlockId]:
        return [BlockId(b.block_id) for b in self._blocks[first_block:end_block]]

    def publish(self, end_block: int) -> None:
        is_new = [not _has_hash(block) for block in self._blocks[:end_block]]
        # The class's method: the instance's one reports to the observer, who calls this.
        BlockPool.cache_full_blocks(
            self._pool,
            self._request,
            list(self._blocks),
            num_cached_blocks=0,
            num_full_blocks=end_block,
            block_size=self._pool.hash_block_size,
            kv_cache_group_id=_GROUP,
            block_mask=is_new,
        )


def observe_pool(
    pool: BlockPool, observer: PoolObserver, note: Callable[[Iterable[BlockId]], None]
) -> None:
    """Tell the observer from now on which blocks the pool hashes, and which lose their hash.

    `note` is told of the blocks that are hashed, and first: the observer may retract some of them,
    and publish them later.

    The four public calls through which that happens are wrapped, on this one pool; the observer is
    told when a call is complete, so that it may call the pool itself. vLLM's own event queue would
    tell the same, but as hashes, and only during steps.
    """
    take, cache = pool.get_new_blocks, pool.cache_full_blocks
    evict, reset = pool.evict_blocks, pool.reset_prefix_cache

    def get_new_blocks(num_blocks: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = take(num_blocks)
        observer.on_taken([BlockId(block.block_id) for block in blocks])
        return blocks

    def cache_full_blocks(
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        cache(request, blocks, num_cached_blocks, num_full_blocks, *args, **kwargs)
        if num_cached_blocks < num_full_blocks:
            running = _Running(pool, request, blocks)
            note(running.block_ids(num_cached_blocks, num_full_blocks))
            observer.on_cached(running, num_cached_blocks, num_full_blocks)

    def evict_blocks(block_ids: set[int]) -> None:
        evict(block_ids)
        observer.on_evicted([BlockId(block_id) for block_id in block_ids])

    def reset_prefix_cache() -> bool:
        is_reset: bool = reset()
        if is_reset:
            observer.on_reset()
        return is_reset

    vars(pool).update(
        get_new_blocks=get_new_blocks,
        cache_full_blocks=cache_full_blocks,
        evict_blocks=evict_blocks,
        reset_prefix_cache=reset_prefix_cache,
    )

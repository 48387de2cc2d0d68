"""MemPool: the paper's memory and index API (its Table 1) over vLLM's BlockPool.

The BlockPool stays the only owner of block ids: running requests, pins and reservations are
references in it, historical KV is what it has indexed and nobody refers to. MemPool adds owners, so
that each reference taken for MemServe has a name, can be dropped by it, and can be audited.

    alloc_mem   get_new_blocks, with some blocks left over for the engine
    free_mem    free_blocks
    insert      cache_full_blocks: active KV becomes historical KV
    match       the longest indexed prefix
    delete      evict_blocks
    pin, unpin  touch, free_blocks

Collaborators: `transfer.py` moves KV between two pools; `engine_loop.py` and `connector.py` call
between and inside the engine's steps. All in one thread, without locks. HBM only so far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from memserve.errors import OutOfBlocksError
from memserve.types import BlockId

_GROUP = 0  # models with several KV cache groups are refused at the start


class BlockCounts(msgspec.Struct, frozen=True):
    """Where the blocks are: free + historical + active = total (without vLLM's null block)."""

    total: int
    free: int
    historical: int
    active: int


class Prefix:
    """Tokens under a namespace, with the hashes of their full blocks. Hashed once, used often."""

    def __init__(self, request: Request) -> None:
        self.request = request
        """Never scheduled; it makes vLLM compute its own block hashes."""

    @property
    def num_blocks(self) -> int:
        """Full blocks; a partial last block is never indexed or transferred."""
        return len(self.request.block_hashes)


class MemPool:
    """All of an instance's KV memory that is not in the hands of a running request."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        make_request: Callable[[Sequence[int], str | None], Request],
        reserve_blocks: int,
    ) -> None:
        """`make_request(tokens, salt)`: a `Request` with block hashes; it is never scheduled.

        `reserve_blocks` are never given to `alloc_mem`, so that a running request can go on.
        """
        self.block_size = block_size
        self._pool = pool
        self._make_request = make_request
        self._reserve_blocks = reserve_blocks
        self._held: dict[str, list[BlockId]] = {}

    # ── memory ────────────────────────────────────────────────────────────────────────────────

    def alloc_mem(self, num_blocks: int, owner: str) -> list[BlockId]:
        """Blocks without contents, evicting the oldest history. Raises: OutOfBlocksError."""
        available = max(0, self._pool.get_num_free_blocks() - self._reserve_blocks)
        if num_blocks > available:
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {available} of {self.num_blocks} available"
            )
        block_ids = [BlockId(b.block_id) for b in self._pool.get_new_blocks(num_blocks)]
        self._hold(owner, block_ids)
        return block_ids

    def free_mem(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of the owner to each block. Raises: KeyError if it has none."""
        held = self._held.get(owner, [])
        if missing := Counter(block_ids) - Counter(held):
            raise KeyError(f"{owner} does not hold the blocks {sorted(missing)}")
        for block_id in block_ids:
            held.remove(block_id)
        if not held:
            self._held.pop(owner, None)
        self._release(block_ids)

    def free_all(self, owner: str) -> int:
        """Drop all references of the owner, who may be unknown; returns how many they were."""
        block_ids = self._held.pop(owner, [])
        self._release(block_ids)
        return len(block_ids)

    def pin(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each block: neither evicted nor reused until it is dropped.

        The blocks hold KV: indexed, or of a request that is running or ends just now.
        """
        self._pool.touch(self._blocks(block_ids))
        self._hold(owner, block_ids)

    def unpin(self, owner: str) -> int:
        """The same as `free_all`: pinned blocks that are indexed become history."""
        return self.free_all(owner)

    def hand_over(self, owner: str, to: str) -> None:
        """Give all references of one owner to another one."""
        self._hold(to, self._held.pop(owner, []))

    # ── index ─────────────────────────────────────────────────────────────────────────────────

    def prefix(self, tokens: Sequence[int], salt: str | None) -> Prefix:
        """The key of these tokens; hashing costs about 3 µs a block. Does not mutate the pool."""
        return Prefix(self._make_request(tokens, salt))

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[BlockId]:
        """The blocks of the longest indexed prefix. Does not mutate: pin them to keep them."""
        return self.match_prefix(self.prefix(tokens, salt))

    def match_prefix(self, prefix: Prefix) -> list[BlockId]:
        """As `match`."""
        block_ids: list[BlockId] = []
        for block_hash in prefix.request.block_hashes:
            block = self._indexed(block_hash)
            if block is None:
                break
            block_ids.append(BlockId(block.block_id))
        return block_ids

    def insert(
        self, tokens: Sequence[int], salt: str | None, block_ids: Sequence[BlockId], owner: str
    ) -> list[BlockId]:
        """Index the full blocks of these tokens, whose KV the owner's `block_ids` hold.

        The owner keeps its references, but where an equal block was indexed meanwhile it gets a
        reference to that one, and its own block is freed: the pool keeps one block per prefix, and
        a pin is on the block that a request will find. Returns the blocks it now holds.
        Raises: ValueError if there is not one block for each full block of the tokens.
        """
        return self.insert_prefix(self.prefix(tokens, salt), block_ids, owner)

    def insert_prefix(
        self, prefix: Prefix, block_ids: Sequence[BlockId], owner: str
    ) -> list[BlockId]:
        """As `insert`."""
        if len(block_ids) != prefix.num_blocks:
            raise ValueError(f"{len(block_ids)} blocks for a prefix of {prefix.num_blocks}")
        blocks = self._blocks(block_ids)
        is_new: list[bool] = []
        for index, block_hash in enumerate(prefix.request.block_hashes):
            indexed = self._indexed(block_hash)
            is_new.append(indexed is None)
            if indexed is not None and indexed is not blocks[index]:
                self._replace(owner, blocks[index], indexed)
                blocks[index] = indexed
        if any(is_new):
            self._pool.cache_full_blocks(
                request=prefix.request,
                blocks=blocks,
                num_cached_blocks=0,
                num_full_blocks=len(blocks),
                block_size=self.block_size,
                kv_cache_group_id=_GROUP,
                block_mask=is_new,
            )
        return [BlockId(b.block_id) for b in blocks]

    def delete(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """Forget the KV of these tokens; returns how many blocks were indexed for them.

        Blocks in use stay with their users. Prompts that share a prefix with these lose it too.
        """
        return self.delete_prefix(self.prefix(tokens, salt))

    def delete_prefix(self, prefix: Prefix) -> int:
        """As `delete`."""
        block_ids: list[int] = []
        for block_hash in prefix.request.block_hashes:
            # Concurrent requests may have computed the same block: all copies go.
            while (block := self._indexed(block_hash)) is not None:
                self._pool.evict_blocks({block.block_id})
                block_ids.append(block.block_id)
        self._to_front(block_ids)
        return len(block_ids)

    def reset(self) -> int:
        """Forget all history that nobody holds; returns how many blocks that were."""
        free = self._pool.free_block_queue.get_all_free_blocks()
        block_ids = {b.block_id for b in free if b.block_hash is not None}
        self._pool.evict_blocks(block_ids)
        return len(block_ids)

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    @property
    def num_blocks(self) -> int:
        """All blocks but vLLM's null block."""
        return len(self._pool.blocks) - 1

    def stats(self) -> BlockCounts:
        """Does not mutate. The cost grows with the smaller one of free and historical."""
        num_free = self._pool.get_num_free_blocks()
        historical = self._count_historical(num_free)
        return BlockCounts(
            total=self.num_blocks,
            free=num_free - historical,
            historical=historical,
            active=self.num_blocks - num_free,
        )

    def held(self, owner: str) -> list[BlockId]:
        """The blocks that the owner refers to, in order (a new list)."""
        return list(self._held.get(owner, []))

    def holds(self, owner: str) -> bool:
        """Whether the owner refers to any block."""
        return owner in self._held

    def holders(self) -> list[str]:
        """Each owner and how much it holds; empty when MemServe holds nothing."""
        return [f"{owner}: {len(ids)} blocks" for owner, ids in self._held.items()]

    def check_integrity(self, running_block_ids: Mapping[str, Sequence[BlockId]]) -> list[str]:
        """What is wrong with the accounting, as text; empty when each block has its owners.

        `running_block_ids`: the block table of each request that the engine holds blocks for.
        Walks over all blocks. Does not mutate.
        """
        return [
            *self._check_references(running_block_ids),
            *self._check_free_queue(),
            *self._check_index(),
        ]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _blocks(self, block_ids: Iterable[int]) -> list[KVCacheBlock]:
        blocks = self._pool.blocks
        return [blocks[block_id] for block_id in block_ids]

    def _indexed(self, block_hash: Any) -> KVCacheBlock | None:
        found = self._pool.get_cached_block(block_hash, [_GROUP])
        return found[0] if found else None

    def _hold(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        if block_ids:
            self._held.setdefault(owner, []).extend(block_ids)

    def _release(self, block_ids: Sequence[BlockId]) -> None:
        # Last block first: the head of a prefix is worth more than its tail, and is evicted later.
        self._pool.free_blocks(reversed(self._blocks(block_ids)))

    def _replace(self, owner: str, own: KVCacheBlock, other: KVCacheBlock) -> None:
        """Move one reference of the owner from its block to an equal one."""
        held = self._held[owner]
        held[held.index(BlockId(own.block_id))] = BlockId(other.block_id)
        self._pool.touch([other])
        self._pool.free_blocks([own])

    def _to_front(self, block_ids: Iterable[int]) -> None:
        """Let blocks that have lost their hash be reused first, if nobody uses them.

        This keeps the free queue in the order that `_count_historical` relies on.
        """
        unused = [b for b in self._blocks(block_ids) if b.ref_cnt == 0]
        self._pool.touch(unused)
        self._pool.free_blocks(unused)

    def _count_historical(self, num_free: int) -> int:
        """Blocks in the free queue that are indexed.

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

    def _check_references(self, running: Mapping[str, Sequence[BlockId]]) -> list[str]:
        owners: dict[int, list[str]] = {}
        for owner, block_ids in [*self._held.items(), *running.items()]:
            for block_id in block_ids:
                owners.setdefault(block_id, []).append(owner)
        problems: list[str] = []
        for block in self._pool.blocks:
            known = owners.get(block.block_id, [])
            if not block.is_null and block.ref_cnt != len(known):
                names = ", ".join(known) or "nobody"
                problems.append(
                    f"block {block.block_id} has {block.ref_cnt} references, known: {names}"
                )
        return problems

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

    def _check_index(self) -> list[str]:
        index = self._pool.cached_block_hash_to_block
        problems: list[str] = []
        hashes = set()
        for block in self._pool.blocks:
            if block.block_hash is None:
                continue
            hashes.add(block.block_hash)
            if not index.contain(block.block_hash, block.block_id):
                problems.append(f"block {block.block_id} has a hash that the index does not know")
            found = index.get_one_block(block.block_hash)
            if found is not None and found.block_hash != block.block_hash:
                problems.append(f"the index finds block {found.block_id} by another block's hash")
        for extra in self._pool.cached_block_hashes_by_block.values():
            hashes |= extra
        if len(hashes) != len(index):
            problems.append(f"the index has {len(index)} hashes, the blocks have {len(hashes)}")
        return problems

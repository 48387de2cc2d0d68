"""MemPool: the paper's memory, index and transfer API (its Table 1) over a pool of KV blocks.

    alloc_mem, free_mem              blocks with an owner, who may have a lease
    insert, match, delete            the index: tokens → blocks; active KV becomes historical KV
    swap_out, swap_in                HBM ⇄ DRAM: `swapping.py`, over this
    transfer, transfer_with_insert   into another instance's pool

The pool stays the only owner of block ids (`pools.py`): running requests, pins and reservations are
references in it, historical KV is what it has published and nobody refers to. MemPool adds owners,
so that each reference taken for MemServe has a name, can be dropped by it, and can be audited
(`owners.py`); and the index over HBM and DRAM (`core/radix`), which follows the pool: what the
engine publishes, evicts and resets by itself is in the index when the pool's call returns.

One block per prefix and medium: where the engine computes again what the index has, its new block
is retracted, and used by its own request alone. A block that leaves the index takes along what lies
below it, in the pool as well: nobody could find it any more. The engine publishes a block when it
schedules the tokens; whoever reads KV elsewhere waits for the step that writes it (`when_written`).

Collaborators: `transfer.py` moves KV between two pools; `engine_loop.py` and `connector.py` call
between and inside the engine's steps; `dram.py` holds the slots. All in one thread, without locks.
Imports no vLLM, and runs without it (docs/mempool.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from memserve.changes import AnyChange, Inserted
from memserve.core.radix import Cursor, Insertion, Locations, Match, RadixIndex
from memserve.core.tokens import Path, pack
from memserve.errors import OutOfBlocksError
from memserve.types import BlockId, Medium, Namespace, SlotId
from memserve.workers.owners import Owners
from memserve.workers.pools import BlockCounts, Peer, Pool, RunningRequest, SlotOwner

_NO_NAMESPACE = Namespace()
PRIVATE_SALT = "memserve/private\0"
"""Beginning of the cache salt under which KV serves one request alone (see `transfer.py`)."""


def is_private(namespace: Namespace) -> bool:
    """Whether KV under this namespace serves one request alone, and is nobody else's business."""
    return namespace.cache_salt is not None and namespace.cache_salt.startswith(PRIVATE_SALT)


class _Place(msgspec.Struct):
    num_blocks: int
    end: Cursor


class MemPool:
    """All of an instance's KV memory that is not in the hands of a running request."""

    def __init__(
        self,
        pool: Pool,
        block_size: int,
        *,
        reserve_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
        records_changes: bool = False,
    ) -> None:
        """`reserve_blocks` are never given to `alloc_mem`, so that a running request can go on.

        `clock`: seconds, for leases and the index. `records_changes`: keep what changes in the
        index for `take_changes`; private namespaces are left out.
        """
        self.block_size = block_size
        self.index = RadixIndex(
            block_size, clock, (lambda n: not is_private(n)) if records_changes else None
        )
        """For reading, and for `dram.py`; everybody else changes it by the calls below."""
        self._pool = pool
        self._reserve_blocks = reserve_blocks
        self._owners = Owners(clock)
        self._places: dict[str, _Place] = {}
        """Running request → its end in the index."""
        self._slots: SlotOwner | None = None
        self._is_allocating = False
        """Whether the pool's blocks are being taken for MemServe, not for the engine."""
        pool.observe(self)

    def attach_slots(self, slots: SlotOwner) -> None:
        """Tell it which slots the index gives up, and what is about to be lost."""
        self._slots = slots

    # ── memory ────────────────────────────────────────────────────────────────────────────────

    def alloc_mem(
        self, num_blocks: int, owner: str, *, lease_s: float | None = None
    ) -> list[BlockId]:
        """Blocks without contents, evicting the oldest history. Raises: OutOfBlocksError.

        `lease_s`: all that the owner holds is due then (see `expired`); None leaves that as it is.
        """
        self.require_available(num_blocks)
        self._is_allocating = True
        block_ids = self._pool.take(num_blocks)
        self._is_allocating = False
        self._owners.hold(owner, block_ids)
        if lease_s is not None:
            self._owners.lease(owner, lease_s)
        return block_ids

    def require_available(self, num_blocks: int) -> None:
        """Raises: OutOfBlocksError if `alloc_mem` would for so many. Does not mutate."""
        available = max(0, self._pool.num_available - self._reserve_blocks)
        if num_blocks > available:
            raise OutOfBlocksError(
                f"{num_blocks} blocks asked for, {available} of {self.num_blocks} available"
            )

    def free_mem(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of the owner to each block.

        Raises: KeyError if it has none; ValueError in quarantine.
        """
        self._owners.remove(owner, block_ids)
        self._pool.release(block_ids)

    def free_all(self, owner: str) -> int:
        """Drop all references of the owner, who may be unknown; returns how many they were.

        Raises: ValueError in quarantine.
        """
        block_ids = self._owners.remove_all(owner)
        self._pool.release(block_ids)
        return len(block_ids)

    def pin(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each block: neither evicted nor reused until it is dropped."""
        self._pool.share(block_ids)
        self._owners.hold(owner, block_ids)

    def unpin(self, owner: str) -> int:
        """The same as `free_all`: pinned blocks that are indexed become history."""
        return self.free_all(owner)

    def hand_over(self, owner: str, to: str) -> None:
        """Give all references of one owner to another one; a lease ends. Raises: ValueError."""
        self._owners.hand_over(owner, to)

    # ── leases ────────────────────────────────────────────────────────────────────────────────

    def renew(self, owner: str, lease_s: float) -> None:
        """What the owner holds is due in so many seconds from now."""
        self._owners.lease(owner, lease_s)

    def expired(self) -> list[str]:
        """Owners whose lease is over: free, renew or quarantine them."""
        return self._owners.due()

    def next_expiry(self) -> float | None:
        """When the next lease is over, by the clock; None: there is none."""
        return self._owners.next_due()

    def quarantine(self, owner: str) -> None:
        """Refuse to free what the owner holds until `end_lease`: a link may be writing it."""
        self._owners.quarantine(owner)

    def end_lease(self, owner: str) -> None:
        """No link writes for this owner any more: it holds its blocks without a deadline."""
        self._owners.end_lease(owner)

    def is_quarantined(self, owner: str) -> bool:
        """Whether its blocks are kept until `end_lease`."""
        return self._owners.is_quarantined(owner)

    # ── index ─────────────────────────────────────────────────────────────────────────────────

    def path(self, token_ids: Sequence[int], namespace: Namespace = _NO_NAMESPACE) -> Path:
        """The key of these tokens, for the calls that end in `_path`. Packed once, used often.

        An empty salt is none, as in vLLM.
        """
        if namespace.cache_salt == "":
            namespace = Namespace(None, namespace.lora_name)
        return Path(token_ids, self.block_size, namespace)

    def match(
        self,
        token_ids: Sequence[int],
        namespace: Namespace = _NO_NAMESPACE,
    ) -> list[BlockId]:
        """The blocks of the longest prefix that is in HBM. Does not mutate: pin to keep them."""
        return self.match_path(self.path(token_ids, namespace))

    def match_path(self, path: Path) -> list[BlockId]:
        """As `match`. What DRAM holds beyond it: `find`."""
        return self.index.match(path).hbm_prefix()

    def when_written(self, block_ids: Sequence[BlockId]) -> Callable[[], bool]:
        """Tells, whenever it is asked, whether KV is in all of these, which are indexed now: the
        engine's present step may still be computing it. Does not mutate: pin to keep them."""
        return self._pool.when_written(block_ids)

    def find(self, path: Path) -> Match:
        """The longest prefix in any medium, and where each block is. Does not mutate."""
        return self.index.match(path)

    def insert(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[BlockId],
        owner: str,
        namespace: Namespace = _NO_NAMESPACE,
    ) -> list[BlockId]:
        """Index the full blocks of these tokens, whose KV the owner's `block_ids` hold.

        The owner keeps its references, but where an equal block was indexed meanwhile it gets a
        reference to that one, and its own block is freed. Returns the blocks it now holds.
        Raises: ValueError unless there is one block for each full block of the tokens, if one is
        indexed for other tokens, and in quarantine; KeyError if the owner does not hold them.
        """
        return self.insert_path(self.path(token_ids, namespace), block_ids, owner)

    def insert_path(self, path: Path, block_ids: Sequence[BlockId], owner: str) -> list[BlockId]:
        """As `insert`."""
        if len(block_ids) != path.num_blocks:
            raise ValueError(f"{len(block_ids)} blocks for a prefix of {path.num_blocks}")
        self._owners.require_free(owner)
        self._owners.require(owner, block_ids)
        held = list(block_ids)
        for index, place in self.index.insert(path, held).duplicates:
            held[index] = BlockId(place)
        replaced = {own: other for own, other in zip(block_ids, held, strict=True) if own != other}
        self._pool.share(list(replaced.values()))
        self._owners.replace(owner, replaced)
        self._pool.release(list(replaced))
        self._pool.publish(path, held)
        return held

    def delete(
        self,
        token_ids: Sequence[int],
        namespace: Namespace = _NO_NAMESPACE,
    ) -> int:
        """Forget the KV of these tokens, and of all that continues them, in every medium.

        Returns how many blocks left the index. Blocks in use stay with their users.
        """
        return self.delete_path(self.path(token_ids, namespace))

    def delete_path(self, path: Path) -> int:
        """As `delete`."""
        before = self.index.num_blocks
        self._give_up(self.index.delete(path))
        return before - self.index.num_blocks

    def reset(self) -> int:
        """Forget all history that nobody holds; returns how many blocks left the index."""
        before = self.index.num_blocks
        # DRAM first: what lies in both media must not stay for the slot's sake.
        self._give_up(self.index.evict(self.index.num_in(Medium.DRAM), Medium.DRAM))
        history = list(self._pool.history())
        self._pool.retract(history)
        self.on_evicted(history)
        return before - self.index.num_blocks

    def drop_slots(self, slot_ids: Sequence[SlotId]) -> None:
        """Forget what lies in these DRAM slots; what HBM does not hold either, with all below."""
        lost = self.index.drop(slot_ids, Medium.DRAM)
        lost.add(Medium.DRAM, list(slot_ids))
        self._give_up(lost)

    def evict_slots(self, num_slots: int, idle_s: float = 0.0) -> None:
        """Forget what was in DRAM for longest (`idle_s` at least): up to so many slots, or more
        where others lie below."""
        self._give_up(self.index.evict(num_slots, Medium.DRAM, idle_s))

    def history(self) -> Iterator[BlockId]:
        """Historical HBM blocks, the next to be evicted first. Nothing may change meanwhile."""
        return self._pool.history()

    def take_changes(self) -> list[AnyChange]:
        """What changed in the index since the last call, in order. Mutates."""
        return self.index.take_changes()

    def snapshot(self) -> Iterator[Inserted]:
        """The whole index as changes, parents before children; nothing may change meanwhile."""
        return self.index.snapshot()

    def request_ended(self, request_id: str) -> None:
        """The engine's request fills no more blocks."""
        self._places.pop(request_id, None)

    # ── transfers (without a cluster; workers: `transfer.py`) ─────────────────────────────────

    def transfer(
        self, peer: Peer, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]
    ) -> int:
        """Copy blocks into blocks that the peer has allocated; returns the bytes written.

        The caller holds the sources. Raises: TransferError.
        """
        return peer.write(source_ids, target_ids)

    def transfer_with_insert(
        self,
        peer: Peer,
        token_ids: Sequence[int],
        block_ids: Sequence[BlockId],
        namespace: Namespace = _NO_NAMESPACE,
    ) -> int:
        """Give the peer the KV of these tokens' full blocks, which `block_ids` hold here.

        Only what the peer lacks is written; then it has all of it as history. Returns how many
        blocks were written. The caller holds the sources. Raises: see `Peer`.
        """
        return peer.write_with_insert(token_ids, block_ids, namespace)

    # ── PoolObserver ──────────────────────────────────────────────────────────────────────────

    def on_cached(self, request: RunningRequest, first_block: int, end_block: int) -> None:
        """See `PoolObserver`. Costs O(new blocks), save where the request's place was lost."""
        own_ids = request.block_ids(first_block, end_block)
        insertion = self._extend(request, first_block, end_block, own_ids)
        if insertion is None:
            first_block, own_ids = 0, request.block_ids(0, end_block)
            path = self.path(request.token_ids(0, end_block), request.namespace)
            insertion = self.index.insert(path, own_ids)
            request.publish(end_block)
        if insertion.end is not None:
            self._places[request.id] = _Place(end_block, insertion.end)
        if copies := [own_ids[index - first_block] for index, _ in insertion.duplicates]:
            self._pool.retract(copies)

    def on_taken(self, block_ids: Sequence[BlockId]) -> None:
        """See `PoolObserver`."""
        if self._slots is not None:
            self._slots.save(block_ids, for_engine=not self._is_allocating)
        self.on_evicted(block_ids)

    def on_evicted(self, block_ids: Sequence[BlockId]) -> None:
        """See `PoolObserver`."""
        self._give_up(self.index.drop(block_ids, Medium.HBM))

    def on_reset(self) -> None:
        """See `PoolObserver`."""
        self._give_up(self.index.clear())

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    @property
    def num_blocks(self) -> int:
        """All HBM blocks."""
        return self._pool.num_blocks

    @property
    def max_alloc(self) -> int:
        """Blocks that `alloc_mem` gives at most, if nobody refers to any."""
        return self.num_blocks - self._reserve_blocks

    @property
    def num_available(self) -> int:
        """HBM blocks that nobody refers to, with history or without."""
        return self._pool.num_available

    def stats(self) -> BlockCounts:
        """Does not mutate."""
        return self._pool.counts()

    def held(self, owner: str) -> list[BlockId]:
        """The blocks that the owner refers to, in order (a new list)."""
        return self._owners.held(owner)

    def holds(self, owner: str) -> bool:
        """Whether the owner refers to any block."""
        return owner in self._owners

    def holders(self) -> list[str]:
        """Each owner and how much it holds; empty when MemServe holds nothing."""
        return [f"{owner}: {len(block_ids)} blocks" for owner, block_ids in self._owners]

    def reconcile(self) -> list[str]:
        """Where the index and the pool disagree about HBM, as text. Walks over all blocks."""
        published = self._pool.published()
        block_ids = map(BlockId, range(self.num_blocks + 1))  # vLLM's null block is number 0
        indexed = {b for b in block_ids if self.index.contains(b, Medium.HBM)}
        problems = [
            f"block {b} is published, but not in the index" for b in sorted(published - indexed)
        ]
        problems += [
            f"block {b} is in the index, but not published" for b in sorted(indexed - published)
        ]
        try:
            self.index.check_integrity()
        except AssertionError as error:
            problems.append(f"the index: {error}")
        return problems

    def check_integrity(self, running_block_ids: Mapping[str, Sequence[BlockId]]) -> list[str]:
        """What is wrong with the accounting, as text; empty when each block has its owners."""
        owners: dict[BlockId, list[str]] = {}
        for owner, block_ids in [*self._owners, *running_block_ids.items()]:
            for block_id in block_ids:
                owners.setdefault(block_id, []).append(owner)
        return [*self._pool.check(owners), *self.reconcile()]

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _extend(
        self, request: RunningRequest, first_block: int, end_block: int, own_ids: list[BlockId]
    ) -> Insertion | None:
        """Index these blocks behind those before them; None: those are not in the index."""
        place = self._places.get(request.id)
        if place is not None and place.num_blocks == first_block:
            with contextlib.suppress(LookupError):  # it was evicted: the request had a copy
                packed = pack(request.token_ids(first_block, end_block))
                return self.index.append(place.end, packed, own_ids)
        with contextlib.suppress(LookupError):
            path = self.path(request.token_ids(0, end_block), request.namespace)
            return self.index.insert(path, own_ids, first_block)
        return None

    def _give_up(self, lost: Locations) -> None:
        """The index does not know these places any more: nobody shall find them."""
        self._pool.retract(lost.hbm)
        if self._slots is not None and lost.dram:
            self._slots.free_slots(lost.dram)

"""MemPool: the paper's memory, index and transfer API (its Table 1) over a pool of KV blocks.

    alloc_mem, free_mem           blocks with an owner, who may have a lease
    insert, match, delete         the index: tokens → blocks; active KV becomes historical KV
    swap_out, swap_in             HBM ⇄ DRAM
    transfer, transfer_with_insert   into another instance's pool

The pool stays the only owner of block ids (`pools.py`): running requests, pins and reservations are
references in it, historical KV is what it has published and nobody refers to. MemPool adds owners,
so that each reference taken for MemServe has a name, can be dropped by it, and can be audited
(`owners.py`); and the index over HBM and DRAM (`core/radix.py`), which follows the pool: what the
engine publishes, evicts and resets by itself is in the index when the pool's call returns.

One block per prefix and medium: where the engine computes again what the index has, its new block is
retracted, and used by its own request alone. A block that leaves the index takes along what lies
below it, in the pool as well: nobody could find it any more.

Collaborators: `transfer.py` moves KV between two pools; `engine_loop.py` and `connector.py` call
between and inside the engine's steps; `dram.py` holds the slots. All in one thread, without locks.
Imports no vLLM, and runs without it (docs/mempool.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from memserve.changes import AnyChange, Inserted
from memserve.core.radix import Cursor, Match, RadixIndex
from memserve.core.tokens import Path
from memserve.types import BlockId, Namespace, SlotId
from memserve.workers.owners import Owners
from memserve.workers.pools import BlockCounts, Pool, RunningRequest

PRIVATE_SALT = "memserve/private\0"
"""Beginning of the cache salt under which KV serves one request alone (see `transfer.py`)."""


class SlotOwner(Protocol):
    """Who has the memory of the DRAM medium."""

    def free_slots(self, slot_ids: Sequence[SlotId]) -> None:
        """The index does not know these slots any more."""
        ...


def is_private(namespace: Namespace) -> bool:
    """Whether KV under this namespace serves one request alone, and is nobody else's business."""
    return namespace.cache_salt is not None and namespace.cache_salt.startswith(PRIVATE_SALT)


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

        `clock`: seconds, for leases and the index. `records_changes`: keep what changes in the index
        for `take_changes`; private namespaces are left out.
        """
        self.block_size = block_size
        self.index = RadixIndex(
            block_size, clock, (lambda n: not is_private(n)) if records_changes else None
        )
        """For reading, and for `dram.py`; everybody else changes it by the calls below."""
        self._pool = pool
        self._reserve_blocks = reserve_blocks
        self._owners = Owners(clock)
        self._cursors: dict[str, Cursor] = {}
        """Running request → its place in the index."""
        self._slots: SlotOwner | None = None
        pool.observe(self)

    def attach_slots(self, slots: SlotOwner) -> None:
        """Tell it which slots the index gives up."""
        self._slots = slots

    # ── memory ────────────────────────────────────────────────────────────────────────────────

    def alloc_mem(
        self, num_blocks: int, owner: str, *, lease_s: float | None = None
    ) -> list[BlockId]:
        """Blocks without contents, evicting the oldest history. Raises: OutOfBlocksError.

        `lease_s`: all that the owner holds is due then (see `expired`); None leaves that as it is.
        """
        raise NotImplementedError

    def free_mem(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of the owner to each block.

        Raises: KeyError if it has none; ValueError in quarantine.
        """
        raise NotImplementedError

    def free_all(self, owner: str) -> int:
        """Drop all references of the owner, who may be unknown; returns how many they were.

        Raises: ValueError in quarantine.
        """
        raise NotImplementedError

    def pin(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each block: neither evicted nor reused until it is dropped."""
        raise NotImplementedError

    def unpin(self, owner: str) -> int:
        """The same as `free_all`: pinned blocks that are indexed become history."""
        raise NotImplementedError

    def hand_over(self, owner: str, to: str) -> None:
        """Give all references of one owner to another one; a lease ends. Raises: ValueError."""
        raise NotImplementedError

    # ── leases ────────────────────────────────────────────────────────────────────────────────

    def renew(self, owner: str, lease_s: float) -> None:
        """What the owner holds is due in so many seconds from now."""
        raise NotImplementedError

    def expired(self) -> list[str]:
        """Owners whose lease is over: free, renew or quarantine them."""
        raise NotImplementedError

    def next_expiry(self) -> float | None:
        """When the next lease is over, by the clock; None: there is none."""
        raise NotImplementedError

    def quarantine(self, owner: str) -> None:
        """Refuse to free what the owner holds until `end_lease`: a link may be writing it."""
        raise NotImplementedError

    def end_lease(self, owner: str) -> None:
        """No link writes for this owner any more: it holds its blocks without a deadline."""
        raise NotImplementedError

    # ── index ─────────────────────────────────────────────────────────────────────────────────

    def path(self, token_ids: Sequence[int], namespace: Namespace = Namespace()) -> Path:  # noqa: B008
        """The key of these tokens, for the calls that end in `_path`. Packed once, used often."""
        return Path(token_ids, self.block_size, namespace)

    def match(
        self,
        token_ids: Sequence[int],
        namespace: Namespace = Namespace(),  # noqa: B008
    ) -> list[BlockId]:
        """The HBM blocks of the longest prefix that is in HBM. Does not mutate: pin to keep them."""
        return self.match_path(self.path(token_ids, namespace))

    def match_path(self, path: Path) -> list[BlockId]:
        """As `match`. What DRAM holds beyond it: `find`."""
        return self.index.match(path).hbm_prefix()

    def find(self, path: Path) -> Match:
        """The longest prefix in any medium, and where each block is. Does not mutate."""
        return self.index.match(path)

    def insert(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[BlockId],
        owner: str,
        namespace: Namespace = Namespace(),  # noqa: B008
    ) -> list[BlockId]:
        """Index the full blocks of these tokens, whose KV the owner's `block_ids` hold.

        The owner keeps its references, but where an equal block was indexed meanwhile it gets a
        reference to that one, and its own block is freed. Returns the blocks it now holds.
        Raises: ValueError unless there is one block for each full block of the tokens; KeyError if
        the owner does not hold them.
        """
        return self.insert_path(self.path(token_ids, namespace), block_ids, owner)

    def insert_path(self, path: Path, block_ids: Sequence[BlockId], owner: str) -> list[BlockId]:
        """As `insert`."""
        raise NotImplementedError

    def delete(
        self,
        token_ids: Sequence[int],
        namespace: Namespace = Namespace(),  # noqa: B008
    ) -> int:
        """Forget the KV of these tokens, and of all that continues them, in every medium.

        Returns how many blocks left the index. Blocks in use stay with their users.
        """
        return self.delete_path(self.path(token_ids, namespace))

    def delete_path(self, path: Path) -> int:
        """As `delete`."""
        raise NotImplementedError

    def reset(self) -> int:
        """Forget all history that nobody holds; returns how many blocks left the index."""
        raise NotImplementedError

    def history(self) -> Iterator[BlockId]:
        """HBM blocks that hold history, the next to be evicted first. Nothing may change meanwhile."""
        raise NotImplementedError

    def take_changes(self) -> list[AnyChange]:
        """What changed in the index since the last call, in order. Mutates."""
        raise NotImplementedError

    def snapshot(self) -> Iterator[Inserted]:
        """The whole index as changes, parents before children; nothing may change meanwhile."""
        raise NotImplementedError

    def request_ended(self, request_id: str) -> None:
        """The engine's request fills no more blocks."""
        raise NotImplementedError

    # ── PoolObserver ──────────────────────────────────────────────────────────────────────────

    def on_cached(self, request: RunningRequest, first_block: int, end_block: int) -> None:
        raise NotImplementedError

    def on_evicted(self, block_ids: Sequence[BlockId]) -> None:
        raise NotImplementedError

    def on_reset(self) -> None:
        raise NotImplementedError

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    @property
    def num_blocks(self) -> int:
        """All HBM blocks."""
        return self._pool.num_blocks

    def stats(self) -> BlockCounts:
        """Does not mutate."""
        return self._pool.counts()

    def held(self, owner: str) -> list[BlockId]:
        """The blocks that the owner refers to, in order (a new list)."""
        raise NotImplementedError

    def holds(self, owner: str) -> bool:
        """Whether the owner refers to any block."""
        raise NotImplementedError

    def holders(self) -> list[str]:
        """Each owner and how much it holds; empty when MemServe holds nothing."""
        raise NotImplementedError

    def reconcile(self) -> list[str]:
        """Where the index and the pool disagree about HBM, as text. Walks over all blocks."""
        raise NotImplementedError

    def check_integrity(self, running_block_ids: Mapping[str, Sequence[BlockId]]) -> list[str]:
        """What is wrong with the accounting, as text; empty when each block has its owners."""
        raise NotImplementedError

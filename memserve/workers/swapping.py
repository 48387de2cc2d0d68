"""swap_out and swap_in: history between the engine's pool and the DRAM tier (the paper's Table 1).

Swapping out copies and leaves: the engine evicts the block when it needs it, and from then on the
index finds it in DRAM alone. So nothing of the engine's is ever in the way of a copy, and nothing
is pinned for one: a block that changes hands while it is read is remembered, and its copy is thrown
away. To have the copies ready before the engine evicts, the oldest history is backed up as soon as
free blocks and backed-up ones are fewer than a margin.

What is taken before that is saved on the spot, before its new user can write. A prefill may save
all that it evicts, since computing its blocks takes much longer than copying as many. Who computes
nothing (a decoding request that takes a block, a reservation, a swap-in) may save only so much
between two polls that no step becomes long.

Swapping in takes blocks of the pool, copies, and inserts: what follows is a plain prefix hit. The
owner holds all blocks of the path from the beginning of the copy on, in HBM already or not.

DRAM is kept free of what HBM holds safely: when slots are needed, those whose blocks were swapped
in go first, then the ends of prompts that were not asked for longest.

Collaborators: `mempool.py` (blocks, owners, index), `dram.py` (slots, copies), `swap_queue.py`
(who waits for what). One thread, between the engine's steps or while it waits inside one.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec
import numpy as np

from memserve.core.radix import ABSENT, Cursor, Match
from memserve.core.swap import SwapLimits
from memserve.core.tokens import TOKEN_BYTES, Path
from memserve.errors import OutOfBlocksError, TransferError
from memserve.types import BlockId, Medium, SlotId
from memserve.workers.copies import CopyEnd, Pace
from memserve.workers.dram import DramTier
from memserve.workers.mempool import MemPool

logger = logging.getLogger(__name__)

_SCAN_INTERVAL_S = 0.01
_SCAN_SHARE = 0.05
"""Of the thread's time, that looking for old history may take."""
_CHECKED_AT_ONCE = 256
"""Candidates that one poll looks up, at a microsecond each."""
_MAX_OUTS = 2
"""Batches that back up at a time: one in flight, and the next."""
_EXPIRE_SHARE = 0.1
"""Of the time to live: how often to look for what is older."""


class SwapStats(msgspec.Struct, frozen=True):
    """Slots now, and blocks since the start."""

    slots: int
    used_slots: int
    swapped_out: int
    swapped_in: int


class SwapEnd(msgspec.Struct, frozen=True):
    """A `swap_in` is over: the path is in HBM, held by the owner; or, with an error, nothing is."""

    owner: str
    error: str | None


class _Out(msgspec.Struct, frozen=True):
    keys: dict[BlockId, int | None]
    """What the index called the blocks when their copy began."""
    slot_ids: list[SlotId]
    spoiled: set[BlockId] = msgspec.field(default_factory=set)
    """Taken since then: they may hold anything."""


class _In(msgspec.Struct, frozen=True):
    path: Path
    block_ids: list[BlockId]
    """For all blocks of the path."""
    slot_ids: list[SlotId]
    reference: Cursor
    """Keeps the index from choosing the slots for eviction."""


class Swapper:
    """Both directions, for one instance."""

    def __init__(
        self,
        mempool: MemPool,
        tier: DramTier,
        limits: SwapLimits,
        clock: Callable[[], float],
        *,
        batch_blocks: int,
    ) -> None:
        """`batch_blocks`: backed up by one copy, and saved between two polls for those who do not
        compute what they take."""
        self._mempool = mempool
        self._index = mempool.index
        self._tier = tier
        self._limits = limits
        self._clock = clock
        self._batch_blocks = batch_blocks
        self._num_savable = batch_blocks
        """Until the next poll, for those who do not compute what they take."""
        self._outs: dict[str, _Out] = {}
        self._ins: dict[str, _In] = {}
        self._num_outs = 0
        self._candidates: deque[BlockId] = deque()
        """Old history, in DRAM or not."""
        self._is_clean = False
        """Whether none of the latest candidates had to be copied, so far."""
        self._next_scan = 0.0
        self._settled_at: tuple[int, int, int] | None = None
        """What the pool looked like when nothing was left to back up."""
        self._next_expiry = clock() + limits.ttl_s * _EXPIRE_SHARE
        self._returned: dict[SlotId, None] = {}
        """Slots whose blocks were swapped in, the latest last; some may have left HBM since."""
        self._swapped_out = 0
        self._swapped_in = 0
        mempool.attach_slots(self)

    # ── the paper's calls ─────────────────────────────────────────────────────────────────────

    def swap_out(self, num_blocks: int) -> int:
        """Begin to copy up to so many blocks of the oldest history that DRAM does not hold.

        They stay in HBM until the engine needs their memory. Returns how many there are; fewer if
        the tier has no room for more.
        """
        missing = filter(self._is_unsafe, self._mempool.history())
        return self._begin_out(list(islice(missing, num_blocks)))

    def swap_in(self, owner: str, path: Path) -> int:
        """Begin to bring what DRAM holds of the path into HBM; `poll` says when that is done.

        The owner, who holds nothing yet, holds the whole known part of the path from now on.
        Returns: how many blocks are copied; 0 if HBM has them all, then nothing is held and nothing
        will be said. Raises: OutOfBlocksError (then nothing is held).
        """
        match = self._mempool.find(path)
        is_missing = match.hbm == ABSENT
        num_missing = num_in_dram_only(match)
        if not num_missing:
            return 0
        known = _first_blocks(path, match.num_blocks)
        # Before there are blocks for it: what they held may want room in DRAM.
        reference = self._index.acquire(known)
        self._mempool.pin(owner, match.hbm[~is_missing].tolist())
        try:
            new_ids = self._mempool.alloc_mem(num_missing, owner)
        except OutOfBlocksError:
            self._mempool.unpin(owner)
            self._index.release(reference)
            raise
        block_ids = match.hbm.copy()
        block_ids[is_missing] = new_ids
        slot_ids = match.dram[is_missing].tolist()
        self._ins[owner] = _In(known, block_ids.tolist(), slot_ids, reference)
        self._tier.copy_in(owner, slot_ids, new_ids)
        return num_missing

    def cancel(self, owner: str) -> None:
        """End the owner's `swap_in` soon: with an error, if it has not ended."""
        self._tier.cancel(owner)

    # ── between the engine's steps ────────────────────────────────────────────────────────────

    def poll(self, pace: Pace = Pace.FREE) -> list[SwapEnd]:
        """Let copies go on for a bounded time, and back up what is about to be evicted."""
        self._num_savable = self._batch_blocks
        self._back_up()
        ended: list[SwapEnd] = []
        for end in self._tier.poll(pace):
            if end.owner in self._outs:
                self._end_out(self._outs.pop(end.owner), end)
            else:
                ended.append(self._end_in(self._ins.pop(end.owner), end))
        return ended

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do now."""
        return self._tier.is_active or bool(self._candidates)

    def next_deadline(self) -> float | None:
        """When to call `poll`, though it is not active; by the clock."""
        return self._next_expiry if self._is_settled else min(self._next_scan, self._next_expiry)

    def is_coming(self, path: Path) -> bool:
        """Whether another `swap_in` is bringing blocks of this path. Does not mutate."""
        slot_ids = self._mempool.find(path).dram.tolist()
        return any(not set(slot_ids).isdisjoint(swap.slot_ids) for swap in self._ins.values())

    def close(self) -> None:
        """Wait for the copies, and drop what is held for them."""
        self._tier.close()
        for owner in self._ins:
            self._mempool.free_all(owner)
        self._ins.clear()
        self._outs.clear()

    # ── SlotOwner ─────────────────────────────────────────────────────────────────────────────

    def save(self, block_ids: Sequence[BlockId], *, for_engine: bool) -> None:
        """See `SlotOwner`. Of what is too much, the ends of prompts are lost."""
        for swap in self._outs.values():
            swap.spoiled.update(swap.keys.keys() & set(block_ids))
        unsafe = sorted(filter(self._is_only_in_hbm, block_ids), key=self._depth)
        # The engine takes one block at a time for a decoding request, a prompt's all at once.
        is_computed = for_engine and len(block_ids) > 1
        if not is_computed:
            unsafe = unsafe[: self._num_savable]
            self._num_savable -= len(unsafe)
        unsafe = self._with_room(unsafe)
        if not unsafe:
            return
        try:
            slot_ids = self._tier.save(unsafe, for_engine=for_engine)
        except TransferError as error:
            logger.warning("%d blocks could not be saved in DRAM: %s", len(unsafe), error)
            return
        self._hold_copies(unsafe, slot_ids)

    def free_slots(self, slot_ids: Sequence[SlotId]) -> None:
        """See `SlotOwner`. A block that is forgotten while it comes in must not come back."""
        self._tier.free(slot_ids)
        for slot_id in slot_ids:
            self._returned.pop(slot_id, None)
        for owner, swap in self._ins.items():
            if not set(swap.slot_ids).isdisjoint(slot_ids):
                self._tier.cancel(owner)

    # ── accounting ────────────────────────────────────────────────────────────────────────────

    def stats(self) -> SwapStats:
        """Does not mutate."""
        return SwapStats(
            slots=self._tier.num_slots,
            used_slots=self._tier.num_used,
            swapped_out=self._swapped_out,
            swapped_in=self._swapped_in,
        )

    def check_integrity(self) -> list[str]:
        """Where slots, index and copies disagree, as text. Does not mutate."""
        problems = self._tier.check_integrity()
        held = self._tier.held()
        if (known := self._index.num_in(Medium.DRAM)) != len(held):
            problems.append(f"the index knows {known} DRAM slots, {len(held)} hold a block")
        lost = [slot for slot in held if not self._index.contains(slot, Medium.DRAM)]
        problems += [
            f"DRAM slot {slot} holds a block that the index does not know" for slot in lost
        ]
        for owner, swap in self._ins.items():
            if sorted(self._mempool.held(owner)) != sorted(swap.block_ids):
                problems.append(f"{owner} does not hold the blocks that are copied for it")
        return problems

    # ── out ───────────────────────────────────────────────────────────────────────────────────

    def _back_up(self) -> None:
        self._expire()
        if len(self._outs) >= _MAX_OUTS or self._is_settled:
            return
        if not self._candidates and self._clock() >= self._next_scan:
            self._scan()
        batch: list[BlockId] = []
        for _ in range(min(len(self._candidates), _CHECKED_AT_ONCE)):
            block_id = self._candidates.popleft()
            if self._is_unsafe(block_id):
                batch.append(block_id)
                if len(batch) == self._batch_blocks:
                    break
        if batch and not self._begin_out(batch):
            self._settle()  # no slot can be had until something changes
        self._is_clean = self._is_clean and not batch
        if self._is_clean and not self._candidates:
            self._settle()

    def _settle(self) -> None:
        self._candidates.clear()
        self._is_clean = False
        self._settled_at = self._state()

    def _scan(self) -> None:
        """Find the history that the margin needs."""
        begun = self._clock()
        margin = self._limits.margin_blocks
        if self._mempool.num_available - self._index.num_in(Medium.HBM) < margin:
            # That many are free at least; to count them costs more.
            free = self._mempool.stats().free
            oldest = islice(self._mempool.history(), max(0, margin - free))
            # The engine evicts ends first, but a prompt that loses its beginning is lost whole: if
            # a burst overtakes the copies, it is to take ends.
            self._candidates.extend(sorted(oldest, key=self._depth))
        self._is_clean = True
        ended = self._clock()
        self._next_scan = ended + max(_SCAN_INTERVAL_S, (ended - begun) / _SCAN_SHARE)

    def _is_unsafe(self, block_id: BlockId) -> bool:
        """Whether a copy of it is worth making."""
        return self._is_only_in_hbm(block_id) and not self._is_leaving(block_id)

    def _is_only_in_hbm(self, block_id: BlockId) -> bool:
        is_known = self._index.contains(block_id, Medium.HBM)
        return is_known and self._index.slot_of(block_id) is None

    def _depth(self, block_id: BlockId) -> int:
        return self._index.depth_of(block_id, Medium.HBM)

    def _is_leaving(self, block_id: BlockId) -> bool:
        return any(block_id in swap.keys for swap in self._outs.values())

    def _state(self) -> tuple[int, int, int]:
        """Changes whenever history comes or goes."""
        index = self._index
        available = self._mempool.num_available
        return available, index.num_in(Medium.HBM), index.num_in(Medium.DRAM)

    @property
    def _is_settled(self) -> bool:
        return self._settled_at == self._state()

    def _begin_out(self, block_ids: list[BlockId]) -> int:
        """Returns how many of them are being copied."""
        block_ids = self._with_room(block_ids)
        if not block_ids:
            return 0
        self._num_outs += 1
        owner = f"swap-out {self._num_outs}"
        slot_ids = self._tier.copy_out(owner, block_ids)
        keys = {block_id: self._index.key_of(block_id, Medium.HBM) for block_id in block_ids}
        self._outs[owner] = _Out(keys, slot_ids)
        return len(block_ids)

    def _end_out(self, swap: _Out, end: CopyEnd) -> None:
        if end.error is not None:
            return  # the tier has its slots back
        good: list[tuple[BlockId, SlotId]] = []
        useless: list[SlotId] = []
        for (block_id, key), slot_id in zip(swap.keys.items(), swap.slot_ids, strict=True):
            is_same = self._index.key_of(block_id, Medium.HBM) == key
            if is_same and block_id not in swap.spoiled:
                good.append((block_id, slot_id))
            else:
                useless.append(slot_id)
        self._tier.free(useless)
        self._hold_copies([block for block, _ in good], [slot for _, slot in good])

    def _hold_copies(self, block_ids: list[BlockId], slot_ids: list[SlotId]) -> None:
        """These slots have what the index knows in these blocks."""
        refused = self._index.copied(Medium.HBM, block_ids, Medium.DRAM, slot_ids)
        self._swapped_out += len(slot_ids) - len(refused)
        self._tier.free([SlotId(slot) for slot in refused])

    def _with_room(self, block_ids: list[BlockId]) -> list[BlockId]:
        """The first of these blocks: as many as DRAM can have slots for now."""
        first = block_ids[: self._make_room(len(block_ids))]
        # To make room, blocks may have been forgotten.
        return list(filter(self._is_only_in_hbm, first))

    def _make_room(self, num_slots: int) -> int:
        """Let as many slots as possible be free, up to so many; returns how many are."""
        missing = num_slots - self._tier.num_free
        doubled: list[SlotId] = []
        while len(doubled) < missing and self._returned:
            slot_id, _ = self._returned.popitem()
            if self._index.block_of(slot_id) is not None:
                doubled.append(slot_id)
        if doubled:
            self._mempool.drop_slots(doubled)
        if (missing := num_slots - self._tier.num_free) > 0:
            self._mempool.evict_slots(missing)
        return min(num_slots, self._tier.num_free)

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_expiry:
            return
        self._next_expiry = now + self._limits.ttl_s * _EXPIRE_SHARE
        self._mempool.evict_slots(self._tier.num_slots, idle_s=self._limits.ttl_s)

    # ── in ────────────────────────────────────────────────────────────────────────────────────

    def _end_in(self, swap: _In, end: CopyEnd) -> SwapEnd:
        self._index.release(swap.reference)
        if end.error is not None:
            self._mempool.free_all(end.owner)
            return SwapEnd(end.owner, end.error)
        self._mempool.insert_path(swap.path, swap.block_ids, end.owner)
        self._swapped_in += len(swap.slot_ids)
        for slot_id in swap.slot_ids:
            if self._index.contains(slot_id, Medium.DRAM):
                self._returned.pop(slot_id, None)
                self._returned[slot_id] = None
        return SwapEnd(end.owner, None)


def num_in_dram_only(match: Match) -> int:
    """How many blocks of a match a `swap_in` would copy."""
    return int(np.count_nonzero(match.hbm == ABSENT))


def _first_blocks(path: Path, num_blocks: int) -> Path:
    size = num_blocks * path.block_size * TOKEN_BYTES
    return Path(path.packed[:size], path.block_size, path.namespace)

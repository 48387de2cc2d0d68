"""The DRAM tier: host memory for KV blocks that the engine's pool has no room for, by slots.

A slot holds one block with all its pages together, whatever the engine's layout is; where an
instance has several ranks, each of them holds its part, in the slot of the same number::

    free ──copy_out──▶ being written ──done──▶ held ──free──▶ free
      ▲                     │                   │ copy_in: read, by any number of copies at once
      └─────── failed ──────┘                   └ freed while it is read: when the last one ends

A copy goes by the name of its owner, and ends exactly once, in a `CopyEnd` that `poll` returns.

What the slots hold, and who keeps the blocks in place during a copy, is `swapping.py`'s matter.
Collaborators: `copies.py` (or, for several ranks, `rank_copies.py`) has the memory and copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from memserve.errors import OutOfBlocksError, TransferError
from memserve.types import BlockId, SlotId
from memserve.workers.copies import Copies, CopyEnd, Pace


class _Use(msgspec.Struct, frozen=True):
    """Of slots by a copy."""

    written: list[SlotId] = []
    """Nobody else may see them."""
    read: list[SlotId] = []


class DramTier:
    """The slots of one instance and all copies from and to them. One thread, no locks."""

    def __init__(self, copies: Copies) -> None:
        """Takes over the copies, and their memory."""
        self._copies = copies
        self.num_slots = copies.num_slots
        self._uses: dict[str, _Use] = {}
        self._free = [SlotId(slot) for slot in reversed(range(self.num_slots))]
        self._held: set[SlotId] = set()
        self._written: set[SlotId] = set()
        self._readers: Counter[SlotId] = Counter()
        self._doomed: set[SlotId] = set()
        """Freed, but still being read."""

    # ── copies ────────────────────────────────────────────────────────────────────────────────

    def copy_out(self, owner: str, block_ids: Sequence[BlockId]) -> list[SlotId]:
        """Begin to copy blocks into free slots, which are the caller's when it ends well.

        If it ends with an error, they are free again.
        Raises: OutOfBlocksError; ValueError if the owner has a copy already.
        """
        self._require_new(owner)
        slot_ids = self._take_slots(len(block_ids))
        self._written.update(slot_ids)
        self._uses[owner] = _Use(written=slot_ids)
        self._copies.copy_out(owner, block_ids, slot_ids)
        return list(slot_ids)

    def copy_in(self, owner: str, slot_ids: Sequence[SlotId], block_ids: Sequence[BlockId]) -> None:
        """Begin to copy held slots into blocks, which must have no other user until it ends.

        The slots may be freed meanwhile; they keep their contents until then.
        Raises: ValueError if the owner has a copy already, or a slot is not held.
        """
        self._require_new(owner)
        if unknown := set(slot_ids) - self._held:
            raise ValueError(f"the DRAM slots {sorted(unknown)} hold nothing")
        self._readers.update(slot_ids)
        self._uses[owner] = _Use(read=list(slot_ids))
        self._copies.copy_in(owner, slot_ids, block_ids)

    def save(self, block_ids: Sequence[BlockId], *, for_engine: bool) -> list[SlotId]:
        """Copy blocks that somebody is about to write into free slots, which are held at once.

        `for_engine`: the engine writes them, by work that it queues from now on, and that waits for
        the copy. Else this call does. Raises: OutOfBlocksError, TransferError (nothing is held).
        """
        slot_ids = self._take_slots(len(block_ids))
        try:
            self._copies.save(block_ids, slot_ids, for_engine=for_engine)
        except TransferError:
            self._free += slot_ids
            raise
        self._held.update(slot_ids)
        return slot_ids

    def cancel(self, owner: str) -> None:
        """End the owner's copy soon, with an error; its `CopyEnd` says when. Unknown: ignored."""
        if owner in self._uses:
            self._copies.cancel(owner)

    def poll(self, pace: Pace = Pace.FREE) -> list[CopyEnd]:
        """Let the copies go on for a bounded time; those that have ended since the last call."""
        ended = self._copies.poll(pace)
        for end in ended:
            self._end(self._uses.pop(end.owner), is_good=end.error is None)
        return ended

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do."""
        return bool(self._uses)

    # ── slots ─────────────────────────────────────────────────────────────────────────────────

    @property
    def num_free(self) -> int:
        """Slots that a `copy_out` can have now."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Slots that hold a block, are being written, or are still being read."""
        return self.num_slots - len(self._free)

    def free(self, slot_ids: Sequence[SlotId]) -> None:
        """Give up held slots. Raises: ValueError for a slot that is not held."""
        if (unknown := set(slot_ids) - self._held) or len(set(slot_ids)) != len(slot_ids):
            raise ValueError(f"the DRAM slots {sorted(unknown) or list(slot_ids)} are not all held")
        self._held.difference_update(slot_ids)
        for slot_id in slot_ids:
            if self._readers[slot_id]:
                self._doomed.add(slot_id)
            else:
                self._free.append(slot_id)

    def held(self) -> set[SlotId]:
        """The slots that hold a block for the caller (a new set)."""
        return set(self._held)

    def check_integrity(self) -> list[str]:
        """What is wrong with the slots' accounting, as text. Does not mutate."""
        problems: list[str] = []
        states = [*self._free, *self._held, *self._written, *self._doomed]
        if sorted(states) != list(range(self.num_slots)):
            twice = [slot for slot, count in Counter(states).items() if count > 1]
            lost = set(range(self.num_slots)).difference(states)
            problems.append(f"DRAM slots in two states: {twice}; in none: {sorted(lost)}")
        written = {slot for use in self._uses.values() for slot in use.written}
        if written != self._written:
            problems.append(f"no copy fills the DRAM slots {sorted(self._written ^ written)}")
        readers = Counter(slot for use in self._uses.values() for slot in use.read)
        if readers != +self._readers:
            problems.append(f"DRAM slots are read {dict(readers)}, counted {dict(self._readers)}")
        if idle := self._doomed - set(readers):
            problems.append(f"nobody reads the DRAM slots {sorted(idle)}, which are not free")
        return problems

    def close(self) -> None:
        """Wait until nothing is in flight, and give the memory back. No `CopyEnd`s follow."""
        self._copies.close()
        self._uses.clear()

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _require_new(self, owner: str) -> None:
        if owner in self._uses:
            raise ValueError(f"{owner} has a copy under way")

    def _take_slots(self, count: int) -> list[SlotId]:
        if count > len(self._free):
            raise OutOfBlocksError(
                f"{count} DRAM slots asked for, {len(self._free)} of {self.num_slots} free"
            )
        return [self._free.pop() for _ in range(count)]

    def _end(self, use: _Use, *, is_good: bool) -> None:
        self._written.difference_update(use.written)
        if is_good:
            self._held.update(use.written)
        else:
            self._free += use.written
        self._readers.subtract(use.read)
        for slot_id in use.read:
            if not self._readers[slot_id]:
                del self._readers[slot_id]
                if slot_id in self._doomed:
                    self._doomed.remove(slot_id)
                    self._free.append(slot_id)

"""What MemPool stands on: a pool that owns block ids, an owner of slots, peers; and a plain pool.

A pool counts references. A block without any is free, or history if it is published: still there
for whoever asks for its tokens, until its memory is needed. Which tokens a block holds, the pool
does not know: `mempool.py` keeps the index, and pools report what happens to published blocks.

Collaborators: `mempool.py` calls; `engine_pool.py` is the other pool, over vLLM's; `dram.py` owns
slots; `peers.py` has a peer. `PlainPool` needs no engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

import msgspec

from memserve.core.tokens import Path
from memserve.types import BlockId, Namespace, SlotId


class BlockCounts(msgspec.Struct, frozen=True):
    """Where the blocks are: free + historical + active = total."""

    total: int
    free: int
    """Hold nothing."""
    historical: int
    """Published, and nobody refers to them: can be evicted."""
    active: int
    """Somebody refers to them."""


class RunningRequest(Protocol):
    """A request of the pool's own user (the engine), whose blocks fill up as it goes on."""

    @property
    def id(self) -> str:
        """Unique while it runs."""
        ...

    @property
    def namespace(self) -> Namespace: ...

    def token_ids(self, first_block: int, end_block: int) -> list[int]:
        """The tokens in these of its blocks."""
        ...

    def block_ids(self, first_block: int, end_block: int) -> list[BlockId]:
        """Where those lie."""
        ...

    def publish(self, end_block: int) -> None:
        """Publish those of its first blocks that are not."""
        ...


class PoolObserver(Protocol):
    """Who has to know what happens to published blocks."""

    def on_cached(self, request: RunningRequest, first_block: int, end_block: int) -> None:
        """These blocks of a running request are full, and were published."""
        ...

    def on_taken(self, block_ids: Sequence[BlockId]) -> None:
        """These blocks have a new user, who has written nothing yet: what they held is evicted."""
        ...

    def on_evicted(self, block_ids: Sequence[BlockId]) -> None:
        """These blocks are, or may be, published no more; unknown ones are to be ignored."""
        ...

    def on_reset(self) -> None:
        """No block is published any more: what they held is not valid for anybody."""
        ...


class Pool(Protocol):
    """Blocks and their references."""

    @property
    def num_blocks(self) -> int:
        """All that can be taken."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that nobody refers to, with history or without."""
        ...

    def observe(self, observer: PoolObserver) -> None:
        """Tell the observer, of which there is one, from now on."""
        ...

    def take(self, num_blocks: int) -> list[BlockId]:
        """So many blocks with one reference each: free ones first, then the oldest history.

        At most `num_available`. Tells the observer before anybody can write to them.
        """
        ...

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each."""
        ...

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """One reference fewer to each, the last one first: a prompt's tail is evicted first."""
        ...

    def publish(self, path: Path, block_ids: Sequence[BlockId]) -> None:
        """Make those blocks of the path that are not published yet findable for the engine.

        One block for each block of the path; somebody refers to each.
        """
        ...

    def retract(self, block_ids: Sequence[BlockId]) -> None:
        """No longer published (unknown ones are fine). The unreferenced of them are taken next."""
        ...

    def when_written(self, block_ids: Sequence[BlockId]) -> Callable[[], bool]:
        """Tells, whenever it is asked, whether KV is in all of these, which are published now.

        A block may be published while its KV is still being computed.
        """
        ...

    def counts(self) -> BlockCounts: ...

    def history(self) -> Iterator[BlockId]:
        """Published blocks that nobody refers to, the next to be evicted first.

        The pool must not change meanwhile.
        """
        ...

    def published(self) -> set[BlockId]:
        """All published blocks. Walks over all."""
        ...

    def check(self, owners: Mapping[BlockId, Sequence[str]]) -> list[str]:
        """What is wrong, as text. `owners`: all known references, by block. Walks over all."""
        ...


class SlotOwner(Protocol):
    """Who has the memory of the DRAM medium."""

    def save(self, block_ids: Sequence[BlockId], *, for_engine: bool) -> None:
        """The engine, or somebody else, has taken these blocks: keep what the index is to lose.

        They may be overwritten as soon as this returns; by the engine, as its next work.
        """
        ...

    def free_slots(self, slot_ids: Sequence[SlotId]) -> None:
        """The index does not know these slots any more."""
        ...


class Peer(Protocol):
    """Another instance's pool, as this one can fill it (`peers.py`). Blocking calls."""

    def write(self, source_ids: Sequence[BlockId], target_ids: Sequence[BlockId]) -> int:
        """Copy own blocks into the peer's; returns the bytes written. Raises: TransferError."""
        ...

    def write_with_insert(
        self, token_ids: Sequence[int], block_ids: Sequence[BlockId], namespace: Namespace
    ) -> int:
        """Have the peer allocate, write what it lacks, have it inserted; returns blocks written.

        Raises: OutOfBlocksError (the peer's), TransferError, ValueError. Nothing is left then.
        """
        ...


class PlainPool:
    """Blocks without an engine: a free list, reference counts, and history in order of age."""

    def __init__(self, num_blocks: int) -> None:
        """Blocks 0 to `num_blocks` - 1, all free. Raises: ValueError if there are none."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks: a pool needs at least one block, not {num_blocks}")
        self._references = [0] * num_blocks
        self._is_published = [False] * num_blocks
        self._free = [BlockId(b) for b in reversed(range(num_blocks))]
        """The next one last."""
        self._history: dict[BlockId, None] = {}
        """Published and unreferenced, by the time of their last release."""
        self._observer: PoolObserver | None = None

    @property
    def num_blocks(self) -> int:
        return len(self._references)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._history)

    def observe(self, observer: PoolObserver) -> None:
        self._observer = observer

    def take(self, num_blocks: int) -> list[BlockId]:
        evicted = list(islice(self._history, max(0, num_blocks - len(self._free))))
        first = len(self._free) - (num_blocks - len(evicted))
        taken = self._free[first:]
        del self._free[first:]
        taken += evicted
        for block_id in evicted:
            del self._history[block_id]
            self._is_published[block_id] = False
        for block_id in taken:
            self._references[block_id] = 1
        if evicted and self._observer is not None:
            self._observer.on_taken(evicted)
        return taken

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Raises: ValueError for a free block, which holds nothing (no reference is taken then)."""
        for block_id in block_ids:
            if not self._references[block_id] and block_id not in self._history:
                raise ValueError(f"block {block_id} is free: there is nothing to refer to")
        for block_id in block_ids:
            if not self._references[block_id]:
                del self._history[block_id]
            self._references[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        references = self._references
        for block_id in reversed(block_ids):
            references[block_id] -= 1
            if not references[block_id]:
                if self._is_published[block_id]:
                    self._history[block_id] = None
                else:
                    self._free.append(block_id)

    def publish(self, path: Path, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._is_published[block_id] = True

    def retract(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            self._is_published[block_id] = False
            if block_id in self._history:
                del self._history[block_id]
                self._free.append(block_id)

    def when_written(self, block_ids: Sequence[BlockId]) -> Callable[[], bool]:
        return _at_once

    def counts(self) -> BlockCounts:
        return BlockCounts(
            total=self.num_blocks,
            free=len(self._free),
            historical=len(self._history),
            active=self.num_blocks - self.num_available,
        )

    def history(self) -> Iterator[BlockId]:
        return iter(self._history)

    def published(self) -> set[BlockId]:
        return {BlockId(b) for b, is_published in enumerate(self._is_published) if is_published}

    def check(self, owners: Mapping[BlockId, Sequence[str]]) -> list[str]:
        problems = []
        free = Counter(self._free)
        for block_id, references in enumerate(self._references):
            known = owners.get(BlockId(block_id), ())
            if references != len(known):
                problems.append(count_problem(block_id, references, known))
            is_history = block_id in self._history
            places = (references > 0) + free[BlockId(block_id)] + is_history
            if places != 1 or is_history > self._is_published[block_id]:
                problems.append(
                    f"block {block_id} has {references} references, is free"
                    f" {free[BlockId(block_id)]} times, history: {is_history},"
                    f" published: {self._is_published[block_id]}"
                )
        return problems


def _at_once() -> bool:
    return True


def count_problem(block_id: int, references: int, known: Sequence[str]) -> str:
    """One line for the audit: the pool counts other references than those that are known."""
    names = ", ".join(known) or "nobody"
    return f"block {block_id} has {references} references, known: {names}"

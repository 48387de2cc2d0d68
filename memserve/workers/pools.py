"""Owners of block ids: what MemPool asks of one, and the one that is there without an engine.

A pool counts references. A block without any is free, or history if it is published: still there
for whoever asks for its tokens, until its memory is needed. Which tokens a block holds, the pool
does not know: `mempool.py` keeps the index, and pools report what happens to published blocks.

Collaborators: `mempool.py` calls; `engine_pool.py` is the other pool, over vLLM's. No engine here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from memserve.core.tokens import Path
from memserve.types import BlockId, Namespace


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

    def publish(self, is_wanted: Sequence[bool]) -> None:
        """Publish those of its first `len(is_wanted)` blocks that are wanted, and not yet."""
        ...


class PoolObserver(Protocol):
    """Who has to know what happens to published blocks."""

    def on_cached(self, request: RunningRequest, first_block: int, end_block: int) -> None:
        """These blocks of a running request are full, and were published."""
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

        At most `num_available`. Tells the observer what was evicted.
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
        """No longer published. Those that nobody refers to are taken next. Unknown ones are fine."""
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


class PlainPool:
    """Blocks without an engine: a free list, reference counts, and history by age."""

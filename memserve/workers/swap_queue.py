"""Requests that wait for blocks from DRAM before the engine sees them.

    bring ──nothing in DRAM, or computing is cheaper──────────────▶ then()
      └▶ waiting ──room──▶ being copied ──done──▶ present, then() ──scheduled──▶ gone
            └── deadline, no room, copy failed ──▶ then()   (the engine computes what is missing)

`then` is called exactly once, unless the request is dropped first. What was brought is held until
the engine has scheduled the request, or until the engine starves. Only some blocks are held so at a
time, the first request's whatever it needs: one that has to wait keeps its place.

Collaborators: `commands.py` asks and is called back; `swapping.py` copies.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from memserve.core.radix import Match
from memserve.core.swap import SwapDecision, SwapLimits
from memserve.core.tokens import Path
from memserve.errors import OutOfBlocksError
from memserve.types import Namespace
from memserve.workers.copies import Pace
from memserve.workers.mempool import MemPool
from memserve.workers.swapping import Swapper, SwapStats, num_in_dram_only


class _State(enum.Enum):
    WAITING = enum.auto()
    COPYING = enum.auto()
    PRESENT = enum.auto()


class _Guest(msgspec.Struct):
    path: Path
    then: Callable[[], None] | None
    """None: it was called, or must not be any more."""
    keeps: bool
    expires_at: float
    state: _State = _State.WAITING


def swap_owner(key: str) -> str:
    """Name in the pool of what is swapped in, until its request is scheduled."""
    return f"swap-in for {key}"


class Swaps(Protocol):
    """What the engine loop asks of swapping: `SwapQueue`, or `NoSwaps`. By key: a request's attempt
    or a transfer."""

    def bring(
        self,
        key: str,
        token_ids: Sequence[int],
        namespace: Namespace,
        then: Callable[[], None],
        *,
        keeps: bool,
        is_prompt: bool = True,
    ) -> None:
        """Call `then` when as much of these tokens' KV is in HBM as pays; at once, if it is now.

        `keeps`: hold the blocks until `scheduled`, else only while `then` runs. `is_prompt`: what
        is missing can be computed instead; else all that DRAM has is brought, if there is room.
        Raises: ValueError if the key is waiting.
        """
        ...

    def scheduled(self, key: str) -> None:
        """The request's own references hold its blocks now."""
        ...

    def drop(self, key: str) -> bool:
        """Let go of what is held for it. Returns whether it was waiting: `then` will not be called.

        Unknown keys are fine.
        """
        ...

    def relax(self) -> int:
        """Drop what is held for requests that are in the engine, when that starves.

        Returns how many blocks that were.
        """
        ...

    def poll(self, pace: Pace = Pace.FREE) -> None:
        """Let the swapper go on, and call `then` for whom it is time."""
        ...

    @property
    def is_active(self) -> bool:
        """Whether `poll` has something to do now."""
        ...

    def next_deadline(self) -> float | None:
        """When to call `poll` though it is not active, by the clock."""
        ...

    def stats(self) -> SwapStats: ...

    def check_integrity(self) -> list[str]:
        """As `Swapper.check_integrity`, and what is held without need. Does not mutate."""
        ...

    def close(self) -> None:
        """Wait for the copies, and drop everything. Nobody is called."""
        ...


class NoSwaps:
    """There is no DRAM tier: nobody waits."""

    is_active = False

    def bring(
        self,
        key: str,
        token_ids: Sequence[int],
        namespace: Namespace,
        then: Callable[[], None],
        *,
        keeps: bool,
        is_prompt: bool = True,
    ) -> None:
        then()

    def scheduled(self, key: str) -> None:
        pass

    def drop(self, key: str) -> bool:
        return False

    def relax(self) -> int:
        return 0

    def poll(self, pace: Pace = Pace.FREE) -> None:
        pass

    def next_deadline(self) -> float | None:
        return None

    def stats(self) -> SwapStats:
        return SwapStats(0, 0, 0, 0)

    def check_integrity(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


class SwapQueue:
    """`Swaps` over a swapper."""

    def __init__(
        self,
        mempool: MemPool,
        swapper: Swapper,
        decision: SwapDecision,
        limits: SwapLimits,
        clock: Callable[[], float],
    ) -> None:
        self._mempool = mempool
        self._swapper = swapper
        self._decision = decision
        self._limits = limits
        self._clock = clock
        self._guests: dict[str, _Guest] = {}
        """In the order in which they came."""

    def bring(
        self,
        key: str,
        token_ids: Sequence[int],
        namespace: Namespace,
        then: Callable[[], None],
        *,
        keeps: bool,
        is_prompt: bool = True,
    ) -> None:
        if self.is_waiting(key):
            raise ValueError(f"{key} waits for DRAM already")
        path = self._mempool.path(token_ids, namespace)
        # A key that is known and does not wait still has a copy that ends.
        if key in self._guests or not self._pays(path, len(token_ids), is_prompt=is_prompt):
            then()
            return
        expires_at = self._clock() + self._limits.deadline_s
        self._guests[key] = _Guest(path, then, keeps, expires_at)
        self._begin()

    def is_waiting(self, key: str) -> bool:
        """Whether `then` is still to be called for it."""
        guest = self._guests.get(key)
        return guest is not None and guest.then is not None

    def scheduled(self, key: str) -> None:
        self.drop(key)

    def drop(self, key: str) -> bool:
        guest = self._guests.get(key)
        if guest is None:
            return False
        was_waiting, guest.then = guest.then is not None, None
        if guest.state is _State.COPYING:
            self._swapper.cancel(swap_owner(key))  # its blocks are written until that has ended
        else:
            del self._guests[key]
            self._mempool.unpin(swap_owner(key))
        return was_waiting

    def relax(self) -> int:
        present = [key for key, guest in self._guests.items() if guest.state is _State.PRESENT]
        for key in present:
            del self._guests[key]
        return sum(self._mempool.unpin(swap_owner(key)) for key in present)

    def poll(self, pace: Pace = Pace.FREE) -> None:
        self._give_up()
        self._begin()  # before the swapper's turn: their copies go on in it
        ended = self._swapper.poll(pace)
        for end in ended:
            self._arrived(end.owner.removeprefix(swap_owner("")), end.error)
        if ended:
            self._begin()

    @property
    def is_active(self) -> bool:
        return self._swapper.is_active

    def next_deadline(self) -> float | None:
        times = [g.expires_at for g in self._guests.values() if g.then is not None]
        if (at := self._swapper.next_deadline()) is not None:
            times.append(at)
        return min(times, default=None)

    def close(self) -> None:
        self._swapper.close()
        for key in self._guests:
            self._mempool.unpin(swap_owner(key))
        self._guests.clear()

    def stats(self) -> SwapStats:
        return self._swapper.stats()

    def check_integrity(self) -> list[str]:
        problems = self._swapper.check_integrity()
        for key, guest in self._guests.items():
            if guest.state is _State.WAITING and self._mempool.holds(swap_owner(key)):
                problems.append(f"{swap_owner(key)} holds blocks before they are copied")
        return problems

    # ── helpers ───────────────────────────────────────────────────────────────────────────────

    def _pays(self, path: Path, num_tokens: int, *, is_prompt: bool) -> bool:
        match = self._mempool.find(path)
        missing = num_in_dram_only(match)
        cached_tokens = match.num_hbm_prefix * path.block_size
        if not missing or not is_prompt:
            return missing > 0
        return self._decision.pays(num_tokens, cached_tokens, missing)

    def _begin(self) -> None:
        """Start copies for those who wait, in order, as long as there is room."""
        for key, guest in list(self._guests.items()):
            if guest.state is not _State.WAITING or key not in self._guests:
                continue
            if self._swapper.is_coming(guest.path):
                continue  # another one brings what it needs, or a part of it
            if not self._has_room(self._mempool.find(guest.path)):
                return
            try:
                num_blocks = self._swapper.swap_in(swap_owner(key), guest.path)
            except OutOfBlocksError:
                if self._num_held():
                    return  # those who hold blocks now will let them go
                num_blocks = 0
            if num_blocks:
                guest.state = _State.COPYING
            else:
                self._leave(key)

    def _has_room(self, match: Match) -> bool:
        held = self._num_held()
        is_small = held + match.num_blocks <= self._limits.pinned_blocks
        return not held or is_small or not num_in_dram_only(match)

    def _num_held(self) -> int:
        return sum(len(self._mempool.held(swap_owner(key))) for key in self._guests)

    def _arrived(self, key: str, error: str | None) -> None:
        guest = self._guests[key]
        if error is not None or guest.then is None:
            self._mempool.unpin(swap_owner(key))
            self._leave(key)
            return
        guest.state = _State.PRESENT
        then, guest.then = guest.then, None
        then()
        if not guest.keeps:
            self.drop(key)

    def _give_up(self) -> None:
        """Who has waited too long goes on with what HBM holds."""
        now = self._clock()
        for key, guest in list(self._guests.items()):
            if guest.then is None or now < guest.expires_at:
                continue
            then = guest.then
            self.drop(key)
            then()

    def _leave(self, key: str) -> None:
        guest = self._guests.pop(key)
        if guest.then is not None:
            guest.then()

"""Who holds which blocks, and until when.

    hold ──▶ held ─┬─ release ──────────────────────────────────▶ gone
                   └─ lease runs out ─▶ due ─┬─ renew ─▶ held
                                             └─ quarantine ─▶ kept, whatever else is asked for,
                                                              until end_lease

An owner is a name: of a request, of a transfer, of a peer and its epoch. It holds references, so
one block may be there twice and with several owners. A lease is the deadline of all that an owner
holds; when it is over, nothing happens by itself: who gave it asks for `due`, and decides.
Quarantine is for blocks that a link may still be writing: they must not go to anybody else before
that is ruled out.

Collaborators: `mempool.py` alone, which takes and drops the references in the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from memserve.types import BlockId


class _Lease(msgspec.Struct):
    expires_at: float
    is_quarantined: bool = False


class Owners:
    """Owner → block ids, in the order in which they were taken, and its lease if it has one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds, monotonic."""
        self._clock = clock
        self._held: dict[str, list[BlockId]] = {}
        self._leases: dict[str, _Lease] = {}

    # ── references ────────────────────────────────────────────────────────────────────────────

    def hold(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """One more reference to each block."""
        if block_ids:
            self._held.setdefault(owner, []).extend(block_ids)

    def remove(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference to each block.

        Raises: KeyError if the owner does not hold them all (nothing is dropped then); ValueError
        in quarantine.
        """
        self.require_free(owner)
        held = self._held.get(owner, [])
        if held == block_ids:
            self.remove_all(owner)
            return
        self.require(owner, block_ids)
        excess = Counter(block_ids)
        kept = []
        for block_id in held:
            if excess[block_id] > 0:
                excess[block_id] -= 1
            else:
                kept.append(block_id)
        if kept:
            self._held[owner] = kept
        else:
            self.remove_all(owner)

    def remove_all(self, owner: str) -> list[BlockId]:
        """Drop all references and the lease; returns the blocks. Unknown owners hold none.

        Raises: ValueError in quarantine.
        """
        self.require_free(owner)
        self._leases.pop(owner, None)
        return self._held.pop(owner, [])

    def hand_over(self, owner: str, to: str) -> None:
        """All references of one owner become another one's; the lease ends. Raises: ValueError."""
        self.hold(to, self.remove_all(owner))

    def replace(self, owner: str, others: Mapping[BlockId, BlockId]) -> None:
        """One reference to each of these blocks becomes one to the other block."""
        if others:
            rest = dict(others)
            self._held[owner] = [rest.pop(b, b) for b in self._held.get(owner, [])]

    def held(self, owner: str) -> list[BlockId]:
        """Its blocks, in order (a new list)."""
        return list(self._held.get(owner, ()))

    def require(self, owner: str, block_ids: Sequence[BlockId]) -> None:
        """Raises: KeyError unless the owner holds all these."""
        held = self._held.get(owner, [])
        if held == block_ids:  # the usual case, and quick
            return
        if missing := Counter(block_ids) - Counter(held):
            raise KeyError(f"{owner} does not hold the blocks {sorted(missing)}")

    def __contains__(self, owner: str) -> bool:
        return owner in self._held

    def __iter__(self) -> Iterator[tuple[str, list[BlockId]]]:
        """Each owner and its blocks; not to be changed meanwhile."""
        return iter(self._held.items())

    # ── leases ────────────────────────────────────────────────────────────────────────────────

    def lease(self, owner: str, lease_s: float) -> None:
        """What the owner holds is due in so many seconds. A quarantine stays one."""
        lease = self._leases.setdefault(owner, _Lease(0.0))
        lease.expires_at = self._clock() + lease_s

    def due(self) -> list[str]:
        """Owners whose lease is over, in quarantine or not."""
        now = self._clock()
        return [owner for owner, lease in self._leases.items() if lease.expires_at <= now]

    def next_due(self) -> float | None:
        """When the next lease is over, by the clock."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def quarantine(self, owner: str) -> None:
        """Keep what the owner holds until `end_lease`. Raises: KeyError without a lease."""
        if owner not in self._leases:
            raise KeyError(f"{owner} has no lease")
        self._leases[owner].is_quarantined = True

    def end_lease(self, owner: str) -> None:
        """The lease is over, and the quarantine with it: the owner holds what it held before."""
        self._leases.pop(owner, None)

    def is_quarantined(self, owner: str) -> bool:
        """Whether what it holds may not be dropped."""
        lease = self._leases.get(owner)
        return lease is not None and lease.is_quarantined

    def require_free(self, owner: str) -> None:
        """Raises: ValueError if the owner is in quarantine."""
        if self.is_quarantined(owner):
            raise ValueError(
                f"{owner} is in quarantine, since a link may be writing its blocks: end_lease first"
            )

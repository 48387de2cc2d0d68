"""Reservations that wait for room, first come first served, each for as long as it may.

    Allocate ─▶ waiting ─┬─ room ─▶ reserved
                         ├─ `patience_s` ─▶ Refused
                         └─ Cancel ─▶ gone

Who waits holds nothing here. What it waits with lies at the sender, pinned, so a decode instance
whose memory is full slows its prefill instances down, and computes nothing twice. While the engine
itself starves for blocks nobody gets any: what is freed would never be enough for it.

Collaborator: `transfer.py`, which reserves and refuses.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memserve.core.tokens import Path
from memserve.messages import Allocate
from memserve.types import TransferId
from memserve.workers.mempool import MemPool


class _Waiting(msgspec.Struct, frozen=True):
    command: Allocate
    path: Path


class RoomQueue:
    """Those that wait for room in one instance's pool."""

    def __init__(self, mempool: MemPool, reserve: Callable[[Allocate, Path], str | None]) -> None:
        """`reserve` takes the blocks, or says why it cannot."""
        self._mempool = mempool
        self._reserve = reserve
        self._waiting: dict[TransferId, _Waiting] = {}
        """In the order in which they came."""
        self._is_held_back = False

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._waiting

    def add(self, command: Allocate, path: Path) -> None:
        """The end of the queue; those that have room are served at once, unless held back."""
        self._waiting[command.transfer_id] = _Waiting(command, path)
        self._mempool.renew(_owner(command.transfer_id), command.patience_s)
        self._reserve_first()

    def hold_back(self) -> None:
        """Until the next `serve`, all wait."""
        self._is_held_back = True

    def serve(self, *, engine_starves: bool) -> None:
        """Reserve for the first ones, as far as there is room; while the engine starves for nobody,
        nor for those that are added until the next call."""
        self._is_held_back = engine_starves
        self._reserve_first()

    def _reserve_first(self) -> None:
        while self._waiting and not self._is_held_back:
            first = next(iter(self._waiting.values()))
            if self._reserve(first.command, first.path) is not None:
                return
            self.remove(first.command.transfer_id)

    def remove(self, transfer_id: TransferId) -> None:
        """It waits no more; unknown ones are fine."""
        if self._waiting.pop(transfer_id, None) is not None:
            self._mempool.end_lease(_owner(transfer_id))

    def take_overdue(self) -> list[Allocate]:
        """Whose patience has ended: they wait no more."""
        due = set(self._mempool.expired())
        overdue = [w.command for id, w in self._waiting.items() if _owner(id) in due]
        for command in overdue:
            self.remove(command.transfer_id)
        return overdue

    def clear(self) -> None:
        """Nobody waits any more."""
        for transfer_id in list(self._waiting):
            self.remove(transfer_id)


def _owner(transfer_id: TransferId) -> str:
    """Name in the pool of whose lease ends the waiting; it holds no block."""
    return f"{transfer_id}, waiting"

"""Keeps a `FollowingTree` true to one life of an instance, through all that can get lost.

Collaborators: `caches.py` passes the instance's `CacheChanged` and `CacheSnapshot` events on, and
sends `SendSnapshot` whenever a call returns True; `following_tree.py` takes the changes.

::

    FOLLOWING ──gap, contradiction, refresh due──▶ WAITING ──first part──▶ LOADING
        ▲                                             ▲                       │ │
        │                                             └──anything in between──┘ │
        └────────────────────────────────────────────────────────last part──────┘

What was known stays in the tree while WAITING: an old hint is better than none. A snapshot is taken
over part by part, so that the event loop is never held for a whole index. It is asked for again if
it does not come, and once in `refresh_s` even if nothing was missed.

While FOLLOWING, `check` compares the tree with a snapshot. The snapshot says after which changes it
was made, so this is exact under traffic, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from memserve.changes import Inserted
from memserve.core.following_tree import FollowingTree
from memserve.core.tokens import TOKEN_BYTES
from memserve.errors import ProtocolError
from memserve.messages import CacheChanged, CacheSnapshot
from memserve.types import InstanceId, Medium

_ANSWER_S = 10.0
"""How long an instance may take to answer with a snapshot."""


class FollowerState(enum.Enum):
    """See the module's picture."""

    FOLLOWING = "following"
    WAITING = "waiting"
    LOADING = "loading"


class CacheFollower:
    """One life of an instance. All methods mutate; True as an answer: send a `SendSnapshot`."""

    def __init__(
        self, tree: FollowingTree, instance: InstanceId, refresh_s: float, now: float
    ) -> None:
        self.state = FollowerState.FOLLOWING
        self.num_resyncs = 0
        """Snapshots asked for because changes were missed or made no sense."""
        self._tree = tree
        self._instance = instance
        self._refresh_s = refresh_s
        self._refreshed_at = now
        self._asked_at = now
        self._next_sequence = 1
        self._checks: list[Callable[[list[str]], None]] = []
        self._checked: list[Inserted] = []
        """The parts so far of a snapshot that the tree is compared with."""

    def changed(self, event: CacheChanged, now: float) -> bool:
        """The instance's index has changed."""
        if self.state is FollowerState.WAITING or (
            self.state is FollowerState.FOLLOWING and event.sequence < self._next_sequence
        ):
            return False
        if self.state is FollowerState.LOADING or event.sequence > self._next_sequence:
            return self._resync(now)
        try:
            self._tree.apply(self._instance, event.changes, now)
        except ProtocolError:
            self._tree.drop(self._instance)
            return self._resync(now)
        self._next_sequence += 1
        return False

    def snapshot(self, event: CacheSnapshot, now: float) -> bool:
        """A part of the whole index."""
        if self.state is FollowerState.FOLLOWING:
            return self._compare(event, now)
        if self.state is FollowerState.WAITING:
            self._tree.drop(self._instance)
            self.state = FollowerState.LOADING
        try:
            self._tree.apply(self._instance, event.changes, now)
        except ProtocolError:
            self._tree.drop(self._instance)
            return self._resync(now)
        if event.is_last:
            self.state = FollowerState.FOLLOWING
            self._next_sequence = event.sequence + 1
            self._refreshed_at = now
            return bool(self._checks) and self._ask(now)
        return False

    def tick(self, now: float) -> bool:
        """See what is overdue."""
        if self.state is FollowerState.FOLLOWING and not self._checks:
            if now - self._refreshed_at < self._refresh_s:
                return False
            self.state = FollowerState.WAITING
            return self._ask(now)
        if now - self._asked_at < _ANSWER_S:
            return False
        return self._resync(now)

    def check(self, done: Callable[[list[str]], None], now: float) -> bool:
        """Compare the tree with the instance; `done` gets a line for each kind of difference."""
        self._checks.append(done)
        return self.state is FollowerState.FOLLOWING and len(self._checks) == 1 and self._ask(now)

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _ask(self, now: float) -> bool:
        self._asked_at = now
        return True

    def _resync(self, now: float) -> bool:
        self.state = FollowerState.WAITING
        self.num_resyncs += 1
        self._checked.clear()
        return self._ask(now)

    def _compare(self, event: CacheSnapshot, now: float) -> bool:
        if not self._checks:  # an answer that came after it was asked for again
            return False
        if event.sequence != self._next_sequence - 1:
            return self._resync(now)
        self._checked += event.changes
        if not event.is_last:
            return False
        problems = self._differences()
        self._checked.clear()
        for done in self._checks:
            done(problems)
        self._checks.clear()
        return bool(problems) and self._resync(now)

    def _differences(self) -> list[str]:
        truth = _index(self._checked, self._tree.block_size)
        known = self._tree.index_of(self._instance)
        missing = [key for key in truth if key not in known]
        wrong = [key for key, block in known.items() if truth.get(key) != block]
        problems = []
        if missing and not self._tree.is_partial(self._instance):
            problems.append(f"the prompt tree lacks {len(missing)} blocks, first {min(missing)}")
        if wrong:
            problems.append(f"the prompt tree is wrong of {len(wrong)} blocks, first {min(wrong)}")
        return problems


def _index(changes: list[Inserted], block_size: int) -> dict[int, tuple[int | None, bytes, Medium]]:
    """As `FollowingTree.index_of`."""
    index: dict[int, tuple[int | None, bytes, Medium]] = {}
    block_bytes = block_size * TOKEN_BYTES
    for change in changes:
        before, key = change.parent, change.first_key
        for start in range(0, len(change.token_ids), block_bytes):
            index[key] = (before, change.token_ids[start : start + block_bytes], change.medium)
            before, key = key, key + 1
    return index

"""What the scheduler knows of every instance's cache, and how it comes to know it.

Collaborators: `scheduler.py` asks (`match`) and passes on what it hears; the trees and the
followers of the instances' changes are pure (`core/following_tree.py`, `core/guessing_tree.py`,
`core/cache_follower.py`). The paper: section 6.

`freshness = "events"`: the instances say what changes, and the tree knows. `"ttl"`, the paper's:
the lifecycles say what requests have left behind (`learn`), and entries expire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, TypeAlias

from memserve.core.cache_follower import CacheFollower
from memserve.core.following_tree import FollowingTree
from memserve.core.guessing_tree import GuessingTree
from memserve.core.tokens import Path
from memserve.core.tree_parts import Match
from memserve.core.vocabulary import Seat
from memserve.messages import AnyCommand, CacheChanged, CacheSnapshot, SendSnapshot
from memserve.types import InstanceId

logger = logging.getLogger(__name__)

Freshness: TypeAlias = Literal["events", "ttl"]


class Caches:
    """One tree for all instances, kept as fresh as the setting says."""

    def __init__(
        self,
        freshness: Freshness,
        block_size: int,
        instances: Iterable[InstanceId],
        *,
        max_blocks: int,
        ttl_s: float,
        send: Callable[[Seat, AnyCommand], None],
        clock: Callable[[], float],
    ) -> None:
        self._send = send
        self._clock = clock
        self._ttl_s = ttl_s
        self._followers: dict[InstanceId, tuple[Seat, CacheFollower]] = {}
        self._checks: dict[InstanceId, list[asyncio.Future[list[str]]]] = {}
        self._tree: FollowingTree | GuessingTree = (
            FollowingTree(block_size, instances, max_blocks)
            if freshness == "events"
            else GuessingTree(block_size, instances, max_blocks, ttl_s)
        )

    @property
    def is_guessing(self) -> bool:
        """Whether `learn` is of use."""
        return isinstance(self._tree, GuessingTree)

    def match(self, path: Path) -> Match:
        """How much of a prompt each instance holds."""
        match = self._tree.match(path)
        self._tree.use(match, self._clock())
        return match

    def learn(self, path: Path, num_tokens: int, instance: InstanceId) -> None:
        """A request has left this KV behind. A tree that follows events knows better."""
        if isinstance(self._tree, GuessingTree):
            num_blocks = num_tokens // self._tree.block_size
            self._tree.learn(path, num_blocks, instance, self._clock())

    def on_event(self, seat: Seat, event: CacheChanged | CacheSnapshot) -> None:
        """A living instance speaks of its cache."""
        follower = self._follower(seat)
        if follower is None:
            return
        before = follower.num_resyncs
        if isinstance(event, CacheChanged):
            asks = follower.changed(event, self._clock())
        else:
            asks = follower.snapshot(event, self._clock())
        if follower.num_resyncs != before:
            logger.warning("%s: changes of its cache were missed; asking for all of it", seat)
        if asks:
            self._ask(seat)

    def lost(self, instance: InstanceId) -> None:
        """This life of the instance is over."""
        self._followers.pop(instance, None)
        for check in self._checks.pop(instance, []):
            check.cancel()
        self._tree.drop(instance)

    def tick(self) -> None:
        """Let old entries go, and answers that are overdue be asked for again."""
        now = self._clock()
        self._tree.tidy(1000)
        if isinstance(self._tree, GuessingTree):
            self._tree.expire(now)
        for seat, follower in self._followers.values():
            if follower.tick(now):
                self._ask(seat)

    def check(self, seats: Iterable[Seat]) -> dict[InstanceId, asyncio.Future[list[str]]]:
        """Compare the tree with these instances' own indexes; a guess is not compared.

        Each future gets a line per kind of difference. It may stay pending if the instance does
        not answer, and is cancelled if it is lost. Time, when an answer comes: what the instance
        holds, in one go; for audits.
        """
        checks: dict[InstanceId, asyncio.Future[list[str]]] = {}
        for seat in seats:
            follower = self._follower(seat)
            if follower is None:
                continue
            check: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
            checks[seat.instance] = check
            self._checks.setdefault(seat.instance, []).append(check)
            if follower.check(partial(self._checked, seat.instance), self._clock()):
                self._ask(seat)
        return checks

    def _checked(self, instance: InstanceId, problems: list[str]) -> None:
        for check in self._checks.pop(instance, []):
            if not check.done():
                check.set_result(problems)

    def _ask(self, seat: Seat) -> None:
        self._send(seat, SendSnapshot(epoch=seat.epoch))

    def _follower(self, seat: Seat) -> CacheFollower | None:
        """Of this life; made when it is first heard of. None for a life that is over."""
        if not isinstance(self._tree, FollowingTree):
            return None
        known, follower = self._followers.get(seat.instance, (None, None))
        if known is not None and known.epoch > seat.epoch:
            return None
        if follower is None or known != seat:
            if known is not None:
                self.lost(seat.instance)
            follower = CacheFollower(self._tree, seat.instance, self._ttl_s, self._clock())
            self._followers[seat.instance] = (seat, follower)
        return follower

"""The scheduler's settings, from the configuration: for real instances and simulated ones alike."""

from __future__ import annotations

import msgspec

from memserve.caches import Freshness
from memserve.config import Config
from memserve.core.policies import PolicyName
from memserve.core.policy import Fetching, Split
from memserve.core.vocabulary import Limits
from memserve.types import Caching, InstanceId

_SILENT_BEATS = 5
_SILENCE_S = 5.0
"""Heartbeats that an instance may omit, and how long that is at least: machines and links have
pauses, and to move a request costs its prompt once more."""


class SchedulerSettings(msgspec.Struct, frozen=True):
    """The scheduler's part of the configuration."""

    caching: Caching
    max_attempts: int
    max_waiting: int
    wait_timeout_s: float
    max_running: int
    max_queued_s: float
    timeline_requests: int
    freshness: Freshness
    tree_ttl_s: float
    tree_max_blocks: int
    reservation_s: float
    room_wait_s: float
    policy: PolicyName
    split: Split
    fetching: Fetching
    link: str
    """The kind of the links between instances, as the cost model calls it."""
    silence_s: float = _SILENCE_S
    """As in `core/hearing.py`."""
    tp_of: dict[InstanceId, int] | None = None
    """Ranks of each instance; None: those that the cost model is for."""

    def limits(self, block_size: int) -> Limits:
        """What the lifecycles go by, when the block size is known."""
        return Limits(block_size, self.max_attempts, self.reservation_s, self.room_wait_s)


def scheduler_settings(config: Config, caching: Caching, link: str) -> SchedulerSettings:
    """`caching`: what is in force; `link`: the kind of the links between the instances."""
    scheduler = config.scheduler
    return SchedulerSettings(
        caching=caching,
        max_attempts=scheduler.max_attempts,
        max_waiting=scheduler.max_waiting,
        wait_timeout_s=scheduler.wait_timeout_s,
        max_running=scheduler.max_running,
        max_queued_s=scheduler.max_queued_s,
        timeline_requests=scheduler.timeline_requests,
        freshness=scheduler.freshness,
        tree_ttl_s=scheduler.tree_ttl_s,
        tree_max_blocks=scheduler.tree_max_blocks,
        reservation_s=config.transfer.reservation_s,
        room_wait_s=config.transfer.room_wait_s,
        policy=scheduler.policy,
        split=Split(scheduler.split),
        fetching=Fetching(scheduler.fetch),
        link=link,
        silence_s=max(_SILENT_BEATS * config.cluster.heartbeat_interval_s, _SILENCE_S),
    )

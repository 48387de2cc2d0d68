"""What the cluster looks like at one moment: the structs behind `/v1/status` and `memserve top`."""

from __future__ import annotations

import msgspec

from memserve.core.timeline import RequestTimeline, Step
from memserve.messages import PoolStats
from memserve.types import InstanceId, InstanceState, Role

__all__ = [
    "AuditReport",
    "Costs",
    "Counters",
    "InstanceStatus",
    "LinkStatus",
    "RequestTimeline",
    "Snapshot",
    "Step",
]


class InstanceStatus(msgspec.Struct, frozen=True):
    """One instance. `stats` is its last report; None until it is ready."""

    id: InstanceId
    role: Role
    state: InstanceState
    epoch: int
    pid: int | None
    restarts: int
    stats: PoolStats | None
    stats_age_s: float | None
    queued_tokens: int
    """Prompt tokens placed here and not yet computed, as the scheduler counts them."""
    running_requests: int
    """Requests placed here that have not ended, as the scheduler counts them."""
    error: str | None = None
    is_silent: bool = False
    """It gives no sign and may hang: others do its work until it is back."""

    @property
    def word(self) -> str:
        """The state for people."""
        return "silent" if self.is_silent else self.state.value


class LinkStatus(msgspec.Struct, frozen=True):
    """One direction between two instances."""

    source: InstanceId
    target: InstanceId
    kind: str
    transfers: int
    failures: int
    blocks: int
    size_bytes: int
    seconds: float
    """Time spent sending."""


class Counters(msgspec.Struct, frozen=True):
    """Since the start of the orchestrator."""

    submitted: int
    running: int
    waiting: int
    """Not placed yet: no instance of a needed role is ready and has room."""
    finished: int
    cancelled: int
    failed: int
    replaced: int
    """Placed again after an instance was lost."""
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


class Costs(msgspec.Struct, frozen=True):
    """What the scheduler's expectations come from (docs/cost_model.md)."""

    profile: str
    """The cost profile in use and where it comes from, in a line."""
    is_calibrated: bool
    """False: made from a data sheet, right within a factor of two."""
    reduce: str
    """Where the costs of all-reduces between an instance's GPUs come from."""
    error: float | None
    """Mean relative error over the prefills that it was calibrated with."""
    device_factor: float
    """What the device's part of observed prefills took, over what the profile says."""
    host_factor: float
    """The same of the host's part."""


class Snapshot(msgspec.Struct, frozen=True):
    """The whole cluster."""

    model: str
    mode: str
    caching: str
    device: str
    is_ready: bool
    uptime_s: float
    instances: list[InstanceStatus]
    links: list[LinkStatus]
    counters: Counters
    costs: Costs


class AuditReport(msgspec.Struct, frozen=True):
    """One instance's answer to an audit."""

    instance: InstanceId
    stats: PoolStats | None
    problems: list[str]
    holders: list[str]

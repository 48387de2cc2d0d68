"""What the front end needs of the rest of the orchestrator, as protocols.

`scheduler.py` implements `Scheduler`; `orchestrator.py` puts it together with the cluster's state
into a `StatusSource`. Tests implement both in process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from memserve.core.delivery import Delivery
from memserve.core.vocabulary import RequestSpec
from memserve.errors import MemServeError
from memserve.status import AuditReport, Snapshot
from memserve.types import RequestId


class OutputSink(Protocol):
    """Where the scheduler puts what the workers made."""

    def on_step(self, payload: bytes, deliveries: Mapping[RequestId, Delivery]) -> None:
        """One engine step's `EngineCoreOutputs`; requests without a delivery are to be ignored."""

    def on_error(self, request_id: RequestId, error: MemServeError) -> None:
        """The request has failed; nothing more comes for it."""


class Scheduler(Protocol):
    """Runs requests. Every method is synchronous and is called on the event loop."""

    def attach(self, sink: OutputSink) -> None:
        """Set where outputs go."""

    def submit(self, spec: RequestSpec) -> None:
        """Take a request. Raises: UnavailableError, RequestError."""

    def cancel(self, request_id: RequestId) -> None:
        """Free whatever is held for the request; ended and unknown ones are ignored."""

    def stop(self, request_id: RequestId) -> None:
        """The request is complete (a stop string); ended and unknown ones are ignored."""


class StatusSource(Protocol):
    """Answers questions about the cluster."""

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""

    def snapshot(self) -> Snapshot:
        """The cluster at this moment."""

    def timeline(self, request_id: RequestId) -> msgspec.Struct | None:
        """What happened to a request, as long as it is remembered."""

    async def audit(self) -> list[AuditReport]:
        """Every instance's own accounting of its pool."""

"""What happened to a request, and when: the answer to `GET /v1/requests/{id}`.

`scheduler.py` writes a `Timeline` per request, with its own clock; a `TimelineStore` keeps those of
the latest requests; `status.py` passes the finished form on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from memserve.types import InstanceId, RequestId

Number: TypeAlias = str | int | float
Detail: TypeAlias = dict[str, Number | list[dict[str, Number]]]
"""What there is to say of a step; a list has one entry per candidate, or the like."""


class Step(msgspec.Struct, frozen=True):
    """One line of a request's timeline."""

    name: str
    at_s: float
    """Seconds since the request was submitted."""
    instance: InstanceId | None = None
    detail: Detail = {}


class RequestTimeline(msgspec.Struct, frozen=True):
    """What happened to one request (`GET /v1/requests/{id}`)."""

    id: RequestId
    state: str
    """running, finished, cancelled or failed."""
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int | None
    steps: list[Step]


class Timeline:
    """One request's timeline while it is written. Times are the caller's clock, in seconds."""

    def __init__(self, request_id: RequestId, prompt_tokens: int, submitted_at: float) -> None:
        self.request_id = request_id
        self.cached_tokens: int | None = None
        """Prompt tokens that were found in a cache; None until that is known."""
        self._prompt_tokens = prompt_tokens
        self._submitted_at = submitted_at
        self._state = "running"
        self._generated_tokens = 0
        self._steps: list[Step] = []

    @property
    def is_over(self) -> bool:
        """Whether the client's stream has ended; KV may still be given back."""
        return self._state != "running"

    def note(
        self,
        name: str,
        now: float,
        instance: InstanceId | None = None,
        detail: Mapping[str, Number | list[dict[str, Number]]] | None = None,
    ) -> None:
        """Add a line."""
        self._steps.append(Step(name, now - self._submitted_at, instance, dict(detail or {})))

    def note_tokens(self, count: int, now: float, instance: InstanceId) -> None:
        """Count tokens that went to the client; only the first ones get a line."""
        if self._generated_tokens == 0:
            self.note("first token", now, instance)
        self._generated_tokens += count

    def end(self, state: str, now: float, error: str | None = None) -> None:
        """The client's stream has ended: finished, cancelled or failed. The first end counts."""
        if self.is_over:
            return
        self._state = state
        reason = {} if error is None else {"error": error}
        self.note(state, now, None, {"generated_tokens": self._generated_tokens, **reason})

    def snapshot(self) -> RequestTimeline:
        """The timeline so far (later lines do not show in it); details rounded to 10⁻⁶."""
        return RequestTimeline(
            id=self.request_id,
            state=self._state,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self.cached_tokens,
            steps=[
                msgspec.structs.replace(step, detail=_rounded(step.detail)) for step in self._steps
            ],
        )


def _rounded(value: Any) -> Any:
    """A detail as it is shown. Done for the few that somebody reads, not for all that are noted."""
    match value:
        case float():
            return round(value, 6)
        case dict():
            return {name: _rounded(part) for name, part in value.items()}
        case list():
            return [_rounded(part) for part in value]
    return value


class TimelineStore:
    """The timelines of the last `max_requests` requests; the oldest is forgotten first."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._timelines: dict[RequestId, Timeline] = {}

    def __len__(self) -> int:
        return len(self._timelines)

    def add(self, timeline: Timeline) -> None:
        """Remember a timeline; it may be written on afterwards."""
        self._timelines[timeline.request_id] = timeline
        while len(self._timelines) > self._max_requests:
            del self._timelines[next(iter(self._timelines))]

    def get(self, request_id: RequestId) -> RequestTimeline | None:
        """The request's timeline so far; None if it is unknown or forgotten."""
        timeline = self._timelines.get(request_id)
        return timeline.snapshot() if timeline is not None else None

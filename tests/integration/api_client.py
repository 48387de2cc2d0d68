"""The tests' own client of the HTTP API: token ids in and out, every call with a deadline.

Collaborators: `cluster_harness.Cluster` is what it talks to; `status.Snapshot` is decoded strictly,
so a change of the status's form shows up here.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from memserve.core.timeline import RequestTimeline
from memserve.status import AuditReport, Snapshot
from memserve.types import InstanceId, InstanceState
from tests.integration.cluster_harness import MODEL, Cluster

CALL_S = 120.0
"""Deadline of one call: what takes longer is a hang."""

T = TypeVar("T")


class ApiError(Exception):
    """The server answered with an error, before or in a stream."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        self.status = status
        self.error = error
        self.message = str(error.get("message", ""))
        super().__init__(f"{status}: {error}")


class StreamCut(Exception):
    """The connection ended without an end of the stream."""


class Completion(msgspec.Struct, frozen=True):
    """One finished completion."""

    token_ids: list[int]
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int


class AuditedSnapshot(Snapshot, frozen=True, kw_only=True):
    """`GET /v1/status?audit=true`."""

    audit: list[AuditReport]


async def until_async(
    condition: Callable[[], Awaitable[T]], what: str, deadline_s: float, every_s: float = 0.05
) -> T:
    """As `cluster_harness.until`, for conditions that await."""
    deadline = time.monotonic() + deadline_s
    while True:
        answer = await condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}")
        await asyncio.sleep(every_s)


class Client:
    """One connection pool to one cluster; an async context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(
            self._cluster.url, timeout=timeout, connector=connector
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    # ── generating ────────────────────────────────────────────────────────────────────────────

    async def complete(
        self, prompt: list[int], max_tokens: int, *, call_id: str | None = None, **extra: Any
    ) -> Completion:
        """A completion that is not streamed, greedy unless `extra` says otherwise."""
        body = await self.post("/v1/completions", _body(prompt, max_tokens, extra), call_id)
        choice = body["choices"][0]
        return Completion(
            token_ids=choice["token_ids"],
            finish_reason=choice["finish_reason"],
            prompt_tokens=body["usage"]["prompt_tokens"],
            cached_tokens=_cached(body["usage"]),
        )

    async def stream(
        self, prompt: list[int], max_tokens: int, *, call_id: str | None = None, **extra: Any
    ) -> Completion:
        """The same by way of a stream."""
        token_ids: list[int] = []
        finish_reason = None
        usage: dict[str, Any] = {}
        async for event in self.events(prompt, max_tokens, call_id=call_id, **extra):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
                finish_reason = choice["finish_reason"] or finish_reason
        return Completion(token_ids, finish_reason, usage["prompt_tokens"], _cached(usage))

    async def events(
        self, prompt: list[int], max_tokens: int, *, call_id: str | None = None, **extra: Any
    ) -> AsyncIterator[dict[str, Any]]:
        """A stream's events. Closing the iterator disconnects. Raises: ApiError, StreamCut."""
        body = _body(prompt, max_tokens, extra)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        headers = {"X-Request-Id": call_id} if call_id else {}
        async with self.session.post("/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                raise ApiError(response.status, await _error_of(response))
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ApiError(200, event["error"])
                yield event
        raise StreamCut("the stream ended without [DONE]")

    async def post(
        self, path: str, body: dict[str, Any], call_id: str | None = None
    ) -> dict[str, Any]:
        """POST JSON, get JSON. Raises: ApiError."""
        headers = {"X-Request-Id": call_id} if call_id else {}
        async with self.session.post(path, json=body, headers=headers) as response:
            if response.status != 200:
                raise ApiError(response.status, await _error_of(response))
            answer: dict[str, Any] = await response.json()
            return answer

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    async def status(self) -> Snapshot:
        async with self.session.get("/v1/status") as response:
            return msgspec.json.decode(await response.read(), type=Snapshot)

    async def audit(self) -> AuditedSnapshot:
        """The status, with every instance's accounting."""
        async with self.session.get("/v1/status", params={"audit": "true"}) as response:
            return msgspec.json.decode(await response.read(), type=AuditedSnapshot)

    async def timelines(self, call_id: str) -> list[RequestTimeline]:
        """Of all requests of one call."""
        async with self.session.get(f"/v1/requests/{call_id}") as response:
            if response.status != 200:
                raise ApiError(response.status, await _error_of(response))
            body = await response.read()
        raw = msgspec.json.decode(body)
        raw = raw.get("requests", raw) if isinstance(raw, dict) else raw
        return msgspec.convert(raw if isinstance(raw, list) else [raw], list[RequestTimeline])

    async def steps(self, call_id: str) -> list[str]:
        """Names of the steps of a call's timelines; empty while it is not known."""
        try:
            timelines = await self.timelines(call_id)
        except ApiError as error:
            if error.status != 404:
                raise
            return []
        return [step.name for timeline in timelines for step in timeline.steps]

    async def until_step(self, call_id: str, name: str, deadline_s: float = 60.0) -> None:
        """Wait until a request's timeline has a step of this name."""

        async def has_step() -> bool:
            return name in await self.steps(call_id)

        await until_async(has_step, f"step {name!r} of {call_id}", deadline_s, every_s=0.02)

    async def until_released(self, call_id: str, deadline_s: float = 30.0) -> None:
        """Wait until nobody holds anything for the call: what it leaves behind is history."""
        await self.until_step(call_id, "released", deadline_s)

    async def until_idle(self, deadline_s: float = 60.0) -> AuditedSnapshot:
        """Wait until every instance is ready, and nobody holds anything anywhere.

        Raises: AssertionError naming what is leaked, held, or owned twice.
        """
        latest = None

        async def is_idle() -> bool:
            nonlocal latest
            latest = await self.audit()
            for report in latest.audit:
                assert report.problems == [], report
            counters = latest.counters
            return counters.running == counters.waiting == 0 and all(
                instance.state is InstanceState.READY and _is_idle(instance.id, latest.audit)
                for instance in latest.instances
            )

        try:
            await until_async(is_idle, "all instances are idle", deadline_s, every_s=0.1)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {latest}") from None
        assert latest is not None
        return latest


def _is_idle(instance: InstanceId, reports: list[AuditReport]) -> bool:
    report = next((report for report in reports if report.instance == instance), None)
    if report is None or report.stats is None:
        return False
    stats = report.stats
    return report.holders == [] and stats.active_blocks == stats.running_requests == 0


def _body(prompt: list[int], max_tokens: int, extra: dict[str, Any]) -> dict[str, Any]:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body | extra


def _cached(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def _error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    body = await response.json(content_type=None)
    error: dict[str, Any] = body["error"]
    return error

"""Clients that leave, and calls that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from memserve.core.delivery import Delivery
from memserve.errors import InstanceLostError, OverloadedError, UnavailableError
from memserve.frontend import app
from memserve.frontend.app import build_app
from memserve.frontend.openai import Frontend
from memserve.messages import Abort
from tests.integration.frontend.harness import FakeCluster, Script
from tests.integration.frontend.serving import (
    COMPLETION,
    MARKS,
    MODEL,
    USER,
    Server,
    events_of,
    serve,
)

pytestmark = MARKS


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("pause_after", [0, 1, 2])
async def test_disconnect_frees_everything(
    server: Server, cluster: FakeCluster, path: str, stream: bool, n: int, pause_after: int
) -> None:
    """While P works, between P and D, and while D works."""
    cluster.play(*[Script([100, 200, 300, 400], pause_after=pause_after) for _ in range(n)])
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "stream": stream, "n": n}
    body |= {"messages": USER} if "chat" in path else {"prompt": "x"}
    call = asyncio.create_task(server.http.post(f"{server.url}{path}", json=body))
    await cluster.until(
        lambda: (
            len(cluster.requests) == n
            and all(len(r.lifecycle.generated) == pause_after for r in cluster.requests)
        )
    )
    if stream and pause_after:
        (await call).close()
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    await cluster.until(lambda: all(r.state == "cancelled" for r in cluster.requests))
    assert all(r.sent(Abort) for r in cluster.requests)


async def test_disconnect_with_several_prompts(server: Server, cluster: FakeCluster) -> None:
    cluster.play(*[Script([100, 200, 300], pause_after=1) for _ in range(3)])
    body = {"model": MODEL, "prompt": ["a", "b", "c"], "max_tokens": 3, "stream": True}
    response = await server.http.post(f"{server.url}/v1/completions", json=body)
    await response.content.readany()
    response.close()
    await cluster.until(lambda: [r.state for r in cluster.requests] == ["cancelled"] * 3)


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(
    server: Server,
    cluster: FakeCluster,
    frontend: Frontend,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    monkeypatch.setattr(frontend.client, "request_timeout_s", 0.05)
    cluster.play(Script([100, 200, 300], pause_after=2))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "stream": stream}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        if stream:
            *_, error, done = await events_of(response)
            assert done == "[DONE]"
        else:
            assert response.status == 504
            error = await response.json()
    assert error["error"]["code"] == 504
    assert error["error"]["type"] == "timeout_error"
    assert "0.05 s" in error["error"]["message"]
    assert cluster.requests[0].state == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_instance_lost(server: Server, cluster: FakeCluster, stream: bool, n: int) -> None:
    cluster.play(*[Script([100, 200, 300], pause_after=2) for _ in range(n)])
    body = {"model": MODEL, "messages": USER, "max_tokens": 3, "stream": stream, "n": n}
    call = asyncio.create_task(server.http.post(f"{server.url}/v1/chat/completions", json=body))
    await cluster.until(
        lambda: (
            len(cluster.requests) == n
            and all(len(r.lifecycle.generated) == 2 for r in cluster.requests)
        )
    )
    cluster.fail(cluster.requests[0], InstanceLostError("instance D0 was lost, at attempt 3"))
    async with await call as response:
        if stream:
            *tokens, error, done = await events_of(response)
            assert done == "[DONE]"
            assert all("choices" in event for event in tokens)
        else:
            assert response.status == 500
            error = await response.json()
    message = "instance D0 was lost, at attempt 3"
    expected = {"message": message, "type": "server_error", "param": None, "code": 500}
    assert error == {"error": expected}


async def test_a_failing_stream_raises_in_the_openai_package(
    server: Server, cluster: FakeCluster
) -> None:
    cluster.play(Script([100, 200, 300], pause_after=2))
    stream = await server.openai.completions.create(
        model=MODEL, prompt="x", max_tokens=3, stream=True
    )
    await cluster.until(lambda: len(cluster.requests[0].lifecycle.generated) == 2)
    cluster.fail(cluster.requests[0], InstanceLostError("instance D0 was lost"))
    with pytest.raises(openai.APIError, match="D0 was lost"):
        async for _ in stream:
            pass


@pytest.mark.parametrize("stream", [False, True])
async def test_unavailable(server: Server, cluster: FakeCluster, stream: bool) -> None:
    cluster.refusal = UnavailableError("no decode instance is ready", retry_after_s=7)
    body = {"model": MODEL, "messages": USER, "stream": stream, "n": 2}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "7"
        error = (await response.json())["error"]
    assert (error["message"], error["code"]) == ("no decode instance is ready", 503)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_who_waits_in_vain_gets_a_status_of_its_own(
    server: Server, cluster: FakeCluster, path: str, stream: bool, n: int
) -> None:
    """Also a stream: no header goes out before its first token."""
    cluster.play(*[Script([100, 200, 300], pause_after=0) for _ in range(n)])
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "stream": stream, "n": n}
    body |= {"messages": USER} if "chat" in path else {"prompt": "x"}
    call = asyncio.create_task(server.http.post(f"{server.url}{path}", json=body))
    await cluster.until(lambda: len(cluster.requests) == n)
    error = OverloadedError("no instance had room within 60 s", retry_after_s=9)
    cluster.fail(cluster.requests[0], error)
    async with await call as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "9")
        assert response.content_type == "application/json"
        answer = (await response.json())["error"]
    assert (answer["code"], answer["message"]) == (429, "no instance had room within 60 s")
    await cluster.until(lambda: all(r.state != "running" for r in cluster.requests))


@pytest.mark.parametrize("stream", [False, True])
async def test_too_many_requests(server: Server, cluster: FakeCluster, stream: bool) -> None:
    cluster.refusal = OverloadedError("1024 requests are waiting already", retry_after_s=17)
    body = {"model": MODEL, "prompt": "x", "stream": stream}
    async with server.http.post(f"{server.url}{COMPLETION}", json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "17")
        error = (await response.json())["error"]
    assert error == {
        "message": "1024 requests are waiting already",
        "type": "rate_limit_error",
        "param": None,
        "code": 429,
    }
    with pytest.raises(openai.RateLimitError):
        await server.openai.completions.create(model=MODEL, prompt="x")


async def test_a_request_takes_the_turn_of_its_key_and_has_its_priority(
    cluster: FakeCluster, frontend: Frontend
) -> None:
    async for server in serve(build_app(cluster, lambda: frontend, api_keys=["one", "two"])):
        for key, priority in (("two", -3), ("one", 0)):
            cluster.play(Script([100]))
            body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "priority": priority}
            headers = {"Authorization": f"Bearer {key}"}
            status, _ = await server.post(COMPLETION, body, headers=headers)
            assert status == 200
    specs = [request.lifecycle.spec for request in cluster.requests]
    assert [(spec.client, spec.priority) for spec in specs] == [("key 1", -3), ("key 0", 0)]


async def test_a_client_that_takes_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "WRITE_TIMEOUT_S", 0.01)
    is_aborted = []

    class Stuck:
        transport = None

        async def write(self, data: bytes) -> None:
            await asyncio.Event().wait()

        def abort(self) -> None:
            is_aborted.append(True)

    stuck = Stuck()
    stuck.transport = stuck
    writer = app.EventWriter(stuck, stuck)
    writer.add("data: x\n\n")
    with pytest.raises(asyncio.CancelledError):
        await writer.flush()
    assert is_aborted


async def test_an_unreadable_step_fails_its_requests_only(
    server: Server, cluster: FakeCluster
) -> None:
    cluster.play(Script([100, 200], pause_after=1), Script([100, 200], pause_after=1))
    body = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}
    lost, kept = [
        asyncio.create_task(server.post(COMPLETION, body | {"prompt": prompt})) for prompt in "ab"
    ]
    await cluster.until(lambda: [len(r.lifecycle.generated) for r in cluster.requests] == [1, 1])
    delivery = Delivery(tokens=True, final=False, prompt=False)
    cluster.sink.on_step(b"garbage", {cluster.requests[0].lifecycle.spec.id: delivery})
    await cluster.until(lambda: cluster.requests[0].state == "cancelled")
    cluster.resume()
    assert sorted([(await lost)[0], (await kept)[0]]) == [200, 500]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shape", [{"prompt": "a", "n": 3}, {"prompt": ["a", "b", "c"]}])
async def test_a_call_that_is_taken_in_part_is_refused_whole(
    server: Server, cluster: FakeCluster, shape: dict[str, Any], stream: bool
) -> None:
    cluster.refusal, cluster.capacity = UnavailableError("too many requests wait"), 2
    cluster.play(*[Script([100, 200], pause_after=0) for _ in range(2)])
    body = {"model": MODEL, "max_tokens": 2, "stream": stream} | shape
    status, answer = await server.post(COMPLETION, body)
    assert (status, answer["error"]["message"]) == (503, "too many requests wait")
    assert [request.state for request in cluster.requests] == ["cancelled", "cancelled"]

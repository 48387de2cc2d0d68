"""The routes about models, text and the cluster."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import pytest

from memserve.errors import StartError
from memserve.frontend.app import build_app
from memserve.frontend.openai import Frontend, build_frontend
from tests.integration.frontend.harness import FakeCluster, Relay
from tests.integration.frontend.serving import (
    CHAT,
    COMPLETION,
    ENGINE,
    MARKS,
    MODEL,
    TEXT,
    USER,
    Server,
    encode,
    events_of,
    serve,
)

pytestmark = MARKS


async def test_health_and_ready(cluster: FakeCluster, frontend: Frontend) -> None:
    loaded: list[Frontend] = []
    async for server in serve(build_app(cluster, lambda: loaded[0] if loaded else None)):
        assert await server.get("/health") == (200, {"status": "alive"})
        for status, answer in [
            await server.get("/ready"),
            await server.get("/v1/models"),
            await server.post(CHAT, {"model": MODEL, "messages": USER}),
        ]:
            assert (status, answer["error"]["type"]) == (503, "unavailable_error")
            assert "the tokenizer is being loaded" in answer["error"]["message"]
        loaded.append(frontend)
        cluster.is_ready = False
        status, answer = await server.get("/ready")
        assert (status, answer["error"]["code"]) == (503, 503)
        assert "no instance is ready" in answer["error"]["message"]
        cluster.is_ready = True
        assert await server.get("/ready") == (200, {"status": "ready"})


async def test_models(server: Server) -> None:
    (model,) = (await server.openai.models.list()).data
    assert (model.id, model.owned_by, model.max_model_len) == (MODEL, "memserve", 2048)
    assert model.root == MODEL  # and not a path of this machine


async def test_tokenize_and_detokenize(server: Server, frontend: Frontend) -> None:
    _, told = await server.post("/tokenize", {"model": MODEL, "prompt": TEXT})
    assert told["tokens"] == encode(frontend, TEXT)
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 2048)
    _, text = await server.post("/detokenize", {"model": MODEL, "tokens": told["tokens"]})
    assert text["prompt"] == TEXT


async def test_a_chat_is_tokenized_as_it_is_served(server: Server, cluster: FakeCluster) -> None:
    _, told = await server.post("/tokenize", {"model": MODEL, "messages": USER})
    await server.post(CHAT, {"model": MODEL, "messages": USER, "max_tokens": 1})
    assert cluster.requests[0].lifecycle.spec.prompt_token_ids == told["tokens"]


async def test_status(server: Server) -> None:
    status, answer = await server.get("/v1/status")
    assert (status, answer["mode"], answer["caching"]) == (200, "1P1D-CC", "full")
    assert "audit" not in answer
    _, answer = await server.get("/v1/status?audit=true")
    assert answer["audit"][0]["instance"] == "P0"
    assert answer["audit"][0]["problems"] == []
    status, answer = await server.get("/v1/status?audit=yes")
    assert (status, answer["error"]["param"]) == (400, "audit")


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("n", [1, 3])
async def test_requests_can_be_asked_about(
    server: Server, cluster: FakeCluster, path: str, n: int
) -> None:
    body = {"model": MODEL, "messages": USER, "prompt": "x", "max_tokens": 2, "n": n}
    headers = {"X-Request-Id": "client's-own:1"}
    async with server.http.post(f"{server.url}{path}", json=body, headers=headers) as response:
        assert response.headers["X-Request-Id"] == "client's-own:1"
        response_id = (await response.json())["id"]
    internal = {request.lifecycle.spec.id for request in cluster.requests}
    for name in (response_id, "client's-own:1", response_id.split("-", 1)[1]):
        status, answer = await server.get(f"/v1/requests/{name}")
        assert (status, answer["id"]) == (200, name)
        assert {found["id"] for found in answer["requests"]} == internal
    status, answer = await server.get("/v1/requests/chatcmpl-unknown")
    assert (status, answer["error"]["code"]) == (404, 404)


async def test_every_answer_has_a_request_id(server: Server, cluster: FakeCluster) -> None:
    seen = set()
    for headers in ({}, {}, {"X-Request-Id": "has space"}, {"X-Request-Id": "x" * 500}):
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "stream": True}
        async with server.http.post(
            f"{server.url}{COMPLETION}", json=body, headers=headers
        ) as response:
            events = await events_of(response)
            assert events[0]["id"] == f"cmpl-{response.headers['X-Request-Id']}"
            seen.add(response.headers["X-Request-Id"])
    async with server.http.get(f"{server.url}/nothing") as response:
        seen.add(response.headers["X-Request-Id"])
    assert len(seen) == 5
    # The same id twice is two calls: nothing of one is taken for the other.
    same = {"X-Request-Id": "twice"}
    answers = await asyncio.gather(
        *[server.post(COMPLETION, {"prompt": "x", "max_tokens": 1}, headers=same) for _ in "12"]
    )
    assert len({answer["id"] for _, answer in answers}) == 2
    assert [status for status, _ in answers] == [200, 200]


async def test_tokenizing_does_not_block_the_loop(
    server: Server, cluster: FakeCluster, frontend: Frontend
) -> None:
    """40 kB prompts take about 10 ms each; a call that held the interpreter would delay most ticks.

    The median is compared, since other processes on the machine delay single ticks.
    """
    prompt = "The quick brown fox jumps over the lazy dog, again. " * 800
    renderer = frontend.client.renderer
    delays: list[float] = []

    async def tick() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - start - 0.001)

    ticker = asyncio.create_task(tick())
    spent = []
    for _ in range(30):
        start = time.perf_counter()
        status, answer = await server.post("/tokenize", {"model": MODEL, "prompt": prompt})
        assert (status, answer["count"] > 8000) == (200, True)
        spent.append(time.perf_counter() - start)
    ticker.cancel()
    assert renderer._executor is not None
    assert len(delays) > 60
    assert statistics.median(delays) < statistics.median(spent) / 5


def test_a_model_that_cannot_be_loaded(tmp_path: Any) -> None:
    with pytest.raises(StartError, match="refuses the model"):
        build_frontend(tmp_path, ENGINE, MODEL, Relay())

"""Requests that cannot be served."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from memserve.frontend.app import build_app
from memserve.frontend.openai import Frontend
from tests.integration.frontend.harness import FakeCluster
from tests.integration.frontend.serving import CHAT, COMPLETION, MARKS, MODEL, USER, Server, serve

pytestmark = MARKS


BAD_BODIES = [
    (CHAT, {"messages": []}, "messages", "at least one message is needed"),
    (CHAT, {}, "messages", "messages: is missing"),
    (CHAT, {"messages": "hello"}, "messages", "'hello' is not allowed; a valid list"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": 5}]},
        "messages[0].content",
        "messages[0].content: 5 is not allowed; a valid string or a list",
    ),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role: is missing"),
    (CHAT, {"messages": [5]}, "messages[0]", "messages[0]: 5 is not allowed; a JSON object"),
    (CHAT, {"messages": USER, "temperature": "hot"}, "temperature", "'hot' is not allowed"),
    (CHAT, {"messages": USER, "temperature": 9}, "temperature", "must be in [0, 2], got 9"),
    (CHAT, {"messages": USER, "max_tokens": 1.5}, "max_tokens", "1.5 is not allowed"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens", "must be at least 1, got 0"),
    (CHAT, {"messages": USER, "n": 0}, None, "n must be at least 1, got 0"),
    (CHAT, {"messages": USER, "n": 129}, "n", "129 answers of one call are too many; allowed: 128"),
    (CHAT, {"messages": USER, "n": 16384}, "n", "allowed: 128 (server.max_answers_per_call)"),
    (
        CHAT,
        {"messages": USER, "stream_options": {"include_usage": True}},
        "stream_options",
        "`stream=True`",
    ),
    (CHAT, {"messages": USER, "use_beam_search": True}, "use_beam_search", "is not supported"),
    (CHAT, {"messages": USER, "kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not supp"),
    (COMPLETION, {"prompt": ["x"] * 129}, "prompt", "prompt: 129 answers of one call are too many"),
    (COMPLETION, {"prompt": [[5]] * 5000}, "prompt", "prompt: 5000 answers"),
    (COMPLETION, {"prompt": ["x"] * 43, "n": 3}, "n", "n: 129 answers of one call are too many"),
    (COMPLETION, {"prompt": [5, 6], "n": 129}, "n", "n: 129 answers"),
    (COMPLETION, {"prompt": ""}, "prompt", "non-empty"),
    (COMPLETION, {"prompt": []}, "prompt", "prompt: is empty"),
    (COMPLETION, {"prompt": [[]]}, None, "prompt"),
    (COMPLETION, {"prompt": 5}, "prompt", "5 is not allowed; a valid list or a valid string"),
    (COMPLETION, {"prompt": [1, 2, "a"]}, "prompt[2]", "'a' is not allowed"),
    (COMPLETION, {"prompt": [999999]}, None, "out of vocabulary"),
    (COMPLETION, {"prompt": [1] * 2048}, None, "the prompt fills the context of 2048 tokens"),
    (COMPLETION, {"prompt": [1] * 2049}, None, "2048"),
    (COMPLETION, {"prompt": "x", "max_tokens": 0}, "max_tokens", "must be at least 1, got 0"),
    (COMPLETION, {"prompt": "long " * 3000}, None, "2048"),
    (CHAT, {"messages": [{"role": "user", "content": "long " * 3000}]}, None, "2048"),
    ("/tokenize", {}, "prompt", "prompt: is missing"),
    ("/detokenize", {"tokens": "x"}, "tokens", "'x' is not allowed"),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    BAD_BODIES,
    ids=[f"{path.strip('/')}-{str(body)[:40]}" for path, body, *_ in BAD_BODIES],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_bodies(
    server: Server,
    cluster: FakeCluster,
    path: str,
    body: dict[str, Any],
    param: str | None,
    message: str,
    stream: bool,
) -> None:
    if stream and "stream_options" in body:
        pytest.skip("allowed with stream")
    status, answer = await server.post(path, body | {"model": MODEL, "stream": stream})
    assert status == 400, answer
    error = answer["error"]
    assert message in error["message"]
    assert len(error["message"]) < 400
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    if param is not None:
        assert error["param"] == param
    assert not cluster.requests


async def test_images_are_refused(server: Server) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [picture]}]}
    status, answer = await server.post(CHAT, body)
    assert status == 400, answer
    assert "multimodal" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "the body is not valid JSON"),
        (b"", "the body is not valid JSON"),
        (b'"\xff"', "the body is not valid JSON"),
        (b"[1]", "the body is not a JSON object"),
        (b"[" * 100_000, "the body is nested too deeply"),
    ],
)
async def test_malformed_json(server: Server, data: bytes, message: str) -> None:
    for path in (CHAT, COMPLETION, "/tokenize", "/detokenize"):
        async with server.http.post(f"{server.url}{path}", data=data) as response:
            assert response.status == 400
            assert message in (await response.json())["error"]["message"]


async def test_a_body_that_is_not_encoded_as_it_says(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"Content-Encoding": "gzip"}
    for path in (CHAT, COMPLETION, "/tokenize", "/detokenize"):
        async with server.http.post(
            f"{server.url}{path}", data=b"plain", headers=headers
        ) as response:
            assert response.status == 400
            assert "Content-Encoding: gzip" in (await response.json())["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize"])
async def test_unknown_model(server: Server, path: str) -> None:
    body = {"model": "nope", "messages": USER, "prompt": "x", "tokens": [1]}
    status, answer = await server.post(path, body)
    assert status == 404
    expected = "the model 'nope' is not served here; allowed: 'smollm2'"
    assert (answer["error"]["message"], answer["error"]["param"]) == (expected, "model")


async def test_routes_that_do_not_exist(server: Server) -> None:
    status, answer = await server.get("/v1/nothing")
    assert (status, answer["error"]["type"]) == (404, "not_found_error")
    async with server.http.get(f"{server.url}{CHAT}") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "allowed: POST" in (await response.json())["error"]["message"]


async def test_what_is_no_http_costs_a_line_of_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nX-Session-Id: \x7f\r\n\r\n")
    async with asyncio.timeout(10):
        assert b" 400 " in await reader.readline()
    writer.close()
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "Invalid header" in record.getMessage() and "\n" not in record.getMessage()


async def test_a_body_too_large(cluster: FakeCluster, frontend: Frontend) -> None:
    async for server in serve(build_app(cluster, lambda: frontend, max_body_bytes=1000)):
        status, answer = await server.post(COMPLETION, {"model": MODEL, "prompt": "x" * 2000})
        assert status == 413
        assert "1000" in answer["error"]["message"]


async def test_api_key(cluster: FakeCluster, frontend: Frontend) -> None:
    async for server in serve(build_app(cluster, lambda: frontend, api_keys=["other", "secret"])):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for path in (CHAT, "/tokenize"):
                status, answer = await server.post(path, {"prompt": "x"}, headers=headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert (await server.get("/v1/status"))[0] == 401
        assert (await server.get("/health"))[0] == 200
        assert (await server.get("/ready"))[0] == 200
        headers = {"Authorization": "Bearer secret"}
        status, _ = await server.post("/tokenize", {"prompt": "x"}, headers=headers)
        assert status == 200

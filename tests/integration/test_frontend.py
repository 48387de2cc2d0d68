"""The front end over HTTP, on a cluster in process: real tokenizer and lifecycles, no engine."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from vllm.sampling_params import (
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from vllm.v1.engine import EngineCoreOutput, FinishReason

from memserve.core.delivery import Delivery
from memserve.errors import InstanceLostError, OverloadedError, StartError, UnavailableError
from memserve.frontend import app
from memserve.frontend.app import build_app, make_runner
from memserve.frontend.client import apply_delivery, needs_resampling
from memserve.frontend.openai import Frontend, build_frontend
from memserve.messages import Abort, Decode
from memserve.models import BUNDLED_NAME, resolve_model
from memserve.types import Namespace
from tests.integration.frontend_harness import WRONG_TOKEN, FakeCluster, Relay, Script

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    # vLLM's own protocol reads a field that it marks as deprecated.
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

MODEL = "smollm2"
ENGINE = {"dtype": "bfloat16", "max_model_len": 2048, "enforce_eager": True, "block_size": 32}
USER = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = " The capital of France is Paris, and it lies on the Seine."


@pytest.fixture(scope="module")
def relay() -> Relay:
    return Relay()


@pytest.fixture(scope="module")
def frontend(relay: Relay) -> Iterator[Frontend]:
    frontend = build_frontend(resolve_model(BUNDLED_NAME), ENGINE, MODEL, relay)
    yield frontend
    frontend.close()


@pytest.fixture
async def cluster(relay: Relay, frontend: Frontend) -> AsyncIterator[FakeCluster]:
    """Fails the test if anything of any request is left at its end."""
    cluster = relay.target = FakeCluster(relay.sink)
    yield cluster
    await cluster.until(lambda: frontend.calls.num_open == 0)
    await cluster.until(lambda: all(r.lifecycle.phase.value == "ended" for r in cluster.requests))
    cluster.check_nothing_left()
    assert frontend.client.num_unfinished == 0
    assert not frontend.client.output_processor.parent_requests
    assert not frontend.client.output_processor.external_req_ids


@dataclass
class Server:
    url: str
    http: aiohttp.ClientSession
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        async with self.http.post(f"{self.url}{path}", json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        async with self.http.get(f"{self.url}{path}") as response:
            return response.status, await response.json()


async def serve(application: web.Application) -> AsyncIterator[Server]:
    runner = make_runner(application, shutdown_timeout_s=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=10.0)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10.0)) as http, client:
            yield Server(url, http, client)
    finally:
        await runner.cleanup()


@pytest.fixture
async def server(cluster: FakeCluster, frontend: Frontend) -> AsyncIterator[Server]:
    async for server in serve(build_app(cluster, lambda: frontend)):
        yield server


@pytest.fixture
def tokens(frontend: Frontend) -> list[int]:
    """`TEXT`, as the model would generate it."""
    return encode(frontend, TEXT)


def encode(frontend: Frontend, text: str) -> list[int]:
    ids: list[int] = frontend.client.renderer.get_tokenizer().encode(text)
    return ids


def decode(frontend: Frontend, ids: list[int]) -> str:
    text: str = frontend.client.renderer.get_tokenizer().decode(ids)
    return text


async def events_of(response: aiohttp.ClientResponse) -> list[Any]:
    """The data of all server-sent events; the last is `[DONE]`."""
    events = [line[6:] for line in (await response.text()).splitlines() if line]
    return [json.loads(event) if event != "[DONE]" else event for event in events]


# ── P's and D's outputs are one answer ────────────────────────────────────────────────────────────


async def test_chat(server: Server, cluster: FakeCluster, tokens: list[int]) -> None:
    cluster.play(Script(tokens, cached_tokens=16))
    answer = await server.openai.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=len(tokens)
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.prompt_tokens == len(cluster.requests[0].lifecycle.spec.prompt_token_ids)
    # D found the whole prompt in its cache: that is not what the client asked.
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_stream(server: Server, cluster: FakeCluster, tokens: list[int]) -> None:
    cluster.play(Script(tokens, cached_tokens=16))
    stream = await server.openai.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=len(tokens),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content for choice in choices) == TEXT
    reasons = [choice.finish_reason for choice in choices]
    assert reasons == [None] * (len(choices) - 1) + ["length"]  # P's own end does not show
    usage = chunks[-1].usage
    assert usage.completion_tokens == len(tokens)
    assert usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(
    server: Server, cluster: FakeCluster, frontend: Frontend, stream: bool
) -> None:
    texts = [" one two three four", " uno dos tres cuatro", " un deux trois quatre"]
    scripts = [encode(frontend, text) for text in texts]
    length = min(map(len, scripts))
    cluster.play(*[Script(script) for script in scripts])
    body = {"model": MODEL, "messages": USER, "n": 3, "max_tokens": length, "stream": stream}
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as response:
        answers = await events_of(response) if stream else [await response.json()]
    found = ["", "", ""]
    for answer in answers:
        for choice in answer["choices"] if answer != "[DONE]" else []:
            found[choice["index"]] += choice["delta" if stream else "message"]["content"]
    assert found == [decode(frontend, script[:length]) for script in scripts]
    assert len({request.lifecycle.spec.id for request in cluster.requests}) == 3


async def test_first_tokens_logprobs_come_from_prefill(
    server: Server, cluster: FakeCluster, tokens: list[int]
) -> None:
    cluster.play(Script(tokens), Script(tokens))
    settings = {"model": MODEL, "messages": USER, "max_tokens": 5, "logprobs": True}
    answer = await server.openai.chat.completions.create(**settings, top_logprobs=2)
    listed = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in listed) == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in listed] == [2] * 5

    stream = await server.openai.chat.completions.create(**settings, stream=True)
    streamed = []
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content
    assert [entry.token for entry in streamed] == [entry.token for entry in listed]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_the_prompts_logprobs(
    server: Server, cluster: FakeCluster, tokens: list[int], stream: bool
) -> None:
    cluster.play(Script(tokens))
    body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 3, "echo": True, "logprobs": 1}
    async with server.http.post(
        f"{server.url}/v1/completions", json=body | {"stream": stream}
    ) as response:
        answers = (await events_of(response))[:-1] if stream else [await response.json()]
    choices = [answer["choices"][0] for answer in answers]
    text = "".join(choice["text"] for choice in choices)
    listed = [token for choice in choices for token in choice["logprobs"]["tokens"]]
    prompt = cluster.requests[0].lifecycle.spec.prompt_token_ids
    assert text.startswith("The sea is")
    assert len(listed) == len(prompt) + 3
    values = [v for choice in choices for v in choice["logprobs"]["token_logprobs"]]
    assert values == [None] + [-0.25] * (len(prompt) - 1) + [-0.5] * 3


async def test_echo_without_generation(server: Server, cluster: FakeCluster) -> None:
    body = {"model": MODEL, "prompt": "The sea is", "max_tokens": 0, "echo": True, "logprobs": 1}
    status, answer = await server.post("/v1/completions", body)
    assert status == 200
    assert answer["choices"][0]["text"] == "The sea is"
    assert not cluster.requests[0].sent(Decode)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 2046])
@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_prompt_lengths(
    server: Server, cluster: FakeCluster, tokens: list[int], length: int, max_tokens: int
) -> None:
    cluster.play(Script(tokens))
    body = {"model": MODEL, "prompt": [500] * length, "max_tokens": max_tokens}
    status, answer = await server.post("/v1/completions", body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == length
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert bool(cluster.requests[0].sent(Decode)) == (max_tokens > 1)


async def test_the_context_limits_the_answer(server: Server, cluster: FakeCluster) -> None:
    body = {"model": MODEL, "prompt": [500] * 2045, "max_tokens": 4}
    cluster.play(Script([100] * 3))
    status, answer = await server.post("/v1/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"

    cluster.play(Script([100] * 2048))
    status, answer = await server.post("/v1/chat/completions", {"model": MODEL, "messages": USER})
    spec = cluster.requests[1].lifecycle.spec
    assert status == 200
    assert spec.max_tokens == 2048 - len(spec.prompt_token_ids)
    assert answer["usage"]["total_tokens"] == 2048


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
async def test_stop_string_over_the_boundary(
    server: Server, cluster: FakeCluster, frontend: Frontend, stream: bool, is_whole: bool
) -> None:
    """P's token and D's first two make the stop string together."""
    cluster.is_split = not is_whole
    tokens = encode(frontend, "One two three four five")
    cluster.play(Script(tokens))
    stop = decode(frontend, tokens[:3])[1:]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 5, "stop": stop, "stream": stream}
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        answers = (await events_of(response))[:-1] if stream else [await response.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == decode(frontend, tokens)[0]
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["stop_reason"] == stop
    assert cluster.requests[0].state == "stopped"
    assert len(cluster.requests[0].lifecycle.generated) == 3


async def test_stop_string_in_the_first_token(
    server: Server, cluster: FakeCluster, frontend: Frontend
) -> None:
    tokens = encode(frontend, "Paris is")
    cluster.play(Script(tokens))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "stop": "aris"}
    status, answer = await server.post("/v1/completions", body)
    assert (status, answer["choices"][0]["text"]) == (200, "P")
    assert not cluster.requests[0].sent(Decode)


async def test_stop_token_as_the_first_token(
    server: Server, cluster: FakeCluster, tokens: list[int]
) -> None:
    cluster.play(Script([tokens[0]]))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 9, "stop_token_ids": [tokens[0]]}
    status, answer = await server.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "", "stop")
    assert choice["stop_reason"] == tokens[0]
    assert answer["usage"]["completion_tokens"] == 1
    assert not cluster.requests[0].sent(Decode)


async def test_the_workers_get_the_clients_settings(
    server: Server, cluster: FakeCluster, tokens: list[int]
) -> None:
    """What P must not take literally (`max_tokens`, `stop`) is D's to obey: it travels whole."""
    cluster.play(Script(tokens))
    body = {
        "model": MODEL,
        "prompt": "x",
        "max_tokens": 6,
        "min_tokens": 4,
        "stop": ["nowhere"],
        "stream": True,
        "cache_salt": "tenant-a",
    }
    async with server.http.post(f"{server.url}/v1/completions", json=body) as response:
        answers = (await events_of(response))[:-1]
    spec, params = cluster.requests[0].lifecycle.spec, cluster.requests[0].params
    assert (params.max_tokens, params.min_tokens, params.stop) == (6, 4, ["nowhere"])
    assert (spec.max_tokens, spec.resample, spec.namespace) == (6, True, Namespace("tenant-a"))
    assert cluster.requests[0].request.cache_salt == "tenant-a"
    assert [answer["choices"][0]["finish_reason"] for answer in answers][-1] == "length"


@pytest.mark.parametrize(
    ("headers", "extra", "session"),
    [
        ({}, {}, ""),
        ({}, {"user": "u"}, "u"),
        ({"X-Session-Id": "s"}, {"user": "u"}, "s"),
    ],
)
async def test_a_conversation_may_have_a_name(
    server: Server,
    cluster: FakeCluster,
    tokens: list[int],
    headers: dict[str, str],
    extra: dict[str, str],
    session: str,
) -> None:
    cluster.play(Script(tokens))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, **extra}
    async with server.http.post(
        f"{server.url}/v1/completions", json=body, headers=headers
    ) as response:
        assert response.status == 200
    assert cluster.requests[0].lifecycle.spec.session == session


@pytest.mark.parametrize("stream", [False, True])
async def test_a_resampled_first_token_is_decodes(
    server: Server, cluster: FakeCluster, frontend: Frontend, tokens: list[int], stream: bool
) -> None:
    cluster.play(Script(tokens, cached_tokens=16))
    body = {
        "model": MODEL,
        "messages": USER,
        "max_tokens": len(tokens),
        "presence_penalty": 1.0,
        "logprobs": True,
        "stream": stream,
        "stream_options": {"include_usage": True} if stream else None,
    }
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as response:
        answers = (await events_of(response))[:-1] if stream else [await response.json()]
    kind = "delta" if stream else "message"
    text = "".join(a["choices"][0][kind]["content"] for a in answers if a["choices"])
    assert text == TEXT
    assert decode(frontend, [WRONG_TOKEN]) not in text
    logprobs = [a["choices"][0].get("logprobs") for a in answers if a["choices"]]
    listed = [token for entry in logprobs if entry for token in entry["content"]]
    assert [token["logprob"] for token in listed] == [-0.5] * len(tokens)  # else: of other tokens
    assert answers[-1]["usage"]["completion_tokens"] == len(tokens)
    assert answers[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 16


def test_apply_delivery() -> None:
    def make() -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id="a",
            new_token_ids=[7],
            new_logprobs="logprobs",
            new_prompt_logprobs_tensors="prompt logprobs",
            finish_reason=FinishReason.LENGTH,
            stop_reason=7,
            prefill_stats="stats",
        )

    nothing = Delivery(tokens=False, final=False, prompt=False)
    assert apply_delivery(make(), nothing) == EngineCoreOutput(request_id="a", new_token_ids=[])
    everything = Delivery(tokens=True, final=True, prompt=True)
    assert apply_delivery(make(), everything) == make()
    from_prefill = apply_delivery(make(), Delivery(tokens=True, final=False, prompt=True))
    assert (from_prefill.new_token_ids, from_prefill.new_logprobs) == ([7], "logprobs")
    assert (from_prefill.finish_reason, from_prefill.stop_reason) == (None, None)
    assert from_prefill.prefill_stats == "stats"
    from_decode = apply_delivery(make(), Delivery(tokens=True, final=True, prompt=False))
    assert from_decode.finish_reason is FinishReason.LENGTH
    assert from_decode.prefill_stats is None
    assert from_decode.new_prompt_logprobs_tensors is None


@pytest.mark.parametrize(
    "settings",
    [
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"bad_words": ["no"]},
        {"seed": 0},
        {"thinking_token_budget": 3},
        {"extra_args": {"my_processor": 1}},
        {"watermarking": True},
        {"trace_decode_token_ids": [1, 2]},
        {
            "repetition_detection": RepetitionDetectionParams(
                max_pattern_size=2, min_pattern_size=1, min_count=2
            )
        },
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_needs_resampling(settings: dict[str, Any]) -> None:
    assert needs_resampling(SamplingParams(**settings))


def test_needs_no_resampling() -> None:
    assert not needs_resampling(SamplingParams())
    assert not needs_resampling(SamplingParams(temperature=0.0, seed=1))
    assert not needs_resampling(
        SamplingParams(top_p=0.5, top_k=5, logprobs=3, stop=["x"], logit_bias={1: 2.0})
    )


async def test_one_write_per_engine_step(server: Server, cluster: FakeCluster) -> None:
    """Four choices make four events in each step, and one HTTP chunk (the aiohttp write)."""
    cluster.play(*[Script([100, 200, 300, 400], pause_after=1) for _ in range(4)])
    body = {"model": MODEL, "messages": USER, "n": 4, "max_tokens": 4, "stream": True}
    counts = []
    async with server.http.post(f"{server.url}/v1/chat/completions", json=body) as response:
        data = b""
        async for part, is_end in response.content.iter_chunks():
            data += part
            if is_end:
                counts.append(data.count(b"data: "))
                data = b""
                cluster.resume(pause_after=len(counts) + 1)
    assert counts == [8, 4, 4, 5]  # roles and first tokens; tokens; the last ones and [DONE]


async def test_concurrent_calls_share_steps(
    server: Server, cluster: FakeCluster, frontend: Frontend
) -> None:
    texts = [f" call number {number} of many" for number in range(8)]
    scripts = [encode(frontend, text) for text in texts]

    async def ask(number: int) -> str:
        answer = await server.openai.completions.create(
            model=MODEL, prompt=f"prompt {number}", max_tokens=len(scripts[number])
        )
        return str(answer.choices[0].text)

    for number in range(8):  # the order of submission is not the order of the calls
        cluster.play(Script(scripts[number], pause_after=0))
    calls = [asyncio.create_task(ask(number)) for number in range(8)]
    await cluster.until(lambda: len(cluster.requests) == 8)
    cluster.resume()
    assert sorted(await asyncio.gather(*calls)) == sorted(texts)


async def test_several_prompts(server: Server, cluster: FakeCluster, frontend: Frontend) -> None:
    scripts = [encode(frontend, " red fox"), encode(frontend, " blue sea")]
    cluster.play(Script(scripts[0]), Script(scripts[1]))
    answer = await server.openai.completions.create(
        model=MODEL, prompt=["a", "b"], max_tokens=2, stream=False
    )
    assert [choice.text for choice in answer.choices] == [
        decode(frontend, script[:2]) for script in scripts
    ]
    status, found = await server.get(f"/v1/requests/{answer.id}")
    assert (status, len(found["requests"])) == (200, 2)


# ── clients that leave, and calls that fail ───────────────────────────────────────────────────────


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


# ── requests that cannot be served ────────────────────────────────────────────────────────────────

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
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
    (
        CHAT,
        {"messages": USER, "stream_options": {"include_usage": True}},
        "stream_options",
        "`stream=True`",
    ),
    (CHAT, {"messages": USER, "use_beam_search": True}, "use_beam_search", "is not supported"),
    (CHAT, {"messages": USER, "kv_transfer_params": {"a": 1}}, "kv_transfer_params", "not supp"),
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


# ── the other routes ──────────────────────────────────────────────────────────────────────────────


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

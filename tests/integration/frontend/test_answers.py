"""P's and D's outputs are one answer, over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from memserve.frontend.openai import Frontend
from memserve.messages import Decode
from memserve.types import Namespace
from tests.integration.frontend.harness import WRONG_TOKEN, FakeCluster, Script
from tests.integration.frontend.serving import (
    MARKS,
    MODEL,
    TEXT,
    USER,
    Server,
    decode,
    encode,
    events_of,
)

pytestmark = MARKS


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

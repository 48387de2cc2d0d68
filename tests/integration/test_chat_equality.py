"""Chat answers are those of a colocated instance, which runs each request whole.

Here are the requests whose first token D has to sample itself (grammars, penalties, seeds), and
what crosses the boundary between P and D: stop strings, log probabilities, several choices.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.api_client import Client
from tests.integration.cluster_harness import MODEL, Cluster, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
_LONG = "Name the large cities of Europe, one after the other, with a word about each of them. "
CHATS: dict[str, dict[str, Any]] = {
    "stop string": {"stop": ["."], "max_tokens": 32},
    "stop string, included": {"stop": [" the"], "include_stop_str_in_output": True},
    "two choices": {"n": 2, "temperature": 0.8, "seed": 3},
    "seed": {"temperature": 1.0, "seed": 7},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "minimum": {"min_tokens": 12, "max_tokens": 14, "ignore_eos": False},
    "log probabilities": {"logprobs": True, "top_logprobs": 3},
    "json schema": {
        "max_tokens": 48,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": _SCHEMA},
        },
    },
}


async def _chat(client: Client, name: str) -> list[dict[str, Any]]:
    """The choices; log probabilities as (token, rounded) pairs."""
    content = f"{_LONG * 3}Request: {name}."
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 20,
    }
    answer = await client.post("/v1/chat/completions", body | CHATS[name])
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    return [
        {
            "text": choice["message"]["content"],
            "finish": choice["finish_reason"],
            "stop": choice.get("stop_reason"),
            "logprobs": [
                (entry["token"], entry["logprob"])
                for entry in (choice["logprobs"] or {"content": []})["content"]
            ],
        }
        for choice in choices
    ]


@pytest.fixture(scope="module")
def whole_chats() -> dict[str, list[dict[str, Any]]]:
    """What a colocated instance answers."""

    async def ask(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
        async with Client(cluster) as client:
            return {name: await _chat(client, name) for name in CHATS}

    with running("1PD", caching="none") as cluster:
        return asyncio.run(ask(cluster))


@pytest.fixture(scope="module", params=[("1P1D", "none"), ("1P2D", "full")])
def split_cluster(
    request: pytest.FixtureRequest, whole_chats: dict[str, list[dict[str, Any]]]
) -> Iterator[Cluster]:
    mode, caching = request.param
    with running(mode, caching=caching) as cluster:
        yield cluster


@pytest.mark.parametrize("name", CHATS)
async def test_chats(
    split_cluster: Cluster, whole_chats: dict[str, list[dict[str, Any]]], name: str
) -> None:
    """Twice: the second time, with caching, everything is found."""
    async with Client(split_cluster) as client:
        for _ in range(2):
            choices = await _chat(client, name)
            for got, want in zip(choices, whole_chats[name], strict=True):
                got_logprobs, want_logprobs = got.pop("logprobs"), list(want["logprobs"])
                assert got == {key: want[key] for key in got}
                assert [token for token, _ in got_logprobs] == [token for token, _ in want_logprobs]
                assert [value for _, value in got_logprobs] == pytest.approx(
                    [value for _, value in want_logprobs], abs=1e-3
                )
            await client.until_idle()
    if name == "json schema":
        assert set(json.loads(whole_chats[name][0]["text"])) == {"city", "people"}
    if name == "log probabilities":
        assert len(whole_chats[name][0]["logprobs"]) > 1

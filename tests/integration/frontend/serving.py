"""A server of the front end in this process, and what its tests say to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from memserve.frontend.app import make_runner
from memserve.frontend.openai import Frontend

MARKS = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    # vLLM's own protocol reads a field that it marks as deprecated.
    pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning"),
]

MODEL = "smollm2"
ENGINE = {"dtype": "bfloat16", "max_model_len": 2048, "enforce_eager": True, "block_size": 32}
USER = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = " The capital of France is Paris, and it lies on the Seine."
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


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

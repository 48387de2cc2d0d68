"""What a client wants the output to be, and no engine can make it: the client's mistake, not ours.

The libraries that compile grammars are vLLM's own; the cluster is a fake.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

from memserve.frontend import grammars
from memserve.frontend.grammars import MAX_CHARS, GrammarCheck
from memserve.frontend.openai import Frontend
from tests.integration.cluster_harness import until
from tests.integration.frontend.harness import FakeCluster, Script
from tests.integration.frontend.serving import CHAT, COMPLETION, MARKS, MODEL, USER, Server

pytestmark = MARKS

FORMAT, OUTPUTS = "response_format", "structured_outputs"
NUMBERS = {"type": "number", "multipleOf": 2}  # for guidance: xgrammar does not know it

TAG = {"type": "structural_tag", "structures": [], "triggers": ["<"]}


def schema(value: object) -> dict[str, Any]:
    return {FORMAT: {"type": "json_schema", "json_schema": {"name": "it", "schema": value}}}


def deep(levels: int, value: dict[str, Any] | None = None) -> dict[str, Any]:
    value = value or {}
    for _ in range(levels):
        value = {"items": value}
    return value


def chain(length: int, levels: int = 1, **more: Any) -> dict[str, Any]:
    """A schema in which one refers to the next, and so on."""
    links = {str(i): deep(levels, {"$ref": f"#/$defs/{i + 1}"}) for i in range(length)}
    return {"$defs": {**links, str(length): {"type": "string"}, **more}, "$ref": "#/$defs/0"}


BAD: list[tuple[dict[str, Any], str]] = [
    (schema({"$ref": "#/$defs/nowhere"}), "nowhere"),
    (schema({"$ref": 5}), "$ref must be a string"),
    (schema({"$ref": "#", **NUMBERS}), "circular"),
    (schema({"type": "strnig"}), "strnig"),
    (schema({"enum": []}), "empty"),
    (schema({"type": "integer", "minimum": 5, "maximum": 1}), "greater"),
    (schema({"type": "string", "pattern": "["}), "unclosed"),
    (schema({"properties": [1]}), "properties"),
    (schema(deep(70)), "nested too deeply"),
    (schema(deep(300)), "nested too deeply"),
    (schema(chain(3000)), f"allowed: {MAX_CHARS} characters"),
    ({OUTPUTS: {"json": "{"}}, "Invalid JSON"),
    ({OUTPUTS: {"json": "[1]"}}, "object"),
    ({OUTPUTS: {"regex": "["}}, "unclosed"),
    ({OUTPUTS: {"regex": "a{5,1}"}}, "repetition"),
    ({OUTPUTS: {"regex": "(" * 20_000 + ")" * 20_000}}, "("),
    ({OUTPUTS: {"regex": "a" * (MAX_CHARS + 1)}}, f"allowed: {MAX_CHARS} characters"),
    ({OUTPUTS: {"regex": "\0"}}, "NUL"),
    ({OUTPUTS: {"choice": []}}, "empty"),
    ({OUTPUTS: {"choice": ["word"] * MAX_CHARS}}, f"allowed: {MAX_CHARS} characters"),
    ({OUTPUTS: {"grammar": "x"}}, "Expected ::="),
    ({OUTPUTS: {"grammar": "root ::= nowhere"}}, "nowhere"),
    ({OUTPUTS: {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}}, "recursion"),
    ({OUTPUTS: {"structural_tag": "{}"}}, "specification"),
    ({OUTPUTS: {"structural_tag": "(" * (MAX_CHARS + 1)}}, f"allowed: {MAX_CHARS} characters"),
    ({FORMAT: {"type": "structural_tag", "format": {"type": "nonsense"}}}, "specification"),
    ({FORMAT: TAG | {"triggers": ["<"] * MAX_CHARS}}, f"allowed: {MAX_CHARS} characters"),
    ({OUTPUTS: {"json_object": False}}, "json_object"),
]


@pytest.mark.parametrize(("fields", "said"), BAD, ids=[str(fields)[:60] for fields, _ in BAD])
async def test_what_cannot_be_compiled(
    server: Server, cluster: FakeCluster, fields: dict[str, Any], said: str
) -> None:
    [field] = fields
    for path, more in ((CHAT, {"messages": USER}), (COMPLETION, {"prompt": ["a", "b"]})):
        for stream in (False, True):
            body = {"model": MODEL, "stream": stream, **more, **fields}
            status, answer = await server.post(path, body)
            assert status == 400, answer
            error = answer["error"]
            assert (error["param"], error["code"]) == (field, 400)
            assert field in error["message"]
            assert said in error["message"]
            assert "\n" not in error["message"] and len(error["message"]) < 300
    assert not cluster.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [schema({"$ref": "#"}), {OUTPUTS: {"grammar": "root ::= root"}}])
async def test_what_compiles_and_leads_nowhere(
    server: Server, cluster: FakeCluster, fields: dict[str, Any], stream: bool
) -> None:
    """The engine finds that no token fits."""
    [field] = fields
    cluster.play(Script([100, 200], stuck_after=0))
    body = {"model": MODEL, "messages": USER, "stream": stream, **fields}
    status, answer = await server.post(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, field), answer
    assert answer["error"]["message"] == f"{field}: nothing fits it"


async def test_a_stream_begins_with_its_first_token(server: Server, cluster: FakeCluster) -> None:
    """What P says of the prompt, before D samples it, is no event: the status is still open."""
    cluster.play(Script([100, 200, 300]))
    more = {"max_tokens": 3, "logprobs": True, "top_logprobs": 2, OUTPUTS: {"regex": "a+"}}
    body = {"model": MODEL, "messages": USER, "stream": True, **more}
    async with server.http.post(f"{server.url}{CHAT}", json=body) as response:
        assert response.status == 200
        events = [line[6:] for line in (await response.text()).splitlines() if line]
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[0]["delta"]["role"] == "assistant"
    said = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert sum(map(len, said)) == 3


async def test_a_dead_end_within_a_stream(server: Server, cluster: FakeCluster) -> None:
    cluster.play(Script([100, 200, 300], stuck_after=2))
    body = {"model": MODEL, "messages": USER, "stream": True, OUTPUTS: {"regex": "a+"}}
    async with server.http.post(f"{server.url}{CHAT}", json=body) as response:
        assert response.status == 200
        *_, last, done = [line[6:] for line in (await response.text()).splitlines() if line]
    error = json.loads(last)["error"]
    assert (error["code"], error["param"], done) == (400, OUTPUTS, "[DONE]")
    assert error["message"] == f"{OUTPUTS}: nothing fits it after 2 tokens"


@pytest.mark.parametrize("more", [{}, {"other": NUMBERS}], ids=["xgrammar", "guidance"])
async def test_the_deepest_that_is_allowed(
    server: Server, cluster: FakeCluster, more: dict[str, Any]
) -> None:
    """It overflows the stack of an ordinary thread: the process would be gone."""
    value = chain(80, levels=50, **more)
    assert 40_000 < len(json.dumps(value)) < MAX_CHARS
    cluster.play(Script([100]))
    status, answer = await server.post(
        CHAT, {"model": MODEL, "messages": USER, "max_tokens": 1, **schema(value)}
    )
    assert status == 200, answer


async def test_prompts_of_one_call_share_a_list_of_choices(
    server: Server, cluster: FakeCluster
) -> None:
    """What vLLM writes into the one's parameters must not meet the other's check."""
    prompts = ["a"] * 16
    cluster.play(*[Script([100]) for _ in prompts])
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 1, OUTPUTS: {"choice": ["yes", "no"]}}
    status, answer = await server.post(COMPLETION, body)
    assert status == 200, answer
    wanted = [request.params.structured_outputs for request in cluster.requests]
    assert len(wanted) == 16 and {it._backend for it in wanted} == {"xgrammar"}
    assert all(it.choice is None and "yes" in it.grammar for it in wanted)


class Gate:
    """Checks that take until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, checks: GrammarCheck) -> None:
        self.entered, self._open = threading.Semaphore(0), threading.Event()
        self._verify = checks._verify
        monkeypatch.setattr(checks, "_verify", self._wait)

    def _wait(self, wanted: StructuredOutputsParams) -> None:
        self.entered.release()
        assert self._open.wait(10)
        self._verify(wanted)

    async def until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=10)

    def open(self) -> None:
        self._open.set()


async def test_others_are_served_while_one_is_checked(
    server: Server, cluster: FakeCluster, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, frontend.client.grammars)
    cluster.play(Script([100]), Script([200]))
    body = {"model": MODEL, "messages": USER, "max_tokens": 1}
    checked = asyncio.create_task(server.post(CHAT, {**body, OUTPUTS: {"regex": "a+"}}))
    try:
        await gate.until_entered()
        assert (await server.post(CHAT, body))[0] == 200
        assert len(cluster.requests) == 1 and not checked.done()
    finally:
        gate.open()
    assert (await checked)[0] == 200


async def test_a_client_that_leaves_before_the_check_has_ended(
    server: Server, cluster: FakeCluster, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, frontend.client.grammars)
    body = {"model": MODEL, "messages": USER, OUTPUTS: {"regex": "a+"}}
    checked = asyncio.create_task(server.post(CHAT, body))
    try:
        await gate.until_entered()
        checked.cancel()
        ended = "the call has ended"
        await asyncio.to_thread(until, lambda: frontend.calls.num_open == 0, ended, 10)
    finally:
        gate.open()
    assert not cluster.requests


async def test_a_check_has_a_deadline(
    server: Server, cluster: FakeCluster, frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes too long has asked too much; who waits behind such checks may come back."""
    gate = Gate(monkeypatch, frontend.client.grammars)
    monkeypatch.setattr(grammars, "_CHECK_S", 0.2)
    body = {"model": MODEL, "messages": USER, OUTPUTS: {"regex": "a+"}}
    try:
        answers = await asyncio.gather(*[server.post(CHAT, body) for _ in range(3)])
    finally:
        gate.open()
    said = sorted((status, answer["error"]["message"]) for status, answer in answers)
    too_long = (400, f"{OUTPUTS}: takes too long to compile")
    assert said == [too_long, too_long, (429, "too many grammars are being checked")]
    assert not cluster.requests

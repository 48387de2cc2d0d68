"""Send simulated calls to a real server, and see what the simulator would have seen.

Prompts go as token ids; each reply has exactly the length that the call asks for, and the next
prompt of the session carries the tokens that the server really generated. The outcomes are those of
`memserve/simulator/simulation.py`, so that both are summed up by the same code.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence

import aiohttp
import msgspec

from memserve.simulator.simulation import Outcome
from memserve.simulator.workload import Call, Literal, Piece, tokens_of

_REQUEST_TIMEOUT_S = 600.0


class Answer(msgspec.Struct):
    """What came back for one call."""

    outcome: Outcome
    id: str = ""
    """Of the response; `/v1/requests/{id}` knows more."""
    token_ids: list[int] = []
    token_times: list[float] = []
    """When each of them came, on the load's clock."""


async def play(
    url: str, calls: Sequence[Call], headers: dict[str, str] | None = None
) -> list[Answer]:
    """Send the calls at their arrivals (a session's next one when the one before has ended)."""
    player = _Player(url, headers or {})
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(_REQUEST_TIMEOUT_S), connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        return await player.play(session, calls)


async def one(url: str, call: Call) -> Answer:
    """Send a single call now."""
    return (await play(url, [msgspec.structs.replace(call, arrival_s=0.0)]))[0]


class _Player:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url = f"{url}/v1/completions"
        self._headers = headers
        self._begun = 0.0
        self._generated: dict[int, list[int]] = {}
        """Key of a reply → what the server generated for it."""

    async def play(self, session: aiohttp.ClientSession, calls: Sequence[Call]) -> list[Answer]:
        self._begun = time.perf_counter()
        queues: dict[str, deque[asyncio.Task[Answer]]] = {}
        tasks: list[asyncio.Task[Answer]] = []
        async with asyncio.TaskGroup() as group:
            for call in calls:
                queue = queues.setdefault(call.session, deque())
                before = queue[-1] if queue else None
                task = group.create_task(self._send(session, call, before))
                queue.append(task)
                tasks.append(task)
        return [task.result() for task in tasks]

    async def _send(
        self, session: aiohttp.ClientSession, call: Call, before: asyncio.Task[Answer] | None
    ) -> Answer:
        await asyncio.sleep(max(0.0, (call.arrival_s or 0.0) - self._now()))
        if before is not None:
            await asyncio.wait([before])
        body = {
            "prompt": [token for piece in call.prompt for token in self._tokens(piece)],
            "max_tokens": call.reply.length,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        outcome = Outcome(
            session=call.session,
            prompt_tokens=call.prompt_tokens,
            reply_tokens=call.reply.length,
            sent_at=self._now(),
        )
        answer = Answer(outcome)
        headers = {**self._headers, "X-Session-Id": call.session}
        async with session.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {await response.text()}"
                return answer
            async for line in response.content:
                self._read(line, answer)
        outcome.ended_at = self._now()
        self._generated[call.reply.key] = answer.token_ids
        return answer

    def _read(self, line: bytes, answer: Answer) -> None:
        if not line.startswith(b"data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            answer.outcome.error = str(event["error"])
            return
        answer.id = event["id"]
        now = self._now()
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            answer.token_ids += new
            answer.token_times += [now] * len(new)
        if answer.token_ids and answer.outcome.first_token_at is None:
            answer.outcome.first_token_at = now

    def _tokens(self, piece: Piece | Literal) -> list[int]:
        if isinstance(piece, Piece) and piece.key in self._generated:
            return self._generated[piece.key]
        return tokens_of(piece)

    def _now(self) -> float:
        return time.perf_counter() - self._begun

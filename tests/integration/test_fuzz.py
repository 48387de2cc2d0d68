"""Many conversations on pools that are far too small, with clients that leave in mid-stream.

Every token that any client saw must be what one plain vLLM instance generates after the same
history, and when all is quiet, nothing may be held anywhere. The seed fixes conversations and
disconnects; the interleaving is the machine's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from tests.integration.api_client import Client
from tests.integration.cluster_harness import BLOCK, Cluster, running
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

SEED = 2406_17565
NUM_CONVERSATIONS = 40
AT_ONCE = 8
MAX_MODEL_LEN = 512
SETTINGS = {
    "engine.max_model_len": MAX_MODEL_LEN,
    "mempool.hbm_mb": 36,  # 25 blocks of 32 float32 tokens: three conversations of eight
    "scheduler.timeline_requests": 1000,
}
DISCONNECT = 0.15
"""Share of the turns whose client leaves in mid-stream."""
CONVERSATION_S = 300.0


@pytest.fixture(scope="module", params=[0.0, 0.1], ids=["hbm", "dram"])
def dram_gb(request: pytest.FixtureRequest) -> float:
    """Three times the HBM pool, or none."""
    size: float = request.param
    return size


@pytest.fixture(scope="module")
def cluster(dram_gb: float) -> Iterator[Cluster]:
    with running("1P2D-CC", settings=SETTINGS | {"mempool.dram_gb": dram_gb}) as cluster:
        yield cluster


@dataclass
class Turn:
    """One request as its client saw it."""

    call_id: str
    prompt: list[int]
    num_tokens: int
    leaves_after: int | None
    """Tokens after which the client disconnects."""
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    known_tokens: int = 0
    """Tokens whose KV P was given before, as long as it keeps it."""


class Conversation:
    """Turns in order; each continues from what its client has."""

    def __init__(self, index: int, texts: Texts) -> None:
        self._index = index
        self._rng = random.Random(SEED + index)
        self._texts = texts
        self.turns: list[Turn] = []

    async def run(self, client: Client) -> None:
        history = self._texts.tokens(self._rng.randrange(20, 150), self._rng)
        for number in range(self._rng.randrange(3, 6)):
            turn = self._plan(number, history)
            self.turns.append(turn)
            await _play(client, turn)
            message = self._texts.tokens(self._rng.randrange(3, 40), self._rng)
            history = history + turn.token_ids + message

    def _plan(self, number: int, history: list[int]) -> Turn:
        num_tokens = self._rng.randrange(1, 40)
        leaves = self._rng.random() < DISCONNECT
        turn = Turn(
            call_id=f"fuzz-{self._index}-{number}",
            prompt=history,
            num_tokens=num_tokens,
            leaves_after=self._rng.randrange(num_tokens) if leaves else None,
        )
        if self.turns and self.turns[-1].leaves_after is None:
            last = self.turns[-1]
            turn.known_tokens = (len(last.prompt) + last.num_tokens - 1) // BLOCK * BLOCK
        return turn


async def _play(client: Client, turn: Turn) -> None:
    """Stream the turn, and leave early if it is planned."""
    stream = client.events(turn.prompt, turn.num_tokens, call_id=turn.call_id)
    async with aclosing(cast(AsyncGenerator[dict[str, Any], None], stream)) as events:
        if turn.leaves_after == 0:
            await _first_sign(client, turn, events)
            return
        async for event in events:
            for choice in event["choices"]:
                turn.token_ids += choice.get("token_ids") or []
            if event.get("usage"):
                turn.cached_tokens = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            if turn.leaves_after is not None and len(turn.token_ids) >= turn.leaves_after:
                return
    assert len(turn.token_ids) == turn.num_tokens, turn.call_id


async def _first_sign(
    client: Client, turn: Turn, events: AsyncGenerator[dict[str, Any], None]
) -> None:
    """Leave while the prompt is being computed: as soon as the request is placed."""
    first_event = asyncio.ensure_future(anext(events))
    try:
        await client.until_step(turn.call_id, "placed")
    finally:
        first_event.cancel()
        await asyncio.gather(first_event, return_exceptions=True)


async def test_conversations_under_pressure(
    cluster: Cluster, dram_gb: float, texts: Texts, reference: Reference
) -> None:
    print(f"seed {SEED}")
    conversations = [Conversation(index, texts) for index in range(NUM_CONVERSATIONS)]
    slots = asyncio.Semaphore(AT_ONCE)

    async def run(client: Client, conversation: Conversation) -> None:
        async with slots, asyncio.timeout(CONVERSATION_S):
            await conversation.run(client)

    async with Client(cluster) as client:
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(run(client, conversation))
        snapshot = await client.until_idle()
        turns = [turn for conversation in conversations for turn in conversation.turns]
        steps = [step for turn in turns for step in await client.steps(turn.call_id)]
    seen = {name: steps.count(name) for name in sorted(set(steps))}
    print(f"{len(turns)} turns; steps: {seen}; {snapshot.counters}")

    # The pressure was real.
    assert seen.get("refused", 0) > 0
    num_left = sum(turn.leaves_after is not None for turn in turns)
    assert snapshot.counters.cancelled == num_left > 0
    evicted = [
        turn
        for turn in turns
        if turn.cached_tokens is not None and turn.cached_tokens < turn.known_tokens
    ]
    swapped = [i.stats.swapped_in_blocks for i in snapshot.instances if i.stats is not None]
    assert sum(swapped) if dram_gb else evicted, "no history had to leave HBM"
    assert seen.get("returned", 0) > 0
    assert snapshot.counters.cached_tokens > 0
    assert snapshot.counters.failed == 0
    assert sum(link.failures for link in snapshot.links) <= num_left

    _compare(turns, reference)


def _compare(turns: list[Turn], reference: Reference) -> None:
    seen = [turn for turn in turns if turn.token_ids]
    expected = reference.tokens(
        [Job(turn.prompt, len(turn.token_ids)) for turn in seen], deadline_s=600.0
    )
    wrong = {
        turn.call_id: (len(turn.prompt), turn.token_ids, tokens)
        for turn, tokens in zip(seen, expected, strict=True)
        if turn.token_ids != tokens
    }
    assert wrong == {}

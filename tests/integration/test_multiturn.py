"""Conversations: what a turn finds in P's cache, at every caching level."""

from __future__ import annotations

import random
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.integration.api_client import CALL_S, Client
from tests.integration.cluster_harness import BLOCK, MODEL, Cluster, running
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TURNS = 3
NUM_TOKENS = 45
"""More than a block, so that what D generates fills blocks of its own."""


@pytest.fixture(scope="module", params=["none", "prefill", "decode", "full"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running("1P1D", caching=request.param) as cluster:
        yield cluster


def _full_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK


async def test_cached_tokens_of_three_turns(
    cluster: Cluster, texts: Texts, reference: Reference
) -> None:
    rng = random.Random(21)
    caching = ""
    history = texts.tokens(75, rng)
    covered = 0
    answers: list[tuple[Job, list[int]]] = []
    async with Client(cluster) as client:
        for turn in range(NUM_TURNS):
            call_id = f"turn-{turn}"
            run = client.stream if turn % 2 else client.complete
            answer = await run(history, NUM_TOKENS, call_id=call_id)
            answers.append((Job(history, NUM_TOKENS), answer.token_ids))
            assert answer.cached_tokens == covered, f"turn {turn + 1}"
            await client.until_released(call_id)
            caching = (await client.status()).caching
            # The last token was sampled but never computed: it has no KV.
            computed = len(history) + NUM_TOKENS - 1
            covered = {
                "none": 0,
                "prefill": _full_blocks(len(history)),
                "decode": _full_blocks(len(history)),
                "full": _full_blocks(computed),
            }[caching]
            history = history + answer.token_ids + texts.tokens(17, rng)
        await client.until_idle()
        status = await client.status()
    sent_back = [link for link in status.links if link.source == "D0"]
    assert bool(sum(link.blocks for link in sent_back)) == (caching == "full")
    expected = reference.tokens([job for job, _ in answers])
    assert [tokens for _, tokens in answers] == expected


async def test_only_what_decode_lacks_is_sent(cluster: Cluster, texts: Texts) -> None:
    """PD-Caching-2's gain over PD-Caching-1: D gets a known prefix only once."""
    prompt = texts.tokens(4 * BLOCK + 3, random.Random(22))
    sent = []
    async with Client(cluster) as client:
        for call in range(2):
            before = await client.until_idle()
            await client.complete(prompt, 3, call_id=f"again-{call}")
            after = await client.until_idle()
            blocks = [
                sum(link.blocks for link in status.links if link.source == "P0")
                for status in (before, after)
            ]
            sent.append(blocks[1] - blocks[0])
    is_kept = after.caching in ("decode", "full")
    assert sent == [4, 0 if is_kept else 4]


@pytest.mark.parametrize("cluster", ["full"], indirect=True)
async def test_chat_through_the_openai_package(cluster: Cluster) -> None:
    """The history that the client sends back renders to the tokens that were generated."""
    messages: list[ChatCompletionMessageParam] = []
    questions = [
        "Tell me in a few sentences how bread is baked, from the grain to the loaf.",
        "And what is different about a cake?",
        "Thank you. Which of both keeps longer?",
    ]
    covered = 0
    base_url = f"{cluster.url}/v1"
    async with (
        Client(cluster) as client,
        openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=CALL_S, max_retries=0) as api,
    ):
        for turn, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            answer = await api.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=50
            )
            usage = answer.usage
            assert usage is not None
            assert usage.prompt_tokens_details is not None
            assert (usage.prompt_tokens_details.cached_tokens or 0) >= covered, f"turn {turn + 1}"
            await client.until_released(answer.id)
            covered = _full_blocks(usage.prompt_tokens + usage.completion_tokens - 1)
            assert covered >= BLOCK
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        await client.until_idle()

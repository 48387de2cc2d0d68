"""The scheduler's prompt tree over real instances whose pools are far too small: it stays true."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import psutil
import pytest

from memserve.core.timeline import RequestTimeline
from memserve.types import InstanceId
from tests.integration.api_client import Client, until_async
from tests.integration.cluster_harness import BLOCK, Cluster, running
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

P0, D0 = InstanceId("P0"), InstanceId("D0")
POOL_MB = 40
"""27 blocks of float32: three of the longest prompts."""
NUM_PROMPTS = 16


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"mempool.hbm_mb": POOL_MB, "engine.max_model_len": 512}
    with running("1P1D-CC", settings=settings) as cluster:
        yield cluster


def prompts(texts: Texts, seed: int) -> list[list[int]]:
    """Some begin with the same tokens; together they need several times the pool."""
    rng = random.Random(seed)
    shared = texts.tokens(3 * BLOCK + 5, rng)
    return [
        (shared if number % 2 else []) + texts.tokens(rng.randrange(BLOCK, 6 * BLOCK), rng)
        for number in range(NUM_PROMPTS)
    ]


def predicted(timeline: RequestTimeline) -> int:
    """Cached tokens on P that the placement counted on."""
    (step,) = [step for step in timeline.steps if step.name == "placed"]
    candidates = step.detail["candidates"]
    assert isinstance(candidates, list)
    return next(int(c["cached_tokens"]) for c in candidates if c["instance"] == P0)


async def test_under_constant_eviction_it_equals_the_instances(
    cluster: Cluster, texts: Texts
) -> None:
    """`until_idle` audits: every instance's own index is compared with the tree, block by block."""
    async with Client(cluster) as client:
        for seed in range(2):
            gate = asyncio.Semaphore(3)

            async def ask(prompt: list[int], gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await client.complete(prompt, BLOCK + 3)

            asked = prompts(texts, seed)
            async with asyncio.TaskGroup() as tasks:
                for prompt in asked:
                    tasks.create_task(ask(prompt))
                tasks.create_task(client.until_idle())  # also under traffic
            await client.until_idle()
        stats = {i.id: i.stats for i in (await client.status()).instances}
        needed = sum(len(prompt) // BLOCK for prompt in asked)
        for instance in (P0, D0):
            pool = stats[instance]
            assert pool is not None
            assert pool.total_blocks < needed / 2, "nothing had to be evicted"
            assert pool.historical_blocks > pool.total_blocks // 2


async def test_what_a_placement_counts_on_is_what_the_request_finds(
    cluster: Cluster, texts: Texts
) -> None:
    found = []
    async with Client(cluster) as client:
        for number, prompt in enumerate([*prompts(texts, 2), *prompts(texts, 2)[-4:]]):
            call_id = f"predicted-{number}"
            answer = await client.complete(prompt, 2, call_id=call_id)
            await client.until_released(call_id)
            (timeline,) = await client.timelines(call_id)
            assert predicted(timeline) == answer.cached_tokens, call_id
            found.append(answer.cached_tokens)
    assert max(found[-4:]) > 3 * BLOCK, "nothing was ever found again"


async def test_a_new_life_of_an_instance_is_followed_from_its_beginning(
    cluster: Cluster, texts: Texts
) -> None:
    prompt = texts.tokens(4 * BLOCK, random.Random(3))
    async with Client(cluster) as client:
        await client.complete(prompt, 2, call_id="before")
        before = await client.until_idle()
        (old,) = [instance for instance in before.instances if instance.id == P0]
        assert old.pid is not None
        psutil.Process(old.pid).send_signal(signal.SIGKILL)

        async def is_back() -> bool:
            (new,) = [i for i in (await client.status()).instances if i.id == P0]
            return new.epoch > old.epoch and new.state.value == "ready"

        await until_async(is_back, "P0 is back", 60.0)
        answer = await client.complete(prompt, 2, call_id="after")
        (timeline,) = await client.timelines("after")
        assert predicted(timeline) == answer.cached_tokens == 0
        await client.until_idle()

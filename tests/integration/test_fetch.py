"""A prompt that one prefill instance knows and another one gets: what it lacks is fetched.

Round robin, and `fetch = "always"`: who computes and who fetches is certain. D keeps nothing here
(`caching = "prefill"`), so that the other prefill instance is the only source. Stages that last
milliseconds are held open by stopping (SIGSTOP) the source.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from memserve.status import InstanceStatus
from memserve.types import InstanceState
from tests.integration.api_client import Client, Completion, until_async
from tests.integration.cluster_harness import BLOCK, Cluster, running
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 12
NUM_BLOCKS = 9
BACK_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {
        "scheduler.policy": "round_robin",
        "scheduler.fetch": "always",
        "transfer.reservation_s": 3.0,
        "cluster.max_restarts": 1000,
        "cluster.heartbeat_interval_s": 0.2,
    }
    with running("2P1D", caching="prefill", settings=settings) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster) as client:
        yield client


def job(texts: Texts, seed: int) -> Job:
    return Job(texts.tokens(NUM_BLOCKS * BLOCK + 7, random.Random(seed)), NUM_TOKENS)


async def placed_on(client: Client, call_id: str) -> str:
    """Where its prompt was first to be computed."""
    (timeline,) = await client.timelines(call_id)
    step = next(step for step in timeline.steps if step.name == "placed")
    assert step.instance is not None
    return step.instance


async def make_known(client: Client, job: Job, call_id: str) -> str:
    """Let one prefill instance compute the prompt; which one."""
    await client.complete(job.prompt, 2, call_id=call_id)
    await client.until_idle()
    return await placed_on(client, call_id)


async def instance(client: Client, id: str) -> InstanceStatus:
    return next(i for i in (await client.status()).instances if i.id == id)


async def until_back(client: Client, before: InstanceStatus) -> None:
    async def is_back() -> bool:
        now = await instance(client, before.id)
        return now.state is InstanceState.READY and now.epoch > before.epoch

    await until_async(is_back, f"{before.id} is back", BACK_S)


class HeldFetch:
    """A request whose fetch has begun, and whose source is stopped."""

    def __init__(self, client: Client, job: Job, name: str) -> None:
        self.client, self.job, self.name = client, job, name

    async def begin(self) -> None:
        source = await make_known(self.client, self.job, f"known-{self.name}")
        self.source = await instance(self.client, source)
        self.receiver = await instance(self.client, "P1" if source == "P0" else "P0")
        assert self.source.pid is not None
        os.kill(self.source.pid, signal.SIGSTOP)
        self.call_id = f"fetch-{self.name}"
        self.task: asyncio.Task[Completion] = asyncio.create_task(
            self.client.stream(self.job.prompt, NUM_TOKENS, call_id=self.call_id)
        )
        await self.client.until_step(self.call_id, "allocated")

    def resume(self) -> None:
        """Let the source go on, if it still lives."""
        assert self.source.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.source.pid, signal.SIGCONT)


@pytest.fixture
async def held(
    client: Client, texts: Texts, request: pytest.FixtureRequest
) -> AsyncIterator[HeldFetch]:
    name = request.node.name
    fetch = HeldFetch(client, job(texts, 200 + sum(name.encode())), name)
    try:
        await fetch.begin()
        yield fetch
    finally:
        fetch.resume()


async def test_a_prompt_known_elsewhere_is_fetched(
    client: Client, texts: Texts, reference: Reference
) -> None:
    work = job(texts, 101)
    source = await make_known(client, work, "known")
    before = {(link.source, link.target): link.blocks for link in (await client.status()).links}
    answer = await client.complete(work.prompt, NUM_TOKENS, call_id="fetches")
    assert answer.cached_tokens == NUM_BLOCKS * BLOCK
    status = await client.until_idle()  # the audit is clean
    target = await placed_on(client, "fetches")
    assert {source, target} == {"P0", "P1"}
    steps = await client.steps("fetches")
    first = ["placed", "fetching", "allocated", "sent", "fetched", "started"]
    assert [name for name in steps if name in first][: len(first)] == first
    moved = {(link.source, link.target): link.blocks for link in status.links}
    assert moved[source, target] - before[source, target] == NUM_BLOCKS
    again = await client.complete(work.prompt, NUM_TOKENS, call_id="again")
    assert again.cached_tokens == NUM_BLOCKS * BLOCK and "fetching" not in await client.steps(
        "again"
    )
    [expected] = await asyncio.to_thread(reference.tokens, [work])
    assert answer.token_ids == again.token_ids == expected


async def test_only_what_is_lacking_is_fetched(
    client: Client, texts: Texts, reference: Reference
) -> None:
    """Both know the beginning; the source knows more."""
    work = job(texts, 102)
    start = work.prompt[: 4 * BLOCK + 1]
    await make_known(client, Job(start, 2), "start-a")
    await make_known(client, Job(start, 2), "start-b")
    source = await make_known(client, work, "whole")
    before = {(link.source, link.target): link.blocks for link in (await client.status()).links}
    answer = await client.complete(work.prompt, NUM_TOKENS, call_id="rest")
    target = await placed_on(client, "rest")
    status = await client.until_idle()
    moved = {(link.source, link.target): link.blocks for link in status.links}
    assert moved[source, target] - before[source, target] == NUM_BLOCKS - 4
    assert answer.cached_tokens == NUM_BLOCKS * BLOCK
    [expected] = await asyncio.to_thread(reference.tokens, [work])
    assert answer.token_ids == expected


@pytest.mark.parametrize("victim", ["source", "receiver", "decode"])
async def test_an_instance_dies_in_mid_fetch(
    held: HeldFetch, reference: Reference, victim: str
) -> None:
    client = held.client
    decode = await instance(client, "D0")
    dead = {"source": held.source, "receiver": held.receiver, "decode": decode}[victim]
    assert dead.pid is not None
    os.kill(dead.pid, signal.SIGKILL)
    if victim == "receiver":
        await client.until_step(held.call_id, "lost")
    held.resume()
    answer = await held.task
    steps = await client.steps(held.call_id)
    assert ("lost" in steps) == (victim != "source")
    if victim == "source":
        assert answer.cached_tokens == 0 and "fetched" not in steps
    await until_back(client, dead)
    await client.until_idle()
    [expected] = await asyncio.to_thread(reference.tokens, [held.job])
    assert answer.token_ids == expected


async def test_a_hung_source_costs_a_request_its_fetch_and_no_more(
    held: HeldFetch, reference: Reference
) -> None:
    """The source is stopped throughout. Its heartbeat's deadline is far away, the fetch's near."""
    client = held.client
    answer = await held.task
    steps = await client.steps(held.call_id)
    assert "reservation expired" in steps and "fetched" not in steps
    assert answer.cached_tokens == 0
    assert "released" not in steps, "its source may still be writing"
    held.resume()
    await client.until_released(held.call_id)
    await client.until_idle()  # the audit is clean
    [expected] = await asyncio.to_thread(reference.tokens, [held.job])
    assert answer.token_ids == expected


async def test_a_client_leaves_in_mid_fetch(held: HeldFetch) -> None:
    held.task.cancel()
    await held.client.until_step(held.call_id, "cancelled")
    assert "released" not in await held.client.steps(held.call_id)  # the source may be writing
    held.resume()
    await held.client.until_released(held.call_id)
    await held.client.until_idle()

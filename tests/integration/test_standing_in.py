"""Service goes on while all prefill, or all decode instances are away (`split = auto`).

The new life of who was killed is stopped (SIGSTOP) while it starts, so that it is away for as long
as a test wants. Requests that were under way, and those that come, run whole on who is left; when
the other is back, requests are split as before. Nobody holds anything in the end.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from memserve.core.timeline import Detail
from memserve.status import InstanceStatus
from memserve.types import InstanceState
from tests.integration.api_client import Client, until_async
from tests.integration.cluster_harness import MODEL, Cluster, running
from tests.integration.failing import Stream, instance_of, signal_instance, until_back
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SETTINGS: dict[str, object] = {
    "cluster.max_restarts": 1000,
    "cluster.heartbeat_interval_s": 0.2,
}
CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Name three colours."}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with running("1P1D-CC", settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with Client(pair) as client:
        yield client


async def _placed(client: Client, call_id: str) -> tuple[str, Detail]:
    """Where the call was placed last, and why."""
    [timeline] = await client.timelines(call_id)
    step = [step for step in timeline.steps if step.name == "placed"][-1]
    assert step.instance is not None
    return step.instance, step.detail


async def _held_while_starting(client: Client, before: InstanceStatus) -> int:
    """The process of the instance's next life, stopped before it is ready."""

    async def pid_of_next_life() -> int | None:
        now = await instance_of(client, before.id)
        return now.pid if now.epoch == before.epoch + 1 else None

    pid = await until_async(pid_of_next_life, f"{before.id} starts again", 30, every_s=0.02)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert (await instance_of(client, before.id)).state is InstanceState.STARTING
    return pid


@pytest.mark.parametrize(("victim", "left"), [("P0", "D0"), ("D0", "P0")])
async def test_who_is_left_serves_alone_until_the_other_is_back(
    client: Client, texts: Texts, reference: Reference, victim: str, left: str
) -> None:
    rng = random.Random(60)
    jobs = [Job(texts.tokens(length, rng), 40) for length in (900, 60, 300, 20)]
    expected = await asyncio.to_thread(reference.tokens, jobs)
    undisturbed = await client.post("/v1/chat/completions", CHAT)
    under_way = [
        Stream(client, job, f"{victim}-{number}", cache_salt=victim)
        for number, job in enumerate(jobs[:3])
    ]
    await client.until_step(under_way[0].call_id, "started")
    before = await signal_instance(client, victim, signal.SIGKILL)
    starting = await _held_while_starting(client, before)
    try:
        answer = await client.post("/v1/chat/completions", CHAT, f"chat-{victim}")
        later = Stream(client, jobs[3], f"later-{victim}", cache_salt=victim)
        assert [await stream.task for stream in (*under_way, later)] == expected
        assert answer["choices"][0]["message"] == undisturbed["choices"][0]["message"]
        for call_id in (f"chat-{victim}", later.call_id):
            instance, reason = await _placed(client, call_id)
            word = "prefill" if victim == "P0" else "decode"
            assert (instance, reason["runs whole"]) == (left, f"no {word} instance answers")
            await client.until_released(call_id)
        status = await client.audit()
        assert status.is_ready and status.counters.failed == 0
        assert [(report.instance, report.problems) for report in status.audit] == [(left, [])]
    finally:
        os.kill(starting, signal.SIGCONT)
    await until_back(client, before)
    again = Stream(client, jobs[0], f"again-{victim}", cache_salt="again")
    assert await again.task == expected[0]
    instance, reason = await _placed(client, again.call_id)
    assert instance == "P0" and "runs whole" not in reason
    await client.until_idle()


async def test_one_that_never_comes_back_is_not_missed(texts: Texts, reference: Reference) -> None:
    job = Job(texts.tokens(50, random.Random(61)), 5)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    with running("2P1D-CC", settings={"cluster.max_restarts": 0}) as cluster:
        async with Client(cluster) as client:
            for victim in ("P0", "P1"):
                before = await signal_instance(client, victim, signal.SIGKILL)

                async def is_given_up(id: str = before.id) -> bool:
                    return (await instance_of(client, id)).state is InstanceState.FAILED

                await until_async(is_given_up, f"{victim} is given up", 20)
            answer = await client.complete(job.prompt, job.num_tokens, call_id="alone")
            assert answer.token_ids == expected
            assert (await _placed(client, "alone"))[0] == "D0"
            await client.until_released("alone")
            assert [report.problems for report in (await client.audit()).audit] == [[]]

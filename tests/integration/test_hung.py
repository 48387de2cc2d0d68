"""Instances that hang (SIGSTOP) long before anybody takes them for dead.

Whoever waits for one goes on elsewhere, whoever comes later is not sent there, and with its first
sign it is back. The cluster manager's own time-out is set so long that it plays no part.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator

import pytest

from tests.integration.api_client import Client
from tests.integration.cluster_harness import running
from tests.integration.failing import Stream, signal_instance
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SETTINGS: dict[str, object] = {"cluster.heartbeat_timeout_s": 600.0, "cluster.max_restarts": 0}
SERVED_S = 60.0
"""For requests that an instance holds up; it hangs for all that time."""


@contextlib.asynccontextmanager
async def _stopped(client: Client, id: str) -> AsyncIterator[None]:
    pid = (await signal_instance(client, id, signal.SIGSTOP)).pid
    assert pid is not None
    try:
        async with asyncio.timeout(SERVED_S):
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def _places(client: Client, call_id: str) -> list[str | None]:
    [timeline] = await client.timelines(call_id)
    return [step.instance for step in timeline.steps if step.name == "placed"]


def _jobs(texts: Texts, count: int, num_tokens: int, rng: random.Random) -> list[Job]:
    return [Job(texts.tokens(700, rng), num_tokens) for _ in range(count)]


async def test_a_hung_prefill_instance_holds_nobody_up(texts: Texts, reference: Reference) -> None:
    jobs = _jobs(texts, 5, 6, random.Random(70))
    expected = await asyncio.to_thread(reference.tokens, jobs)
    with running("2P1D-CC", settings=SETTINGS) as cluster:
        async with Client(cluster) as client:
            async with _stopped(client, "P0"):
                together = [Stream(client, job, f"pair-{i}") for i, job in enumerate(jobs[:2])]
                assert [await stream.task for stream in together] == expected[:2]
                places = [await _places(client, stream.call_id) for stream in together]
                assert sorted(places, key=len) == [["P1"], ["P0", "P1"]]
                for number in (2, 3, 4):
                    late = Stream(client, jobs[number], f"late-{number}")
                    assert await late.task == expected[number]
                    assert await _places(client, late.call_id) == ["P1"]
            await client.until_idle()
            again = [Stream(client, job, f"again-{i}") for i, job in enumerate(jobs[3:])]
            assert [await stream.task for stream in again] == expected[3:]
            assert (await client.until_idle()).counters.failed == 0


async def test_a_hung_decode_instance_holds_nobody_up(texts: Texts, reference: Reference) -> None:
    [job] = _jobs(texts, 1, 200, random.Random(71))
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    with running("1P2D-CC", settings=SETTINGS) as cluster:
        async with Client(cluster) as client:
            stream = Stream(client, job, "generates")
            await stream.until_tokens(4)
            [timeline] = await client.timelines("generates")
            [decode] = {step.instance for step in timeline.steps if step.name == "allocated"}
            assert decode is not None
            async with _stopped(client, decode):
                assert await stream.task == expected
                assert "silent" in await client.steps("generates")
                later = await client.complete(job.prompt, 6, call_id="later")
                assert later.token_ids == expected[:6]
                assert "silent" not in await client.steps("later")
            await client.until_idle()


async def test_the_only_prefill_instance_hangs(texts: Texts, reference: Reference) -> None:
    """D runs requests whole, until P is heard of again."""
    [job] = _jobs(texts, 1, 8, random.Random(72))
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    with running("1P1D-CC", settings=SETTINGS) as cluster:
        async with Client(cluster) as client:
            async with _stopped(client, "P0"):
                for name in ("sits-on-it", "later"):
                    answer = await client.complete(job.prompt, job.num_tokens, call_id=name)
                    assert answer.token_ids == expected
                assert await _places(client, "sits-on-it") == ["P0", "D0"]
                assert await _places(client, "later") == ["D0"]
            await client.until_idle()
            answer = await client.complete(job.prompt, job.num_tokens, call_id="afterwards")
            assert answer.token_ids == expected
            assert await _places(client, "afterwards") == ["P0"]
            await client.until_idle()

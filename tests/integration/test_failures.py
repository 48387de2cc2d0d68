"""Instances, and the zygote, that die or hang at every stage of a request.

No client hangs: its request is placed again and gives the right tokens, or ends with one clear
error. Afterwards no survivor holds anything for the dead, and the instance that was started again
serves. Stages that last a few milliseconds are held open by a stopped (SIGSTOP) peer.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from memserve.status import InstanceStatus
from memserve.types import InstanceState
from tests.integration.api_client import ApiError, Client, Completion, until_async
from tests.integration.cluster_harness import MODEL, Cluster, running
from tests.integration.failing import Stream, instance_of, signal_instance, until_back
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 40
SETTINGS: dict[str, object] = {
    "cluster.max_restarts": 1000,
    "cluster.heartbeat_interval_s": 0.2,
    "scheduler.max_attempts": 4,
    "scheduler.split": "always",  # requests wait for the dead one: `test_standing_in.py` has others
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    """Where a request's instances are certain."""
    with running("1P1D-CC", settings=SETTINGS) as cluster:
        yield cluster


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[Client]:
    async with Client(pair) as client:
        yield client


def _job(texts: Texts, length: int, seed: int) -> Job:
    return Job(texts.tokens(length, random.Random(seed)), NUM_TOKENS)


async def _check_alive(client: Client, texts: Texts, reference: Reference) -> None:
    """Nothing is held, and requests are served as ever."""
    await client.until_idle()
    job = Job(_job(texts, 70, 40).prompt, 6)
    answer = await client.complete(job.prompt, job.num_tokens)
    assert [answer.token_ids] == await asyncio.to_thread(reference.tokens, [job])
    await client.until_idle()


# ── instances that hang, or die too often ─────────────────────────────────────────────────────


async def test_an_instance_that_hangs_is_replaced(texts: Texts, reference: Reference) -> None:
    settings = SETTINGS | {"cluster.heartbeat_timeout_s": 3.0}
    job = _job(texts, 50, 49)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    with running("1P1D-CC", settings=settings) as cluster:
        async with Client(cluster) as client:
            stream = Stream(client, job, "hangs")
            await stream.until_tokens(3)
            before = await signal_instance(client, "D0", signal.SIGSTOP)
            assert await stream.task == expected
            await until_back(client, before)
            assert before.pid is not None
            assert not psutil.pid_exists(before.pid)
            await _check_alive(client, texts, reference)
        assert "no heartbeat" in cluster.output()


async def test_an_instance_that_dies_too_often_is_given_up(texts: Texts) -> None:
    settings = {"cluster.max_restarts": 1, "scheduler.split": "always"}
    with running("1P1D-CC", settings=settings) as cluster:
        async with Client(cluster) as client:
            first = await signal_instance(client, "D0", signal.SIGKILL)
            await until_back(client, first)
            await signal_instance(client, "D0", signal.SIGKILL)

            async def has_failed() -> bool:
                return (await instance_of(client, "D0")).state is InstanceState.FAILED

            await until_async(has_failed, "D0 is given up", 20)
            with pytest.raises(ApiError, match="no decode instance answers") as caught:
                await client.complete(texts.tokens(20, random.Random(50)), 2)
            assert caught.value.status == 503
            assert (await instance_of(client, "D0")).error == "killed by SIGKILL"
            assert not (await client.status()).is_ready
            assert (await asyncio.to_thread(cluster.get, "/ready"))[0] == 503
            assert (await asyncio.to_thread(cluster.get, "/health"))[0] == 200


# ── under load ────────────────────────────────────────────────────────────────────────────────


async def test_every_instance_dies_once_under_load(texts: Texts, reference: Reference) -> None:
    rng = random.Random(51)
    jobs = [Job(texts.tokens(rng.randrange(10, 250), rng), rng.randrange(2, 40)) for _ in range(24)]
    expected = await asyncio.to_thread(reference.tokens, jobs)
    with running("1P2D-CC", settings=SETTINGS) as cluster:
        async with Client(cluster) as client:
            slots = asyncio.Semaphore(6)
            num_done = 0
            progress = asyncio.Condition()

            async def one(job: Job) -> Completion | ApiError:
                nonlocal num_done
                async with slots:
                    try:
                        return await client.stream(job.prompt, job.num_tokens)
                    except ApiError as error:
                        return error
                    finally:
                        async with progress:
                            num_done += 1
                            progress.notify_all()

            async def kill_some() -> list[InstanceStatus]:
                killed = []
                for victim, at in (("D0", 3), ("P0", 9), ("D1", 15)):
                    async with progress:
                        while num_done < at:
                            await progress.wait()
                    killed.append(await signal_instance(client, victim, signal.SIGKILL))
                return killed

            killing = asyncio.create_task(kill_some())
            async with asyncio.timeout(240):
                answers = await asyncio.gather(*(one(job) for job in jobs))
                killed = await killing
            for before in killed:
                await until_back(client, before)
            errors = [answer for answer in answers if isinstance(answer, ApiError)]
            for answer, tokens in zip(answers, expected, strict=True):
                if isinstance(answer, Completion):
                    assert answer.token_ids == tokens
            assert errors == []  # greedy requests can all be placed again
            assert (await client.status()).counters.replaced > 0
            await _check_alive(client, texts, reference)


# ── one instance dies, at a known stage ───────────────────────────────────────────────────────


@pytest.mark.parametrize("victim", ["P0", "D0"])
async def test_dies_idle(client: Client, texts: Texts, reference: Reference, victim: str) -> None:
    await client.complete(_job(texts, 100, 41).prompt, 3)
    await client.until_idle()
    before = await signal_instance(client, victim, signal.SIGKILL)
    await until_back(client, before)
    await _check_alive(client, texts, reference)


@pytest.mark.parametrize("victim", ["P0", "D0"])
async def test_dies_while_the_prompt_is_computed(
    client: Client, texts: Texts, reference: Reference, victim: str
) -> None:
    job = _job(texts, 900, 42)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    # Salted: the other victim's test left the prompt in P's cache.
    stream = Stream(client, job, f"prefill-{victim}", cache_salt=victim)
    await client.until_step(stream.call_id, "started")
    before = await signal_instance(client, victim, signal.SIGKILL)
    assert stream.token_ids == []
    assert await stream.task == expected
    assert "lost" in await client.steps(stream.call_id)
    await until_back(client, before)
    await _check_alive(client, texts, reference)


@pytest.mark.parametrize("victim", ["P0", "D0"])
async def test_dies_before_the_kv_has_arrived(
    client: Client, texts: Texts, reference: Reference, victim: str
) -> None:
    """D is stopped, so that its reservation stays open after the first token."""
    job = _job(texts, 150, 43)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    stopped = await signal_instance(client, "D0", signal.SIGSTOP)
    assert stopped.pid is not None
    try:
        stream = Stream(client, job, f"handoff-{victim}", cache_salt=victim)
        await stream.until_tokens(1)
        before = await signal_instance(client, victim, signal.SIGKILL)
    finally:
        if victim != "D0":
            os.kill(stopped.pid, signal.SIGCONT)
    assert await stream.task == expected
    await until_back(client, before)
    await _check_alive(client, texts, reference)


@pytest.mark.parametrize("victim", ["P0", "D0"])
async def test_dies_while_decode_runs(
    client: Client, texts: Texts, reference: Reference, victim: str
) -> None:
    job = _job(texts, 120, 44)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    stream = Stream(client, job, f"decode-{victim}", cache_salt=victim)
    await stream.until_tokens(4)
    before = await signal_instance(client, victim, signal.SIGKILL)
    assert await stream.task == expected
    assert ("lost" in await client.steps(stream.call_id)) == (victim == "D0")
    await until_back(client, before)
    await _check_alive(client, texts, reference)


@pytest.mark.parametrize("victim", ["P0", "D0"])
async def test_dies_while_kv_is_given_back(
    client: Client, texts: Texts, reference: Reference, victim: str
) -> None:
    """P is stopped, so that D holds the finished request's KV for it."""
    job = _job(texts, 120, 45)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    stream = Stream(client, job, f"return-{victim}", cache_salt=victim)
    await stream.until_tokens(2)
    stopped = await signal_instance(client, "P0", signal.SIGSTOP)
    assert stopped.pid is not None
    try:
        assert await stream.task == expected
        before = await signal_instance(client, victim, signal.SIGKILL)
    finally:
        if victim != "P0":
            os.kill(stopped.pid, signal.SIGCONT)
    await client.until_released(stream.call_id)
    await until_back(client, before)
    await _check_alive(client, texts, reference)


async def test_what_cannot_be_placed_again_fails_with_an_error(
    client: Client, texts: Texts, reference: Reference
) -> None:
    """A seeded request cannot go on elsewhere: its random generator died with D."""
    job = _job(texts, 60, 46)
    stream = Stream(client, job, "seeded", temperature=1.0, seed=5)
    await stream.until_tokens(3)
    before = await signal_instance(client, "D0", signal.SIGKILL)
    with pytest.raises(ApiError, match="D0 was lost") as caught:
        await stream.task
    assert caught.value.error["code"] == 500
    [timeline] = await client.timelines(stream.call_id)
    assert timeline.state == "failed"
    await until_back(client, before)
    await _check_alive(client, texts, reference)


async def test_a_client_leaves_while_decode_is_dead(
    client: Client, texts: Texts, reference: Reference
) -> None:
    """A cancel of a request that waits for its place."""
    stream = Stream(client, _job(texts, 60, 47), "gone")
    await stream.until_tokens(3)
    before = await signal_instance(client, "D0", signal.SIGKILL)
    await client.until_step("gone", "lost")
    stream.task.cancel()
    await asyncio.gather(stream.task, return_exceptions=True)
    await client.until_released("gone")
    await until_back(client, before)
    await _check_alive(client, texts, reference)


async def test_the_zygote_dies(
    pair: Cluster, client: Client, texts: Texts, reference: Reference
) -> None:
    """Its workers die with it; all start again, and the requests with them."""
    jobs = [_job(texts, length, 48) for length in (40, 90, 300)]
    expected = await asyncio.to_thread(reference.tokens, jobs)
    before = (await client.status()).instances
    streams = [Stream(client, job, f"zygote-{i}") for i, job in enumerate(jobs)]
    await streams[0].until_tokens(2)
    (await asyncio.to_thread(lambda: pair.zygote)).kill()
    assert [await stream.task for stream in streams] == expected
    for instance in before:
        await until_back(client, instance)
    await _check_alive(client, texts, reference)


async def test_a_chat_answer_that_is_not_streamed_survives_too(
    client: Client, texts: Texts, reference: Reference
) -> None:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count from one to fifty, in words."}],
        "temperature": 0,
        "max_tokens": 60,
    }
    undisturbed = await client.post("/v1/chat/completions", body)
    asked = asyncio.create_task(client.post("/v1/chat/completions", body, "survivor"))
    await client.until_step("survivor", "inserted")
    before = await signal_instance(client, "D0", signal.SIGKILL)
    answer = await asked
    assert answer["choices"][0]["message"] == undisturbed["choices"][0]["message"]
    assert answer["usage"]["completion_tokens"] == undisturbed["usage"]["completion_tokens"]
    await until_back(client, before)
    await _check_alive(client, texts, reference)

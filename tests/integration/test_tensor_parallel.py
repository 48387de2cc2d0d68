"""Instances of several ranks, on the CPU: the small model has three KV heads, so TP 3, and 1.

Tokens equal those of one plain instance, over two turns: the second one finds what D has given back
to P. And no rank outlives its instance, nor an instance its rank.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from memserve.messages import Abort, Allocate, Allocated, Cancel, Prefill, Started, Tokens
from memserve.status import InstanceStatus
from memserve.types import InstanceState, Namespace, RequestId, TransferId
from tests.integration.api_client import Client, until_async
from tests.integration.cluster_harness import BLOCK, Cluster, running
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts
from tests.integration.worker_harness import Rig, request_bytes

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 10
"""Enough for the prompts below to fill a block more, which D has to give back."""
LENGTHS = (28, 92, 156)
BACK_S = 90.0
SETTINGS: dict[str, object] = {
    "cluster.max_restarts": 1000,
    "cluster.heartbeat_interval_s": 0.2,
    "mempool.dram_gb": 0.1,
}


@pytest.fixture(scope="module", params=["P=3", "D=3"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """P of three ranks and D of one, then the other way round."""
    with running("1P1D-CC", settings=SETTINGS | {"cluster.tp": request.param}) as cluster:
        yield cluster


async def test_two_turns_equal_one_plain_instance(
    cluster: Cluster, texts: Texts, reference: Reference
) -> None:
    rng = random.Random(5)
    prompts = [texts.tokens(length, rng) for length in LENGTHS]
    async with Client(cluster) as client:
        for turn in range(2):
            answers = await asyncio.gather(*(client.complete(p, NUM_TOKENS) for p in prompts))
            await client.until_idle()
            jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
            expected = await asyncio.to_thread(reference.tokens, jobs)
            assert [answer.token_ids for answer in answers] == expected
            for prompt, answer in zip(prompts, answers, strict=True):
                # All of the first turn but its last token, which was never computed, and the rest.
                known = len(prompt) - 10 - 1 if turn else 0
                assert answer.cached_tokens == known // BLOCK * BLOCK
            prompts = [
                prompt + answer.token_ids + texts.tokens(10, rng)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
        kinds = {link.kind for link in (await client.status()).links}
        assert kinds == {"shm"}


async def _ranked(client: Client) -> tuple[InstanceStatus, list[psutil.Process]]:
    """The instance that has ranks, and their processes."""
    for instance in (await client.status()).instances:
        assert instance.pid is not None
        children = psutil.Process(instance.pid).children()
        ranks = [child for child in children if "tracker" not in " ".join(child.cmdline())]
        if ranks:
            assert len(ranks) == 3
            return instance, ranks
    raise AssertionError("no instance has ranks")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("victim", ["a rank", "the driver"])
async def test_an_instance_and_its_ranks_die_together_and_come_back(
    cluster: Cluster, texts: Texts, reference: Reference, victim: str
) -> None:
    job = Job(texts.tokens(70, random.Random(6)), NUM_TOKENS)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    async with Client(cluster) as client:
        instance, ranks = await _ranked(client)
        assert instance.pid is not None
        driver = psutil.Process(instance.pid)
        os.kill(ranks[1].pid if victim == "a rank" else driver.pid, signal.SIGKILL)

        async def are_gone() -> bool:
            return not any(_is_alive(process) for process in (driver, *ranks))

        await until_async(are_gone, f"{instance.id} and its ranks are gone", 20)

        async def is_back() -> bool:
            now = next(i for i in (await client.status()).instances if i.id == instance.id)
            return now.epoch == instance.epoch + 1 and now.state is InstanceState.READY

        await until_async(is_back, f"{instance.id} is ready again", BACK_S, every_s=0.1)
        answer = await client.complete(job.prompt, job.num_tokens)
        assert answer.token_ids == expected
        await client.until_idle()


def test_the_driver_serves_while_its_ranks_compute(model_folder: Path) -> None:
    """A prompt takes them seconds, in one step; what is asked meanwhile is answered before it."""
    rig = Rig(str(model_folder))
    name, other = RequestId("long"), RequestId("other")
    try:
        rig.start("P0", tp=3)
        rig.send(
            "P0",
            Prefill(
                epoch=1,
                request_id=name,
                attempt=1,
                request=request_bytes(1),
                known_tokens=0,
                token_ids=random.Random(1).choices(range(1000, 40_000), k=1500),
                whole=True,
                hold=False,
                is_private=False,
            ),
        )
        rig.expect("P0", Started)
        rig.send(
            "P0",
            Allocate(
                epoch=1,
                transfer_id=TransferId("t"),
                request_id=other,
                known_tokens=0,
                token_ids=list(range(2 * BLOCK)),
                namespace=Namespace(),
                is_private=False,
                deadline_s=60.0,
            ),
        )
        rig.expect("P0", Allocated)
        assert rig.take("P0") == [], "the prompt is still being computed"
        rig.expect("P0", Tokens)
        rig.send("P0", Cancel(epoch=1, transfer_id=TransferId("t")))
        for request_id in (name, other):
            rig.send("P0", Abort(epoch=1, request_id=request_id))
        rig.assert_clean("P0")
    finally:
        rig.close()

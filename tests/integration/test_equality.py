"""Every mode and caching level gives, token for token, what one plain vLLM instance gives.

Greedy completions of prompts around block boundaries; what D has to sample itself is compared in
`test_chat_equality.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import pytest

from memserve.status import Snapshot
from tests.integration.api_client import Client, Completion
from tests.integration.cluster_harness import BLOCK, Cluster, running
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

CLUSTERS = [("1PD", "none"), ("1PD", "full")] + [
    (mode, caching)
    for mode in ("1P1D", "1P2D")
    for caching in ("none", "prefill", "decode", "full")
]
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 161]
LENGTHS += [200, 255, 256, 257, 400, 512, 1025, 1500]
NUM_TOKENS = 16
AT_ONCE = 4
KV_MB = 384
"""So that nothing is evicted: 270 blocks in float32, for about 210 of prompts and answers."""


@pytest.fixture(scope="module")
def jobs(texts: Texts) -> list[Job]:
    rng = random.Random(11)
    return [Job(texts.tokens(length, rng), NUM_TOKENS) for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(jobs: list[Job], reference: Reference) -> list[list[int]]:
    return reference.tokens(jobs)


@pytest.fixture(scope="module", params=CLUSTERS, ids=lambda param: "-".join(param))
def cluster(request: pytest.FixtureRequest, expected: list[list[int]]) -> Iterator[Cluster]:
    """One cluster at a time; the plain instance has answered before."""
    mode, caching = request.param
    with running(mode, caching=caching, settings={"mempool.hbm_mb": KV_MB}) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    async with Client(cluster) as client:
        yield client


async def _run_all(client: Client, jobs: list[Job], *, stream: bool) -> list[Completion]:
    """A few at once, so that requests share steps and pools."""
    slots = asyncio.Semaphore(AT_ONCE)
    run = client.stream if stream else client.complete

    async def one(job: Job) -> Completion:
        async with slots:
            return await run(job.prompt, job.num_tokens)

    return list(await asyncio.gather(*(one(job) for job in jobs)))


def _check(jobs: list[Job], expected: list[list[int]], answers: list[Completion]) -> None:
    wrong = {
        len(job.prompt): (answer.token_ids, tokens)
        for job, tokens, answer in zip(jobs, expected, answers, strict=True)
        if answer.token_ids != tokens
    }
    assert wrong == {}
    for job, answer in zip(jobs, answers, strict=True):
        assert answer.prompt_tokens == len(job.prompt)
        assert answer.finish_reason == "length"
        assert answer.cached_tokens <= len(job.prompt) - 1  # one token is always computed


async def test_completions(client: Client, jobs: list[Job], expected: list[list[int]]) -> None:
    answers = await _run_all(client, jobs, stream=False)
    _check(jobs, expected, answers)
    await client.until_idle()


async def test_streams_of_known_prompts(
    client: Client, cluster: Cluster, jobs: list[Job], expected: list[list[int]]
) -> None:
    """The same prompts again: with caching, whole prompts are found."""
    short = [i for i, job in enumerate(jobs) if len(job.prompt) <= 260]
    jobs, expected = [jobs[i] for i in short], [expected[i] for i in short]
    answers = await _run_all(client, jobs, stream=True)
    _check(jobs, expected, answers)
    status = (await client.until_idle()).caching
    for job, answer in zip(jobs, answers, strict=True):
        full_blocks = (len(job.prompt) - 1) // BLOCK * BLOCK
        assert answer.cached_tokens == (0 if status == "none" else full_blocks)


@pytest.mark.parametrize("num_tokens", [1, 2])
async def test_short_answers(
    client: Client, jobs: list[Job], expected: list[list[int]], num_tokens: int
) -> None:
    """One token needs no decode at all; two are one from each side."""
    lengths = (1, 32, 33, 64, 200)
    short = [Job(job.prompt, num_tokens) for job in jobs if len(job.prompt) in lengths]
    tokens = [
        want[:num_tokens]
        for job, want in zip(jobs, expected, strict=True)
        if len(job.prompt) in lengths
    ]
    for stream in (False, True):
        _check(short, tokens, await _run_all(client, short, stream=stream))
    await client.until_idle()


async def test_kv_really_travels(client: Client, cluster: Cluster, texts: Texts) -> None:
    """Equal tokens alone would also come from a D that computes every prompt again."""
    before = _sent_blocks(await client.status(), "P0")
    prompt = texts.tokens(4 * BLOCK + 5, random.Random(12))
    await client.complete(prompt, 4)
    after = await client.until_idle()
    if cluster.mode == "1PD":
        assert after.links == []
    else:
        assert _sent_blocks(after, "P0") - before == 4
    assert sum(link.failures for link in after.links) == 0


def _sent_blocks(status: Snapshot, source: str) -> int:
    return sum(link.blocks for link in status.links if link.source == source)

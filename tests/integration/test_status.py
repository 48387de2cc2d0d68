"""`GET /v1/status` agrees with the pools: under load at every poll, and with an audit when idle."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from memserve.status import Snapshot
from tests.integration.api_client import Client, until_async
from tests.integration.cluster_harness import BLOCK, Cluster, running
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_REQUESTS = 16
POLL_S = 0.02
BLOCK_BYTES = BLOCK * 30 * 2 * 3 * 64 * 4
"""Tokens × layers × (K and V) × heads × dimensions × bytes of a float32, of the embedded model."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = {"engine.max_model_len": 512, "mempool.hbm_mb": 48}
    with running("1P2D-CC", settings=settings) as cluster:
        yield cluster


def _check_sums(snapshot: Snapshot) -> None:
    for instance in snapshot.instances:
        stats = instance.stats
        assert stats is not None
        parts = stats.free_blocks + stats.historical_blocks + stats.active_blocks
        assert parts == stats.total_blocks, instance
        assert min(stats.free_blocks, stats.historical_blocks, stats.active_blocks) >= 0
        assert 0 <= stats.quarantined_blocks <= stats.reserved_blocks <= stats.active_blocks
        assert 0 <= stats.prefix_hit_tokens <= stats.prefix_query_tokens
        assert instance.queued_tokens >= 0
        assert instance.running_requests >= 0
        assert instance.state.value == "ready"


async def _poll(client: Client, done: asyncio.Event) -> list[Snapshot]:
    snapshots = []
    while not done.is_set():
        snapshots.append(await client.status())
        _check_sums(snapshots[-1])
        await asyncio.sleep(POLL_S)
    return snapshots


async def test_under_load(cluster: Cluster, texts: Texts) -> None:
    rng = random.Random(31)
    prompts = [texts.tokens(rng.randrange(20, 300), rng) for _ in range(NUM_REQUESTS)]
    done = asyncio.Event()
    async with Client(cluster) as client:
        before = await client.until_idle()
        polling = asyncio.create_task(_poll(client, done))
        answers = await asyncio.gather(*(client.stream(prompt, 16) for prompt in prompts))
        done.set()
        snapshots = await polling
        after = await client.until_idle()
    counters = [snapshot.counters for snapshot in snapshots]
    assert all(c.submitted == c.running + c.waiting + c.finished for c in counters)
    assert any(c.running > 1 for c in counters)
    assert any(
        instance.stats is not None and instance.stats.active_blocks > 0
        for snapshot in snapshots
        for instance in snapshot.instances
    )
    new = after.counters
    old = before.counters
    assert new.submitted - old.submitted == new.finished - old.finished == NUM_REQUESTS
    assert new.generated_tokens - old.generated_tokens == sum(len(a.token_ids) for a in answers)
    assert new.prompt_tokens - old.prompt_tokens == sum(len(prompt) for prompt in prompts)
    assert new.cached_tokens - old.cached_tokens == sum(a.cached_tokens for a in answers)


async def test_idle_status_equals_the_audit(cluster: Cluster, texts: Texts) -> None:
    """Within a few heartbeats: the status is what the instances said last."""
    async with Client(cluster) as client:
        await client.complete(texts.tokens(100, random.Random(32)), 8)
        audited = {report.instance: report.stats for report in (await client.until_idle()).audit}

        async def is_equal() -> bool:
            snapshot = await client.status()
            _check_sums(snapshot)
            return {instance.id: instance.stats for instance in snapshot.instances} == audited

        await until_async(is_equal, f"the status says {audited}", 5)


async def test_links_count_what_was_sent(cluster: Cluster, texts: Texts) -> None:
    """The links' sums are those of the requests' timelines, in blocks and in bytes."""
    rng = random.Random(33)
    call_ids = [f"count-{index}" for index in range(4)]
    async with Client(cluster) as client:
        before = await client.until_idle()
        for call_id in call_ids:
            await client.stream(texts.tokens(3 * BLOCK + 7, rng), 2 * BLOCK, call_id=call_id)
        after = await client.until_idle()
        timelines = [t for call_id in call_ids for t in await client.timelines(call_id)]
    sent: dict[str, list[int]] = {}
    for timeline in timelines:
        for step in timeline.steps:
            if step.name == "sent":
                assert step.instance is not None
                totals = sent.setdefault(step.instance, [0, 0, 0])
                totals[0] += 1
                totals[1] += int(step.detail["blocks"])
                totals[2] += int(step.detail["bytes"])
    for source, totals in sent.items():
        assert _traffic(after, source) == [
            old + new for old, new in zip(_traffic(before, source), totals, strict=True)
        ]
        assert totals[2] == totals[1] * BLOCK_BYTES
    assert sent["P0"][0] == len(call_ids)
    assert {"D0", "D1"} & sent.keys()  # somebody gave its KV back
    assert all(link.kind == "shm" for link in after.links)
    assert len(after.links) == 6  # both directions of each pair: any one may fetch


def _traffic(snapshot: Snapshot, source: str) -> list[int]:
    links = [link for link in snapshot.links if link.source == source]
    return [
        sum(link.transfers for link in links),
        sum(link.blocks for link in links),
        sum(link.size_bytes for link in links),
    ]


async def test_a_timeline_tells_the_life_of_a_request(cluster: Cluster, texts: Texts) -> None:
    prompt = texts.tokens(3 * BLOCK + 2, random.Random(34))
    async with Client(cluster) as client:
        answer = await client.stream(prompt, 2 * BLOCK, call_id="life")
        await client.until_released("life")
        [timeline] = await client.timelines("life")
    decode = next(step.instance for step in timeline.steps if step.name == "inserted")
    assert decode in ("D0", "D1")
    steps: list[tuple[str, str | None]] = [(step.name, step.instance) for step in timeline.steps]
    first_token, finished = ("first token", "P0"), ("finished", None)
    assert [step for step in steps if step != first_token] == [
        ("queued", None),
        ("placed", "P0"),
        ("started", "P0"),
        ("allocated", decode),
        ("sent", "P0"),
        ("inserted", decode),
        ("started", decode),
        finished,
        ("allocated", "P0"),
        ("sent", decode),
        ("returned", "P0"),
        ("released", None),
    ]
    # The reservation is made while the prompt is computed: which comes first is a race.
    assert steps.index(("started", "P0")) < steps.index(first_token) < steps.index(("sent", "P0"))
    times = [step.at_s for step in timeline.steps]
    assert times == sorted(times)
    assert timeline.state == "finished"
    assert timeline.prompt_tokens == len(prompt)
    assert timeline.generated_tokens == len(answer.token_ids)
    assert timeline.cached_tokens == answer.cached_tokens

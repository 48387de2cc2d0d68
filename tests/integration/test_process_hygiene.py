"""However `memserve up` ends, nothing is left: no process, port, run directory, shared memory.

And what its clients see of an end: running requests may finish until the deadline, then they get
an error; new ones are refused.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
from collections.abc import Iterator

import aiohttp
import pytest

from tests.integration.api_client import ApiError, Client, StreamCut, until_async
from tests.integration.cluster_harness import STOP_S, Cluster, until
from tests.integration.failing import signal_instance, until_back
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A 1P1D-CC cluster, to be ended by the test."""
    cluster = Cluster("1P1D-CC", settings=getattr(request, "param", {}))
    try:
        yield cluster.start()
    finally:
        cluster.close()


def _check_running(cluster: Cluster) -> None:
    """What `assert_gone` looks for is there now, or its answer would mean nothing."""
    names = [" ".join(process.cmdline()) for process in cluster.processes()]
    assert len(names) >= 4, names  # orchestrator, zygote, P0, D0
    assert any("memserve.workers.zygote" in name for name in names)
    assert len(cluster.run_dirs) == 1
    [run_dir] = cluster.run_dirs
    assert run_dir.stat().st_mode & 0o777 == 0o700
    left = " ".join(cluster.leftovers())
    for word in ("process", "run directory", "socket", "port"):
        assert word in left


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_when_idle(cluster: Cluster, number: signal.Signals) -> None:
    _check_running(cluster)
    assert cluster.stop(number) == 0
    assert cluster.leftovers() == []
    assert "Traceback" not in cluster.output()


@pytest.mark.parametrize("whom", ["the orchestrator", "everybody"])
async def test_running_requests_drain(
    cluster: Cluster, texts: Texts, reference: Reference, whom: str
) -> None:
    """Everybody is sent SIGTERM by systemd, for one."""
    job = Job(texts.tokens(60, random.Random(61)), 60)
    [expected] = await asyncio.to_thread(reference.tokens, [job])
    token_ids: list[int] = []
    async with Client(cluster) as client:
        async for event in client.events(job.prompt, job.num_tokens):
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
            if len(token_ids) == 3:
                _terminate(cluster, whom)
                await _check_refuses(client, job)
        assert token_ids == expected
    assert await asyncio.to_thread(cluster.wait) == 0
    cluster.assert_gone()


def _terminate(cluster: Cluster, whom: str) -> None:
    orchestrator = cluster.orchestrator
    others = [p for p in cluster.processes() if p != orchestrator] if whom == "everybody" else []
    assert len(others) in (0, 3), others  # the zygote, P0, D0
    for process in [*others, orchestrator]:
        process.send_signal(signal.SIGTERM)


async def test_sigterm_of_one_worker_starts_it_again(cluster: Cluster, texts: Texts) -> None:
    async with Client(cluster) as client:
        before = await signal_instance(client, "P0", signal.SIGTERM)
        await until_back(client, before)
        await client.complete(texts.tokens(60, random.Random(64)), 1)
    assert await asyncio.to_thread(cluster.stop) == 0
    cluster.assert_gone()


async def _check_refuses(client: Client, job: Job) -> None:
    """New requests get 503 as soon as the signal was seen, or no connection at all."""

    async def refusal() -> str:
        try:
            await client.complete(job.prompt, 1)
        except ApiError as error:
            return f"{error.status}: {error.message}"
        except aiohttp.ClientConnectionError:
            return "503: not listening, as after shutting down"
        return ""

    said = await until_async(refusal, "new requests are refused", 10)
    assert said.startswith("503: ")
    assert "shutting down" in said


async def _stream_until_error(
    cluster: Cluster, prompt: list[int], signals: list[signal.Signals]
) -> None:
    """A request that would take a minute; every third event a signal is sent. Raises its error."""
    num_events = 0
    async with Client(cluster) as client:
        async for _ in client.events(prompt, 1500):
            num_events += 1
            if num_events % 3 == 0 and signals:
                cluster.orchestrator.send_signal(signals.pop(0))


@pytest.mark.parametrize("cluster", [{"server.shutdown_grace_s": 0.5}], indirect=True)
async def test_the_drain_has_a_deadline(cluster: Cluster, texts: Texts) -> None:
    await _check_aborted(cluster, texts, [signal.SIGINT])


@pytest.mark.parametrize("cluster", [{"server.shutdown_grace_s": 600}], indirect=True)
async def test_a_second_signal_ends_the_drain(cluster: Cluster, texts: Texts) -> None:
    await _check_aborted(cluster, texts, [signal.SIGINT, signal.SIGINT])


async def _check_aborted(cluster: Cluster, texts: Texts, signals: list[signal.Signals]) -> None:
    prompt = texts.tokens(60, random.Random(62))
    with pytest.raises(ApiError, match="shut") as caught:
        await _stream_until_error(cluster, prompt, signals)
    assert caught.value.error["code"] == 503
    assert await asyncio.to_thread(cluster.wait) == 0
    cluster.assert_gone()
    assert "Traceback" not in cluster.output()


async def test_the_orchestrator_is_killed(cluster: Cluster, texts: Texts) -> None:
    """Workers notice, in mid-request, and the zygote removes the run directory."""
    _check_running(cluster)
    prompt = texts.tokens(60, random.Random(63))
    with pytest.raises((aiohttp.ClientError, StreamCut)):
        await _stream_until_error(cluster, prompt, [signal.SIGKILL])
    await asyncio.to_thread(cluster.wait)
    cluster.assert_gone(10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_while_starting(number: signal.Signals) -> None:
    cluster = Cluster("1P1D-CC")
    try:
        process = cluster.launch()
        until(lambda: cluster.run_dirs, "the zygote runs", 30)
        process.send_signal(number)
        cluster.wait()
        cluster.assert_gone(STOP_S)  # the zygote may be in the middle of its imports
    finally:
        cluster.close()


def test_the_port_is_taken() -> None:
    """One line, and nothing is left of what had been started."""
    cluster = Cluster("1P1D-CC")
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", cluster.port))
        owner.listen()
        try:
            cluster.launch()
            until(lambda: cluster.processes() or True, "it runs", 5)
            assert cluster.wait(60) == 1
            assert f"127.0.0.1:{cluster.port}" in cluster.output()
            assert "memserve: error: " in cluster.output()
            assert "Traceback" not in cluster.output()
            left = [line for line in cluster.leftovers() if not line.startswith("port")]
            assert left == []
        finally:
            cluster.close()


def test_an_instance_that_cannot_start_ends_everything() -> None:
    """An engine argument that only the engine can judge."""
    cluster = Cluster("1P1D-CC", settings={"engine.max_model_len": 1_000_000})
    try:
        cluster.launch()
        assert cluster.wait(120) == 1
        cluster.assert_gone()
        errors = [line for line in cluster.output().splitlines() if "memserve: error: " in line]
        assert len(errors) == 1, cluster.output()
        assert "max_model_len" in errors[0]
        assert "Traceback" not in cluster.output()
    finally:
        cluster.close()

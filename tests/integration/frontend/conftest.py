"""The front end, and a cluster in process behind it: real tokenizer and lifecycles, no engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from memserve.frontend.app import build_app
from memserve.frontend.openai import Frontend, build_frontend
from memserve.models import BUNDLED_NAME, resolve_model
from tests.integration.frontend.harness import FakeCluster, Relay
from tests.integration.frontend.serving import ENGINE, MODEL, TEXT, Server, encode, serve


@pytest.fixture(scope="module")
def relay() -> Relay:
    return Relay()


@pytest.fixture(scope="module")
def frontend(relay: Relay) -> Iterator[Frontend]:
    frontend = build_frontend(resolve_model(BUNDLED_NAME), ENGINE, MODEL, relay)
    yield frontend
    frontend.close()


@pytest.fixture
async def cluster(relay: Relay, frontend: Frontend) -> AsyncIterator[FakeCluster]:
    """Fails the test if anything of any request is left at its end."""
    cluster = relay.target = FakeCluster(relay.sink)
    yield cluster
    await cluster.until(lambda: frontend.calls.num_open == 0)
    await cluster.until(lambda: all(r.lifecycle.phase.value == "ended" for r in cluster.requests))
    cluster.check_nothing_left()
    assert frontend.client.num_unfinished == 0
    assert not frontend.client.output_processor.parent_requests
    assert not frontend.client.output_processor.external_req_ids


@pytest.fixture
async def server(cluster: FakeCluster, frontend: Frontend) -> AsyncIterator[Server]:
    async for server in serve(build_app(cluster, lambda: frontend)):
        yield server


@pytest.fixture
def tokens(frontend: Frontend) -> list[int]:
    """`TEXT`, as the model would generate it."""
    return encode(frontend, TEXT)

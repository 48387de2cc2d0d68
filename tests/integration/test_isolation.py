"""Tenants with different salts, and different LoRA adapters, never share KV: through the API."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memserve.models import BUNDLED_NAME, resolve_model
from tests.integration.adapters import random_adapter
from tests.integration.api_client import ApiError, AuditedSnapshot, Client
from tests.integration.cluster_harness import BLOCK, MODEL, Cluster, running
from tests.integration.reference import Job, Reference
from tests.integration.texts import Texts

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_BLOCKS = 4
NUM_TOKENS = 6
IDENTITIES: dict[str, dict[str, Any]] = {
    "base": {},
    "sql": {"model": "sql"},
    "chat": {"model": "chat"},
    "tenant": {"cache_salt": "tenant"},
    "other tenant": {"cache_salt": "other tenant"},
    "tenant with sql": {"model": "sql", "cache_salt": "tenant"},
}
"""Who asks: what each adds to the body. No two of them may share a block."""
STRANGERS: dict[str, dict[str, Any]] = {
    "salt": {"cache_salt": "stranger"},
    "sql with salt": {"model": "sql", "cache_salt": "stranger"},
}
SMALL: dict[str, object] = {
    "engine.max_model_len": 512,
    "mempool.hbm_mb": 51,
    "mempool.dram_gb": 0.2,
}
"""36 blocks of HBM an instance, and room for four times as many in DRAM."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name → folder."""
    folder = tmp_path_factory.mktemp("adapters")
    model = Path(resolve_model(BUNDLED_NAME))
    return {
        name: random_adapter(folder / name, model, seed)
        for seed, name in enumerate(("sql", "chat"))
    }


@pytest.fixture(scope="module")
def cluster(adapters: dict[str, str]) -> Iterator[Cluster]:
    table = ", ".join(f"{name} = {json.dumps(folder)}" for name, folder in adapters.items())
    with running("1P1D-CC", settings=SMALL | {"models.loras": f"{{{table}}}"}) as cluster:
        yield cluster


def _sent(status: AuditedSnapshot) -> int:
    """Blocks that went from P to D."""
    return sum(link.blocks for link in status.links if link.source == "P0")


async def test_nobody_finds_anothers_blocks_and_everybody_finds_its_own(
    cluster: Cluster, texts: Texts, reference: Reference
) -> None:
    prompt = texts.tokens(NUM_BLOCKS * BLOCK + 3, random.Random(31))
    rounds: list[dict[str, list[int]]] = [{}, {}]
    async with Client(cluster) as client:
        for number, answers in enumerate(rounds):
            for name, identity in IDENTITIES.items():
                before = await client.until_idle()
                answer = await client.complete(prompt, NUM_TOKENS, **identity)
                after = await client.until_idle()
                is_again = number == 1
                assert answer.cached_tokens == (NUM_BLOCKS * BLOCK if is_again else 0), name
                assert _sent(after) - _sent(before) == (0 if is_again else NUM_BLOCKS), name
                answers[name] = answer.token_ids
    first, again = rounds
    assert again == first
    expected = reference.tokens([Job(prompt, NUM_TOKENS)])[0]
    assert first["base"] == first["tenant"] == first["other tenant"] == expected
    assert first["sql"] == first["tenant with sql"]
    assert len({tuple(first[name]) for name in ("base", "sql", "chat")}) == 3, first


async def test_blocks_in_dram_are_as_separate(cluster: Cluster, texts: Texts) -> None:
    rng = random.Random(33)
    prompt = texts.tokens(NUM_BLOCKS * BLOCK + 3, rng)
    answers: dict[str, list[int]] = {}
    async with Client(cluster) as client:
        for name, identity in IDENTITIES.items():
            answers[name] = (await client.complete(prompt, NUM_TOKENS, **identity)).token_ids
        before = await client.until_idle()
        for _ in range(4):  # more than the pools have room for
            await client.complete(texts.tokens(14 * BLOCK, rng), 2)
        await client.until_idle()
        for name, identity in STRANGERS.items():
            other = await client.complete(prompt, NUM_TOKENS, **identity)
            assert other.cached_tokens == 0, name
        num_cached = 0
        for name, identity in IDENTITIES.items():
            answer = await client.complete(prompt, NUM_TOKENS, **identity)
            assert answer.token_ids == answers[name], name
            num_cached += answer.cached_tokens
        after = await client.until_idle()
    assert num_cached > 0
    for old, new in zip(before.audit, after.audit, strict=True):
        assert old.stats is not None and new.stats is not None
        assert new.stats.swapped_in_blocks > old.stats.swapped_in_blocks, new


async def test_what_was_generated_is_not_shared_either(cluster: Cluster, texts: Texts) -> None:
    """D's blocks come back to P under the namespace of their request."""
    prompt = texts.tokens(BLOCK, random.Random(32))
    async with Client(cluster) as client:
        answer = await client.complete(prompt, 2 * BLOCK, model="sql")
        await client.until_idle()
        history = prompt + answer.token_ids
        for name in ("base", "chat", "tenant with sql"):
            other = await client.complete(history, 1, **IDENTITIES[name])
            assert other.cached_tokens == 0, name
        own = await client.complete(history, 1, model="sql")
        assert own.cached_tokens == 2 * BLOCK
        await client.until_idle()


async def test_adapters_are_models_of_the_api(cluster: Cluster) -> None:
    async with Client(cluster) as client:
        async with client.session.get("/v1/models") as response:
            cards = (await response.json())["data"]
        assert [card["id"] for card in cards] == [MODEL, "sql", "chat"]
        assert [card["parent"] for card in cards] == [None, MODEL, MODEL]
        body = {"prompt": "Hello", "max_tokens": 1}
        answer = await client.post("/v1/completions", body | {"model": "chat"})
        assert answer["model"] == "chat"
        with pytest.raises(ApiError, match="'sql', 'chat'") as caught:
            await client.post("/v1/completions", body | {"model": "poetry"})
        assert caught.value.status == 404

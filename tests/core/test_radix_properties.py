"""The local index against a naive one: any order of operations, everything compared after each.

A soak of any length, from the root of the project (a million operations take minutes)::

    MEMSERVE_SOAK_OPERATIONS=1000000 python -m pytest tests/core/test_radix_properties.py -k soak
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.types import Medium, Namespace
from tests.core.radix_model import PRIVATE, Pair

BLOCK_SIZE = 2
NAMESPACES = [Namespace(), Namespace(lora_name="a"), PRIVATE]
MEDIA = [Medium.HBM, Medium.HBM, Medium.DRAM]
SOAK_OPERATIONS = int(os.environ.get("MEMSERVE_SOAK_OPERATIONS", "3000"))


def step(pair: Pair, rng: random.Random) -> None:
    """One operation, chosen and filled in by `rng`."""
    pair.now_s += rng.choice([0.0, 1.0, 1.0, 5.0])
    namespace = rng.choice(NAMESPACES) if rng.random() < 0.4 else NAMESPACES[0]
    medium = rng.choice(MEDIA)
    # Few different tokens, so that prompts share beginnings; a partial block at times.
    tokens = [rng.randrange(2) for _ in range(rng.randrange(2 * 10))]
    depth = rng.randrange(len(tokens) // BLOCK_SIZE + 1)
    places = [rng.randrange(pair.num_places) for _ in range(rng.randrange(1, 4))]
    operations: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: pair.insert(namespace, tokens, 0, 10, medium)),
        (3, lambda: pair.insert(namespace, tokens, depth, rng.randrange(6), medium)),
        (1, lambda: pair.insert_wrongly(namespace, tokens, medium)),
        (4, lambda: pair.append(rng.randrange(8), tokens[:6], medium)),
        (2, lambda: pair.copy(places, Medium.HBM, Medium.DRAM)),
        (2, lambda: pair.copy(places, Medium.DRAM, Medium.HBM)),
        (1, lambda: pair.relocate(places[0], medium)),
        (4, lambda: pair.match(namespace, tokens)),
        (3, lambda: pair.drop(places, medium)),
        (1, lambda: pair.delete(namespace, tokens, depth)),
        (2, lambda: pair.evict(rng.randrange(5), medium, rng.choice([0.0, 0.0, 7.0]))),
        (1, lambda: pair.touch(namespace, tokens, rng.choice([None, depth]))),
        (2, lambda: pair.acquire(namespace, tokens, depth)),
        (2, lambda: pair.release(rng.randrange(8))),
    ]
    if rng.random() < 0.002:
        pair.clear()
        return
    weights, calls = zip(*operations, strict=True)
    rng.choices(calls, weights)[0]()


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_any_operations_agree_with_the_naive_index(rng: random.Random, num_steps: int) -> None:
    pair = Pair(BLOCK_SIZE, num_places=24)
    for _ in range(num_steps):
        step(pair, rng)
        pair.check()


@pytest.mark.timeout(60 + SOAK_OPERATIONS // 500)
def test_soak() -> None:
    """One long life: keys, queues and tables that only go wrong after many operations."""
    rng = random.Random(4)
    pair = Pair(BLOCK_SIZE, num_places=40)
    for number in range(SOAK_OPERATIONS):
        step(pair, rng)
        if number % 10 == 0:
            pair.check()
    pair.check()

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


def prompt(pair: Pair, rng: random.Random) -> tuple[Namespace, list[int]]:
    """Mostly one that begins with what is known; few different tokens, at times a partial block."""
    end = [rng.randrange(2) for _ in range(rng.randrange(2 * 6))]
    if pair.naive.blocks and rng.random() < 0.7:
        namespace, known = rng.choice(list(pair.naive.blocks))
        return namespace, [*known, *end]
    return rng.choice(NAMESPACES), end


def step(pair: Pair, rng: random.Random) -> None:
    """One operation, chosen and filled in by `rng`."""
    pair.now_s += rng.choice([0.0, 1.0, 1.0, 5.0])
    namespace, tokens = prompt(pair, rng)
    medium = rng.choice(MEDIA)
    known = len(pair.naive.known(namespace, tokens))
    depth = max(0, known - rng.choice([-1, 0, 0, 1, 1, 2, 3]))
    places = [rng.randrange(pair.num_places) for _ in range(rng.randrange(1, 4))]
    operations: list[tuple[int, Callable[[], None]]] = [
        (8, lambda: pair.insert(namespace, tokens, 0, 30, medium)),
        (3, lambda: pair.insert(namespace, tokens, min(depth, known), rng.randrange(6), medium)),
        (1, lambda: pair.insert(namespace, tokens, depth, 2, medium)),
        (1, lambda: pair.insert_wrongly(namespace, tokens, medium)),
        (4, lambda: pair.append(rng.randrange(8), tokens[:6], medium)),
        (3, lambda: pair.copy(places, Medium.HBM, Medium.DRAM)),
        (3, lambda: pair.copy(places, Medium.DRAM, Medium.HBM)),
        (4, lambda: pair.match(namespace, tokens)),
        (2, lambda: pair.drop(places[:2], medium)),
        (1, lambda: pair.delete(namespace, tokens, depth)),
        (3, lambda: pair.evict(rng.randrange(9), medium, rng.choice([0.0, 0.0, 12.0]))),
        (2, lambda: pair.touch(namespace, tokens, rng.choice([None, depth]))),
        (3, lambda: pair.acquire(namespace, tokens, depth)),
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

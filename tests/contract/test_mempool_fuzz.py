"""A bounded run of `mempool_fuzz.py`, which explains itself."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.contract.mempool_fuzz import Fuzz

STEPS = 400


@pytest.mark.parametrize("seed", range(6))
def test_over_the_engines_pool(seed: int) -> None:
    fuzz = Fuzz(seed, with_engine=True)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end()


@pytest.mark.parametrize("seed", range(2))
def test_over_a_plain_pool(seed: int) -> None:
    fuzz = Fuzz(seed, with_engine=False)
    for _ in range(STEPS):
        fuzz.step()
    fuzz.end()


def test_every_operation_takes_effect() -> None:
    done: Counter[str] = Counter()
    for seed in range(6, 10):
        fuzz = Fuzz(seed, with_engine=True)
        for _ in range(STEPS):
            fuzz.step()
        done += fuzz.done
    assert set(done) >= {
        "arrive", "hit", "hold_tail", "drop", "delete", "lease", "wait", "start", "generate",
        "finish", "preempt", "resume", "lose_block", "reset_pool",
    }  # fmt: skip

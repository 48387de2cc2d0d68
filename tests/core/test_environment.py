"""What the engine's environment is set to."""

from __future__ import annotations

from memserve.workers.environment import set_engine_environment

COMPILE = "TORCH_COMPILE_DISABLE"


def set_in(environment: dict[str, str], *, compiles: bool) -> dict[str, str]:
    set_engine_environment(environment, num_threads=2, log_level="info", compiles=compiles)
    return environment


def test_an_eager_engine_on_the_cpu_compiles_nothing() -> None:
    assert set_in({}, compiles=False)[COMPILE] == "1"
    assert COMPILE not in set_in({}, compiles=True)


def test_what_the_user_set_is_kept() -> None:
    kept = {COMPILE: "0", "OMP_NUM_THREADS": "7"}
    found = set_in(dict(kept), compiles=False)
    assert {name: found[name] for name in kept} == kept

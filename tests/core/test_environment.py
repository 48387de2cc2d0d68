"""What the engine's processes are told before they import vLLM."""

from __future__ import annotations

from memserve.workers.environment import (
    NO_MULTICAST,
    set_engine_environment,
    without_multicast,
)

COMPILE = "TORCH_COMPILE_DISABLE"


def test_no_process_of_an_engine_sets_up_nvlink_multicast() -> None:
    environment: dict[str, str] = {}
    set_engine_environment(environment, num_threads=1, log_level="error")
    assert NO_MULTICAST.items() <= environment.items()


def test_ranks_do_not_fuse_their_all_reduces() -> None:
    engine = {"max_num_seqs": 3, "compilation_config": {"mode": 3, "pass_config": {"eliminate": 1}}}
    assert without_multicast(engine, 1) == engine
    found = without_multicast(engine, 2)
    passes = {"fuse_allreduce_rms": False, "eliminate": 1}
    assert found == {"max_num_seqs": 3, "compilation_config": {"mode": 3, "pass_config": passes}}
    assert without_multicast({}, 2)["compilation_config"]["pass_config"] == {
        "fuse_allreduce_rms": False
    }


def test_who_asks_for_fused_all_reduces_gets_them() -> None:
    asked = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": True}}}
    assert without_multicast(asked, 2) == asked


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

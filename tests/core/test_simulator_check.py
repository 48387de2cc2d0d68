"""`bench/simulator_check.py` without a cluster: a run that was itself simulated is met exactly."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import simulator_check, simulator_others
from bench._probes import Probe, Spent, fit
from bench.simulator_check import MACHINES, Load, Machine, Measured
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import DecodeSample, LinkSample, PrefillSample

CPU = msgspec.structs.replace(MACHINES["cpu"], requests=30)
UTILISATION = 0.5
RESULTS = Path(simulator_check.__file__).parent / "results"


def a_probe(machine: Machine, model: CostModel) -> Probe:
    """What a cluster of exactly these costs would show."""
    points = machine.points
    return Probe(
        prefills=[PrefillSample(x, y, model.exec_s(x, y)) for x, y in points.prefills],
        decodes=[DecodeSample(n, n * c, model.decode_step_s(n, n * c)) for n, c in points.decodes],
        links=[LinkSample("shm", size, 1e-3 + size / 1e9) for size in (1 << 20, 1 << 24)],
        messages_s=[0.0003, 0.0005],
        front_end_s=[0.003],
    )


def spent(slowdown: float) -> dict[str, Spent]:
    names = ("P0", "D0", "orchestrator", "client")
    return dict.fromkeys(names, Spent(1.0, slowdown - 1.0))


@pytest.fixture
def run() -> Measured:
    """One load, at half utilisation, on processors that nobody else wants."""
    base = simulator_check.builtin_of(CPU, None)
    probe = a_probe(CPU, CostModel(base))
    run = Measured("cpu", base, 181, 32, {}, [probe, probe], [])
    rate = simulator_check.rate_for(CPU, run, UTILISATION, seed=3)
    calls = simulator_check.make_load(CPU, rate, seed=3)
    stored = [simulator_check.stored(call) for call in calls]
    load = Load(UTILISATION, rate, stored, [], [], spent(1.0))
    outcomes = simulator_check.simulate(run, fit(base, [probe]), load).outcomes
    run.loads.append(msgspec.structs.replace(load, outcomes=outcomes))
    return run


def test_the_rate_is_the_one_at_which_the_instance_is_so_busy(run: Measured) -> None:
    result = simulator_check.simulate(run, fit(run.base, run.probes), run.loads[0])
    assert result.busy[CPU.bound_by] == pytest.approx(UTILISATION, abs=0.05)


def test_what_was_simulated_is_met(run: Measured) -> None:
    result = simulator_check.simulate(run, fit(run.base, run.probes), run.loads[0])
    found = simulator_check.row(run.loads[0], result)
    errors = [found[f"{name} error, %"] for name in ("ttft", "tpot", "jct")]
    assert errors == pytest.approx([0.0] * 3, abs=0.1)
    assert found["failed"] == 0


def test_who_waits_for_a_processor_is_slower_by_that(run: Measured) -> None:
    slow = msgspec.structs.replace(run.loads[0], spent=spent(1.5))
    result = simulator_check.simulate(run, fit(run.base, run.probes), slow)
    found = simulator_check.row(slow, result)
    assert 45 < found["tpot error, %"] < 60  # type: ignore[operator]
    assert found["ttft error, %"] > 45  # type: ignore[operator]


@pytest.mark.parametrize("name", ["simulator_check_h200x2", "simulator_check"])
def test_the_runs_on_record_are_met_within_15_percent(name: str) -> None:
    run = simulator_check.read(RESULTS / f"{name}.json")
    for load, probes in zip(run.loads, itertools.pairwise(run.probes), strict=True):
        result = simulator_check.simulate(run, fit(run.base, probes), load)
        found = simulator_check.compare(load.outcomes, result.outcomes)
        assert [x for x, value in found.items() if x.endswith("%") and abs(value) > 15] == []


def test_what_other_benches_have_on_record_is_met_too() -> None:
    run = simulator_check.read(RESULTS / "simulator_check_h200x2.json")
    costs = fit(run.base, run.probes)
    styles, bursts = (
        json.loads((RESULTS / f"{name}_h200x2.json").read_text("utf-8"))
        for name in ("fig12_styles", "gpu_vs_vllm")
    )
    rows = simulator_others.of_styles(styles, costs, run.block_size)
    rows += simulator_others.of_bursts(bursts, costs, run.block_size)
    assert len(rows) == 5
    for row in rows:
        for figure, percent in (("ttft", 15), ("jct", 5), ("tpot", 5)):
            assert abs(row[f"{figure} error, %"]) < percent, (row["load"], figure)


def test_a_result_can_be_replayed(run: Measured, tmp_path: Path) -> None:
    base = msgspec.structs.replace(run.base, steps={2: run.base.step})  # as on several GPUs
    run = msgspec.structs.replace(run, base=base)
    path = tmp_path / "result.json"
    content: dict[str, Any] = {"raw": {"measured": msgspec.to_builtins(run)}}
    path.write_text(json.dumps(content))
    assert simulator_check.read(path) == run
    path.write_text("{}")
    with pytest.raises(SystemExit, match="not a result of this script"):
        simulator_check.read(path)

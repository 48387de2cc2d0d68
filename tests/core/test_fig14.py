"""Figure 14 without a GPU: from recorded measurements to errors, and how points are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from bench.fig14_cost_model import Result, evaluate, load
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import PrefillSample
from memserve.workers.calibrate import by_point, medians, prefill_points, prefill_round
from tests.core.test_cost_fit import STEP, TESTED, measure, noise_of, points, truth

RECORDED = Path(__file__).parents[2] / "bench/results/fig14_cost_model_h200.json"


class Probe:
    """Takes a second longer every time."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def prefill(self, num_tokens: int, cached_tokens: int) -> PrefillSample:
        self.asked.append((num_tokens, cached_tokens))
        return PrefillSample(num_tokens, cached_tokens, float(len(self.asked)))


def rounds_of(probe: Probe, at: list[tuple[int, int]], count: int) -> Any:
    return [prefill_round(cast(Any, probe), at, index) for index in range(count)]


def test_points_are_measured_in_turns_and_long_ones_less_often() -> None:
    probe = Probe()
    at = [(100, 0), (4000, 0), (4000, 3000)]
    found = by_point(rounds_of(probe, at, 4))
    short = [at[0], at[2]]
    assert probe.asked == [*short, *at, *short, *at]
    # The first round warms up.
    assert [[sample.seconds for sample in one] for one in found] == [[3, 6, 8], [4, 9], [5, 7, 10]]
    assert [sample.seconds for sample in medians(found)] == [6, 9, 7]


@pytest.mark.parametrize("rounds", [2, 6])
def test_every_point_is_measured(rounds: int) -> None:
    at = prefill_points(16383)
    found = medians(by_point(rounds_of(Probe(), at, rounds)))
    assert [(one.num_tokens, one.cached_tokens) for one in found] == at


def test_calibration_has_short_prefills_of_both_kinds() -> None:
    computed = [total - cached for total, cached in prefill_points(16383)]
    assert sum(100 < new <= 256 for new in computed) >= 4, "in the sizes of graphs"
    assert sum(512 < new < 1100 for new in computed) >= 4, "launched one by one"


def test_errors_are_those_of_the_points_tested() -> None:
    true = CostModel(truth(STEP))
    noise = noise_of(0.02)
    tests = [[PrefillSample(*at, true.exec_s(*at) * noise())] for at in points(TESTED)]
    samples = measure(true.profile, noise)
    result = Result(samples=samples, prefills=tests, started_s=0, measured_s=0)
    metrics, rows = evaluate({"m": result}, has_bounds=True)
    assert metrics["m: operators, mean error, %"] < 4
    best = metrics["m: BOUND, fitted to the tests, mean error, %"]
    assert best <= metrics["m: operators, mean error, %"] + 0.1
    assert [row["tokens"] for row in rows] == sorted(TESTED)


def test_what_an_h200_took_is_predicted_where_the_device_bounds_it() -> None:
    settings, results = load(RECORDED)
    assert settings["measured on"]["gpus"][0]["name"] == "NVIDIA H200"
    metrics, _ = evaluate(results, has_bounds=False)
    for name in results:
        most = 5.0 if name.endswith("TP=2") else 2.0
        found = metrics[f"{name}: operators, more than 2048 computed, mean error, %"]
        assert found < most
        assert found < metrics[f"{name}: whole model, more than 2048 computed, mean error, %"]


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"settings": {}}')
    with pytest.raises(SystemExit, match=r"other\.json: not a result of this script"):
        load(path)

"""Figure 14 without a GPU: from recorded measurements to errors, and how points are measured."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from bench import fig14_engines
from bench.fig14_cost_model import (
    as_others,
    cases_of,
    evaluate,
    load,
    load_all,
    make_jobs,
    options_of,
)
from bench.fig14_engines import Child, Job, Result, goes_on
from memserve.core.cost_fit import fit_operators
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import PrefillSample, ReduceSample, undisturbed
from memserve.core.profile import ReduceFit
from memserve.workers.calibrate import measured, prefill_points, prefill_round
from tests.core.test_cost_fit import STEP, TESTED, measure, noise_of, points, truth

RECORDED = Path(__file__).parents[2] / "bench/results/fig14_cost_model_h200x2.json"


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
    found = measured(rounds_of(probe, at, 6))
    computed = [(one.num_tokens, one.cached_tokens) for one in found]
    assert [computed.count(one) for one in at] == [6, 2, 6]
    assert sorted(probe.asked[:2]) == [at[0], at[2]], "a long one is not due in the first round"
    assert sorted(probe.asked[2:5]) == at
    assert len({tuple(probe.asked[i : i + 2]) for i in (0, 5, 7)}) > 1, "orders differ"


@pytest.mark.parametrize("rounds", [2, 6])
def test_every_point_is_measured(rounds: int) -> None:
    at = prefill_points(16383)
    found = undisturbed(measured(rounds_of(Probe(), at, rounds)))
    assert {(one.num_tokens, one.cached_tokens) for one in found} == set(at)


def test_calibration_has_short_prefills_of_both_kinds() -> None:
    computed = [total - cached for total, cached in prefill_points(16383)]
    assert sum(100 < new <= 256 for new in computed) >= 4, "in the sizes of graphs"
    assert sum(512 < new < 1100 for new in computed) >= 4, "launched one by one"


def test_errors_are_those_of_the_points_tested() -> None:
    true = CostModel(truth(STEP))
    noise = noise_of(0.02)
    tests = [PrefillSample(*at, true.exec_s(*at) * noise()) for at in points(TESTED)]
    samples = measure(true.profile, noise)
    result = Result(samples=samples, prefills=tests, started_s=0, measured_s=0)
    metrics, rows = evaluate({"m": result}, has_bounds=True)
    assert metrics["m: operators, mean error, %"] < 4
    best = metrics["m: BOUND, fitted to the tests, mean error, %"]
    assert best <= metrics["m: operators, mean error, %"] + 0.1
    assert [row["tokens"] for row in rows] == sorted(TESTED)


@pytest.mark.parametrize("is_half", [False, True])
def test_two_ranks_are_predicted_with_the_all_reduces_that_are_in_them(is_half: bool) -> None:
    samples = measure(truth(STEP), noise_of(0), (1, 2))
    reduces = [ReduceSample(2, size, 2e-5 + size / 1e11, 5e-5) for size in (1 << 13, 1 << 26)]
    known = fit_operators(msgspec.structs.replace(samples, reduces=reduces), truth(STEP))
    if is_half:
        known = msgspec.structs.replace(known, reduce=ReduceFit(0.0, 1e15))
    of_two = CostModel(known, 2)
    tests = [PrefillSample(*at, of_two.exec_s(*at)) for at in points(TESTED)]
    results = {
        "all-reduce": Result(reduces=reduces),
        "m": Result(samples=samples),
        "m TP=2": Result(prefills=tests, is_half=is_half),
    }
    metrics, rows = evaluate(results, has_bounds=False)
    assert metrics["m TP=2: operators, shards measured, mean error, %"] < 0.1
    assert metrics["m TP=2: whole model, mean error, %"] > 5
    assert {row["model"] for row in rows} == {"m TP=2"}


def test_what_is_predicted_needs_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    tests = [PrefillSample(100, 0, 1.0)]
    assert evaluate({"m TP=2": Result(prefills=tests)}, has_bounds=False) == ({}, [])
    assert "m TP=2: its model was not calibrated" in capsys.readouterr().out


def test_two_gpus_share_the_cache_and_one_ranks_half_has_it_all(tmp_path: Path) -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
    }
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    by_kind = {}
    for kind in ("none", "half", "real"):
        (tmp_path / kind).mkdir()
        options = options_of(["--model", str(model), "--tp2", kind, "--engine", "max_num_seqs=7"])
        by_kind[kind] = make_jobs(options, tmp_path / kind)
    assert [job.name for job in by_kind["none"]] == ["m"]
    assert [job.name for job in by_kind["half"]] == ["m", "m TP=2"]
    assert [job.name for job in by_kind["real"]] == ["all-reduce", "m", "m TP=2"]
    assert [job.name for job in make_jobs(options_of(["--all-reduce"]), tmp_path)] == ["all-reduce"]
    whole, half = by_kind["half"]
    assert half.kv_bytes == whole.kv_bytes // 2
    assert half.is_half
    assert by_kind["real"][2].kv_bytes == whole.kv_bytes // 2
    assert by_kind["real"][2].folder == whole.folder
    assert whole.engine == {"max_num_seqs": 7}


def test_a_job_that_fails_says_why(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        job = Job(name="m", folder=str(tmp_path), device="cpu", result="")
        child = Child(job, log, [sys.executable, "-c", "raise SystemExit('no such model')"])
        assert not child.is_ready()
        child.go([0])
        assert child.complaint() == "m failed:\nno such model"
        child.end()


def test_a_job_that_hangs_is_ended_and_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("w+b") as log:
        job = Job(name="m", folder=str(tmp_path), device="cpu", result="")
        child = Child(job, log, [sys.executable, "-c", "import threading as t; t.Event().wait()"])
        assert not goes_on(child, 0.05, "started")
        child.end()
    assert "m failed:" in capsys.readouterr().out


def test_what_two_h200_took_is_predicted() -> None:
    settings, results = load_all([RECORDED])
    assert [gpu["name"] for gpu in settings["measured on"]["gpus"]] == ["NVIDIA H200"] * 2
    metrics, _ = evaluate(results, has_bounds=False)
    for name in results:
        found = metrics[f"{name}: operators, mean error, %"]
        assert found < (10 if name.endswith("TP=2") else 6)
        assert found < 0.6 * metrics[f"{name}: whole model, mean error, %"]
        assert metrics[f"{name}: operators, more than 2048 computed, mean error, %"] < 4


def test_two_models_can_be_predicted_from_each_other() -> None:
    cases = cases_of(load(RECORDED)[1])
    of_two = [case for case in cases if case.is_predicted]
    assert [case.samples.model for case in of_two] == ["llama-2-13b", "llama-3.1-8b"]
    assert as_others(of_two[0], cases).keys() == {
        "CROSS, the quantile that suits the other models' TP=2"
    }
    assert (
        as_others(of_two[0], [case for case in cases if case.samples.model == "llama-2-13b"]) == {}
    )


def test_a_later_file_adds_to_the_one_before(tmp_path: Path) -> None:
    reduces = [ReduceSample(2, 1 << 13, 2e-5, 1e-5)]
    path = tmp_path / "reduce.json"
    raw = msgspec.to_builtins({"all-reduce": Result(reduces=reduces)})
    path.write_text(json.dumps({"commit": "c", "hardware": {}, "settings": {}, "raw": raw}))
    settings, results = load_all([RECORDED, path])
    assert settings["measured at"] == "6f9920b"
    assert results["all-reduce"].reduces == reduces
    assert {*results} == {*load(RECORDED)[1], "all-reduce"}
    metrics, _ = evaluate(load_all([path])[1], has_bounds=True)
    assert metrics == {
        "all-reduce over 2 ranks: 8 KiB, µs": 20.0,
        "all-reduce over 2 ranks: launching, µs": 10.0,
    }


def test_what_a_job_has_found_is_kept_after_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(Probe):
        longest = 700

        def start(self) -> None:
            pass

        warm_up = start

    samples = measure(truth(STEP), noise_of(0))
    kept: list[Result] = []
    monkeypatch.setattr(fig14_engines, "make_probe", lambda job: Engine())
    monkeypatch.setattr(fig14_engines, "operators_of", lambda probe, job: samples)
    monkeypatch.setattr(fig14_engines, "with_steps", lambda known, *_: known)
    monkeypatch.setattr(
        fig14_engines,
        "write",
        lambda job, result: kept.append(
            msgspec.json.decode(msgspec.json.encode(result), type=Result)
        ),
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("0\n" * 9))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    fig14_engines.run_job(Job(name="m", device="cpu", rounds=3, result=""))
    fitted, tested = len(prefill_points(700)), sum(x <= 700 for x in fig14_engines.LENGTHS)
    assert len(kept) == 4, "the rounds, and the decode steps"
    for count, one in zip((1, 2, 3, 3), kept, strict=True):
        assert one.samples is not None
        assert len(one.samples.prefills) == count * fitted
        assert len(one.prefills) == count * tested * len(fig14_engines.SHARES)


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"settings": {}}')
    with pytest.raises(SystemExit, match=r"other\.json: not a result of this script"):
        load(path)

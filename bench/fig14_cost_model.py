"""How well exec(x, y) predicts prefills: the operators' model against a whole-model fit.

    python -m bench.fig14_cost_model --model FOLDER [--model FOLDER …] [--tp2 half|real]
        [--engine KEY=VALUE …] [--seconds N] [--out FILE]
    python -m bench.fig14_cost_model --replay FILE [--bounds] [--out FILE]

For each model: an engine with the settings that instances serve with; a calibration in it
(`workers/calibrate.py`); and prefills, each alone, at other points than those calibrated at:
prompts of up to 16k tokens of which 0 to 95% are cached. Shown: the mean absolute error of the
calibrated operator model, and of a polynomial fitted to the very prefills that the calibration
measured. Nothing is fitted to tested points.

Short prefills take what launching their kernels takes, and go by the host's speed, which drifts.
So both kinds of points are measured in the same rounds, in an order of the round's own; the engines
take turns at rounds; all of them launch from the same core, the quickest one; and of the rounds at
a point the lower quartile counts, for fits and for tests. How long a fixed piece of work took the
host before each prefill is kept with it.

`--tp2` predicts TP=2 from TP=1. `real` runs the model on two GPUs, and measures all-reduces over
them, alone. `half` measures one rank's half of the model (half the heads, half the MLP, half the
vocabulary) on one GPU, so the all-reduce is in neither side. The operators' prediction is made
twice: from the operators at TP=1 alone, and with the shards' operators measured too, as
`memserve calibrate` does. The whole-model fit can only be halved.

`--replay` makes fits and tables again from a result's file; it needs no GPU. `--bounds` adds how
good this form can get on these measurements: fitted to the tested points themselves, and calibrated
with every other tested point of a single step too (tested on the rest, and vice versa).

A folder needs no weights: a `config.json` will do. All engines start at once, to share the time
that compiling takes. An engine that fails leaves the others alone; after `--seconds`, what was
measured so far counts. `--clock process` counts processor time instead of time: for rehearsing on a
CPU that others use, with one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench._report import parser, publish
from bench.fig14_engines import ALL_REDUCE, LENGTHS, RANKS, SHARES, Job, Result, run_all
from memserve.core.builtin import built_in
from memserve.core.cost_fit import fit_operators, fit_prefills, fit_whole_model
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import PrefillSample, Samples
from memserve.core.profile import ModelShape, Profile, ReduceFit
from memserve.workers.calibrate import ROUNDS, undisturbed

DEADLINE_S = 480.0
SHORT = 2048
"""Tokens: below, the launches bound most prefills on a fast GPU."""
KV_PROMPTS = 2.1
"""Room for so many prompts of full length: the cached one, and one that is computed."""
NO_REDUCE = ReduceFit(0.0, 1e15, source="none: one rank's half")


def write_shard(source: Path, target: Path) -> Path:
    """The configuration of one rank of two, as a model of its own."""
    config = json.loads((source / "config.json").read_text())
    config["head_dim"] = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if config[key] % 2:
            raise SystemExit(f"{source}: {key} = {config[key]} cannot be halved")
        config[key] //= 2
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    return target


def at_tp_1(samples: Samples) -> Samples:
    """Without the operators of other shards."""
    shape = samples.shape
    gemms, heads = {*shape.layer_gemms(1), shape.head_gemm(1)}, shape.heads(1)
    return msgspec.structs.replace(
        samples,
        gemms=[sample for sample in samples.gemms if sample.gemm in gemms],
        attention=[
            sample
            for sample in samples.attention
            if (sample.num_heads, sample.num_kv_heads) == heads
        ],
    )


def errors(model: Any, prefills: Sequence[PrefillSample]) -> list[float]:
    """Relative, with their sign."""
    return [model.exec_s(one.num_tokens, one.cached_tokens) / one.seconds - 1 for one in prefills]


def compare(
    name: str, models: dict[str, Any], prefills: Sequence[PrefillSample]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Mean absolute errors by model, in percent; their means for each prompt length."""
    found = {label: np.array(errors(model, prefills)) for label, model in models.items()}
    computed = np.array([one.num_tokens - one.cached_tokens for one in prefills])
    parts = {
        "": computed > 0,
        f" at most {SHORT} computed,": computed <= SHORT,
        f" more than {SHORT} computed,": computed > SHORT,
    }
    metrics = {
        f"{name}: {label},{part} mean error, %": round(100 * float(np.abs(values[at]).mean()), 2)
        for label, values in found.items()
        for part, at in parts.items()
        if at.any()
    }
    metrics |= {
        f"{name}: {label}, largest error, %": round(100 * float(np.abs(values).max()), 2)
        for label, values in found.items()
    }
    rows = []
    lengths = np.array([one.num_tokens for one in prefills])
    for length in sorted(set(lengths.tolist())):
        cold = next(one for one in prefills if one.num_tokens == length and not one.cached_tokens)
        row: dict[str, Any] = {"model": name, "tokens": length, "cold, ms": 1e3 * cold.seconds}
        for label, values in found.items():
            row[f"{label}, %"] = 100 * float(np.abs(values[lengths == length]).mean())
        rows.append(row)
    return metrics, rows


def fit(samples: Samples, extra: Sequence[PrefillSample] = ()) -> Profile:
    """The profile. `extra`: prefills beside the calibration's."""
    samples = msgspec.structs.replace(samples, prefills=[*samples.prefills, *extra])
    return fit_operators(samples, built_in(samples.shape, samples.device))


def models_of(samples: Samples, result: Result) -> dict[str, Any]:
    """For the calibrated degree, or for TP=2."""
    whole = fit_whole_model(samples.prefills)
    if result.samples is not None:
        return {"operators": CostModel(fit(samples)), "whole model": whole}
    reduce = {} if result.has_reduce else {"reduce": NO_REDUCE}
    alone, shards = (
        msgspec.structs.replace(fit(chosen), **reduce) for chosen in (at_tp_1(samples), samples)
    )
    return {
        "operators": CostModel(alone, RANKS),
        "operators, shards measured": CostModel(shards, RANKS),
        "whole model": whole.with_tp(RANKS),
    }


class ByPoint:
    """Another model for some of the points."""

    def __init__(self, models: Mapping[tuple[int, int], CostModel]) -> None:
        self._models = models

    def exec_s(self, num_tokens: int, cached_tokens: int) -> float:
        return self._models[num_tokens, cached_tokens].exec_s(num_tokens, cached_tokens)


def bounds_of(samples: Samples, result: Result, tests: Sequence[PrefillSample]) -> dict[str, Any]:
    """What the form can do at best on these measurements: not predictions."""
    tp = RANKS if result.samples is None else samples.tp
    profile = msgspec.structs.replace(fit(samples), tp=tp)
    if not result.has_reduce:
        profile = msgspec.structs.replace(profile, reduce=NO_REDUCE)
    ideal = msgspec.structs.replace(profile, step=fit_prefills(profile, tests))
    bounds: dict[str, Any] = {"BOUND, fitted to the tests": CostModel(ideal)}
    if tp == samples.tp:
        single = [
            one for one in tests if one.num_tokens - one.cached_tokens <= profile.chunk_tokens
        ]
        single.sort(key=lambda one: one.num_tokens - one.cached_tokens)
        halves = single[::2], single[1::2]
        by_half = [CostModel(fit(samples, half)) for half in halves]
        models = {(one.num_tokens, one.cached_tokens): by_half[0] for one in tests}
        models |= {(one.num_tokens, one.cached_tokens): by_half[1] for one in halves[0]}
        bounds["SPLIT, the other half of short tests calibrated"] = ByPoint(models)
    return bounds


def evaluate(
    results: Mapping[str, Result], has_bounds: bool
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """All errors. What is only predicted follows its model."""
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    reduces = [sample for result in results.values() for sample in result.reduces]
    samples: Samples | None = None
    for name, result in results.items():
        if result.samples is not None:
            samples = msgspec.structs.replace(result.samples, reduces=reduces)
            if result.calibrated:
                prefills = undisturbed(result.calibrated)
                samples = msgspec.structs.replace(samples, prefills=prefills)
        tests = undisturbed(result.prefills)
        if not tests:
            continue
        if samples is None or not name.startswith(samples.model):
            print(f"{name}: its model was not calibrated", flush=True)
            continue
        models = models_of(samples, result)
        if has_bounds:
            models |= bounds_of(samples, result, tests)
        found, more = compare(name, models, tests)
        metrics |= found | host_of(name, result.prefills)
        rows += more
    return metrics, rows


def host_of(name: str, prefills: Sequence[Sequence[PrefillSample]]) -> dict[str, float]:
    """How the host's speed varied while these were measured."""
    times = [sample.host_s for point in prefills for sample in point if sample.host_s is not None]
    if not times:
        return {}
    low, mid, high = np.percentile(times, (5, 50, 95))
    return {
        f"{name}: host, slowest over median": round(float(high / mid), 3),
        f"{name}: host, median over quickest": round(float(mid / low), 3),
    }


def load(path: Path) -> tuple[dict[str, Any], dict[str, Result]]:
    """A result's file: its settings, with where it was measured, and what was found."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        origin = {"measured at": found["commit"], "measured on": found["hardware"]}
        settings = found["settings"] | origin
        return settings, msgspec.convert(found["raw"], dict[str, Result])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--replay {path}: not a result of this script: {error}") from error


def make_jobs(options: argparse.Namespace, folder: Path) -> list[Job]:
    """For each model itself and what is predicted from it; and the all-reduce."""
    jobs: list[Job] = []
    common = {"device": options.device, "clock": options.clock, "rounds": options.rounds}
    if options.tp2 == "real":
        jobs.append(Job(name=ALL_REDUCE, tp=RANKS, result=str(folder / "reduce.json"), **common))
    for path in options.model:
        variants = [(path.name, path, 1)]
        if options.tp2 == "half":
            half = write_shard(path, folder / f"{path.name}-shard")
            variants.append((f"{path.name} TP={RANKS}", half, RANKS))
        elif options.tp2 == "real":
            variants.append((f"{path.name} TP={RANKS}", path, RANKS))
        for name, source, tp in variants:
            config = json.loads((source / "config.json").read_text())
            prompt_bytes = (
                options.max_model_len * ModelShape.from_config(config, 2).kv_bytes_per_token
            )
            job = Job(
                name=name,
                folder=str(source.resolve()),
                tp=tp,
                is_half=options.tp2 == "half" and tp > 1,
                engine=dict(options.engine),
                max_model_len=options.max_model_len,
                kv_bytes=int(KV_PROMPTS * prompt_bytes / (tp if options.tp2 == "real" else 1)),
                result=str(folder / f"{len(jobs)}.json"),
                **common,
            )
            jobs.append(job)
    return jobs


def engine_setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE`, with the value as JSON where it is some."""
    key, sign, value = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    found = parser(__doc__)
    source = found.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", action="append", type=Path, metavar="FOLDER")
    source.add_argument("--replay", type=Path, metavar="FILE", help="a result of this script")
    found.add_argument("--bounds", action="store_true", help="show the best possible as well")
    found.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    found.add_argument("--clock", choices=("time", "process"), default="time")
    found.add_argument("--max-model-len", type=int, default=16384)
    found.add_argument("--tp2", choices=("none", "half", "real"), default="none")
    found.add_argument("--rounds", type=int, default=ROUNDS)
    found.add_argument("--seconds", type=float, default=DEADLINE_S, help="for all measurements")
    found.add_argument(
        "--engine", action="append", type=engine_setting, default=[], metavar="KEY=VALUE"
    )
    return found.parse_args(arguments)


def measured(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Result]]:
    """Settings and what was found."""
    with tempfile.TemporaryDirectory(prefix="memserve-fig14-") as name:
        results = run_all(make_jobs(options, Path(name)), Path(name), options.seconds)
    settings = {
        "models": list(results),
        "lengths": LENGTHS,
        "cached shares": SHARES,
        "rounds": options.rounds,
        "tp2": options.tp2,
        "engine": dict(options.engine),
        "clock": options.clock,
        "max_model_len": options.max_model_len,
    }
    return settings, results


def main() -> None:
    """Measure, fit, compare, print, write."""
    options = options_of()
    if options.replay:
        settings, results = load(options.replay)
        raw: Any = f"{options.replay.name}, as measured"
    else:
        settings, results = measured(options)
        raw = msgspec.to_builtins(results)
    metrics, rows = evaluate(results, options.bounds)
    publish(
        "fig14_cost_model", settings=settings, metrics=metrics, raw=raw, out=options.out, rows=rows
    )
    for label, value in metrics.items():
        print(f"{label}: {value}")


if __name__ == "__main__":
    main()

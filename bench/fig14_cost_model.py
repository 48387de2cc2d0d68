"""How well exec(x, y) predicts prefills: the operators' model against a whole-model fit.

    python -m bench.fig14_cost_model --model FOLDER [--model FOLDER …] [--tp2 half|real]
        [--engine KEY=VALUE …] [--seconds N] [--out FILE]
    python -m bench.fig14_cost_model --all-reduce [--out FILE]
    python -m bench.fig14_cost_model --replay FILE [--replay FILE …] [--bounds] [--out FILE]

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

A step of two ranks takes as long as the slower of their hosts. If one is undisturbed a quarter of
the time, the slower of two is so a sixteenth of it: the lower quartile of two ranks is predicted
from the median of one rank's rounds (`core/cost_fit.py`). That needs no measurement with two ranks.

`--tp2` predicts TP=2 from TP=1. `real` runs the model on two GPUs, and measures all-reduces over
them, alone. `half` measures one rank's half of the model (half the heads, half the MLP, half the
vocabulary) on one GPU, so the all-reduce is in neither side. The operators' prediction is made
twice: from the operators at TP=1 alone, and with the shards' operators measured too, as
`memserve calibrate` does. The whole-model fit can only be halved.

`--all-reduce` measures nothing but that. `--replay` makes fits and tables again from a result's
file; it needs no GPU. Of several files the later ones add to the earlier ones: an all-reduce, say.

`--bounds` adds what is no prediction: how good this form can get on these measurements, fitted to
the tested points themselves; calibrated with every other tested point of a single step too (tested
on the rest, and vice versa); and for TP=2, with that quantile of one rank's rounds that suits the
measured TP=2 of the *other* models best, in place of the median. And it shows how the rule of the
slower host does at several quantiles of TP=2's rounds, against taking the same quantile of TP=1's.

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
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench._report import parser, publish
from bench._whole_model import fit_whole_model
from bench.fig14_engines import ALL_REDUCE, LENGTHS, RANKS, SHARES, Job, Result, run_all
from memserve.core.builtin import built_in
from memserve.core.cost_fit import fit_operators, fit_prefills
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import PrefillSample, Samples, undisturbed
from memserve.core.profile import ModelShape, Profile, ReduceFit
from memserve.workers.calibrate import ROUNDS

DEADLINE_S = 480.0
SHORT = 2048
"""Tokens: below, the launches bound most prefills on a fast GPU."""
KV_PROMPTS = 2.1
"""Room for so many prompts of full length: the cached one, and one that is computed."""
SHARES_OF_ROUNDS = tuple((index + 0.5) / ROUNDS for index in range(ROUNDS))
CHECKED_SHARES = SHARES_OF_ROUNDS[1:5]
"""The third is where the lower quartile of eight rounds lies."""
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
    whole = fit_whole_model(undisturbed(samples.prefills))
    if result.samples is not None:
        return {"operators": CostModel(fit(samples)), "whole model": whole}
    return {
        "operators": of_two(at_tp_1(samples), result),
        "operators, shards measured": of_two(samples, result),
        "whole model": whole.with_tp(RANKS),
    }


def of_two(samples: Samples, result: Result) -> CostModel:
    """TP=2 predicted from TP=1."""
    profile = fit(samples)
    if result.is_half:  # one host, no all-reduce
        profile = msgspec.structs.replace(profile, reduce=NO_REDUCE, steps={})
    return CostModel(profile, RANKS)


class ByPoint:
    """Another model for some of the points."""

    def __init__(self, models: Mapping[tuple[int, int], CostModel]) -> None:
        self._models = models

    def exec_s(self, num_tokens: int, cached_tokens: int) -> float:
        return self._models[num_tokens, cached_tokens].exec_s(num_tokens, cached_tokens)


class Case(NamedTuple):
    """What is tested, with what its model is calibrated from."""

    name: str
    samples: Samples
    result: Result

    @property
    def tests(self) -> list[PrefillSample]:
        return undisturbed(self.result.prefills)

    @property
    def is_predicted(self) -> bool:
        """For another degree than the calibrated one."""
        return self.result.samples is None


def at_share(case: Case, share: float) -> CostModel:
    """TP=2 from that quantile of one rank's rounds."""
    prefills = undisturbed(case.samples.prefills, share)
    samples = msgspec.structs.replace(at_tp_1(case.samples), prefills=prefills)
    return of_two(samples, case.result)


def as_others(case: Case, cases: Sequence[Case]) -> dict[str, Any]:
    """With the quantile that suits the other models' TP=2 best."""
    others = [one for one in cases if one.is_predicted and one.samples.model != case.samples.model]
    if not others:
        return {}

    def misses(share: float) -> float:
        found = [errors(at_share(one, share), one.tests) for one in others]
        return float(np.mean([np.abs(one).mean() for one in found]))

    share = min(SHARES_OF_ROUNDS, key=misses)
    return {"CROSS, the quantile that suits the other models' TP=2": at_share(case, share)}


def at_quantiles(case: Case) -> dict[str, float]:
    """Errors at several quantiles of TP=2's rounds, predicted by the rule and without it."""
    metrics = {}
    for share in CHECKED_SHARES:
        tests = undisturbed(case.result.prefills, share)
        for label, chosen in (("slower host", share ** (1 / RANKS)), ("one host", share)):
            found = float(np.abs(errors(at_share(case, chosen), tests)).mean())
            label = f"{case.name}: CHECK, quantile {share:.2f} as of the {label}, mean error, %"
            metrics[label] = round(100 * found, 2)
    return metrics


def bounds_of(case: Case, cases: Sequence[Case]) -> dict[str, Any]:
    """What the form can do at best on these measurements: not predictions."""
    samples, result, tests = case.samples, case.result, case.tests
    tp = RANKS if case.is_predicted else samples.tp
    profile = msgspec.structs.replace(fit(samples), tp=tp)
    if result.is_half:
        profile = msgspec.structs.replace(profile, reduce=NO_REDUCE)
    ideal = msgspec.structs.replace(profile, step=fit_prefills(profile, tests))
    bounds: dict[str, Any] = {"BOUND, fitted to the tests": CostModel(ideal)}
    if case.is_predicted:
        bounds |= as_others(case, cases)
    else:
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
    """All errors."""
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    cases = cases_of(results)
    for case in cases:
        models = models_of(case.samples, case.result)
        if has_bounds:
            models |= bounds_of(case, cases)
            if case.is_predicted and not case.result.is_half:
                metrics |= at_quantiles(case)
        found, more = compare(case.name, models, case.tests)
        metrics |= found | host_of(case.name, case.result.prefills)
        rows += more
    return metrics | reduces_of(results), rows


def reduces_of(results: Mapping[str, Result]) -> dict[str, float]:
    """What an all-reduce took, in microseconds."""
    metrics = {}
    for one in (sample for result in results.values() for sample in result.reduces):
        name = f"all-reduce over {one.ranks} ranks"
        metrics[f"{name}: {one.size_bytes >> 10} KiB, µs"] = round(1e6 * one.seconds, 1)
        metrics[f"{name}: launching, µs"] = round(1e6 * one.launch_s, 1)
    return metrics


def cases_of(results: Mapping[str, Result]) -> list[Case]:
    """What can be compared. What is only predicted follows its model."""
    cases = []
    reduces = [sample for result in results.values() for sample in result.reduces]
    samples: Samples | None = None
    for name, result in results.items():
        if result.samples is not None:
            samples = msgspec.structs.replace(result.samples, reduces=reduces)
        if not result.prefills:
            continue
        if samples is None or not name.startswith(samples.model):
            print(f"{name}: its model was not calibrated", flush=True)
        else:
            cases.append(Case(name, samples, result))
    return cases


def host_of(name: str, prefills: Sequence[PrefillSample]) -> dict[str, float]:
    """How the host's speed varied while these were measured."""
    times = [sample.host_s for sample in prefills if sample.host_s is not None]
    if not times:
        return {}
    low, mid, high = np.percentile(times, (5, 50, 95))
    return {
        f"{name}: host, slowest over median": round(float(high / mid), 3),
        f"{name}: host, median over quickest": round(float(mid / low), 3),
    }


def load_all(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Result]]:
    """Several files of results. Each adds to those before it; the settings are the first one's."""
    found = [load(path) for path in paths]
    results = {name: result for _, results in found for name, result in results.items()}
    return found[0][0], results


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
    if options.tp2 == "real" or options.all_reduce:
        jobs.append(Job(name=ALL_REDUCE, tp=RANKS, result=str(folder / "reduce.json"), **common))
    for path in options.model or ():
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
    source.add_argument("--all-reduce", action="store_true", help="measure only that")
    source.add_argument(
        "--replay", action="append", type=Path, metavar="FILE", help="a result of this script"
    )
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
        settings, results = load_all(options.replay)
        raw: Any = f"{', '.join(path.name for path in options.replay)}, as measured"
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

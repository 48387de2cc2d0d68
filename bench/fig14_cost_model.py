"""How well exec(x, y) predicts prefills: the operators' model against a whole-model fit.

    python -m bench.fig14_cost_model --model FOLDER [--model FOLDER …] [--shards] [--out FILE]
    python -m bench.fig14_cost_model --replay FILE [--bounds] [--out FILE]

For each model: an engine with its default settings; a calibration in it (`workers/calibrate.py`);
and prefills, each alone, at other points than those calibrated at: prompts of up to 16k tokens of
which 0 to 95% are cached. Shown: the mean absolute error of the calibrated operator model, and of a
polynomial fitted to the very prefills that the calibration measured. Nothing is fitted to tested
points. Both kinds of points are measured in the same rounds, and the engines take turns at rounds:
the launches go by the host's speed, which drifts, and that is not what the figure asks about.

`--replay` makes fits and tables again from a result's file; it needs no GPU. `--bounds` adds how
good this form can get on these measurements: fitted to the tested points themselves, and calibrated
with every other tested point of a single step too (tested on the rest, and vice versa).

`--shards` predicts TP=2 from TP=1. It measures one rank's half of the model (half the heads, half
the MLP, half the vocabulary) on one GPU, so the all-reduce, which takes two, is in neither side.
The operators' prediction is made twice: from the operators at TP=1 alone, and with the shards'
operators measured too, as `memserve calibrate` does. The whole-model fit can only be halved.

A folder needs no weights: a `config.json` will do. All engines start at once, to share the time
that compiling takes. `--clock process` counts processor time
instead of time: for rehearsing on a CPU that others use, with one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec
import numpy as np

from bench._report import parser, publish
from memserve.core.builtin import built_in
from memserve.core.cost_fit import fit_operators, fit_prefills, fit_whole_model
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import PrefillSample, Samples
from memserve.core.profile import LinkFit, ModelShape, Profile
from memserve.profiles import device_name
from memserve.workers.calibrate import (
    ROUNDS,
    by_point,
    measure_operators,
    medians,
    prefill_points,
    prefill_round,
    with_steps,
)

LENGTHS = (256, 512, 1024, 1536, 2000, 4096, 8192, 12288, 16352)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
READY = "fig14: ready"
DEADLINE_S = 540.0
SHORT = 2048
"""Tokens: below, the launches bound most prefills on a fast GPU."""
KV_PROMPTS = 2.1
"""Room for so many prompts of full length: the cached one, and one that is computed."""
NO_REDUCE = LinkFit(0.0, float("inf"))

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine's process has to do."""

    name: str
    folder: str
    device: str
    clock: str
    is_shard: bool
    max_model_len: int
    kv_bytes: int
    result: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What it found."""

    samples: Samples | None
    """None of a shard: it is only predicted."""
    prefills: list[list[PrefillSample]]
    """The repeats at each point."""
    started_s: float
    measured_s: float


# ── in an engine's process ────────────────────────────────────────────────────────────────────


def run_job(job: Job) -> None:
    """Start the engine; measure operators and rounds, a turn each; write the result."""
    from memserve.engine_args import engine_defaults
    from memserve.workers.environment import set_engine_environment

    begun = time.perf_counter()
    set_engine_environment(os.environ, num_threads=1, log_level="error")
    import torch

    from memserve.workers.probe import EngineProbe
    from memserve.workers.spec import CalibrationJob

    torch.set_num_threads(1)
    engine: dict[str, Any] = engine_defaults(job.device) | {"dtype": "bfloat16"}
    if not list(Path(job.folder).glob("*.safetensors")):
        engine |= {"load_format": "dummy", "skip_tokenizer_init": True}
    engine["max_model_len"] = job.max_model_len
    if job.device == "cuda":
        engine["gpu_memory_utilization"] = 0.1  # asked for at the start; kv_bytes decides
    clock = time.process_time if job.clock == "process" else time.perf_counter
    probe = EngineProbe(job.folder, engine, job.kv_bytes, clock=clock)
    probe.start()
    started_s = time.perf_counter() - begun
    turn = Turns()
    calibration = CalibrationJob(
        name=job.name,
        model=job.folder,
        kv_bytes=None,
        device=device_name(job.device),
        dtype="bfloat16",
        created="",
    )
    samples = turn(lambda: None if job.is_shard else measure_operators(probe, calibration, silent))
    fitted = [] if job.is_shard else prefill_points(probe.longest)
    tested = [(x, int(x * y)) for y in SHARES for x in LENGTHS if x <= probe.longest]
    rounds = [
        turn(lambda index=index: prefill_round(probe, fitted + tested, index))  # type: ignore[misc]
        for index in range(ROUNDS + 1)
    ]
    prefills = by_point(rounds)
    if samples is not None:
        calibrated = medians(prefills[: len(fitted)])
        operators = samples
        samples = turn(lambda: with_steps(operators, probe, calibrated, silent))
    result = Result(
        samples=samples,
        prefills=prefills[len(fitted) :],
        started_s=started_s,
        measured_s=turn.measured_s,
    )
    Path(job.result).write_bytes(msgspec.json.encode(result))


class Turns:
    """Measures only while it is this engine's turn: only one of them uses the GPU at a time."""

    def __init__(self) -> None:
        self.measured_s = 0.0

    def __call__(self, measure: Callable[[], T]) -> T:
        """Say that the last turn is over, wait for the next, measure."""
        print(READY, flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the bench has gone")
        begun = time.perf_counter()
        found = measure()
        self.measured_s += time.perf_counter() - begun
        return found


def silent(_: str) -> None:
    """Progress is told by the bench itself."""


# ── in the bench's own ────────────────────────────────────────────────────────────────────────


@contextmanager
def child(job: Job, log: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    """The process of an engine; it ends with the block, whatever happens."""
    command = [sys.executable, "-m", "bench.fig14_cost_model", "--job"]
    process = subprocess.Popen(
        [*command, msgspec.json.encode(job).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def run_all(jobs: Sequence[Job], folder: Path) -> list[Result]:
    """Start all engines, then let them measure in turns."""
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / f"{job.name}.log").open("w+b")) for job in jobs]
        children = [
            stack.enter_context(child(job, log)) for job, log in zip(jobs, logs, strict=True)
        ]
        watchdog = threading.Timer(DEADLINE_S, lambda: [one.kill() for one in children])
        stack.callback(watchdog.cancel)
        watchdog.start()
        waiting = list(zip(jobs, logs, children, strict=True))
        for job, log, one in waiting:
            if not is_ready(one):
                fail(job, log)
            print(f"{job.name}: engine started", flush=True)
        while waiting:
            for job, log, one in waiting:
                assert one.stdin is not None
                one.stdin.write("go\n")
                one.stdin.flush()
                if not is_ready(one) and (one.wait() != 0 or not Path(job.result).exists()):
                    fail(job, log)
            waiting = [found for found in waiting if found[2].poll() is None]
    return [msgspec.json.decode(Path(job.result).read_bytes(), type=Result) for job in jobs]


def is_ready(process: subprocess.Popen[str]) -> bool:
    """Waits for the end of its turn. False: it was the last one, or the process failed."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in process.stdout)


def fail(job: Job, log: IO[bytes]) -> None:
    """End with what the engine's process said last."""
    log.seek(0)
    lines = log.read().decode(errors="replace").splitlines()[-30:]
    raise SystemExit("\n".join([f"{job.name} failed:", *lines]))


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
    """The profile, without all-reduce. `extra`: prefills beside the calibration's."""
    samples = msgspec.structs.replace(samples, prefills=[*samples.prefills, *extra])
    found = fit_operators(samples, built_in(samples.shape, samples.device))
    return msgspec.structs.replace(found, reduce=NO_REDUCE)


def models_of(samples: Samples, tp: int) -> dict[str, Any]:
    """For the calibrated degree, and for TP=2 without all-reduce."""
    whole = fit_whole_model(samples.prefills)
    if tp == samples.tp:
        return {"operators": CostModel(fit(samples)), "whole model": whole}
    return {
        "operators": CostModel(fit(at_tp_1(samples)), tp),
        "operators, shards measured": CostModel(fit(samples), tp),
        "whole model": whole.with_tp(tp),
    }


class ByPoint:
    """Another model for some of the points."""

    def __init__(self, models: Mapping[tuple[int, int], CostModel]) -> None:
        self._models = models

    def exec_s(self, num_tokens: int, cached_tokens: int) -> float:
        return self._models[num_tokens, cached_tokens].exec_s(num_tokens, cached_tokens)


def bounds_of(samples: Samples, tp: int, tests: Sequence[PrefillSample]) -> dict[str, Any]:
    """What the form can do at best on these measurements: not predictions."""
    profile = msgspec.structs.replace(fit(samples), tp=tp)
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
    """All errors. A shard's result follows that of its model."""
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    samples: Samples | None = None
    for name, result in results.items():
        samples = result.samples or samples
        assert samples is not None, "a shard comes after its model"
        tp, tests = 1 if result.samples else 2, medians(result.prefills)
        models = models_of(samples, tp)
        if has_bounds:
            models |= bounds_of(samples, tp, tests)
        found, more = compare(name, models, tests)
        metrics |= found
        rows += more
    return metrics, rows


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
    """Two for each model with `--shards`: itself and its half."""
    jobs = []
    for path in options.model:
        sources = [(path.name, path, False)]
        if options.shards:
            name = f"{path.name} TP=2"
            sources.append((name, write_shard(path, folder / f"{path.name}-shard"), True))
        for name, source, is_shard in sources:
            config = json.loads((source / "config.json").read_text())
            prompt_bytes = (
                options.max_model_len * ModelShape.from_config(config, 2).kv_bytes_per_token
            )
            jobs.append(
                Job(
                    name=name,
                    folder=str(source.resolve()),
                    device=options.device,
                    clock=options.clock,
                    is_shard=is_shard,
                    max_model_len=options.max_model_len,
                    kv_bytes=int(KV_PROMPTS * prompt_bytes),
                    result=str(folder / f"{len(jobs)}.json"),
                )
            )
    return jobs


def main() -> None:
    """Measure, fit, compare, print, write."""
    if sys.argv[1:2] == ["--job"]:
        run_job(msgspec.json.decode(sys.argv[2], type=Job))
        sys.stdout.flush()
        os._exit(0)
    arguments = parser(__doc__)
    source = arguments.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", action="append", type=Path, metavar="FOLDER")
    source.add_argument("--replay", type=Path, metavar="FILE", help="a result of this script")
    arguments.add_argument("--bounds", action="store_true", help="show the best possible as well")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--clock", choices=("time", "process"), default="time")
    arguments.add_argument("--max-model-len", type=int, default=16384)
    arguments.add_argument("--shards", action="store_true", help="predict TP=2 as well")
    options = arguments.parse_args()
    if options.replay:
        settings, results = load(options.replay)
        raw: Any = f"{options.replay.name}, as measured"
    else:
        with tempfile.TemporaryDirectory(prefix="memserve-fig14-") as name:
            jobs = make_jobs(options, Path(name))
            found = run_all(jobs, Path(name))
        results = {job.name: result for job, result in zip(jobs, found, strict=True)}
        settings = {
            "models": list(results),
            "lengths": LENGTHS,
            "cached shares": SHARES,
            "rounds": ROUNDS,
            "clock": options.clock,
            "max_model_len": options.max_model_len,
        }
        raw = msgspec.to_builtins(results)
    metrics, rows = evaluate(results, options.bounds)
    publish(
        "fig14_cost_model", settings=settings, metrics=metrics, raw=raw, out=options.out, rows=rows
    )
    for label, value in metrics.items():
        print(f"{label}: {value}")


if __name__ == "__main__":
    main()

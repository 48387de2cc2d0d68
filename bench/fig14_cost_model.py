"""How well exec(x, y) predicts prefills: the operators' model against a whole-model fit.

    python -m bench.fig14_cost_model --model FOLDER [--model FOLDER …] [--shards] [--out FILE]

For each model: an engine with its default settings; a calibration in it (`workers/calibrate.py`);
then prefills, each alone, at other points than those calibrated at: prompts of up to 16k tokens of
which 0 to 95% are cached. Shown: the mean absolute error of the calibrated operator model, and of a
polynomial fitted to the very prefills that the calibration measured.

`--shards` predicts TP=2 from TP=1. It measures one rank's half of the model (half the heads, half
the MLP, half the vocabulary) on one GPU, so the all-reduce, which takes two, is in neither side.
The operators' prediction is made twice: from the operators at TP=1 alone, and with the shards'
operators measured too, as `memserve calibrate` does. The whole-model fit can only be halved.

A folder needs no weights: a `config.json` will do. All engines start at once, to share the time
that compiling takes, and then measure one after the other. `--clock process` counts processor time
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from bench._report import parser, publish
from memserve.core.builtin import built_in
from memserve.core.cost_fit import fit_operators, fit_whole_model
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import PrefillSample, Samples
from memserve.core.profile import LinkFit, ModelShape, Profile
from memserve.profiles import device_name

LENGTHS = (256, 512, 1024, 1536, 2000, 4096, 8192, 12288, 16352)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
REPEATS = 3
READY = "fig14: ready"
DEADLINE_S = 540.0
KV_PROMPTS = 2.1
"""Room for so many prompts of full length: the cached one, and one that is computed."""
NO_REDUCE = LinkFit(0.0, float("inf"))


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
    """Start the engine, say so, wait for the turn, measure, write the result."""
    from memserve.engine_args import engine_defaults
    from memserve.workers.environment import set_engine_environment

    begun = time.perf_counter()
    set_engine_environment(os.environ, num_threads=1, log_level="error")
    import torch

    from memserve.workers.calibrate import measure
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
    started = time.perf_counter()
    print(READY, flush=True)
    sys.stdin.readline()
    turn = time.perf_counter()
    calibration = CalibrationJob(
        name=job.name,
        model=job.folder,
        kv_bytes=None,
        device=device_name(job.device),
        dtype="bfloat16",
        created="",
    )
    samples = None if job.is_shard else measure(probe, calibration, lambda text: None)
    points = [(x, int(x * y)) for y in SHARES for x in LENGTHS if x <= probe.longest]
    prefills = [[probe.prefill(*point) for _ in range(REPEATS)] for point in points]
    result = Result(
        samples=samples,
        prefills=prefills,
        started_s=started - begun,
        measured_s=time.perf_counter() - turn,
    )
    Path(job.result).write_bytes(msgspec.json.encode(result))


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
    """Start all engines, then let them measure in turn."""
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / f"{job.name}.log").open("w+b")) for job in jobs]
        children = [
            stack.enter_context(child(job, log)) for job, log in zip(jobs, logs, strict=True)
        ]
        watchdog = threading.Timer(DEADLINE_S, lambda: [one.kill() for one in children])
        stack.callback(watchdog.cancel)
        watchdog.start()
        for job, log, one in zip(jobs, logs, children, strict=True):
            assert one.stdout is not None
            if not any(line.strip() == READY for line in one.stdout):
                fail(job, log)
            print(f"{job.name}: engine started", flush=True)
        for job, log, one in zip(jobs, logs, children, strict=True):
            one.communicate("go\n")
            if one.returncode != 0 or not Path(job.result).exists():
                fail(job, log)
            print(f"{job.name}: measured", flush=True)
    return [msgspec.json.decode(Path(job.result).read_bytes(), type=Result) for job in jobs]


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


def medians(prefills: Sequence[Sequence[PrefillSample]]) -> list[PrefillSample]:
    """The repeat in the middle, of each point."""
    return [sorted(found, key=lambda one: one.seconds)[len(found) // 2] for found in prefills]


def errors(model: Any, prefills: Sequence[PrefillSample]) -> list[float]:
    """Relative, with their sign."""
    return [model.exec_s(one.num_tokens, one.cached_tokens) / one.seconds - 1 for one in prefills]


def compare(
    name: str, models: dict[str, Any], prefills: Sequence[PrefillSample]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Mean absolute errors by model, in percent; a row for each prompt length."""
    found = {label: np.array(errors(model, prefills)) for label, model in models.items()}
    metrics = {
        f"{name}: {label}, {kind} error, %": round(100 * float(reduce(np.abs(values))), 2)
        for label, values in found.items()
        for kind, reduce in (("mean", np.mean), ("largest", np.max))
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


def models_of(samples: Samples) -> tuple[dict[str, Any], dict[str, Any]]:
    """For the calibrated degree, and for TP=2 without all-reduce."""
    fallback = built_in(samples.shape, samples.device)

    def profile(found: Samples) -> Profile:
        return msgspec.structs.replace(fit_operators(found, fallback), reduce=NO_REDUCE)

    whole = fit_whole_model(samples.prefills)
    full = profile(samples)
    here = {"operators": CostModel(full), "whole model": whole}
    two = {
        "operators": CostModel(profile(at_tp_1(samples)), 2),
        "operators, shards measured": CostModel(full, 2),
        "whole model": whole.with_tp(2),
    }
    return here, two


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
    arguments.add_argument("--model", action="append", required=True, type=Path, metavar="FOLDER")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    arguments.add_argument("--clock", choices=("time", "process"), default="time")
    arguments.add_argument("--max-model-len", type=int, default=16384)
    arguments.add_argument("--shards", action="store_true", help="predict TP=2 as well")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="memserve-fig14-") as name:
        jobs = make_jobs(options, Path(name))
        results = run_all(jobs, Path(name))
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    predictions: dict[str, Any] = {}
    for job, result in zip(jobs, results, strict=True):
        if result.samples is not None:
            here, predictions = models_of(result.samples)
        models = predictions if job.is_shard else here
        found, more = compare(job.name, models, medians(result.prefills))
        metrics |= found
        rows += more
    publish(
        "fig14_cost_model",
        settings={
            "models": [job.name for job in jobs],
            "lengths": LENGTHS,
            "cached shares": SHARES,
            "repeats": REPEATS,
            "clock": options.clock,
            "max_model_len": options.max_model_len,
        },
        metrics=metrics,
        raw={
            job.name: msgspec.to_builtins(result) for job, result in zip(jobs, results, strict=True)
        },
        out=options.out,
        rows=rows,
    )
    for label, value in metrics.items():
        print(f"{label}: {value}")


if __name__ == "__main__":
    main()

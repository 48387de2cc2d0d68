"""The engines of figure 14: a process for each, which take turns at measuring.

For `fig14_cost_model.py`, which says what for. `python -m bench.fig14_engines JOB` is such a
process; it writes what it has found after each turn, so that the bench can stop at any time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from memserve.core.cost_samples import PrefillSample, ReduceSample, Samples
from memserve.profiles import device_name
from memserve.workers.all_reduce import measure_reduces
from memserve.workers.calibrate import (
    ROUNDS,
    measure_operators,
    measured,
    prefill_points,
    prefill_round,
    with_steps,
)
from memserve.workers.cores import fastest_cores

LENGTHS = (256, 512, 1024, 1536, 2000, 4096, 8192, 12288, 16352)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.95)
READY = "fig14: ready"
ALL_REDUCE = "all-reduce"
"""The name of the job that measures it, and of its result."""
RANKS = 2
START_S = 240.0
TURN_S = 100.0
RANKS_SPIN_S = 1.5
"""An engine's ranks wait actively for about a second after a step: on cores that others need."""
COMMAND = (sys.executable, "-m", "bench.fig14_engines")

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process has to do."""

    name: str
    folder: str = ""
    device: str
    clock: str = "time"
    tp: int = 1
    """Of the prediction."""
    is_half: bool = False
    """`folder` is one rank's half of the model."""
    engine: dict[str, Any] = {}
    """Arguments of the engine, beside those that are in force anyway."""
    max_model_len: int = 0
    kv_bytes: int = 0
    rounds: int = ROUNDS
    result: str

    @property
    def num_ranks(self) -> int:
        return 1 if self.is_half else self.tp


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What it found."""

    samples: Samples | None = None
    """None of what is only predicted."""
    prefills: list[PrefillSample] = []
    """Those tested: all, several at each point."""
    reduces: list[ReduceSample] = []
    is_half: bool = False
    """The prefills are one rank's half of the model: one host, and no all-reduces."""
    started_s: float = 0.0
    measured_s: float = 0.0


# ── in an engine's process ────────────────────────────────────────────────────────────────────


def run_job(job: Job) -> None:
    """Start the engine; measure operators and rounds, a turn each; write what is found so far."""
    from memserve.workers.environment import set_engine_environment

    set_engine_environment(os.environ, num_threads=1, log_level="error")
    turn = Turns()
    if job.name == ALL_REDUCE:
        write(job, Result(reduces=turn(lambda: measure_reduces(job.device, RANKS))))
        return
    begun = time.perf_counter()
    probe = make_probe(job)
    probe.start()
    started_s = time.perf_counter() - begun
    is_calibrated = job.tp == 1
    samples = turn(lambda: operators_of(probe, job) if is_calibrated else None)
    if job.device == "cuda":
        probe.pin(turn.cores)
    turn(probe.warm_up)
    fitted = prefill_points(probe.longest) if is_calibrated else []
    tested = [(x, int(x * y)) for y in SHARES for x in LENGTHS if x <= probe.longest]
    rounds: list[list[PrefillSample | None]] = []

    def note() -> None:
        calibrated = measured(found[: len(fitted)] for found in rounds)
        result = Result(
            samples=samples and msgspec.structs.replace(samples, prefills=calibrated),
            prefills=measured(found[len(fitted) :] for found in rounds),
            is_half=job.is_half,
            started_s=started_s,
            measured_s=turn.measured_s,
        )
        write(job, result)

    for index in range(job.rounds):
        rounds.append(turn(partial(prefill_round, probe, fitted + tested, index)))
        note()
    if samples is not None:
        known = samples
        samples = turn(lambda: with_steps(known, probe, [], silent))
        note()


def make_probe(job: Job) -> Any:
    """An engine's, as instances have them. Imports torch and vllm."""
    import torch

    from memserve.engine_args import engine_defaults
    from memserve.workers.probe import EngineProbe

    torch.set_num_threads(1)
    engine: dict[str, Any] = engine_defaults(job.device) | {"dtype": "bfloat16"}
    if not list(Path(job.folder).glob("*.safetensors")):
        engine |= {"load_format": "dummy", "skip_tokenizer_init": True}
    engine["max_model_len"] = job.max_model_len
    if job.device == "cuda":
        engine["gpu_memory_utilization"] = 0.05  # asked for at the start; kv_bytes decides
    clock = time.process_time if job.clock == "process" else time.perf_counter
    return EngineProbe(job.folder, engine | job.engine, job.kv_bytes, tp=job.num_ranks, clock=clock)


def operators_of(probe: Any, job: Job) -> Samples:
    """All operators alone, and how the engine cuts its steps."""
    from memserve.workers.spec import CalibrationJob

    calibration = CalibrationJob(
        name=job.name,
        model=job.folder,
        kv_bytes=None,
        device=device_name(job.device),
        dtype="bfloat16",
        created="",
    )
    samples = measure_operators(probe, calibration, silent)
    limits = probe.limits
    return msgspec.structs.replace(
        samples, chunk_tokens=limits.chunk_tokens, graph_sizes=limits.graph_sizes
    )


def write(job: Job, result: Result) -> None:
    """In one piece: the bench may read at any time."""
    path = Path(job.result)
    partial = path.with_suffix(".partial")
    partial.write_bytes(msgspec.json.encode(result))
    partial.replace(path)


class Turns:
    """Measures only while it is this process's turn: only one of them uses the GPUs at a time."""

    def __init__(self) -> None:
        self.measured_s = 0.0
        self.cores: list[int] = []

    def __call__(self, measure: Callable[[], T]) -> T:
        """Say that the last turn is over, wait for the next, measure."""
        print(READY, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit("the bench has gone")
        self.cores = [int(core) for core in line.split()]
        begun = time.perf_counter()
        found = measure()
        self.measured_s += time.perf_counter() - begun
        return found


def silent(_: str) -> None:
    """Progress is told by the bench itself."""


# ── in the bench's own ────────────────────────────────────────────────────────────────────────


class Child:
    """The process of a job. It ends with the block, whatever happens."""

    def __init__(self, job: Job, log: IO[bytes], command: Sequence[str] = COMMAND) -> None:
        self.job = job
        self._log = log
        self.process = subprocess.Popen(
            [*command, msgspec.json.encode(job).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )

    def is_ready(self) -> bool:
        """Waits for the end of its turn. False: it was the last one, or the process failed."""
        assert self.process.stdout is not None
        return any(line.strip() == READY for line in self.process.stdout)

    def go(self, cores: Sequence[int]) -> None:
        """It is its turn."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(" ".join(map(str, cores)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # `is_ready` will say so
            pass

    def _kill(self) -> None:
        """With the processes of an engine's ranks, which are of its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def complaint(self) -> str | None:
        """What it said last, if it failed."""
        if self.process.wait() == 0:
            return None
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()[-30:]
        return "\n".join([f"{self.job.name} failed:", *lines])

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Inside it the process has so long; then it is stopped."""
        watchdog = threading.Timer(max(0.0, seconds), self._kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def end(self) -> None:
        """Whatever is left of it."""
        self._kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


@contextmanager
def started(jobs: Sequence[Job], folder: Path) -> Iterator[list[Child]]:
    """All of them."""
    with ExitStack() as stack:
        children = []
        for index, job in enumerate(jobs):
            log = stack.enter_context((folder / f"{index}.log").open("w+b"))
            children.append(Child(job, log))
            stack.callback(children[-1].end)
        yield children


def run_all(jobs: Sequence[Job], folder: Path, seconds: float) -> dict[str, Result]:
    """Start all, then let them measure in turns for so long. What failed is told and left out."""
    begun = time.monotonic()
    with started(jobs, folder) as children:
        waiting = [
            one for one in children if goes_on(one, START_S - (time.monotonic() - begun), "started")
        ]
        cores = fastest_cores(RANKS + 1)
        print(f"they launch from the cores {cores}", flush=True)
        while waiting:
            still = []
            for one in waiting:
                left_s = seconds - (time.monotonic() - begun)
                one.go(cores)
                if goes_on(one, min(TURN_S, left_s), "had a turn"):
                    still.append(one)
                if one.job.num_ranks > 1:
                    time.sleep(RANKS_SPIN_S)
            waiting = still
    paths = {job.name: Path(job.result) for job in jobs}
    return {
        name: msgspec.json.decode(path.read_bytes(), type=Result)
        for name, path in paths.items()
        if path.exists()
    }


def goes_on(child: Child, seconds: float, what: str) -> bool:
    """Whether it waits for another turn within the time. Says what it did, or why it failed."""
    begun = time.monotonic()
    with child.limited(seconds):
        is_ready = child.is_ready()
    print(f"{child.job.name}: {what}, {time.monotonic() - begun:.1f} s", flush=True)
    if is_ready:
        return True
    if complaint := child.complaint():
        print(complaint, flush=True)
    return False


def main() -> None:
    """Be the process of the job in the first argument."""
    run_job(msgspec.json.decode(sys.argv[1], type=Job))
    sys.stdout.flush()
    for process in multiprocessing.active_children():  # an engine's ranks
        process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()

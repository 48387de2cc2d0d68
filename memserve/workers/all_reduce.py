"""All-reduces over the GPUs of one instance, each alone: for `calibrate.py`.

It takes as many GPUs as ranks, so a machine with one does without. `measure_reduces` starts a
process for each rank, `python -m memserve.workers.all_reduce JOB.json RANK`, which joins the others
as the ranks of an engine do and calls what the engine's layers call: vLLM chooses the way by the
size of the message. Each rank launches from a core of its own, as an engine's that is calibrated.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memserve.core.cost_samples import UNDISTURBED, ReduceSample
from memserve.errors import StartError
from memserve.workers.cores import fastest_cores
from memserve.workers.environment import set_engine_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_SIZES = tuple(1 << power for power in (13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26))
"""Bytes of a message: of one token up to a large step."""
_WIDTH = 4096
_CALLS = 32
_LAUNCHES = 200
_RUNS = 9
_PRODUCT = 8192
_SPARE = 3.0
"""How much longer than the launches the device is kept busy, so that they run ahead of it."""
_TIMEOUT_S = 120.0
_POLL_S = 0.1


class ReduceJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks have to do."""

    device: str
    """cuda or cpu."""
    ranks: int
    sizes: tuple[int, ...]
    folder: str
    """Where the ranks meet, and rank 0 leaves the samples."""
    cores: tuple[int, ...] = ()
    """Of the ranks, each its own. Empty: they go where the kernel puts them."""


def measure_reduces(
    device: str, ranks: int, sizes: tuple[int, ...] = _SIZES, timeout_s: float = _TIMEOUT_S
) -> list[ReduceSample]:
    """Over the first `ranks` GPUs, or as many processes on a CPU. Its processes end with the call.

    Raises: StartError, with what a rank said last.
    """
    with tempfile.TemporaryDirectory(prefix="memserve-reduce-") as folder, ExitStack() as stack:
        cores = fastest_cores(ranks) if device == "cuda" else ()
        job = ReduceJob(device=device, ranks=ranks, sizes=sizes, folder=folder, cores=cores)
        job_file = Path(folder) / "job.json"
        job_file.write_bytes(msgspec.json.encode(job))
        environment = dict(os.environ)
        set_engine_environment(environment, num_threads=1, log_level="error")
        processes = []
        for rank in range(ranks):
            log = stack.enter_context((Path(folder) / f"{rank}.log").open("wb"))
            command = [sys.executable, "-m", "memserve.workers.all_reduce", str(job_file)]
            process = subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(_end, process)
            processes.append(process)
        _wait(processes, time.monotonic() + timeout_s, Path(folder))
        return msgspec.json.decode(_found(Path(folder)).read_bytes(), type=list[ReduceSample])


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float, folder: Path) -> None:
    """Until all have ended well. The first that has not ends the wait: the others wait for it."""
    running = dict(enumerate(processes))
    while running:
        for rank, process in list(running.items()):
            with suppress(subprocess.TimeoutExpired):
                if (status := process.wait(_POLL_S)) != 0:
                    last = _last(folder, rank, status)
                    raise StartError(f"rank {rank} of an all-reduce failed: {last}")
                del running[rank]
        if running and time.monotonic() > deadline:
            raise StartError(f"rank {min(running)} of an all-reduce did not end in time")


def _last(folder: Path, rank: int, status: int) -> str:
    """What it said of why: torch explains an error of CUDA in lines that follow it."""
    text = (folder / f"{rank}.log").read_text(errors="replace").strip()
    _, traced, end = f"\n{text}".rpartition("\nTraceback ")
    told = [line for line in end.splitlines()[1:] if line and not line[0].isspace()]
    lines = told[:1] if traced else text.splitlines()[-1:]
    return lines[0] if lines else f"exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _found(folder: Path) -> Path:
    return folder / "found.json"


# ── in a rank's process ───────────────────────────────────────────────────────────────────────


def run_rank(job: ReduceJob, rank: int) -> None:
    """Join, measure, and as rank 0 write the samples."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    device = torch.device(f"cuda:{rank}" if job.device == "cuda" else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=job.ranks,
            rank=rank,
            distributed_init_method=f"file://{job.folder}/meeting",
            local_rank=rank,
            backend="nccl" if device.type == "cuda" else "gloo",
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=job.ranks)
        if rank < len(job.cores):  # this thread, not those that the communicators have started
            os.sched_setaffinity(0, {job.cores[rank]})
        with torch.inference_mode():
            samples = _measure(parallel_state.get_tp_group(), device, job)
    if rank == 0:
        _found(Path(job.folder)).write_bytes(msgspec.json.encode(samples))


def _measure(group: Any, device: torch.device, job: ReduceJob) -> list[ReduceSample]:
    launch_s = _launch_s(group, device, min(job.sizes))
    samples = [
        ReduceSample(job.ranks, size, _seconds(group, device, size, launch_s), launch_s)
        for size in job.sizes
    ]
    group.barrier()
    return samples


def _message(device: torch.device, size_bytes: int) -> torch.Tensor:
    import torch

    width = min(_WIDTH, size_bytes // 2)
    return torch.zeros(size_bytes // 2 // width, width, dtype=torch.bfloat16, device=device)


def _launch_s(group: Any, device: torch.device, size_bytes: int) -> float:
    """What the host of the slowest rank takes for one that the device is done with sooner. 0 on a
    CPU, which does not launch anything beside it."""
    if device.type == "cpu":
        return 0.0
    import torch

    message = _message(device, size_bytes)

    def run() -> float:
        torch.cuda.synchronize()
        group.barrier()
        begun = time.perf_counter()
        for _ in range(_LAUNCHES):
            group.all_reduce(message)
        return time.perf_counter() - begun

    return _quick(group, run) / _LAUNCHES


def _seconds(group: Any, device: torch.device, size_bytes: int, launch_s: float) -> float:
    """Per all-reduce, run after run, without its launch."""
    message = _message(device, size_bytes)
    is_on_cpu = device.type == "cpu"
    run = _run_on_cpu(group, message) if is_on_cpu else _run_ahead(group, message, launch_s)
    return _quick(group, run) / _CALLS


def _quick(group: Any, run: Callable[[], float]) -> float:
    """An undisturbed run of several, after one to warm up. The slowest rank counts."""
    import torch

    run()
    times = torch.tensor([run() for _ in range(_RUNS)], dtype=torch.float64)
    torch.distributed.all_reduce(times, torch.distributed.ReduceOp.MAX, group.cpu_group)
    return float(times.sort().values[int(_RUNS * UNDISTURBED)])


def _run_on_cpu(group: Any, message: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        group.barrier()
        begun = time.perf_counter()
        for _ in range(_CALLS):
            group.all_reduce(message)
        return time.perf_counter() - begun

    return run


def _run_ahead(group: Any, message: torch.Tensor, launch_s: float) -> Callable[[], float]:
    """Launched while the device is busy with products, so that it then does one after the other.
    Not as a graph: vLLM would have to register the messages of one with all ranks."""
    import torch

    factors = torch.zeros(2, _PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=message.device)
    product = torch.empty_like(factors[0])

    def keep_busy(count: int) -> None:
        for _ in range(count):
            torch.mm(factors[0], factors[1], out=product)

    def timed(work: Callable[[], None]) -> tuple[Any, Any]:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        work()
        ended.record()
        return begun, ended

    def seconds(events: tuple[Any, Any]) -> float:
        events[1].synchronize()
        return float(events[0].elapsed_time(events[1])) / 1e3

    def reduce() -> None:
        for _ in range(_CALLS):
            group.all_reduce(message)

    keep_busy(2)
    one_s = seconds(timed(lambda: keep_busy(4))) / 4
    enough = math.ceil(_SPARE * (_CALLS + 1) * launch_s / one_s)

    def run() -> float:
        group.barrier()
        keep_busy(enough)
        group.all_reduce(message)  # the ranks' devices get there together
        return seconds(timed(reduce))

    return run


def main(arguments: list[str]) -> int:
    """The command line of a rank. Returns: the exit status."""
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=ReduceJob)
    try:
        run_rank(job, int(arguments[1]))
    except Exception:  # noqa: BLE001 - the process's boundary
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)  # tearing down process groups may wait for ranks that have gone

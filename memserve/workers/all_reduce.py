"""All-reduces over the GPUs of one instance, each alone: for `calibrate.py`.

It takes as many GPUs as ranks, so a machine with one does without. `measure_reduces` starts a
process for each rank, `python -m memserve.workers.all_reduce JOB.json RANK`, which joins the others
as the ranks of an engine do and calls what the engine's layers call: vLLM chooses the way by the
size of the message.
"""

from __future__ import annotations

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

from memserve.core.cost_samples import ReduceSample
from memserve.errors import StartError
from memserve.workers.environment import set_engine_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_SIZES = tuple(1 << power for power in (13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26))
"""Bytes of a message: of one token up to a large step."""
_WIDTH = 4096
_CALLS = 32
_LAUNCHES = 200
_RUNS = 5
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


def measure_reduces(
    device: str, ranks: int, sizes: tuple[int, ...] = _SIZES, timeout_s: float = _TIMEOUT_S
) -> list[ReduceSample]:
    """Over the first `ranks` GPUs, or as many processes on a CPU. Its processes end with the call.

    Raises: StartError, with what a rank said last.
    """
    with tempfile.TemporaryDirectory(prefix="memserve-reduce-") as folder, ExitStack() as stack:
        job = ReduceJob(device=device, ranks=ranks, sizes=sizes, folder=folder)
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
    lines = (folder / f"{rank}.log").read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"exit status {status}"


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
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        parallel_state.init_distributed_environment(
            world_size=job.ranks,
            rank=rank,
            distributed_init_method=f"file://{job.folder}/meeting",
            local_rank=rank,
            backend="nccl" if device.type == "cuda" else "gloo",
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=job.ranks)
        group = parallel_state.get_tp_group()
        launch_s = _launch_s(group, device, min(job.sizes))
        samples = [
            ReduceSample(job.ranks, size, _seconds(group, device, size), launch_s)
            for size in job.sizes
        ]
        group.barrier()
    if rank == 0:
        _found(Path(job.folder)).write_bytes(msgspec.json.encode(samples))


def _message(device: torch.device, size_bytes: int) -> torch.Tensor:
    import torch

    width = min(_WIDTH, size_bytes // 2)
    return torch.zeros(size_bytes // 2 // width, width, dtype=torch.bfloat16, device=device)


def _launch_s(group: Any, device: torch.device, size_bytes: int) -> float:
    """What the host takes for one that the device is done with sooner. 0 on a CPU, which does not
    launch anything beside it."""
    if device.type == "cpu":
        return 0.0
    import torch

    message = _message(device, size_bytes)
    times = []
    for _ in range(_RUNS + 1):
        torch.cuda.synchronize()
        group.barrier()
        begun = time.perf_counter()
        for _ in range(_LAUNCHES):
            group.all_reduce(message)
        times.append((time.perf_counter() - begun) / _LAUNCHES)
    torch.cuda.synchronize()
    return min(times[1:])


def _seconds(group: Any, device: torch.device, size_bytes: int) -> float:
    """Per all-reduce, the least disturbed of several runs of many."""
    message = _message(device, size_bytes)
    for _ in range(2):
        group.all_reduce(message)
    run = _replay(group, message) if device.type == "cuda" else _run_on_cpu(group, message)
    times = []
    for _ in range(_RUNS):
        group.barrier()
        times.append(run())
    return min(times) / _CALLS


def _run_on_cpu(group: Any, message: torch.Tensor) -> Callable[[], float]:
    def run() -> float:
        begun = time.perf_counter()
        for _ in range(_CALLS):
            group.all_reduce(message)
        return time.perf_counter() - begun

    return run


def _replay(group: Any, message: torch.Tensor) -> Callable[[], float]:
    """One graph, so that launching is not in it. It is captured without vLLM's own context, so the
    message is copied into the shared buffer first, as outside of graphs: where large ones run."""
    import torch

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            group.all_reduce(message)

    def run() -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    run()
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

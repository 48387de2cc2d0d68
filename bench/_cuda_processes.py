"""Which processes of a cluster use a GPU, and which import opens the driver.

Holding the driver's device files open is not using a GPU: NVML, by which vLLM looks for GPUs, opens
them too. A process that has a CUDA context has device memory of the driver mapped; a process whose
driver was initialised answers otherwise to a first question, which only it can ask itself.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

_CUDA_ERROR_NOT_INITIALIZED = 3


class Seen(msgspec.Struct, frozen=True):
    """One process, as far as /proc shows it."""

    pid: int
    parent: int
    command: str
    """Its words, without the folders of paths: results are published."""
    files: list[str]
    """Of the driver, open."""
    maps: list[str]
    """Of the driver, mapped into its memory."""


def look(pid: int) -> Seen | None:
    """None if it is gone, or cannot be looked at."""
    try:
        process = psutil.Process(pid)
        folder = Path(f"/proc/{pid}")
        files = {_target(path) for path in (folder / "fd").iterdir()}
        maps = {line.split()[-1] for line in (folder / "maps").read_text().splitlines()}
        command = " ".join(word.rpartition("/")[2] for word in process.cmdline())[:160]
        parent = process.ppid()
    except (OSError, psutil.Error):
        return None
    return Seen(pid, parent, command, _of_driver(files), _of_driver(maps))


def faults(root: int, workers: Sequence[int]) -> tuple[list[str], list[dict[str, Any]]]:
    """Processes under `root` that are no workers and have a CUDA context, as text; and all seen.

    A worker must show what is looked for: else this proves nothing, and that is a fault as well.
    """
    pids = [root, *(child.pid for child in psutil.Process(root).children(recursive=True))]
    seen = [one for pid in pids if (one := look(pid)) is not None]
    found = [
        f"process {p.pid} ({p.command}; child of {p.parent}) is no worker and maps {p.maps}"
        for p in seen
        if p.pid not in workers and p.maps
    ]
    if not any(p.maps for p in seen if p.pid in workers):
        found.append("no worker shows that it uses a GPU: the check sees nothing here")
    return found, [msgspec.to_builtins(p) for p in seen if p.files or p.maps]


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _of_driver(names: set[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("/dev/nvidia"))


# ── in a process of its own ───────────────────────────────────────────────────────────────────


def is_driver_initialised() -> bool:
    """Whether `cuInit` was called in this process. Does not call it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_ERROR_NOT_INITIALIZED)


def trace_imports() -> list[dict[str, Any]]:
    """What each import of a zygote opens of the driver. In a fresh process; seconds."""
    command = [sys.executable, "-m", "bench._cuda_processes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        lines.append(msgspec.json.encode({"module": "failed", "says": done.stderr[-500:]}).decode())
    return [msgspec.json.decode(line) for line in lines]


def _trace() -> None:
    from memserve.workers import zygote
    from memserve.workers.environment import set_engine_environment

    set_engine_environment(os.environ, num_threads=1, log_level="error")
    _tell("nothing")
    modules = ["torch", *zygote._ENGINE_MODULES, *zygote._DEVICE_MODULES["cuda"]]
    modules.append("memserve.frontend.openai")  # the orchestrator's
    for module in modules:
        importlib.import_module(module)
        _tell(module)


def _tell(module: str) -> None:
    seen = look(os.getpid())
    line = {
        "module": module,
        "files": seen.files if seen else [],
        "maps": seen.maps if seen else [],
        "initialised": is_driver_initialised(),
    }
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _trace()

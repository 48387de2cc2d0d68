"""How long a start takes, where the time goes, and what an idle cluster costs.

    python -m bench.startup [--mode 1P1D-CC] [--runs 3] [--idle-s 10] [--out FILE]

Each run starts `memserve up`, waits until it is ready, lets it idle, adds up the processor time of
all its processes meanwhile, and stops it. The phases come from the lines that `up` prints.
"""

from __future__ import annotations

import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field

import psutil

from bench._report import Scalar, parser, publish

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05
_IMPORTED = re.compile(r"engine imported in ([\d.]+) s")
_READY = re.compile(r"\b(P\d+|D\d+|PD\d+)\b.*ready in ([\d.]+) s \((.*?)\)")
_PHASE = re.compile(r"([a-z ]+?) ([\d.]+) s")


@dataclass
class Run:
    """One start."""

    ready_s: float
    idle_core_percent: float
    rss_bytes: int
    stop_s: float
    import_s: float | None = None
    instances: dict[str, dict[str, float]] = field(default_factory=dict)
    """By instance: `asked to ready`, and the phases of building the engine."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--mode", default="1P1D-CC", help="instances to start")
    arguments.add_argument("--runs", type=int, default=3, help="starts to measure")
    arguments.add_argument("--idle-s", type=float, default=10.0, help="how long to watch it idle")
    args = arguments.parse_args()
    if args.runs < 1:
        arguments.error(f"--runs: {args.runs}; allowed: 1 or more")
    runs = [measure(args.mode, args.idle_s) for _ in range(args.runs)]
    metrics: dict[str, Scalar] = {
        "ready_s": statistics.median(run.ready_s for run in runs),
        "idle_core_percent": statistics.median(run.idle_core_percent for run in runs),
        "rss_bytes": max(run.rss_bytes for run in runs),
        "stop_s": statistics.median(run.stop_s for run in runs),
    }
    imports = [run.import_s for run in runs if run.import_s is not None]
    if imports:
        metrics["import_s"] = statistics.median(imports)
    for instance in runs[0].instances:
        for phase in runs[0].instances[instance]:
            seconds = [run.instances.get(instance, {}).get(phase) for run in runs]
            known = [value for value in seconds if value is not None]
            metrics[f"{instance} {phase}_s"] = statistics.median(known)
    publish(
        "startup",
        settings={"mode": args.mode, "runs": args.runs, "idle_s": args.idle_s},
        metrics=metrics,
        raw=[asdict(run) for run in runs],
        out=args.out,
    )


def measure(mode: str, idle_s: float) -> Run:
    """Start, idle, stop. Raises: SystemExit with what it printed if it does not become ready."""
    port = _free_port()
    started_at = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "memserve", "up", "--no-tui", "--mode", mode, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    lines: list[str] = []
    # The pipe has to be emptied all the time, or the process stops at a full one.
    reader = threading.Thread(target=_collect, args=(process, lines))
    reader.start()
    try:
        _wait_until_ready(process, port, lines)
        ready_s = time.monotonic() - started_at
        family = [psutil.Process(process.pid)]
        family += family[0].children(recursive=True)
        idle_core_percent = _core_percent(family, idle_s)
        rss_bytes = sum(member.memory_info().rss for member in family)
        stopping_at = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(_STOP_TIMEOUT_S)
        run = Run(ready_s, idle_core_percent, rss_bytes, time.monotonic() - stopping_at)
    finally:
        process.kill()
        process.wait()
        reader.join(_STOP_TIMEOUT_S)
    _read_phases("".join(lines), run)
    return run


def _collect(process: subprocess.Popen[str], lines: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        lines.extend(process.stdout)


def _wait_until_ready(process: subprocess.Popen[str], port: int, lines: list[str]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(_POLL_S)
    sys.exit(f"memserve up did not become ready:\n{''.join(lines)}")


def _core_percent(family: list[psutil.Process], seconds: float) -> float:
    """Processor time of them all, in percent of one core."""
    started_at, before_s = time.monotonic(), _cpu_s(family)
    time.sleep(seconds)
    return 100 * (_cpu_s(family) - before_s) / (time.monotonic() - started_at)


def _cpu_s(family: list[psutil.Process]) -> float:
    times = [member.cpu_times() for member in family]
    return sum(one.user + one.system for one in times)


def _read_phases(output: str, run: Run) -> None:
    if (imported := _IMPORTED.search(output)) is not None:
        run.import_s = float(imported[1])
    for instance, seconds, phases in _READY.findall(output):
        found = {name.strip(): float(value) for name, value in _PHASE.findall(phases)}
        run.instances[instance] = {"asked to ready": float(seconds), **found}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()

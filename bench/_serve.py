"""A `memserve up` for a benchmark: started, waited for, and stopped whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

_START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
_RELEASE_TIMEOUT_S = 30.0
_POLL_S = 0.2
_TURN = "MEMSERVE_BENCH_TURN"
"""Environment: a file that benches lock while they measure. So several may start their servers at
the same time, which takes minutes on GPUs, and none disturbs another."""


@contextlib.contextmanager
def serving(
    flags: Sequence[str],
    settings: Mapping[str, object] | None = None,
    *,
    program: str = "memserve",
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """The URL of a ready server. `settings`: keys for `--set`; `program`: the module to run.

    Raises: SystemExit with what it printed if it does not become ready.
    """
    port = _free_port()
    command = [sys.executable, "-m", program, "up", "--no-tui", "--port", str(port), *flags]
    for key, value in (settings or {}).items():
        command += ["--set", f"{key}={value}"]
    with tempfile.TemporaryFile("w+") as log, tempfile.NamedTemporaryFile() as no_settings:
        variables = {
            **os.environ,
            "MEMSERVE_CONFIG": no_settings.name,
            **(environment or {}),
        }
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=variables
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(process, url):
                log.seek(0)
                sys.exit(f"memserve up did not become ready:\n{log.read()}")
            with turn():
                yield url
            process.send_signal(signal.SIGTERM)
            process.wait(_STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Measure while nobody else does; waits as long as it takes."""
    path = os.environ.get(_TURN)
    if path is None:
        yield
        return
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def get(url: str) -> Any:
    """GET, as JSON."""
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def released(url: str, request_id: str) -> Any:
    """The steps of a request's timeline by name, once nobody holds anything for it.

    Raises: SystemExit if that takes too long.
    """
    deadline = time.monotonic() + _RELEASE_TIMEOUT_S
    while time.monotonic() < deadline:
        found = get(f"{url}/v1/requests/{request_id}")
        (timeline,) = found.get("requests", [found])
        steps = {step["name"]: step for step in timeline["steps"]}
        if "released" in steps:
            return steps
        time.sleep(0.005)
    raise SystemExit(f"request {request_id} was not released in {_RELEASE_TIMEOUT_S:g} s")


def pin_instances(url: str) -> dict[str, int]:
    """Let each instance have a processor core of its own, as far as there are enough.

    Returns: instance → core.
    """
    cores = sorted(os.sched_getaffinity(0))
    pinned = {}
    for number, instance in enumerate(get(f"{url}/v1/status")["instances"]):
        core = cores[number % len(cores)]
        for thread in psutil.Process(instance["pid"]).threads():
            os.sched_setaffinity(thread.id, {core})
        pinned[instance["id"]] = core
    return pinned


def _is_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
            get(f"{url}/ready")
            return True
        time.sleep(_POLL_S)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

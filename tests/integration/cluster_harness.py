"""A real cluster for tests: `memserve up` as a child process, and proof that it leaves nothing.

`running(...)` starts one and stops it whatever happens; `Cluster` can also be stopped by hand, in
any way, and `leftovers()` then names every process, port, folder and shared memory segment that is
still there. Collaborators: `api_client.py` talks to it.

Every process of a cluster carries a mark in its environment; descendants are remembered too, for a
process may overwrite its environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

BLOCK = 32
"""Tokens in a KV block, in every cluster that the tests start."""
MODEL = "smollm2-135m-instruct"
START_S = 180.0
"""Deadline for a start; the first one ever converts the model and inspects it."""
STOP_S = 30.0
DEFAULTS: Mapping[str, object] = {
    "engine.dtype": "float32",  # in bfloat16, equal tokens cannot be promised
    "engine.block_size": BLOCK,
}
_ROOT = Path(__file__).resolve().parents[2]
_SHM = Path("/dev/shm")
_MARK = "CLUSTER_UNDER_TEST"

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, deadline_s: float, every_s: float = 0.05) -> T:
    """The first true answer of `condition`. Raises: TimeoutError that says what did not happen."""
    deadline = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {deadline_s:g} s: {what}")
        time.sleep(every_s)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def command_line(
    mode: str,
    port: int,
    *,
    caching: str | None = None,
    model: str | None = None,
    settings: Mapping[str, object] = {},
) -> list[str]:
    """The `memserve up` that a cluster is started with."""
    words = [sys.executable, "-m", "memserve", "up", "--no-tui", "--device", "cpu"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--mode", mode]
    words += ["--caching", caching] if caching is not None else []
    words += ["--model", model] if model is not None else []
    for key, value in {**DEFAULTS, **settings}.items():
        words += ["--set", f"{key}={value}"]
    return words


class Cluster:
    """One `memserve up`, from `start` to `stop` or `kill`."""

    def __init__(
        self,
        mode: str,
        *,
        caching: str | None = None,
        model: str | None = None,
        settings: Mapping[str, object] = {},
    ) -> None:
        self.mode = mode
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = command_line(
            mode, self.port, caching=caching, model=model, settings=settings
        )
        self._mark = uuid.uuid4().hex
        # Sockets lie below it, whose paths must be short: not in pytest's own folder.
        self._folder = Path(tempfile.mkdtemp(prefix="memserve-test-"))
        self._log = self._folder / "up.log"
        self._seen: set[psutil.Process] = set()
        self._run_dirs: set[Path] = set()
        self._shm_before = set(_SHM.iterdir())
        self._process: subprocess.Popen[bytes] | None = None

    # ── life ──────────────────────────────────────────────────────────────────────────────────

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process; does not wait for anything."""
        temporary = self._folder / "tmp"
        temporary.mkdir()
        no_settings = self._folder / "memserve.toml"
        no_settings.touch()
        environment = {**os.environ, _MARK: self._mark, "TMPDIR": str(temporary)}
        environment["MEMSERVE_CONFIG"] = str(no_settings)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=_ROOT,
                process_group=0,
            )
        return self._process

    def start(self) -> Cluster:
        """Launch, and wait until it is ready. Raises: AssertionError with its output."""
        process = self.launch()

        def is_ready() -> bool:
            assert process.poll() is None, f"{self.mode} ended while starting:\n{self.output()}"
            return self.get("/ready")[0] == 200

        try:
            until(is_ready, f"{self.mode} is ready", START_S, every_s=0.2)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.output()}") from None
        self.processes()
        return self

    def stop(self, number: signal.Signals = signal.SIGTERM, deadline_s: float = STOP_S) -> int:
        """Signal the orchestrator and wait for its end; the exit code."""
        assert self._process is not None
        self.processes()
        self._process.send_signal(number)
        return self.wait(deadline_s)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """Wait for the orchestrator to end; the exit code."""
        assert self._process is not None
        try:
            return self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.mode} did not end within {deadline_s:g} s:\n{self.output()}"
            ) from None

    def close(self) -> None:
        """End what still runs, by force, and remove the folder. For finalizers; never fails."""
        remaining = self.processes()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for process in remaining:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(remaining, timeout=5)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ── what can be seen of it ────────────────────────────────────────────────────────────────

    @property
    def orchestrator(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    @property
    def zygote(self) -> psutil.Process:
        """The process that forks the workers."""
        found = [p for p in self.processes() if _is_zygote(p) and p.ppid() == self.orchestrator.pid]
        assert len(found) == 1, found
        return found[0]

    def output(self, num_chars: int = 6000) -> str:
        """The end of what it printed."""
        return self._log.read_text(errors="replace")[-num_chars:]

    def processes(self) -> list[psutil.Process]:
        """All its living processes; also notes their run directories for `leftovers`."""
        marked = [process for process in psutil.process_iter() if self._is_marked(process)]
        self._seen.update(marked)
        for process in list(self._seen):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update(process.children(recursive=True))
        living = [process for process in self._seen if _is_alive(process)]
        for process in living:
            self._run_dirs.update(_run_dirs_of(process))
        return living

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(_MARK) == self._mark
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False

    def leftovers(self) -> list[str]:
        """What is still there of a cluster that has ended, in words."""
        left = [f"process {p.pid}: {_describe(p)}" for p in self.processes()]
        left += [f"run directory {path}" for path in self._run_dirs if path.exists()]
        left += [f"socket {path}" for path in self._folder.rglob("*") if path.is_socket()]
        new_shm = set(_SHM.iterdir()) - self._shm_before
        left += [f"shared memory {path}" for path in new_shm - _mapped_by_others()]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                left.append(f"port {self.port}")
        return left

    def assert_gone(self, deadline_s: float = 10.0) -> None:
        """Nothing is left of it. Raises: AssertionError naming what is."""
        with contextlib.suppress(TimeoutError):
            until(lambda: not self.leftovers(), "nothing is left", deadline_s)
        left = self.leftovers()
        assert not left, left

    @property
    def run_dirs(self) -> set[Path]:
        """Run directories that its processes were seen with."""
        self.processes()
        return set(self._run_dirs)

    def get(self, path: str, deadline_s: float = 10.0) -> tuple[int, dict[str, object]]:
        """GET, as (status, JSON); (0, {}) while nothing answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=deadline_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0, {}


@contextlib.contextmanager
def running(
    mode: str,
    *,
    caching: str | None = None,
    model: str | None = None,
    settings: Mapping[str, object] = {},
) -> Iterator[Cluster]:
    """A ready cluster; stopped at the end, in order, and nothing may be left of it."""
    cluster = Cluster(mode, caching=caching, model=model, settings=settings)
    try:
        cluster.start()
        yield cluster
        if cluster.orchestrator.is_running():
            assert cluster.stop() == 0, cluster.output()
        cluster.assert_gone()
    finally:
        cluster.close()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.NoSuchProcess:
        return "just ended"


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def _is_zygote(process: psutil.Process) -> bool:
    return "memserve.workers.zygote" in _arguments(process)


def _run_dirs_of(process: psutil.Process) -> list[Path]:
    """From the zygote's arguments, which its forked workers share."""
    words = _arguments(process)
    return [Path(words[i + 1]) for i, word in enumerate(words[:-1]) if word == "--run-dir"]


def _mapped_by_others() -> set[Path]:
    """Segments that some living process has mapped: not left by the dead."""
    mapped: set[Path] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            paths = [region.path for region in process.memory_maps()]
            mapped.update(Path(path) for path in paths if path.startswith("/dev/shm/"))
    return mapped

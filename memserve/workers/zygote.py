"""The zygote: imports torch and vllm once, then forks a worker whenever it is asked to.

    python -m memserve.workers.zygote --fd N --run-dir DIR --parent PID

Collaborators: `cluster.py` holds the other end of the socket pair `N` (messages in `spec.py`);
`main.py` is what a fork becomes. The zygote has one thread and never initialises a device, for
neither survives a fork.

A worker has gone when all of its processes have: what a peer frees after its `Exited`, no rank of
it may still be writing to. So each worker is a process group, the zygote inherits what the first
process of it leaves behind (the kernel kills ranks with their driver, which takes a moment), and
says `Exited` when the last one is reaped.

SIGTERM may be sent to all processes of a cluster at once, as systemd does. The orchestrator needs
this one and the workers until running requests have ended, so it ends neither. But nothing outlives
the orchestrator: when its end of the socket pair closes, however it died, the zygote kills its
workers, waits for them, removes the run directory if the orchestrator is gone, and ends. A worker
whose zygote dies is killed by the kernel.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from memserve.errors import MemServeError
from memserve.run_dirs import hold
from memserve.types import InstanceId
from memserve.workers.environment import set_engine_environment
from memserve.workers.spec import (
    Exited,
    Forked,
    Imported,
    WorkerSpec,
    receive_request,
    send_frame,
)

_PARENT_GRACE_S = 0.2
"""A dying process closes its sockets a moment before it is gone."""
_GROUP_GRACE_S = 2.0
"""For the rest of a worker to end by itself, as who tidies up after it does; then it is killed, and
has so long again: one that hangs in a device's driver must not hold up the cluster."""
_END_GRACE_S = 2.0
"""The same when the zygote ends; below the patience of `zygote_process.py`."""
_PR_SET_CHILD_SUBREAPER = 36

_ENGINE_MODULES = (
    "vllm",
    "transformers",
    "vllm.config",
    "memserve.workers.main",
    "memserve.workers.connector",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.llama",
)
_DEVICE_MODULES = {
    "cpu": ("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner"),
    "cuda": (
        "vllm.v1.worker.gpu_worker",
        "vllm.v1.worker.gpu.model_runner",
        "vllm.v1.attention.backends.flash_attn",
    ),
}


def import_engine(check: Callable[[], None]) -> None:
    """Import what every worker needs, with a `check` between any two parts, which take seconds.

    Raises: StartError for an unsupported vLLM.
    """
    for name in _ENGINE_MODULES:
        check()
        importlib.import_module(name)
    compat = importlib.import_module("memserve.workers.compat")
    compat.check_version()
    for name in _DEVICE_MODULES.get(compat.current_platform.device_type, ()):
        check()
        importlib.import_module(name)


class _Ending(msgspec.Struct):
    """A worker whose first process is reaped, and others not yet."""

    notice: Exited
    deadline: float
    is_killed: bool = False


class Zygote:
    """Forks workers, and reports and reaps them. Owns the socket and the processes."""

    def __init__(self, sock: socket.socket, run_dir: str, parent_pid: int) -> None:
        self._sock = sock
        self._run_dir = run_dir
        self._parent_pid = parent_pid
        self._parent = os.pidfd_open(os.getppid())
        self._children: dict[int, tuple[InstanceId, int]] = {}
        self._ending: dict[int, _Ending] = {}
        """Process group → what is to be said when it is empty."""
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        """Until the orchestrator closes its end."""
        self._catch_signals()
        _inherit_orphans()
        started_at = time.monotonic()
        try:
            hold(Path(self._run_dir))  # the workers too: they inherit the lock
            import_engine(self._require_parent)
            gc.collect()
            gc.freeze()  # the workers share these pages as long as nobody writes to them
            send_frame(self._sock, Imported(time.monotonic() - started_at))
            self._serve_requests()
        except (EOFError, OSError):  # the orchestrator is gone
            pass
        self._end()

    def _require_parent(self) -> None:
        if self._is_orphan(0):
            raise EOFError("the orchestrator is gone")

    def _is_orphan(self, wait_s: float) -> bool:
        if os.getppid() != self._parent_pid:  # it may have died before this process looked
            return True
        ready, _, _ = select.select([self._parent], [], [], wait_s)
        return bool(ready)

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # that it came is seen at the pipe
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def _serve_requests(self) -> None:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(self._patience_ms())}
            if self._wake_read in ready:
                os.read(self._wake_read, 512)
            self._reap()
            if self._sock.fileno() in ready:
                self._handle()

    def _handle(self) -> None:
        self._fork(receive_request(self._sock).spec)

    def _fork(self, spec: WorkerSpec) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(spec, zygote_pid)
        self._children[pid] = (spec.instance, spec.epoch)
        send_frame(self._sock, Forked(spec.instance, spec.epoch, pid))

    def _become_worker(self, spec: WorkerSpec, zygote_pid: int) -> NoReturn:
        """In the child: let go of everything that is the zygote's."""
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._wake_read, self._wake_write, self._parent):
                os.close(fd)
            self._sock.close()
            _redirect_output(spec.log_path)
            run_worker = importlib.import_module("memserve.workers.main").run_worker
            run_worker(spec, zygote_pid)
        finally:
            os._exit(1)  # only reached if the lines above fail

    def _patience_ms(self) -> float | None:
        deadlines = [ending.deadline for ending in self._ending.values()]
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - time.monotonic()) * 1000

    def _reap(self) -> None:
        now = time.monotonic()
        for pid in list(self._children):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                instance, epoch = self._children.pop(pid)
                notice = Exited(instance, epoch, pid, os.waitstatus_to_exitcode(status))
                self._ending[pid] = _Ending(notice, now + _GROUP_GRACE_S)
        for group, ending in list(self._ending.items()):
            if _is_group_reaped(group):
                del self._ending[group]
                send_frame(self._sock, ending.notice)
            elif now >= ending.deadline:
                self._press(group, ending, now)

    def _press(self, group: int, ending: _Ending, now: float) -> None:
        """The rest of a worker has not ended in time: kill it, or give it up."""
        if not ending.is_killed:
            ending.is_killed, ending.deadline = True, now + _GROUP_GRACE_S
            os.killpg(group, signal.SIGKILL)
            return
        name = f"{ending.notice.instance} epoch {ending.notice.epoch}"
        text = f"a process of {name} has not died {_GROUP_GRACE_S:g} s after it was killed"
        sys.stderr.write(f"memserve: error: {text}\n")
        sys.stderr.flush()
        del self._ending[group]
        send_frame(self._sock, ending.notice)

    def _end(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the child's
        for pid in self._children:
            os.waitpid(pid, 0)
        left = self._wait_for_groups([*self._children, *self._ending])
        for group in left:
            os.killpg(group, signal.SIGKILL)
        if self._is_orphan(_PARENT_GRACE_S):
            shutil.rmtree(self._run_dir, ignore_errors=True)

    def _wait_for_groups(self, groups: list[int]) -> list[int]:
        """Those that have not ended in time."""
        deadline = time.monotonic() + _END_GRACE_S
        while left := [group for group in groups if not _is_group_reaped(group)]:
            patience_s = max(0.0, deadline - time.monotonic())
            if not select.select([self._wake_read], [], [], patience_s)[0]:
                break
            os.read(self._wake_read, 512)
        return left


def _inherit_orphans() -> None:
    """What a worker leaves behind when it dies becomes a child of this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _is_group_reaped(group: int) -> bool:
    """Reap what has died of a process group; whether no child of this process is left in it."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="memserve.workers.zygote")
    parser.add_argument("--fd", type=int, required=True, help="of the socket pair")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid of the orchestrator")
    arguments = parser.parse_args()
    sock = socket.socket(fileno=arguments.fd)
    sock.set_inheritable(False)
    log_level = os.environ.get("VLLM_LOGGING_LEVEL", "info")
    set_engine_environment(os.environ, num_threads=1, log_level=log_level)
    try:
        Zygote(sock, arguments.run_dir, arguments.parent).serve()
    except MemServeError as error:
        sys.exit(f"memserve: error: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # taking torch apart, module by module, would take half a second


if __name__ == "__main__":
    main()

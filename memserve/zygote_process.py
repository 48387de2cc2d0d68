"""The orchestrator's handles on processes: the zygote, and the workers that it has forked.

Collaborators: `workers/zygote.py` is the other end; `cluster.py` asks for workers, and ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from memserve.workers.spec import AnyNotice, Fork, read_notice, write_request

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""From asking a process to end to killing it."""
_LOG_TAIL_LINES = 12


class Zygote:
    """One zygote at a time, and the socket pair to it."""

    def __init__(self, run_dir: Path, environment: Mapping[str, str]) -> None:
        self._run_dir = run_dir
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Start the process; it says `Imported` when it can fork."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, self._log_path.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 -- returns at once
                [sys.executable, "-m", "memserve.workers.zygote", "--fd", str(theirs.fileno())]
                + ["--run-dir", str(self._run_dir), "--parent", str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # Ctrl-C is the orchestrator's to handle, in order
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours)

    def request(self, request: Fork) -> None:
        """Ask for something; lost if the zygote is gone, which `notice` will tell."""
        if self._writer is not None and not self._writer.is_closing():
            write_request(self._writer, request)

    async def notice(self) -> AnyNotice:
        """The next notice. Raises: EOFError or ConnectionError if the zygote is gone, and
        ProtocolError."""
        assert self._reader is not None
        return await read_notice(self._reader)

    async def close(self) -> None:
        """Close the socket: the zygote kills what is left of its children, removes the run
        directory, and ends."""
        if self._writer is not None:
            self._writer.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        self._process = self._writer = None

    def log_tail(self) -> str:
        """The end of its log, for an error message."""
        return log_tail(self._log_path)

    @property
    def _log_path(self) -> Path:
        return self._run_dir / "zygote.log"


class WorkerProcess:
    """A worker's process, a child of the zygote's: by a descriptor, which means no other one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd: int | None = None
        self._is_gone = False
        self._look()

    def kill(self) -> None:
        self._look()
        if self._fd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    async def wait(self, timeout_s: float) -> None:
        """Until it is gone, or the time is over."""
        self._look()
        if self._fd is not None:
            has_ended = select.poll()  # a `select` takes no descriptor above 1023
            has_ended.register(self._fd, select.POLLIN)
            await asyncio.to_thread(has_ended.poll, timeout_s * 1000)

    def _look(self) -> None:
        """Have the descriptor, if there is one to be had."""
        if self._fd is not None or self._is_gone:
            return
        try:
            self._fd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # gone already; its exit is reported next
            self._is_gone = True
        except OSError as error:  # clients have them all at the moment
            logger.error("no descriptor for process %d now: %s", self.pid, error)

    def close(self) -> None:
        """Forget it."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._is_gone = None, True


def log_tail(path: Path) -> str:
    """The last lines of a log, ready to follow an error's text; empty if there are none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    lines = [line for line in lines if line.strip()][-_LOG_TAIL_LINES:]
    return "; the end of its log:\n  " + "\n  ".join(lines) if lines else ""

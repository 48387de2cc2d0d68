"""Handles on workers' processes, however many descriptors clients have taken."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator

import pytest

from memserve.zygote_process import WorkerProcess


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def _may_open(num_files: int) -> Iterator[None]:
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (now, most))


@contextlib.contextmanager
def _taken(num_files: int) -> Iterator[None]:
    """All descriptors below this number."""
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < num_files:
        taken.append(os.dup(taken[0]))
    os.close(taken.pop())
    try:
        yield
    finally:
        for fd in taken:
            os.close(fd)


async def test_one_among_thousands_of_descriptors(sleeper: subprocess.Popen[bytes]) -> None:
    with _may_open(2000), _taken(1024):
        worker = WorkerProcess(sleeper.pid)
        worker.kill()
        await worker.wait(10.0)
        assert sleeper.wait(1) == -signal.SIGKILL
        worker.close()


async def test_none_is_left_for_it_yet(sleeper: subprocess.Popen[bytes]) -> None:
    with _taken(100), _may_open(100):
        worker = WorkerProcess(sleeper.pid)
        worker.kill()
        with pytest.raises(subprocess.TimeoutExpired):
            sleeper.wait(0)
    worker.kill()
    await worker.wait(10.0)
    assert sleeper.wait(1) == -signal.SIGKILL
    worker.close()


def test_one_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    worker = WorkerProcess(process.pid)
    worker.kill()
    worker.close()

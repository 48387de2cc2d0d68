"""When a worker has gone: the zygote says so once no process of it is left. Without an engine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from memserve.types import InstanceId, Role
from memserve.workers.spec import (
    Exited,
    Fork,
    Forked,
    Imported,
    WorkerSpec,
    receive_notice,
    send_frame,
)
from tests.integration.cluster_harness import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).with_name("zygote_rig.py")
DEADLINE_S = 30.0
FOREVER_S = 1000.0


class Rig:
    """The script, and the orchestrator's end of its socket pair."""

    def __init__(self, folder: Path, grace_s: float, *, kills: bool = True) -> None:
        self.folder = folder
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(DEADLINE_S)
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(theirs.fileno()), str(folder), str(os.getpid())]
                + [str(grace_s), str(int(kills))],
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
            )
        assert isinstance(receive_notice(self.socket), Imported), self.log.read_text()

    @property
    def log(self) -> Path:
        return self.folder / "zygote.log"

    def fork(self, instance: str) -> tuple[psutil.Process, psutil.Process]:
        """The driver and its rank."""
        path = self.folder / f"{instance}.log"
        send_frame(
            self.socket,
            Fork(
                WorkerSpec(
                    instance=InstanceId(instance),
                    epoch=1,
                    role=Role.PREFILL,
                    hub_address="",
                    run_dir=str(self.folder),
                    log_path=str(path),
                    model="",
                    kv_bytes=None,
                    heartbeat_interval_s=1.0,
                )
            ),
        )
        forked = receive_notice(self.socket)
        assert isinstance(forked, Forked) and forked.instance == instance, forked
        until(lambda: path.exists() and path.read_text().endswith("\n"), "a rank", DEADLINE_S)
        return psutil.Process(forked.pid), psutil.Process(int(path.read_text()))

    def close(self) -> None:
        self.socket.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            for path in self.folder.glob("P*.log"):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(int(path.read_text())).kill()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


RigMaker = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[RigMaker]:
    rigs: list[Rig] = []

    def make(grace_s: float, **options: bool) -> Rig:
        rigs.append(Rig(tmp_path, grace_s, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_a_worker_has_gone_when_its_ranks_have(make_rig: RigMaker) -> None:
    rig = make_rig(FOREVER_S)
    driver, rank = rig.fork("P0")
    driver.kill()
    until(lambda: not driver.is_running(), "the driver is reaped", DEADLINE_S)
    rig.fork("P1")  # the zygote goes on, and its next notice is not the end of P0
    rank.kill()
    assert receive_notice(rig.socket) == Exited(InstanceId("P0"), 1, driver.pid, -signal.SIGKILL)
    assert not rank.is_running()


def test_what_does_not_leave_by_itself_is_killed(make_rig: RigMaker) -> None:
    rig = make_rig(0.1)
    driver, rank = rig.fork("P0")
    driver.kill()
    notice = receive_notice(rig.socket)
    assert isinstance(notice, Exited) and notice.pid == driver.pid
    assert not rank.is_running()
    assert rig.log.read_text() == ""


def test_what_cannot_be_killed_holds_up_nobody_for_ever(make_rig: RigMaker) -> None:
    rig = make_rig(0.1, kills=False)
    driver, rank = rig.fork("P0")
    driver.kill()
    notice = receive_notice(rig.socket)
    assert isinstance(notice, Exited) and notice.pid == driver.pid
    assert rank.is_running()
    expected = "a process of P0 epoch 1 has not died 0.1 s after it was killed"
    assert expected in rig.log.read_text()


def test_it_works_on_after_a_signal_to_all(make_rig: RigMaker) -> None:
    rig = make_rig(FOREVER_S)
    for number in (signal.SIGTERM, signal.SIGINT):
        rig.process.send_signal(number)
    driver, rank = rig.fork("P0")
    for process in (rank, driver):
        process.kill()
    assert receive_notice(rig.socket) == Exited(InstanceId("P0"), 1, driver.pid, -signal.SIGKILL)


def test_nothing_is_left_when_the_orchestrator_lets_go(make_rig: RigMaker) -> None:
    rig = make_rig(FOREVER_S)
    first, left_behind = rig.fork("P0")
    running = rig.fork("P1")
    first.kill()
    until(lambda: not first.is_running(), "the driver is reaped", DEADLINE_S)
    rig.socket.close()
    rig.process.wait(DEADLINE_S)
    until(
        lambda: not any(map(_is_alive, (left_behind, *running))),
        "all have been killed",
        DEADLINE_S,
    )


def _is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

"""The cluster manager's patience: whom it ends for having said nothing, and whom it does not.

Its zygote is a fake one, whose workers are processes that only sleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from memserve.cluster import ClusterManager, ClusterSettings
from memserve.core.vocabulary import Seat
from memserve.messages import PROTOCOL_VERSION, AnyCommand, Heartbeat, PoolStats, Ready
from memserve.types import Geometry, InstanceId, InstanceState, Role
from memserve.workers.spec import AnyNotice, Fork, Forked, WorkerSpec

HEARD, MUTE = InstanceId("PD0"), InstanceId("PD1")
TIMEOUT_S, TICK_S = 6.0, 0.5
STATS = PoolStats(*[0] * 11)
GEOMETRY = Geometry("m", "float32", 32, 64, 1, 100, 100, (0,))


class FakeZygote:
    def __init__(self) -> None:
        self.workers: dict[InstanceId, subprocess.Popen[bytes]] = {}
        self._notices: asyncio.Queue[AnyNotice] = asyncio.Queue()
        self.has_told = asyncio.Event()
        """All notices were taken."""

    async def start(self) -> None: ...

    def request(self, request: Fork) -> None:
        worker = self.workers[request.spec.instance] = subprocess.Popen(["sleep", "60"])
        self._notices.put_nowait(Forked(request.spec.instance, request.spec.epoch, worker.pid))

    async def notice(self) -> AnyNotice:
        if self.workers and self._notices.empty():
            self.has_told.set()
        return await self._notices.get()

    def is_ended(self, instance: InstanceId) -> bool:
        """Whether it was killed by now; waits for one that was."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.workers[instance].wait(0.2)
        return self.workers[instance].returncode is not None

    def close(self) -> None:
        for worker in self.workers.values():
            worker.kill()
            worker.wait()


class Audience:
    """Whoever is told of the instances."""

    def configure(self, block_size: int) -> None: ...
    def instance_ready(self, seat: Seat) -> None: ...
    def instance_lost(self, seat: Seat, *, returns: bool) -> None: ...
    def load(self, instance: InstanceId) -> tuple[int, int]:
        return 0, 0

    def is_silent(self, instance: InstanceId) -> bool:
        return False

    def instance(self, id: InstanceId, text: str, state: InstanceState) -> None: ...
    def note(self, text: str) -> None: ...
    def send(self, seat: Seat, command: AnyCommand) -> None: ...


class Rig:
    """Two instances, ready since 0; one gives a sign at every tick."""

    def __init__(self, run_dir: Path, zygote: FakeZygote) -> None:
        self.now = 0.0
        self.zygote = zygote
        audience = Audience()
        self.manager = ClusterManager(
            ClusterSettings(300.0, TIMEOUT_S, 3, 300.0, may_fetch=False),
            {HEARD: Role.COLOCATED, MUTE: Role.COLOCATED},
            lambda id, role, epoch: WorkerSpec(
                instance=id,
                epoch=epoch,
                role=role,
                hub_address="",
                run_dir=str(run_dir),
                log_path="",
                model="",
                kv_bytes=None,
            ),
            run_dir=run_dir,
            environment={},
            members=audience,
            send=audience.send,
            watcher=audience,
            clock=lambda: self.now,
        )

    def says_ready(self, id: InstanceId) -> None:
        seat = Seat(id, 1)
        ready = Ready(
            instance=id,
            epoch=1,
            protocol=PROTOCOL_VERSION,
            geometry=GEOMETRY,
            addresses={},
            max_model_len=512,
            stats=STATS,
            startup_s={},
        )
        assert self.manager.is_current(seat)
        self.manager.on_event(seat, ready)

    def gives_a_sign(self, id: InstanceId) -> None:
        assert self.manager.is_current(Seat(id, 1))
        self.manager.on_event(Seat(id, 1), Heartbeat(instance=id, epoch=1, stats=STATS))

    def tick_until(self, now: float) -> None:
        while self.now < now:
            self.now += TICK_S
            self.gives_a_sign(HEARD)
            self.manager.tick()


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    zygote = FakeZygote()
    monkeypatch.setattr("memserve.cluster.Zygote", lambda run_dir, environment: zygote)
    rig = Rig(tmp_path, zygote)
    await rig.manager.open()
    watching = asyncio.create_task(rig.manager.watch())
    starting = asyncio.create_task(rig.manager.start())
    async with asyncio.timeout(10):
        await zygote.has_told.wait()
        for id in (HEARD, MUTE):
            rig.says_ready(id)
        await starting
    yield rig
    watching.cancel()
    zygote.close()


async def test_who_says_nothing_is_ended(rig: Rig) -> None:
    rig.tick_until(TIMEOUT_S)
    assert not rig.zygote.is_ended(MUTE)
    rig.tick_until(TIMEOUT_S + TICK_S)
    assert rig.zygote.is_ended(MUTE) and not rig.zygote.is_ended(HEARD)
    [error] = [status.error for status in rig.manager.statuses() if status.id == MUTE]
    assert error is not None and "no heartbeat for 6 s" in error


async def test_a_stopped_orchestrator_blames_nobody(rig: Rig) -> None:
    """Ctrl-Z and fg: the next tick comes before what the instances have said meanwhile is read."""
    rig.tick_until(2.0)
    rig.now += 10 * TIMEOUT_S
    rig.manager.tick()
    assert not rig.zygote.is_ended(HEARD) and not rig.zygote.is_ended(MUTE)
    rig.tick_until(rig.now + TIMEOUT_S + TICK_S)
    assert rig.zygote.is_ended(MUTE) and not rig.zygote.is_ended(HEARD)

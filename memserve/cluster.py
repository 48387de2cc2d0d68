"""The cluster manager: brings instances up, notices their ends, and tells everybody.

Collaborators: the zygote (`workers/zygote.py`) forks the workers and reports their exits over a
socket pair; workers report themselves over the hub (`channel.py`); the scheduler is told which
instances it can use. The paper: section 4.4.

Life of an instance::

    STARTING ──Ready, links open──▶ READY ──exit, or no heartbeat──▶ LOST ──▶ STARTING (next epoch)
        └────────────── too late, or died too often ──────────────▶ FAILED

An instance is called lost only when its process is gone: then nobody writes any memory in its name,
and blocks that it might have written can be freed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from memserve.audits import Audits
from memserve.core.hearing import Hearing
from memserve.core.vocabulary import Seat
from memserve.errors import ProtocolError, StartError
from memserve.messages import (
    PROTOCOL_VERSION,
    AnyCommand,
    Audited,
    Heartbeat,
    LinkReady,
    PeerJoined,
    PeerLost,
    PoolStats,
    Ready,
    StartFailed,
    Stop,
)
from memserve.status import AuditReport, InstanceStatus
from memserve.types import InstanceId, InstanceState, Role
from memserve.workers.spec import Exited, Fork, Forked, Imported, WorkerSpec
from memserve.zygote_process import STOP_GRACE_S, WorkerProcess, Zygote, log_tail

logger = logging.getLogger(__name__)


class ClusterSettings(msgspec.Struct, frozen=True):
    """The cluster manager's part of the configuration."""

    start_timeout_s: float
    heartbeat_timeout_s: float
    max_restarts: int
    restart_window_s: float
    may_fetch: bool
    """Whether any instance may fetch from any other; else KV goes between P and D only."""
    audit_timeout_s: float = 10.0


class Members(Protocol):
    """Whoever has to know the membership: the scheduler."""

    def configure(self, block_size: int) -> None: ...
    def instance_ready(self, seat: Seat) -> None: ...
    def instance_lost(self, seat: Seat, *, returns: bool) -> None: ...
    def load(self, instance: InstanceId) -> tuple[int, int]: ...
    def is_silent(self, instance: InstanceId) -> bool: ...


class Watcher(Protocol):
    """Whoever shows people how the instances come up (`progress.py`)."""

    def instance(self, id: InstanceId, text: str, state: InstanceState) -> None: ...
    def note(self, text: str) -> None: ...


class _Instance(msgspec.Struct):
    id: InstanceId
    role: Role
    state: InstanceState = InstanceState.LOST
    epoch: int = 0
    process: WorkerProcess | None = None
    started_at: float = 0.0
    last_seen: float = 0.0
    ready: Ready | None = None
    stats: PoolStats | None = None
    error: str | None = None
    restarts: int = 0
    lost_at: list[float] = []
    awaited_links: set[tuple[InstanceId, InstanceId]] = set()
    """Links (source, target) that must be open before the instance is announced."""

    @property
    def seat(self) -> Seat:
        return Seat(self.id, self.epoch)

    @property
    def is_up(self) -> bool:
        return self.ready is not None

    def kill(self) -> None:
        """Have its end reported soon; nothing, while it is being forked."""
        if self.process is not None:
            self.process.kill()

    def forget_process(self) -> None:
        if self.process is not None:
            self.process.close()
        self.process = self.ready = self.stats = None


class ClusterManager:
    """Membership of one machine's instances."""

    def __init__(
        self,
        settings: ClusterSettings,
        roles: Mapping[InstanceId, Role],
        make_spec: Callable[[InstanceId, Role, int], WorkerSpec],
        *,
        run_dir: Path,
        environment: Mapping[str, str],
        members: Members,
        send: Callable[[Seat, AnyCommand], None],
        watcher: Watcher,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._instances = {id: _Instance(id, role) for id, role in roles.items()}
        self._make_spec = make_spec
        self._run_dir = run_dir
        self._members = members
        self._send = send
        self._watcher = watcher
        self._clock = clock
        self._zygote = Zygote(run_dir, environment)
        self._changed = asyncio.Event()
        self._link_kinds: dict[tuple[InstanceId, InstanceId], str] = {}
        self._audits = Audits(send, settings.audit_timeout_s)
        self._hearing = Hearing(settings.heartbeat_timeout_s)
        self._has_started = False
        self._is_stopping = False

    # ── start ─────────────────────────────────────────────────────────────────────────────────

    async def open(self) -> None:
        """Start the zygote; `watch` can run from now on, and `stop` has something to end."""
        await self._zygote.start()

    async def start(self) -> None:
        """Bring all instances up. `watch` must be running.

        Raises: StartError naming the instance that could not start, with what it said.
        """
        for instance in self._instances.values():
            self._fork(instance)
        deadline = self._clock() + self._settings.start_timeout_s
        while not all(i.state is InstanceState.READY for i in self._instances.values()):
            self._raise_start_error()
            await self._wait_for_change(deadline)
        self._has_started = True

    async def _wait_for_change(self, deadline: float) -> None:
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), max(0.0, deadline - self._clock()))
        except TimeoutError:
            late = [i.id for i in self._instances.values() if i.state is not InstanceState.READY]
            seconds = self._settings.start_timeout_s
            raise StartError(
                f"not ready after {seconds:g} s (cluster.start_timeout_s): {', '.join(late)}"
            ) from None

    def _raise_start_error(self) -> None:
        for instance in self._instances.values():
            if instance.error is not None:
                raise StartError(f"{instance.id} could not start: {instance.error}")

    def _fork(self, instance: _Instance) -> None:
        instance.epoch += 1
        instance.state = InstanceState.STARTING
        instance.started_at = instance.last_seen = self._clock()
        instance.ready = instance.stats = instance.error = None
        self._zygote.request(Fork(self._make_spec(instance.id, instance.role, instance.epoch)))
        self._watcher.instance(instance.id, "starting", instance.state)

    # ── what happens ──────────────────────────────────────────────────────────────────────────

    async def watch(self) -> None:
        """Follow the zygote's notices until cancelled; start it again if it dies."""
        while True:
            try:
                notice = await self._zygote.notice()
            except (EOFError, ConnectionError, ProtocolError) as error:
                await self._on_zygote_lost(error)
                continue
            match notice:
                case Imported():
                    self._watcher.note(f"engine imported in {notice.seconds:.1f} s")
                case Forked():
                    self._on_forked(notice)
                case Exited():
                    self._on_exited(notice)

    def tick(self) -> None:
        """End instances that are silent, or that take too long to start."""
        now = self._clock()
        for id in self._hearing.silent(lambda _: 0.0, now):
            instance = self._instances[id]
            self._kill(instance, f"no heartbeat for {now - instance.last_seen:.0f} s")
            self._hearing.heard(id, now)  # say it once per time-out
        for instance in self._instances.values():
            is_starting = instance.state is InstanceState.STARTING and self._has_started
            if is_starting and now - instance.started_at > self._settings.start_timeout_s:
                self._kill(instance, "not ready in time")

    def _kill(self, instance: _Instance, why: str) -> None:
        logger.error("%s: %s; ending its process", instance.id, why)
        instance.error = why
        instance.started_at = self._clock()  # say it once per time-out
        instance.kill()

    def _on_forked(self, notice: Forked) -> None:
        instance = self._instances[notice.instance]
        if notice.epoch == instance.epoch:
            instance.process = WorkerProcess(notice.pid)

    def on_event(
        self, seat: Seat, event: Ready | StartFailed | Heartbeat | LinkReady | Audited
    ) -> None:
        """A worker's word about itself. An audit says nothing of the step that it may be in."""
        instance = self._instances[seat.instance]
        if not isinstance(event, Audited):
            instance.last_seen = self._clock()
            if instance.state is InstanceState.READY:
                self._hearing.heard(instance.id, instance.last_seen)
        match event:
            case Ready():
                self._on_ready(instance, event)
            case StartFailed():
                instance.error = event.message
            case Heartbeat():
                instance.stats = event.stats
            case LinkReady():
                self._on_link_ready(instance, event)
            case Audited():
                instance.stats = event.stats
                self._audits.answered(event)

    def is_current(self, seat: Seat) -> bool:
        """Whether this life of the instance is the present one."""
        instance = self._instances.get(seat.instance)
        return bool(instance and instance.epoch == seat.epoch and instance.process)

    def _on_ready(self, instance: _Instance, event: Ready) -> None:
        if event.protocol != PROTOCOL_VERSION:
            instance.error = f"protocol {event.protocol}, the orchestrator has {PROTOCOL_VERSION}"
            self._changed.set()
            return
        if not any(other.is_up for other in self._instances.values()) and not self._has_started:
            self._members.configure(event.geometry.block_size)
        instance.ready, instance.stats = event, event.stats
        for partner in self._partners(instance):
            assert partner.ready is not None
            instance.awaited_links |= {(instance.id, partner.id), (partner.id, instance.id)}
            self._introduce(instance, partner)
            self._introduce(partner, instance)
        self._announce_if_linked(instance)

    def _partners(self, instance: _Instance) -> list[_Instance]:
        """Those it exchanges KV with."""
        others = [i for i in self._instances.values() if i is not instance and i.is_up]
        if self._settings.may_fetch:
            return others
        pair = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}.get(instance.role)
        return [other for other in others if other.role is pair]

    def _introduce(self, to: _Instance, newcomer: _Instance) -> None:
        assert newcomer.ready is not None
        command = PeerJoined(
            epoch=to.epoch,
            peer=newcomer.id,
            peer_epoch=newcomer.epoch,
            geometry=newcomer.ready.geometry,
            addresses=newcomer.ready.addresses,
        )
        self._send(to.seat, command)

    def _on_link_ready(self, instance: _Instance, event: LinkReady) -> None:
        peer = self._instances[event.peer]
        if event.peer_epoch != peer.epoch:
            return
        link = (instance.id, peer.id)
        newcomer = instance if link in instance.awaited_links else peer
        if event.error is not None:
            self._kill(newcomer, f"no link from {instance.id} to {peer.id}: {event.error}")
            self._changed.set()
            return
        self._link_kinds[link] = event.kind
        for one in (instance, peer):
            if link in one.awaited_links:
                one.awaited_links.discard(link)
                self._announce_if_linked(one)

    def _announce_if_linked(self, instance: _Instance) -> None:
        must_wait = instance.awaited_links or instance.state is not InstanceState.STARTING
        if must_wait or instance.ready is None:
            return
        instance.state = InstanceState.READY
        self._hearing.heard(instance.id, self._clock())
        seconds = self._clock() - instance.started_at
        phases = ", ".join(f"{k} {v:.1f} s" for k, v in instance.ready.startup_s.items())
        text = f"ready in {seconds:.1f} s ({phases}), {instance.ready.stats.total_blocks} blocks"
        logger.info("%s epoch %d %s", instance.id, instance.epoch, text)
        self._watcher.instance(instance.id, text, instance.state)
        self._members.instance_ready(instance.seat)
        self._changed.set()

    # ── ends ──────────────────────────────────────────────────────────────────────────────────

    def _on_exited(self, notice: Exited) -> None:
        instance = self._instances[notice.instance]
        if notice.epoch == instance.epoch and instance.state is not InstanceState.LOST:
            self._on_lost(instance, _describe(notice.status))

    def _on_lost(self, instance: _Instance, how: str) -> None:
        self._hearing.forget(instance.id)
        if instance.error is None:
            instance.error = how if instance.is_up else f"{how}{self._log_tail(instance)}"
        instance.forget_process()
        now = self._clock()
        window = now - self._settings.restart_window_s
        instance.lost_at = [at for at in instance.lost_at if at > window] + [now]
        may_return = (
            self._has_started
            and not self._is_stopping
            and len(instance.lost_at) <= self._settings.max_restarts
        )
        instance.state = InstanceState.LOST if may_return else InstanceState.FAILED
        if not self._is_stopping:
            logger.error("%s epoch %d: %s", instance.id, instance.epoch, instance.error)
            self._watcher.instance(instance.id, instance.error, instance.state)
        for other in self._instances.values():
            if other is not instance and other.is_up:
                lost = PeerLost(epoch=other.epoch, peer=instance.id, peer_epoch=instance.epoch)
                self._send(other.seat, lost)
        self._members.instance_lost(instance.seat, returns=may_return)
        self._drop_links(instance)
        if may_return:
            instance.restarts += 1
            self._fork(instance)
        self._changed.set()

    def _drop_links(self, lost: _Instance) -> None:
        self._link_kinds = {k: v for k, v in self._link_kinds.items() if lost.id not in k}
        self._audits.lost(lost.id)
        for instance in self._instances.values():
            instance.awaited_links = {k for k in instance.awaited_links if lost.id not in k}
            if instance is not lost:
                self._announce_if_linked(instance)

    async def _on_zygote_lost(self, error: Exception) -> None:
        """Its children die with it; when they are gone, a new one takes over."""
        if self._is_stopping:
            await asyncio.Event().wait()  # `stop` ends this task
        logger.error("the zygote is gone (%s)", error)
        await self._zygote.close()
        if not self._has_started:
            tail = self._zygote.log_tail()
            for instance in self._instances.values():
                instance.error = f"the zygote ended{tail}"
            self._changed.set()
            await asyncio.Event().wait()  # `start` raises, and ends this task
        await self._zygote.start()
        living = [i for i in self._instances.values() if i.state is not InstanceState.FAILED]
        for instance in living:
            if instance.process is not None:
                instance.kill()
                await instance.process.wait(STOP_GRACE_S)
            self._on_lost(instance, "ended with the zygote")

    def _log_tail(self, instance: _Instance) -> str:
        return log_tail(self._run_dir / f"{instance.id}.log")

    async def stop(self) -> None:
        """End all workers in order, then the zygote."""
        self._is_stopping = True
        deadline = self._clock() + STOP_GRACE_S
        for instance in self._instances.values():
            if instance.is_up:
                self._send(instance.seat, Stop(epoch=instance.epoch))
        while any(i.process is not None and i.is_up for i in self._instances.values()):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0, deadline - self._clock()))
            except TimeoutError:
                break
        await self._zygote.close()

    # ── status ────────────────────────────────────────────────────────────────────────────────

    @property
    def link_kinds(self) -> Mapping[tuple[InstanceId, InstanceId], str]:
        """Open links: (source, target) → kind."""
        return self._link_kinds

    def statuses(self) -> list[InstanceStatus]:
        """One row per instance, in the mode's order."""
        return [self._status(instance) for instance in self._instances.values()]

    def _status(self, instance: _Instance) -> InstanceStatus:
        queued_tokens, running_requests = self._members.load(instance.id)
        return InstanceStatus(
            id=instance.id,
            role=instance.role,
            state=instance.state,
            is_silent=self._members.is_silent(instance.id),
            epoch=instance.epoch,
            pid=None if instance.process is None else instance.process.pid,
            restarts=instance.restarts,
            stats=instance.stats,
            stats_age_s=self._clock() - instance.last_seen if instance.is_up else None,
            queued_tokens=queued_tokens,
            running_requests=running_requests,
            error=instance.error,
        )

    async def audit(self) -> list[AuditReport]:
        """Ask every ready instance to check its pool; an instance that does not answer has that as
        its problem."""
        answers = await self._audits.ask(i.seat for i in self._instances.values() if i.is_up)
        return [self._report(id, answer) for id, answer in answers.items()]

    def _report(self, id: InstanceId, answer: Audited | None) -> AuditReport:
        if answer is not None:
            return AuditReport(id, answer.stats, answer.problems, answer.holders)
        problem = f"no answer within {self._settings.audit_timeout_s:g} s"
        return AuditReport(id, self._instances[id].stats, [problem], [])


def _describe(status: int) -> str:
    """Exit status as `os.waitstatus_to_exitcode` gives it → words."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"

"""The real scheduler over worker models, step by step: channels, clients and a clock by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.delivery import Delivery
from memserve.core.policy import Fetching, Split
from memserve.core.profile import ModelShape
from memserve.core.timeline import Detail
from memserve.core.vocabulary import RequestSpec, Seat
from memserve.errors import MemServeError
from memserve.messages import (
    AnyCommand,
    AnyEvent,
    PeerJoined,
    PeerLost,
    PoolStats,
    Prefill,
    SendSnapshot,
)
from memserve.scheduler import GlobalScheduler
from memserve.scheduler_settings import SchedulerSettings
from memserve.types import Caching, Geometry, InstanceId, Namespace, RequestId, Role
from tests.core.worker_model import BLOCK_SIZE, Choices, Truth, WorkerModel

GEOMETRY = Geometry("m", "float32", BLOCK_SIZE, 64, 1, 100, 100, (0,))
SHAPE = ModelShape(
    num_layers=2,
    hidden=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=1000,
)
PROMPT_S = CostModel(built_in(SHAPE, "cpu")).exec_s(5)
"""Of computing a prompt of these tests: the floor of a step."""
SETTINGS = SchedulerSettings(
    caching=Caching.FULL,
    max_attempts=3,
    max_waiting=4,
    wait_timeout_s=60.0,
    max_running=2,
    max_queued_s=1000.0,
    timeline_requests=100,
    freshness="events",
    tree_ttl_s=3600.0,
    tree_max_blocks=1000,
    reservation_s=30.0,
    room_wait_s=300.0,
    policy="cost",
    split=Split.ALWAYS,
    fetching=Fetching.AUTO,
    link="shm",
)

PAIR = {"P0": Role.PREFILL, "D0": Role.DECODE}
ONE = {"PD0": Role.COLOCATED}
TWO = ONE | {"PD1": Role.COLOCATED}
MANY = PAIR | {"P1": Role.PREFILL, "D1": Role.DECODE, "PD0": Role.COLOCATED}
TICK_S = 0.5
STATS = PoolStats(
    total_blocks=10_000,
    free_blocks=10_000,
    historical_blocks=0,
    active_blocks=0,
    reserved_blocks=0,
    quarantined_blocks=0,
    pinned_requests=0,
    running_requests=0,
    waiting_requests=0,
    prefix_hit_tokens=0,
    prefix_query_tokens=0,
)
"""There is room for everybody."""


class Rig:
    """One cluster. It is also the front end: `ended` says how each request's stream ended."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        data: bytes = b"",
        shape: ModelShape = SHAPE,
        is_calibrated: bool = False,
        **settings: object,
    ) -> None:
        self.now = 0.0
        self.choices = Choices(data)
        self.truths: dict[RequestId, Truth] = {}
        self.lives: dict[tuple[InstanceId, int], WorkerModel] = {}
        self.workers: dict[InstanceId, WorkerModel] = {}
        self.ended: dict[RequestId, str] = {}
        self.errors: dict[RequestId, MemServeError] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.hanging: set[InstanceId] = set()
        """Which serve nothing, and say nothing."""
        self.sent: list[tuple[Seat, AnyCommand]] = []
        self.roles = {InstanceId(name): role for name, role in roles.items()}
        profile = built_in(shape, "cpu")
        if is_calibrated:
            profile = msgspec.structs.replace(profile, source="calibrated")
        self.cost = CostModel(profile)
        self.scheduler = GlobalScheduler(
            msgspec.structs.replace(SETTINGS, **settings),
            self.roles,
            self._send,
            lambda: self.now,
            self.cost,
        )
        self.scheduler.attach(self)
        self.scheduler.configure(BLOCK_SIZE)

    # ── the front end ─────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        name: str,
        *,
        client: str = "",
        priority: int = 0,
        length: int = 5,
        first_token: int = 0,
        session: str = "",
    ) -> None:
        number = len(self.truths) + 1
        id = RequestId(name)
        truth = Truth(
            list(range(first_token, first_token + length)),
            [1000 * number + i for i in range(4)],
            False,
        )
        self.truths[id] = truth
        self.tokens[id] = []
        spec = RequestSpec(
            id=id,
            prompt_token_ids=truth.prompt,
            request=b"",
            max_tokens=4,
            resample=False,
            namespace=Namespace(),
            client=client,
            session=session,
            priority=priority,
        )
        self.scheduler.submit(spec)

    def on_step(self, payload: bytes, deliveries: Mapping[RequestId, Delivery]) -> None:
        for id, delivery in deliveries.items():
            if delivery.final:
                self.ended[id] = "final"

    def on_error(self, request_id: RequestId, error: MemServeError) -> None:
        assert request_id not in self.ended
        self.ended[request_id] = "error"
        self.errors[request_id] = error

    def cancel(self, name: str) -> None:
        id = RequestId(name)
        if id not in self.ended:
            self.ended[id] = "cancelled"
        self.scheduler.cancel(id)

    # ── the cluster ───────────────────────────────────────────────────────────────────────────

    def start(self, *names: str) -> None:
        for name in names or self.roles:
            instance = InstanceId(name)
            epoch = 1 + sum(known == instance for known, _ in self.lives)
            worker = WorkerModel(instance, epoch, self.truths, self.choices, self.lives)
            self.lives[instance, epoch] = worker
            for other in self.workers.values():
                self._introduce(worker, other)
                self._introduce(other, worker)
            self.workers[instance] = worker
            self.scheduler.instance_ready(Seat(instance, epoch))

    def lose(self, name: str, *, returns: bool = True) -> None:
        worker = self.workers.pop(InstanceId(name))
        worker.die()
        for other in self.workers.values():
            lost = PeerLost(epoch=other.epoch, peer=worker.instance, peer_epoch=worker.epoch)
            other.inbox.append(lost)
        self.scheduler.instance_lost(Seat(worker.instance, worker.epoch), returns=returns)

    def _introduce(self, worker: WorkerModel, peer: WorkerModel) -> None:
        joined = PeerJoined(
            epoch=worker.epoch,
            peer=peer.instance,
            peer_epoch=peer.epoch,
            geometry=GEOMETRY,
            addresses={},
        )
        worker.inbox.append(joined)

    def _send(self, seat: Seat, command: AnyCommand) -> None:
        self.sent.append((seat, command))
        worker = self.workers.get(seat.instance)
        if worker is not None and worker.epoch == seat.epoch:
            if not isinstance(command, SendSnapshot):
                worker.inbox.append(command)

    def wait(self, seconds: float) -> None:
        """Time passes: with heartbeats of those who do not hang, and the scheduler's ticks."""
        until = self.now + seconds
        while self.now < until:
            self.now += TICK_S
            for worker in self.workers.values():
                if worker.instance not in self.hanging:
                    self.scheduler.on_stats(Seat(worker.instance, worker.epoch), STATS)
            self.scheduler.tick()

    # ── what happens next ─────────────────────────────────────────────────────────────────────

    def candidates(self) -> list[Callable[[], None]]:
        """Everything that could."""
        todo: list[Callable[[], None]] = []
        for worker in self.workers.values():
            if worker.instance in self.hanging:
                continue
            if worker.outbox:
                todo.append(lambda w=worker: self._take(w))
            if worker.inbox:
                todo.append(worker.serve)
            todo += worker.progress()
        return todo

    def run(self) -> None:
        """Until nothing happens any more."""
        for _ in range(5000):
            todo = self.candidates()
            if not todo:
                return
            todo[0]()
            self.scheduler.check_integrity()
        raise AssertionError("no end in sight")

    def _take(self, worker: WorkerModel) -> None:
        event: AnyEvent = worker.outbox.popleft()
        self.scheduler.on_event(Seat(worker.instance, worker.epoch), event)  # type: ignore[arg-type]

    # ── what is asked about it ────────────────────────────────────────────────────────────────

    def has_begun(self, name: str) -> bool:
        """Whether its client has a token."""
        timeline = self.scheduler.timeline(RequestId(name))
        assert timeline is not None
        return any(step.name == "first token" for step in timeline.steps)

    def placed(self) -> list[str]:
        """The requests that were placed, in order."""
        return [c.request_id for _, c in self.sent if isinstance(c, Prefill)]

    def instance_of(self, name: str) -> str:
        """Where the request was placed last."""
        return [
            s.instance for s, c in self.sent if isinstance(c, Prefill) and c.request_id == name
        ][-1]

    def check_quiet(self) -> None:
        """Nobody holds anything, and nothing is charged to anybody."""
        self.scheduler.check_integrity()
        assert self.scheduler.idle.is_set()
        assert self.scheduler.num_served == 0
        for instance, worker in self.workers.items():
            assert worker.holders() == []
            assert self.scheduler.load(instance) == (0, 0)


def rig_of(roles: dict[str, Role], **settings: object) -> Rig:
    """All instances have started."""
    rig = Rig(roles, **settings)
    rig.start()
    return rig


def placed_by(rig: Rig, name: str) -> Detail:
    """Why the request was placed where it was, the last time."""
    timeline = rig.scheduler.timeline(RequestId(name))
    assert timeline is not None
    return [step.detail for step in timeline.steps if step.name == "placed"][-1]

"""A load on a simulated cluster: the real scheduler, simulated instances and clients.

    clients ──▶ GlobalScheduler ──commands──▶ SimulatedWorker × n
       ◀─outputs──      ◀──────────events──────────

Messages take `message_s` each way. Clients send a session's next call when the one before has
ended, not before its own time. Nothing here is random: the same load and set-up give the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from memserve.changes import Evicted
from memserve.core.cost_model import CostModel
from memserve.core.delivery import Delivery
from memserve.core.mode import Mode
from memserve.core.vocabulary import RequestSpec, Seat
from memserve.errors import MemServeError, OverloadedError, UnavailableError
from memserve.messages import AnyCommand, AnyEvent, CacheChanged, Heartbeat, Sent, Started
from memserve.scheduler import GlobalScheduler
from memserve.scheduler_settings import SchedulerSettings
from memserve.simulator.clock import EventQueue
from memserve.simulator.worker import Hardware, SimulatedRequest, SimulatedWorker
from memserve.simulator.workload import Call, prompt_ids
from memserve.types import InstanceId, Namespace, RequestId

_TICK_S = 1.0
"""Between heartbeats, and between the scheduler's looks at its deadlines."""
_encoder = msgspec.msgpack.Encoder()


class Setup(msgspec.Struct, frozen=True):
    """The cluster."""

    mode: Mode
    scheduler: SchedulerSettings
    hardware: Hardware
    message_s: float
    """From the scheduler to an instance, and back."""
    front_end_s: float
    """From a client to the scheduler and back: HTTP, template, tokenizer."""
    blocks_of: Mapping[InstanceId, int] = {}
    """Instances whose pool has another size than `hardware` says."""
    slowdowns: Mapping[InstanceId, float] = {}
    """Instances whose steps take so many times as long as the costs say; others: 1."""


class Outcome(msgspec.Struct):
    """What became of one call. Times in seconds since the start of the load."""

    session: str
    prompt_tokens: int
    reply_tokens: int
    sent_at: float
    """When the client sent it."""
    first_token_at: float | None = None
    ended_at: float | None = None
    cached_tokens: int = 0
    """Of the prompt, where it was computed first."""
    instance: str = ""
    """Where that was."""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return None if self.first_token_at is None else self.first_token_at - self.sent_at

    @property
    def jct_s(self) -> float | None:
        """Until the last token."""
        return None if self.ended_at is None else self.ended_at - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None if there is only one."""
        if self.ended_at is None or self.first_token_at is None or self.reply_tokens < 2:
            return None
        return (self.ended_at - self.first_token_at) / (self.reply_tokens - 1)


class Traffic(msgspec.Struct):
    """What moved, and what was given up."""

    transfers: dict[str, int] = {}
    """By direction: `forward`, `back`, `fetch`."""
    bytes: dict[str, int] = {}
    moved: list[tuple[float, int]] = []
    """When, and how many bytes, of all directions."""
    evicted_blocks: int = 0


class Work(msgspec.Struct, frozen=True):
    """What the scheduler itself cost: this machine's time, not simulated time."""

    submit_s: list[float]
    """Each submission: look-up, placement, and the first command."""
    events_s: dict[str, float]
    """Answering the instances' events, by their kind."""
    num_events: dict[str, int]


class Result(msgspec.Struct, frozen=True):
    """A whole run."""

    outcomes: list[Outcome]
    traffic: Traffic
    duration_s: float
    """Simulated, from the first arrival to the last token."""
    busy: dict[str, float]
    """Instance → share of the time in which its engine computed."""
    num_preempted: int
    num_events: int
    """Of the simulation."""
    work: Work


class _Session(msgspec.Struct):
    waiting: deque[Call] = msgspec.field(default_factory=deque)
    is_busy: bool = False


class Simulation:
    """One run; build it, then `run` it once."""

    def __init__(
        self,
        setup: Setup,
        calls: Sequence[Call],
        costs: CostModel,
        stopwatch: Callable[[], float],
    ) -> None:
        """`calls` have arrivals, rising. `stopwatch` measures the scheduler's own work.

        `costs`: what the engines take, save for those of other degrees (`scheduler.tp_of`). The
        scheduler starts with the same profile, and corrects its own model by what it observes, as a
        real one does.
        """
        self._setup = setup
        self._calls = calls
        self._stopwatch = stopwatch
        self._queue = EventQueue()
        roles = dict(setup.mode.instances())
        self._workers: dict[InstanceId, SimulatedWorker] = {}
        expected = CostModel(costs.profile, costs.tp)
        self.scheduler = GlobalScheduler(
            setup.scheduler, roles, self._send, self._queue.now, expected
        )
        self.scheduler.attach(self)
        tp_of = setup.scheduler.tp_of or {}
        costs_of = {tp: CostModel(costs.profile, tp) for tp in {*tp_of.values()} - {costs.tp}}
        for instance in roles:
            seat = Seat(instance, 1)
            self._workers[instance] = SimulatedWorker(
                seat,
                self._hardware_of(instance),
                costs_of.get(tp_of.get(instance, costs.tp), costs),
                self._queue,
                partial(self._emit, seat),
                self._workers,
                setup.slowdowns.get(instance, 1.0),
            )
        self._sessions: dict[str, _Session] = {}
        self._outcomes: dict[RequestId, Outcome] = {}
        self._open: dict[RequestId, Call] = {}
        self._traffic = Traffic()
        self._submit_s: list[float] = []
        self._events_s: dict[str, float] = {}
        self._num_events: dict[str, int] = {}
        self._num_arrived = 0

    def _hardware_of(self, instance: InstanceId) -> Hardware:
        hardware = self._setup.hardware
        blocks = self._setup.blocks_of.get(instance, hardware.geometry.num_blocks)
        geometry = msgspec.structs.replace(hardware.geometry, num_blocks=blocks)
        return msgspec.structs.replace(hardware, geometry=geometry)

    def run(self) -> Result:
        """Until the last request has ended and nothing is held for any."""
        self.scheduler.configure(self._setup.hardware.geometry.block_size)
        for worker in self._workers.values():
            self.scheduler.instance_ready(worker.seat)
        if self._calls:
            self._queue.at(self._calls[0].arrival_s or 0.0, self._arrive)
            self._queue.at(0.0, self._tick)
        self._queue.run()
        ends = [o.ended_at for o in self._outcomes.values() if o.ended_at is not None]
        begin = min((o.sent_at for o in self._outcomes.values()), default=0.0)
        duration_s = max(ends, default=begin) - begin
        return Result(
            outcomes=list(self._outcomes.values()),
            traffic=self._traffic,
            duration_s=duration_s,
            busy={
                name: worker.engine.busy_s / duration_s if duration_s else 0.0
                for name, worker in self._workers.items()
            },
            num_preempted=sum(w.engine.num_preempted for w in self._workers.values()),
            num_events=self._queue.num_done,
            work=Work(self._submit_s, self._events_s, self._num_events),
        )

    def check_idle(self) -> list[str]:
        """What is still held or wrong after the run, as text."""
        problems = [] if self.scheduler.idle.is_set() else ["the scheduler holds requests"]
        for worker in self._workers.values():
            problems += worker.check_idle()
        return problems

    # ── clients ───────────────────────────────────────────────────────────────────────────────

    def _arrive(self) -> None:
        call = self._calls[self._num_arrived]
        self._num_arrived += 1
        if self._num_arrived < len(self._calls):
            self._queue.at(self._calls[self._num_arrived].arrival_s or 0.0, self._arrive)
        session = self._sessions.setdefault(call.session, _Session())
        session.waiting.append(call)
        self._next(session)

    def _next(self, session: _Session) -> None:
        if session.is_busy or not session.waiting:
            return
        session.is_busy = True
        call = session.waiting.popleft()
        request_id = RequestId(f"r{len(self._outcomes)}")
        self._outcomes[request_id] = Outcome(
            session=call.session,
            prompt_tokens=call.prompt_tokens,
            reply_tokens=call.reply.length,
            sent_at=self._queue.now(),
        )
        self._open[request_id] = call
        self._queue.after(self._setup.front_end_s, partial(self._submit, request_id, call))

    def _submit(self, request_id: RequestId, call: Call) -> None:
        spec = RequestSpec(
            id=request_id,
            prompt_token_ids=prompt_ids(call),
            request=_encoder.encode(SimulatedRequest(call.reply)),
            max_tokens=call.reply.length,
            resample=False,
            namespace=Namespace(),
            session=call.session,
        )
        begun = self._stopwatch()
        try:
            self.scheduler.submit(spec)
        except (UnavailableError, OverloadedError) as error:
            self.on_error(request_id, error)
        self._submit_s.append(self._stopwatch() - begun)

    def _end(self, request_id: RequestId) -> None:
        """Its session may go on."""
        session = self._sessions[self._open.pop(request_id).session]
        session.is_busy = False
        self._next(session)

    def _tick(self) -> None:
        self.scheduler.tick()
        for worker in self._workers.values():
            worker.beat()
        if self._open or self._num_arrived < len(self._calls):
            self._queue.after(_TICK_S, self._tick)

    # ── the scheduler's sink ──────────────────────────────────────────────────────────────────

    def on_step(self, payload: bytes, deliveries: Mapping[RequestId, Delivery]) -> None:
        """Tokens for clients."""
        for request_id, delivery in deliveries.items():
            outcome = self._outcomes[request_id]
            if delivery.tokens and outcome.first_token_at is None:
                outcome.first_token_at = self._queue.now()
            if delivery.final:
                outcome.ended_at = self._queue.now()
                self._end(request_id)

    def on_error(self, request_id: RequestId, error: MemServeError) -> None:
        """A request failed."""
        self._outcomes[request_id].error = str(error)
        self._end(request_id)

    # ── the channel ───────────────────────────────────────────────────────────────────────────

    def _send(self, seat: Seat, command: AnyCommand) -> None:
        worker = self._workers[seat.instance]
        self._queue.after(self._setup.message_s, partial(worker.deliver, command))

    def _emit(self, seat: Seat, event: AnyEvent) -> None:
        self._watch(event)
        self._queue.after(self._setup.message_s, partial(self._on_event, seat, event))

    def _on_event(self, seat: Seat, event: AnyEvent) -> None:
        begun = self._stopwatch()
        if isinstance(event, Heartbeat):
            self.scheduler.on_stats(seat, event.stats)
        else:
            self.scheduler.on_event(seat, event)  # type: ignore[arg-type]
        kind = type(event).__name__
        self._events_s[kind] = self._events_s.get(kind, 0.0) + self._stopwatch() - begun
        self._num_events[kind] = self._num_events.get(kind, 0) + 1

    def _watch(self, event: AnyEvent) -> None:
        """Count what passes; changes nothing."""
        match event:
            case Started():
                outcome = self._outcomes[event.request_id]
                if not outcome.instance:
                    outcome.instance = event.instance
                    outcome.cached_tokens = event.cached_tokens
            case Sent():
                direction = event.transfer_id.rsplit("/", 2)[1]
                traffic = self._traffic
                traffic.transfers[direction] = traffic.transfers.get(direction, 0) + 1
                traffic.bytes[direction] = traffic.bytes.get(direction, 0) + event.size_bytes
                traffic.moved.append((self._queue.now(), event.size_bytes))
            case CacheChanged():
                for change in event.changes:
                    if isinstance(change, Evicted):
                        self._traffic.evicted_blocks += sum(count for _, count in change.keys)

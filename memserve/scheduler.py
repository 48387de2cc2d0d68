"""The global scheduler: where each request runs, and its life from submission to its last block.

Collaborators: the front end submits and cancels (`frontend/`), and gets outputs through its
`OutputSink`; the cluster manager says which instances are ready or lost (`cluster.py`); the hub
carries commands (`channel.py`). The decisions themselves are pure and live in `core/`: `policy`
chooses instances, `prompt_tree` remembers what they hold, `lifecycle` answers every event. The
paper: section 6.

Everything here runs on the event loop and nothing awaits, so no decision is torn: state is read and
changed in one go.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping

import msgspec

from memserve.accounting import Members, Totals, Traffic
from memserve.core import policy
from memserve.core.delivery import Delivery
from memserve.core.lifecycle import Phase, RequestLifecycle
from memserve.core.prompt_tree import PromptTree
from memserve.core.timeline import RequestTimeline, Timeline, TimelineStore
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    InstanceLost,
    Learned,
    Limits,
    Note,
    Output,
    PlaceAgain,
    Plan,
    RequestSpec,
    Seat,
    Send,
    StopSeen,
    WorkerEvent,
)
from memserve.errors import InstanceLostError, MemServeError, UnavailableError
from memserve.frontend.service import OutputSink
from memserve.messages import (
    AnyCommand,
    CacheChanged,
    CacheSnapshot,
    Sent,
    Tokens,
    Transmit,
    TransmitFailed,
)
from memserve.status import Counters, LinkStatus
from memserve.types import Caching, InstanceId, RequestId, Role

logger = logging.getLogger(__name__)


class SchedulerSettings(msgspec.Struct, frozen=True):
    """The scheduler's part of the configuration."""

    caching: Caching
    max_attempts: int
    max_waiting: int
    wait_timeout_s: float
    timeline_requests: int
    tree_ttl_s: float
    tree_max_blocks: int
    reservation_s: float


class _Active(msgspec.Struct):
    """A request that somebody still holds something for."""

    lifecycle: RequestLifecycle
    timeline: Timeline
    deadline: float
    """Until when it may wait for a place, while it has none."""
    missing_tokens: int = 0
    """Prompt tokens that its first instance has to compute, as far as the tree knows."""


class GlobalScheduler:
    """Places requests and drives their lifecycles."""

    def __init__(
        self,
        settings: SchedulerSettings,
        roles: Mapping[InstanceId, Role],
        send: Callable[[Seat, AnyCommand], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._roles = dict(roles)
        self._send = send
        self._clock = clock
        self._sink: OutputSink | None = None
        self._members = Members()
        self._hopeless: set[InstanceId] = set()
        self._trees: dict[Role, PromptTree] = {}
        self._limits: Limits | None = None
        self._requests: dict[RequestId, _Active] = {}
        self._waiting: deque[RequestId] = deque()
        self._timelines = TimelineStore(settings.timeline_requests)
        self._traffic = Traffic()
        self._totals = Totals()
        self._is_closing = False
        self.idle = asyncio.Event()
        """Set while nothing is held for any request."""
        self.idle.set()

    # ── the front end's side ──────────────────────────────────────────────────────────────────

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""
        return not self._is_closing and self._can_place(self._members.instances)

    def attach(self, sink: OutputSink) -> None:
        """Set where outputs go."""
        self._sink = sink

    def submit(self, spec: RequestSpec) -> None:
        """Take a request; its outputs and errors come through the sink.

        Raises: UnavailableError if it can be neither placed nor kept waiting.
        """
        if self._is_closing:
            raise UnavailableError("the server is shutting down")
        if self._limits is None or not self._can_place(self._roles.keys() - self._hopeless):
            raise UnavailableError("no instance can serve requests now")
        if len(self._waiting) >= self._settings.max_waiting:
            raise UnavailableError(f"{len(self._waiting)} requests are waiting for an instance")
        now = self._clock()
        timeline = Timeline(spec.id, len(spec.prompt_token_ids), now)
        self._timelines.add(timeline)
        active = _Active(
            lifecycle=RequestLifecycle(spec, self._limits),
            timeline=timeline,
            deadline=now + self._settings.wait_timeout_s,
        )
        self._requests[spec.id] = active
        self.idle.clear()
        self._totals.submitted += 1
        self._totals.prompt_tokens += len(spec.prompt_token_ids)
        timeline.note("queued", now)
        self._place(active)

    def cancel(self, request_id: RequestId) -> None:
        """The client is gone: free whatever is held for it. Unknown requests are ignored."""
        active = self._requests.get(request_id)
        if active is None or active.lifecycle.is_client_done:
            return
        self._totals.cancelled += 1
        active.timeline.end("cancelled", self._clock())
        self._step(active, ClientCancelled())

    def stop(self, request_id: RequestId) -> None:
        """The front end saw a stop string: the request is complete. Unknown ones are ignored."""
        active = self._requests.get(request_id)
        if active is None or active.lifecycle.is_client_done:
            return
        self._finish(active)
        self._step(active, StopSeen())

    def timeline(self, request_id: RequestId) -> RequestTimeline | None:
        """What happened to a request, as long as it is remembered."""
        return self._timelines.get(request_id)

    # ── the cluster's side ────────────────────────────────────────────────────────────────────

    def configure(self, block_size: int) -> None:
        """Say what only a started engine knows. Before the first `instance_ready`."""
        self._limits = Limits(
            block_size=block_size,
            max_attempts=self._settings.max_attempts,
            reservation_s=self._settings.reservation_s,
        )
        self._trees = {
            role: PromptTree(block_size, self._settings.tree_max_blocks, self._settings.tree_ttl_s)
            for role in set(self._roles.values())
        }

    def instance_ready(self, seat: Seat) -> None:
        """The instance can take requests; its links are open."""
        self._members.add(seat, self._roles[seat.instance])
        self._hopeless.discard(seat.instance)
        for _ in range(len(self._waiting)):
            self._place(self._requests[self._waiting.popleft()])

    def instance_lost(self, seat: Seat, *, returns: bool) -> None:
        """This life of the instance is over, and its process is gone.

        `returns`: it is being started again; requests may wait for it.
        """
        if not returns:
            self._hopeless.add(seat.instance)
        if self._members.remove(seat):
            self._trees[self._roles[seat.instance]].drop(seat.instance)
        self._traffic.lost(seat.instance)
        for active in list(self._requests.values()):
            self._step(active, InstanceLost(seat))
        if not self._can_place(self._roles.keys() - self._hopeless):
            self._refuse_waiting(lambda _: True, "no instance is left that could serve it")

    def on_event(
        self, seat: Seat, event: WorkerEvent | Tokens | CacheChanged | CacheSnapshot
    ) -> None:
        """One event of a living instance."""
        if isinstance(event, CacheChanged | CacheSnapshot):
            return
        if isinstance(event, Tokens):
            self._on_tokens(event)
            return
        if isinstance(event, Sent | TransmitFailed):
            self._traffic.answered(event)
        active = self._requests.get(_request_of(event))
        if active is not None:
            self._step(active, event)

    def tick(self) -> None:
        """Let requests that waited too long for a place fail, and stale tree entries go."""
        now = self._clock()
        self._refuse_waiting(
            lambda active: active.deadline <= now, "no instance became ready in time"
        )
        for tree in self._trees.values():
            tree.evict(now)

    # ── shutdown ──────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Take no more requests, and fail those that wait for a place."""
        self._is_closing = True
        self._refuse_waiting(lambda _: True, "the server is shutting down")

    @property
    def num_served(self) -> int:
        """Requests whose clients still wait for tokens."""
        return sum(not active.lifecycle.is_client_done for active in self._requests.values())

    def fail_all(self, message: str) -> None:
        """End every client's stream with an error (the drain's deadline has passed)."""
        for active in list(self._requests.values()):
            if not active.lifecycle.is_client_done:
                self._error(active, UnavailableError(message))
                self._step(active, ClientCancelled())

    # ── status ────────────────────────────────────────────────────────────────────────────────

    def load(self, instance: InstanceId) -> tuple[int, int]:
        """(queued prompt tokens, running requests) as counted here; zeros if it is not ready."""
        member = self._members.get(instance)
        return (member.queued_tokens, member.running_requests) if member else (0, 0)

    def counters(self) -> Counters:
        """Totals since the start, and what runs and waits now."""
        running = self.num_served - len(self._waiting)
        return self._totals.snapshot(running=running, waiting=len(self._waiting))

    def links(self, kinds: Mapping[tuple[InstanceId, InstanceId], str]) -> list[LinkStatus]:
        """Traffic of the links in `kinds` ((source, target) → kind)."""
        return self._traffic.statuses(kinds)

    # ── placing ───────────────────────────────────────────────────────────────────────────────

    def _can_place(self, instances: Collection[InstanceId]) -> bool:
        """Whether these instances could serve a request: a whole one, or a P and a D."""
        roles = {self._roles[instance] for instance in instances}
        return Role.COLOCATED in roles or {Role.PREFILL, Role.DECODE} <= roles

    def _place(self, active: _Active) -> None:
        """Give the request its instances, or let it wait."""
        if not self._can_place(self._members.instances):
            self._waiting.append(active.lifecycle.spec.id)
            return
        lifecycle = active.lifecycle
        now = self._clock()
        token_ids = lifecycle.token_ids
        matches: dict[InstanceId, int] = {}
        for tree in self._trees.values():
            matches |= tree.match(token_ids, now, lifecycle.spec.namespace)
        views = self._members.views(matches)
        placement = policy.place(len(token_ids), views)
        first = self._members.seat(placement.first)
        decode = self._members.seat(placement.decode) if placement.decode is not None else None
        active.missing_tokens = len(token_ids) - matches.get(placement.first, 0)
        active.timeline.note("placed", now, first.instance, placement.reason)
        self._carry_out(active, lifecycle.place(self._plan(first, decode)))

    def _plan(self, first: Seat, decode: Seat | None) -> Plan:
        caching = self._settings.caching
        return Plan(
            first=first,
            decode=decode,
            first_is_private=not caching.prefill_keeps,
            decode_is_private=not caching.decode_keeps,
            returns=decode is not None and caching.decode_returns,
        )

    def _refuse_waiting(self, is_due: Callable[[_Active], bool], message: str) -> None:
        for request_id in list(self._waiting):
            active = self._requests[request_id]
            if is_due(active):
                self._waiting.remove(request_id)
                self._error(active, UnavailableError(message))
                self._carry_out(active, active.lifecycle.give_up(message))

    # ── events and actions ────────────────────────────────────────────────────────────────────

    def _on_tokens(self, event: Tokens) -> None:
        deliveries: dict[RequestId, Delivery] = {}
        for output in event.outputs:
            active = self._requests.get(output.request_id)
            if active is None:
                continue
            for action in self._step(active, Output(event.instance, output)):
                if isinstance(action, Deliver):
                    deliveries[output.request_id] = action.delivery
                    self._note_delivery(active, event.instance, action.delivery, output.token_ids)
        if deliveries and self._sink is not None:
            self._sink.on_step(event.payload, deliveries)

    def _note_delivery(
        self, active: _Active, instance: InstanceId, delivery: Delivery, token_ids: list[int]
    ) -> None:
        now = self._clock()
        if delivery.tokens and token_ids:
            active.timeline.note_tokens(len(token_ids), now, instance)
            self._totals.generated_tokens += len(token_ids)
        if delivery.final:
            self._finish(active)

    def _step(self, active: _Active, event: AnyInput) -> list[Action]:
        was_placed = active.lifecycle.phase is not Phase.UNPLACED
        actions = active.lifecycle.step(event)
        if not was_placed and active.lifecycle.is_client_done:
            self._waiting.remove(active.lifecycle.spec.id)
        self._carry_out(active, actions)
        return actions

    def _carry_out(self, active: _Active, actions: list[Action]) -> None:
        now = self._clock()
        for action in actions:
            match action:
                case Send():
                    self._send_command(action)
                case Note():
                    active.timeline.note(action.name, now, action.instance, action.detail)
                    self._learn_cached(active, action)
                case Learned():
                    self._learn(active, action, now)
                case Fail():
                    self._error(active, InstanceLostError(action.message))
                case PlaceAgain():
                    self._totals.replaced += 1
                    active.deadline = now + self._settings.wait_timeout_s
                    self._place(active)
                case Ended():
                    active.timeline.note("released", now)
                    del self._requests[active.lifecycle.spec.id]
                    if not self._requests:
                        self.idle.set()
                case Deliver():
                    pass  # the caller's: it has the payload
        self._members.charge(active.lifecycle, active.missing_tokens)

    def _send_command(self, action: Send) -> None:
        """Commands to an earlier life of an instance go nowhere."""
        seat = Seat(action.instance, action.command.epoch)
        if seat in self._members:
            self._send(seat, action.command)
        if isinstance(action.command, Transmit):
            self._traffic.ordered(action.instance, action.command)

    def _learn_cached(self, active: _Active, note: Note) -> None:
        """The first prefill said how much of the prompt it found."""
        cached = active.lifecycle.cached_tokens
        if note.name == "started" and active.timeline.cached_tokens is None and cached is not None:
            active.timeline.cached_tokens = cached
            self._totals.cached_tokens += cached

    def _learn(self, active: _Active, action: Learned, now: float) -> None:
        if action.instance in self._members.instances:
            token_ids = active.lifecycle.token_ids[: action.num_tokens]
            tree = self._trees[self._roles[action.instance]]
            tree.insert(token_ids, action.instance, now, active.lifecycle.spec.namespace)

    def _finish(self, active: _Active) -> None:
        self._totals.finished += 1
        active.timeline.end("finished", self._clock())

    def _error(self, active: _Active, error: MemServeError) -> None:
        if active.timeline.is_over:
            return
        request_id = active.lifecycle.spec.id
        logger.warning("request %s failed: %s", request_id, error)
        self._totals.failed += 1
        active.timeline.note("failed", self._clock(), None, {"error": str(error)})
        active.timeline.end("failed", self._clock())
        if self._sink is not None:
            self._sink.on_error(request_id, error)


def _request_of(event: WorkerEvent) -> RequestId:
    """The request that an event belongs to (`TransferId` is request id / direction / attempt)."""
    transfer_id = getattr(event, "transfer_id", None)
    if transfer_id is not None:
        return RequestId(transfer_id.rsplit("/", 2)[0])
    request_id: RequestId = event.request_id  # type: ignore[union-attr]
    return request_id

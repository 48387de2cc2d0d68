"""The global scheduler: where each request runs, and its life from submission to its last block.

Collaborators: the front end submits and cancels (`frontend/`), and gets outputs through its
`OutputSink`; the cluster manager says which instances are ready or lost (`cluster.py`); the hub
carries commands (`channel.py`). The decisions themselves are pure and live in `core/`: `policy`
chooses instances (asked by `placing.py`), `admission` orders those that wait, `lifecycle` answers
every event. What the instances hold is known to `caches.py`. The paper: section 6.

A request waits here, where it can still be ordered, while the instances have enough to do:
`_admit` places the next ones, and is the last thing that every entry point does.

Everything here runs on the event loop and nothing awaits, so no decision is torn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from memserve.accounting import Members, Totals, Traffic
from memserve.active import Active, request_of
from memserve.caches import Caches
from memserve.core.admission import AdmissionQueue
from memserve.core.cost_model import CostModel
from memserve.core.delivery import Delivery
from memserve.core.lifecycle import Phase, RequestLifecycle
from memserve.core.loads import Seconds
from memserve.core.timeline import RequestTimeline, Timeline, TimelineStore
from memserve.core.tokens import pack
from memserve.core.vocabulary import (
    Action,
    AnyInput,
    ClientCancelled,
    Deliver,
    Ended,
    Fail,
    InstanceLost,
    InstanceSilent,
    Learned,
    Limits,
    Note,
    Output,
    PlaceAgain,
    RequestSpec,
    Seat,
    Send,
    StopSeen,
    WorkerEvent,
)
from memserve.errors import MemServeError, OverloadedError, UnavailableError
from memserve.frontend.service import OutputSink
from memserve.messages import (
    AnyCommand,
    CacheChanged,
    CacheSnapshot,
    Expired,
    PoolStats,
    Sent,
    Tokens,
    TransmitFailed,
)
from memserve.placing import Placer
from memserve.scheduler_settings import SchedulerSettings
from memserve.status import Counters, LinkStatus
from memserve.types import InstanceId, RequestId, Role

logger = logging.getLogger(__name__)

_LOOKED_AT = 4
"""Of those that wait, so many are considered at a time: placing each takes a while."""


class GlobalScheduler:
    """Places requests and drives their lifecycles."""

    def __init__(
        self,
        settings: SchedulerSettings,
        roles: Mapping[InstanceId, Role],
        send: Callable[[Seat, AnyCommand], None],
        clock: Callable[[], float],
        cost: CostModel,
    ) -> None:
        self._settings = settings
        self._roles = dict(roles)
        self._send = send
        self._clock = clock
        self._sink: OutputSink | None = None
        self._cost = cost
        limits = settings.max_running, settings.max_queued_s
        self._members = Members(roles, cost, *limits, settings.tp_of, settings.silence_s)
        self._placer = Placer(settings, cost, self._roles, self._members)
        self._caches: Caches | None = None
        self._limits: Limits | None = None
        self._requests: dict[RequestId, Active] = {}
        self._queue = AdmissionQueue(settings.max_waiting)
        self._fruitless: int | None = None
        """How many changes there had been when nobody's place was free."""
        self._timelines = TimelineStore(settings.timeline_requests)
        self._traffic = Traffic(self._members.loads)
        self._totals = Totals()
        self._is_closing = False
        self.idle = asyncio.Event()
        """Set while nothing is held for any request."""
        self.idle.set()

    # ── the front end's side ──────────────────────────────────────────────────────────────────

    @property
    def is_ready(self) -> bool:
        """Whether a request could be placed now."""
        return not self._is_closing and self._placer.can_place(self._members.instances)

    def attach(self, sink: OutputSink) -> None:
        """Set where outputs go."""
        self._sink = sink

    def submit(self, spec: RequestSpec) -> None:
        """Take a request; its outputs and errors come through the sink.

        Raises: UnavailableError if nothing could serve it; OverloadedError if too many wait.
        """
        if self._is_closing:
            raise UnavailableError("the server is shutting down")
        if self._limits is None or not self._placer.is_possible:
            raise UnavailableError(f"nothing can serve requests now: {self._placer.missing}")
        now = self._clock()
        if self._queue.is_full and (self._queue or not self._placer.has_room()):
            raise OverloadedError(
                f"{len(self._queue)} requests are waiting already (scheduler.max_waiting)",
                self._queue.retry_after_s(now),
            )
        timeline = Timeline(spec.id, len(spec.prompt_token_ids), now)
        self._timelines.add(timeline)
        lifecycle = RequestLifecycle(spec, self._limits)
        active = Active(lifecycle, timeline, pack(spec.prompt_token_ids))
        self._requests[spec.id] = active
        self.idle.clear()
        self._totals.submitted += 1
        self._totals.prompt_tokens += len(spec.prompt_token_ids)
        timeline.note("queued", now)
        self._queue.push(active.ticket(now + self._settings.wait_timeout_s))
        self._admit()

    def cancel(self, request_id: RequestId) -> None:
        """The client is gone: free whatever is held for it. Unknown requests are ignored."""
        active = self._requests.get(request_id)
        if active is None or active.lifecycle.is_client_done:
            return
        self._totals.cancelled += 1
        active.timeline.end("cancelled", self._clock())
        self._step(active, ClientCancelled())
        self._admit()

    def stop(self, request_id: RequestId) -> None:
        """The front end saw a stop string: the request is complete. Unknown ones are ignored."""
        active = self._requests.get(request_id)
        if active is None or active.lifecycle.is_client_done:
            return
        self._finish(active)
        self._step(active, StopSeen())
        self._admit()

    def timeline(self, request_id: RequestId) -> RequestTimeline | None:
        """What happened to a request, as long as it is remembered."""
        return self._timelines.get(request_id)

    # ── the cluster's side ────────────────────────────────────────────────────────────────────

    def configure(self, block_size: int) -> None:
        """Say what only a started engine knows. Before the first `instance_ready`."""
        self._limits = self._settings.limits(block_size)
        self._caches = Caches(
            self._settings.freshness,
            block_size,
            self._roles,
            max_blocks=self._settings.tree_max_blocks,
            ttl_s=self._settings.tree_ttl_s,
            send=self._send,
            clock=self._clock,
        )

    def instance_ready(self, seat: Seat) -> None:
        """The instance can take requests; its links are open."""
        self._members.add(seat, self._roles[seat.instance], self._clock())
        self._placer.expect(seat.instance, True)
        self._admit()

    def instance_lost(self, seat: Seat, *, returns: bool) -> None:
        """This life of the instance is over, and its process is gone.

        `returns`: it is being started again; requests may wait for it.
        """
        self._placer.expect(seat.instance, returns)
        self._members.remove(seat)
        if self._caches is not None:
            self._caches.lost(seat.instance)
        self._traffic.lost(seat.instance)
        for active in list(self._requests.values()):
            self._step(active, InstanceLost(seat))
        if not self._placer.is_possible:
            error = UnavailableError(f"nothing is left that could serve it: {self._placer.missing}")
            self._refuse(self._queue.waiting(), error)
        self._admit()

    def on_event(
        self, seat: Seat, event: WorkerEvent | Tokens | CacheChanged | CacheSnapshot
    ) -> None:
        """One event of a living instance, but no sign that it serves (`core/hearing.py`)."""
        if isinstance(event, Tokens):  # by far the most
            self._on_tokens(event)
        elif isinstance(event, CacheChanged | CacheSnapshot):
            if self._caches is not None:
                self._caches.on_event(seat, event)
            return
        else:
            if isinstance(event, Sent | TransmitFailed):
                self._traffic.answered(event)
            active = self._requests.get(request_of(event))
            if active is not None:
                self._step(active, event)
        self._admit()

    def on_stats(self, seat: Seat, stats: PoolStats) -> None:
        """A heartbeat: what a living instance says of its pool."""
        self._members.heard(seat.instance, self._clock())
        if self._limits is not None and seat in self._members:
            block_size = self._limits.block_size
            free_tokens = (stats.free_blocks + stats.historical_blocks) * block_size
            empty_blocks = stats.free_blocks + stats.dram_blocks - stats.dram_used_blocks
            self._members.loads.set_room(seat.instance, free_tokens, empty_blocks * block_size)

    def tick(self) -> None:
        """Pass over who is silent, let requests fail that waited too long, and stale entries go."""
        now = self._clock()
        silent = self._members.silent(now)
        for seat in silent if self._placer.is_possible_now else ():
            for active in list(self._requests.values()):
                self._step(active, InstanceSilent(seat))
        self._refuse(self._queue.overdue(now), self._waited_too_long(now))
        if self._caches is not None:
            self._caches.tick()
        self._fruitless = None
        self._admit()

    def check_trees(self) -> dict[InstanceId, asyncio.Future[list[str]]]:
        """Compare what is known of the ready instances' caches with the truth (`Caches.check`)."""
        if self._caches is None:
            return {}
        return self._caches.check(self._members.seat(id) for id in self._members.instances)

    # ── shutdown ──────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Take no more requests, and fail those that wait for a place."""
        self._is_closing = True
        self._refuse(self._queue.waiting(), UnavailableError("the server is shutting down"))

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
        loads = self._members.loads
        slot = loads.slots[instance]
        return int(loads.queued_tokens[slot]), int(loads.num_requests[slot])

    def is_silent(self, instance: InstanceId) -> bool:
        """Whether it gives no sign, so that it is given nothing to do."""
        return bool(self._members.loads.is_silent[self._members.loads.slots[instance]])

    def counters(self) -> Counters:
        """Totals since the start, and what runs and waits now."""
        waiting = len(self._queue)
        return self._totals.snapshot(running=self.num_served - waiting, waiting=waiting)

    def links(self, kinds: Mapping[tuple[InstanceId, InstanceId], str]) -> list[LinkStatus]:
        """Traffic of the links in `kinds` ((source, target) → kind)."""
        return self._traffic.statuses(kinds)

    def check_integrity(self) -> None:
        """Raises: AssertionError if the books, the queue and the requests contradict each other."""
        self._queue.check_integrity()
        unplaced = {id for id, a in self._requests.items() if a.lifecycle.phase is Phase.UNPLACED}
        assert unplaced == set(self._queue.waiting())
        waits_in_vain = self._queue and self._placer.has_room() and not self._members.is_waited_for
        assert not waits_in_vain, "somebody waits though there is room everywhere"
        assert self.idle.is_set() == (not self._requests)
        self._members.check_integrity({id: a.lifecycle for id, a in self._requests.items()})

    # ── placing ───────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        """Place those whose turn it is, while there is room where they had better be."""
        while self._queue and self._placer.has_room():
            changes = self._members.num_changes + self._queue.num_changes
            if changes == self._fruitless:
                return
            if not self._place_next():
                self._fruitless = changes

    def _place_next(self) -> bool:
        """Place those of the next ones whose place is free; whether there was one."""
        ahead_s = self._placer.nobody_ahead()
        is_placed = False
        for ticket in self._queue.first(_LOOKED_AT):
            if self._placer.has_room():
                is_placed |= self._place(self._requests[ticket.id], ahead_s)
        return is_placed

    def _place(self, active: Active, ahead_s: Seconds) -> bool:
        """Give the request its instances, if they are free (`Placer.place`)."""
        assert self._caches is not None and self._limits is not None
        now, path = self._clock(), active.path(self._limits.block_size)
        generates = self._totals.mean_generated_tokens
        plan = self._placer.place(active, path, self._caches.match(path), generates, now, ahead_s)
        if plan is None:
            return False
        self._queue.take(active.lifecycle.spec.id, now)
        self._carry_out(active, active.lifecycle.place(plan))
        return True

    def _refuse(self, waiting: Iterable[RequestId], error: MemServeError) -> None:
        for request_id in waiting:
            active = self._requests[request_id]
            self._queue.remove(request_id)
            self._error(active, error)
            self._carry_out(active, active.lifecycle.give_up(str(error)))

    def _waited_too_long(self, now: float) -> MemServeError:
        if not self._placer.is_possible_now:
            return UnavailableError(f"nothing could serve it in time: {self._placer.missing}")
        seconds = self._settings.wait_timeout_s
        message = f"no instance had room within {seconds:g} s (scheduler.wait_timeout_s)"
        return OverloadedError(message, self._queue.retry_after_s(now))

    # ── events and actions ────────────────────────────────────────────────────────────────────

    def _on_tokens(self, event: Tokens) -> None:
        now = self._clock()
        deliveries: dict[RequestId, Delivery] = {}
        for output in event.outputs:
            active = self._requests.get(output.request_id)
            if active is None:
                continue
            delivery = active.lifecycle.more_tokens(event.instance, output)
            if delivery is None:
                actions = self._step(active, Output(event.instance, output))
                delivery = next((a.delivery for a in actions if isinstance(a, Deliver)), None)
            if delivery is not None:
                deliveries[output.request_id] = delivery
                self._note_delivery(active, event.instance, delivery, output.token_ids, now)
        if deliveries and self._sink is not None:
            self._sink.on_step(event.payload, deliveries)

    def _note_delivery(
        self,
        active: Active,
        instance: InstanceId,
        delivery: Delivery,
        token_ids: list[int],
        now: float,
    ) -> None:
        if delivery.tokens and token_ids:
            active.timeline.note_tokens(len(token_ids), now, instance)
            self._totals.generated_tokens += len(token_ids)
            self._queue.charge(active.lifecycle.spec.client, len(token_ids))
        if delivery.final:
            self._finish(active)

    def _step(self, active: Active, event: AnyInput) -> list[Action]:
        was_placed = active.lifecycle.phase is not Phase.UNPLACED
        was_fetching = active.lifecycle.phase is Phase.FETCH
        actions = active.lifecycle.step(event)
        if was_fetching and isinstance(event, Sent | Expired):
            now, since = self._clock(), active.placed_at
            self._members.observe_fetch(active.lifecycle, active.fetch_known_s, now - since, now)
        if not was_placed and active.lifecycle.is_client_done:
            self._queue.remove(active.lifecycle.spec.id)
        self._carry_out(active, actions)
        return actions

    def _carry_out(self, active: Active, actions: list[Action]) -> None:
        now = self._clock()
        for action in actions:
            match action:
                case Send():
                    self._send_command(action)
                case Note():
                    active.timeline.note(action.name, now, action.instance, action.detail)
                    self._totals.cached_tokens += active.newly_known_cached_tokens()
                case Learned():
                    self._learn(active, action)
                case Fail():
                    self._error(active, action.error)
                case PlaceAgain():
                    self._totals.replaced += 1
                    deadline = now + self._settings.wait_timeout_s
                    self._queue.push_returned(active.ticket(deadline))
                case Ended():
                    active.timeline.note("released", now)
                    del self._requests[active.lifecycle.spec.id]
                    if not self._requests:
                        self.idle.set()
                case Deliver():
                    pass  # the caller's: it has the payload
        self._members.charge(active.lifecycle, active.missing_tokens, active.prefill_s, now)

    def _send_command(self, action: Send) -> None:
        """Commands to an earlier life of an instance go nowhere."""
        seat = Seat(action.instance, action.command.epoch)
        if seat not in self._members:
            return
        self._send(seat, action.command)
        if self._limits is not None:
            block_bytes = self._cost.kv_bytes(self._limits.block_size)
            self._traffic.commanded(action.instance, action.command, block_bytes)

    def _learn(self, active: Active, action: Learned) -> None:
        assert self._caches is not None and self._limits is not None
        if self._caches.is_guessing and action.instance in self._members.instances:
            path = active.path(self._limits.block_size)
            self._caches.learn(path, action.num_tokens, action.instance)

    def _finish(self, active: Active) -> None:
        self._totals.finish(len(active.lifecycle.generated))
        active.timeline.end("finished", self._clock())

    def _error(self, active: Active, error: MemServeError) -> None:
        if active.timeline.is_over:
            return
        request_id = active.lifecycle.spec.id
        logger.warning("request %s failed: %s", request_id, error)
        self._totals.failed += 1
        active.timeline.end("failed", self._clock(), str(error))
        if self._sink is not None:
            self._sink.on_error(request_id, error)

"""The scheduler's books: load per instance, traffic per link, totals.

Load is charged by where a request is, not by events: `Members.charge` makes the books agree with
the request's lifecycle, so no path through it can leave a charge behind.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import KeysView, Mapping

import msgspec
import numpy as np

from memserve.core.cost_model import CostModel
from memserve.core.hearing import Hearing
from memserve.core.lifecycle import Phase, RequestLifecycle
from memserve.core.loads import Loads, Share
from memserve.core.pending import Pending
from memserve.core.vocabulary import Seat
from memserve.messages import AnyCommand, Cancel, Sent, Transmit, TransmitFailed
from memserve.status import Counters, LinkStatus
from memserve.types import InstanceId, RequestId, Role, TransferId

logger = logging.getLogger(__name__)

_EXPECTED_TOKENS = 128
_FIRST_PHASES = (Phase.FETCH, Phase.PREFILL)


class _Member(msgspec.Struct, frozen=True):
    """A ready instance."""

    seat: Seat
    role: Role


class _Charge(msgspec.Struct, frozen=True):
    """The load of one request on one instance."""

    seat: Seat
    share: Share


class Members:
    """The ready instances and what each has to do.

    An instance is open to more while it has fewer than `max_running` requests, and busy while the
    prompts that it has to compute take `max_queued_s` or more, by the cost model.
    """

    def __init__(
        self,
        roles: Mapping[InstanceId, Role],
        cost: CostModel,
        max_running: int,
        max_queued_s: float,
        tp_of: Mapping[InstanceId, int] | None = None,
        silence_s: float = math.inf,
    ) -> None:
        """`tp_of`: as in `Loads`; `silence_s`: as in `Hearing`."""
        self.loads = Loads(roles, cost, tp_of)
        """For the policy to read."""
        self.pending = Pending(list(roles))
        """Prompts that were placed, and are not computed yet."""
        self._max_running = max_running
        self._max_queued_s = max_queued_s
        self._hearing = Hearing(silence_s)
        self._silent: set[InstanceId] = set()
        self._num_there: Counter[Role] = Counter()
        self._num_free: Counter[Role] = Counter()
        self.num_changes = 0
        """Of the instances and of what they have to do."""
        self._members: dict[InstanceId, _Member] = {}
        self._charges: dict[RequestId, tuple[_Charge, ...]] = {}
        self._alone: dict[Seat, tuple[RequestId, float]] = {}
        """Who has had an instance for itself since when: its prefill can be timed."""

    @property
    def instances(self) -> KeysView[InstanceId]:
        return self._members.keys()

    def __contains__(self, seat: Seat) -> bool:
        member = self._members.get(seat.instance)
        return member is not None and member.seat == seat

    def seat(self, instance: InstanceId) -> Seat:
        """The present life of a ready instance. Raises: KeyError."""
        return self._members[instance].seat

    @property
    def roles(self) -> set[Role]:
        """Roles with an instance that is ready, and not silent."""
        return {role for role, count in self._num_there.items() if count}

    @property
    def free_roles(self) -> set[Role]:
        """Roles with an instance that is open; one that computes prompts must not be busy."""
        return {role for role, count in self._num_free.items() if count}

    @property
    def is_waited_for(self) -> bool:
        """Whether an instance is busy, or fetches: requests may wait for it by choice."""
        return bool(self.loads.is_busy.any() or self.loads.num_fetching.any())

    def add(self, seat: Seat, role: Role, now: float) -> None:
        """A new life is ready."""
        self._members[seat.instance] = _Member(seat, role)
        self._hearing.heard(seat.instance, now)
        self.loads.start(seat.instance)
        self._num_there[role] += 1
        self._num_free[role] += 1
        self.num_changes += 1

    def remove(self, seat: Seat) -> None:
        """This life is over; one that is no member is ignored."""
        if seat not in self:
            return
        self._hearing.forget(seat.instance)
        member = self._members.pop(seat.instance)
        self._num_there[member.role] -= seat.instance not in self._silent
        self._num_free[member.role] -= self._is_free(seat.instance, member.role)
        self._silent.discard(seat.instance)
        self.num_changes += 1
        self._alone.pop(seat, None)
        self.loads.end(seat.instance)

    def heard(self, instance: InstanceId, now: float) -> None:
        """It gave a sign. One that is not ready yet is ignored."""
        if instance in self._members:
            self._hearing.heard(instance, now)
        if instance in self._silent:
            self._set_silent(instance, False)

    def silent(self, now: float) -> list[Seat]:
        """Those from which nothing is heard. Mutates: they are not there until they are heard."""
        silent = self._hearing.silent(self.loads.longest_step_s, now)
        for instance in silent:
            if instance not in self._silent:
                self._set_silent(instance, True)
        return [self.seat(instance) for instance in silent]

    def _set_silent(self, instance: InstanceId, is_silent: bool) -> None:
        role, slot = self._members[instance].role, self.loads.slots[instance]
        was_free = self._is_free(instance, role)
        (self._silent.add if is_silent else self._silent.discard)(instance)
        self.loads.is_silent[slot] = is_silent
        logger.warning("%s %s", instance, "is silent: it may hang" if is_silent else "is back")
        self._num_there[role] += -1 if is_silent else 1
        self._num_free[role] += self._is_free(instance, role) - was_free
        self.num_changes += 1

    def charge(
        self, lifecycle: RequestLifecycle, missing_tokens: int, prefill_s: float, now: float
    ) -> None:
        """Make the books agree with where the request is now.

        `missing_tokens`, `prefill_s`: what its first instance has to compute, and for how long.
        """
        if not _is_prefilling(lifecycle):
            self.pending.remove(lifecycle.spec.id)
        elif lifecycle.phase is not Phase.FETCH:
            self.pending.fetched(lifecycle.spec.id)
        before = self._charges.pop(lifecycle.spec.id, ())
        after = _charges(lifecycle, missing_tokens, prefill_s, self.loads)
        if after:
            self._charges[lifecycle.spec.id] = after
        if after == before:
            return
        self.num_changes += 1
        for charge in before:
            if charge.seat in self:
                self._observe(lifecycle, charge.seat, now)
                self.loads.remove(charge.seat.instance, charge.share, now)
                self._reckon(charge.seat.instance)
        for charge in after:
            if charge.seat in self:
                self._note_alone(lifecycle.spec.id, charge, now)
                self.loads.add(charge.seat.instance, charge.share, now)
                self._reckon(charge.seat.instance)

    def _note_alone(self, request_id: RequestId, charge: _Charge, now: float) -> None:
        is_alone = not self.loads.num_requests[self.loads.slots[charge.seat.instance]]
        self._alone.pop(charge.seat, None)
        if is_alone and charge.share.prefill_s:
            self._alone[charge.seat] = request_id, now

    def _observe(self, lifecycle: RequestLifecycle, seat: Seat, now: float) -> None:
        """Tell the cost model how long a prompt took that nothing else was computed beside."""
        request_id, since = self._alone.pop(seat, (None, 0.0))
        plan, cached_tokens = lifecycle.plan, lifecycle.cached_tokens
        is_told = request_id == lifecycle.spec.id and lifecycle.is_prompt_computed
        if not is_told or plan is None or plan.fetch is not None or cached_tokens is None:
            return
        if seat != plan.first:  # of what D holds nobody has told
            return
        if lifecycle.attempt == 1:
            num_tokens = len(lifecycle.spec.prompt_token_ids)
            cost = self.loads.cost_of(seat.instance)
            cost.observe(num_tokens, cached_tokens, now - since)

    def observe_fetch(
        self, lifecycle: RequestLifecycle, known_s: float | None, seconds: float, now: float
    ) -> None:
        """A fetch has ended, or was given up, after so long (if the request goes on by it)."""
        plan = lifecycle.plan
        if lifecycle.phase is not Phase.PREFILL or known_s is None:
            return
        if plan is not None and plan.fetch is not None:
            source = self.loads.slots[plan.fetch.source.instance]
            self.loads.fetch_times.observe(source, known_s, seconds, now)

    def check_integrity(self, lifecycles: Mapping[RequestId, RequestLifecycle]) -> None:
        """Raises: AssertionError if the loads are not those of these requests, at their phases."""
        assert self._charges.keys() <= lifecycles.keys()
        loads = self.loads
        context, requests, queued, prefills, fetching = (
            np.zeros(len(loads.instances), np.int64) for _ in range(5)
        )
        for id, charges in self._charges.items():
            assert [charge.seat for charge in charges] == _seats(lifecycles[id])
            for charge in charges:
                if charge.seat in self:
                    slot = loads.slots[charge.seat.instance]
                    requests[slot] += 1
                    context[slot] += charge.share.context_tokens
                    queued[slot] += charge.share.queued_tokens
                    prefills[slot] += charge.share.prefill_s > 0
                    fetching[slot] += charge.share.is_fetching
        assert not any(
            _seats(lifecycle) for id, lifecycle in lifecycles.items() if id not in self._charges
        )
        assert (requests == loads.num_requests).all() and (context == loads.context_tokens).all()
        assert (queued == loads.queued_tokens).all() and (prefills == loads.num_prefills).all()
        assert (fetching == loads.num_fetching).all()
        num_free = Counter(m.role for id, m in self._members.items() if self._is_free(id, m.role))
        assert +self._num_free == num_free
        assert self.roles == loads.roles_there()
        silent = self._silent
        assert self.roles == {m.role for id, m in self._members.items() if id not in silent}
        assert self._silent <= self._members.keys()

    def _is_free(self, instance: InstanceId, role: Role) -> bool:
        slot = self.loads.slots[instance]
        is_busy = self.loads.is_busy[slot] and role is not Role.DECODE
        return bool(self.loads.is_open[slot] and not is_busy and instance not in self._silent)

    def _reckon(self, instance: InstanceId) -> None:
        """See whether it is open and busy, still or again."""
        slot, role = self.loads.slots[instance], self._members[instance].role
        was_free = self._is_free(instance, role)
        self.loads.is_open[slot] = self.loads.num_requests[slot] < self._max_running
        self.loads.is_busy[slot] = self.loads.prefill_s[slot] >= self._max_queued_s
        self._num_free[role] += self._is_free(instance, role) - was_free


def _is_prefilling(lifecycle: RequestLifecycle) -> bool:
    """Whether its prompt is still to be computed, and wanted."""
    is_first = lifecycle.phase in _FIRST_PHASES
    return is_first and not lifecycle.is_prompt_computed and not lifecycle.is_client_done


def _charges(
    lifecycle: RequestLifecycle, missing_tokens: int, prefill_s: float, loads: Loads
) -> tuple[_Charge, ...]:
    plan = lifecycle.plan
    if plan is None or lifecycle.is_client_done:
        return ()
    context_tokens = len(lifecycle.spec.prompt_token_ids)
    running = Share(context_tokens)
    is_fetching = lifecycle.phase is Phase.FETCH
    prefilling = Share(context_tokens, prefill_s, missing_tokens, is_fetching)
    if lifecycle.phase not in _FIRST_PHASES:
        seat = plan.decode or plan.first
        if not lifecycle.is_decode_cold:
            return (_Charge(seat, running),)
        cold = Share(context_tokens, loads.cost_of(seat.instance).exec_s(context_tokens))
        return (_Charge(seat, cold),)
    first = _Charge(plan.first, prefilling if _is_prefilling(lifecycle) else running)
    return (first,) if plan.decode is None else (first, _Charge(plan.decode, running))


def _seats(lifecycle: RequestLifecycle) -> list[Seat]:
    """Where a request has something to do, now or next."""
    plan = lifecycle.plan
    if plan is None or lifecycle.is_client_done:
        return []
    if plan.decode is None:
        return [plan.first]
    if lifecycle.phase in _FIRST_PHASES:
        return [plan.first, plan.decode]
    return [plan.decode]


class _LinkTotals(msgspec.Struct):
    transfers: int = 0
    failures: int = 0
    blocks: int = 0
    size_bytes: int = 0
    seconds: float = 0.0


class _UnderWay(msgspec.Struct):
    source: InstanceId
    target: InstanceId
    size_bytes: int
    link: _LinkTotals
    is_cancelled: bool = False


class Traffic:
    """What every link has carried, and what is under way (in `loads` too)."""

    def __init__(self, loads: Loads) -> None:
        self._loads = loads
        self._links: dict[tuple[InstanceId, InstanceId], _LinkTotals] = {}
        self._open: dict[TransferId, _UnderWay] = {}

    def commanded(self, instance: InstanceId, command: AnyCommand, block_bytes: int) -> None:
        """This goes out to the instance."""
        if isinstance(command, Transmit):
            self.ordered(instance, command, len(command.block_ids) * block_bytes)
        elif isinstance(command, Cancel):
            self.cancelled(instance, command.transfer_id)

    def ordered(self, source: InstanceId, command: Transmit, size_bytes: int) -> None:
        """A `Transmit` of so much went out to `source`."""
        link = self._links.setdefault((source, command.peer), _LinkTotals())
        link.transfers += 1
        self._open[command.transfer_id] = _UnderWay(source, command.peer, size_bytes, link)
        self._loads.add_transfer(source, command.peer, size_bytes)

    def cancelled(self, source: InstanceId, transfer_id: TransferId) -> None:
        """`source` was told to give this one up; those that it does not send are ignored."""
        under_way = self._open.get(transfer_id)
        if under_way is None or under_way.source != source or under_way.is_cancelled:
            return
        under_way.is_cancelled = True
        self._loads.add_owed(source, 1)

    def answered(self, event: Sent | TransmitFailed) -> None:
        """Its answer came."""
        if event.transfer_id not in self._open:
            return
        link = self._end(event.transfer_id)
        if isinstance(event, TransmitFailed):
            link.failures += 1
            return
        link.blocks += event.num_blocks
        link.size_bytes += event.size_bytes
        link.seconds += event.seconds

    def lost(self, source: InstanceId) -> None:
        """This sender will not answer any more."""
        for transfer_id, under_way in list(self._open.items()):
            if under_way.source == source:
                self._end(transfer_id).failures += 1

    def _end(self, transfer_id: TransferId) -> _LinkTotals:
        under_way = self._open.pop(transfer_id)
        self._loads.add_transfer(under_way.source, under_way.target, -under_way.size_bytes)
        self._loads.add_owed(under_way.source, -under_way.is_cancelled)
        return under_way.link

    def statuses(self, kinds: Mapping[tuple[InstanceId, InstanceId], str]) -> list[LinkStatus]:
        """The links in `kinds` ((source, target) → kind)."""
        return [
            LinkStatus(
                source=source,
                target=target,
                kind=kind,
                **msgspec.structs.asdict(self._links.get((source, target), _LinkTotals())),
            )
            for (source, target), kind in sorted(kinds.items())
        ]


class Totals(msgspec.Struct):
    """Counts since the start."""

    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    replaced: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    _of_finished: int = 0
    """Generated tokens of the finished requests alone."""

    def finish(self, num_generated: int) -> None:
        """A request has come to its end, after so many tokens."""
        self.finished += 1
        self._of_finished += num_generated

    @property
    def mean_generated_tokens(self) -> int:
        """Per finished request; a guess until one has finished."""
        return max(1, self._of_finished // self.finished) if self.finished else _EXPECTED_TOKENS

    def snapshot(self, *, running: int, waiting: int) -> Counters:
        totals = msgspec.structs.asdict(self)
        del totals["_of_finished"]
        return Counters(running=running, waiting=waiting, **totals)

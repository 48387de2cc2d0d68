"""From a request and what is known at the moment to a plan: the scheduler's question to the policy.

Collaborators: `scheduler.py` asks when it is a request's turn; `core/policy.py` and its policies
decide; `accounting.Members` has the instances and their loads. The paper: section 6.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from memserve.accounting import Members
from memserve.active import Active
from memserve.core.cost_model import CostModel
from memserve.core.loads import Seconds
from memserve.core.pending import Coming
from memserve.core.policies import make_policy
from memserve.core.policy import (
    Demand,
    FetchChoice,
    Fetching,
    Placement,
    session_key,
    with_fetch,
)
from memserve.core.tokens import TOKEN_BYTES, Path
from memserve.core.tree_parts import Match
from memserve.core.vocabulary import Fetch, Plan
from memserve.scheduler_settings import SchedulerSettings
from memserve.types import InstanceId, Role

_PATIENCE = 2.0
_PATIENCE_S = 0.1
"""A fetch, or a queue, may take so many times what was predicted, and so much longer, beside the
time that computing would take: no machine is that exact."""


class Placer:
    """Chooses instances for requests. Holds no request."""

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: CostModel,
        roles: Mapping[InstanceId, Role],
        members: Members,
    ) -> None:
        self._policy = make_policy(settings.policy, settings.split, cost, settings.link)
        self._reservation_s = settings.reservation_s
        self._fetching = settings.fetching
        self._caching = settings.caching
        self._roles = roles
        self._members = members
        self._hopeless: set[InstanceId] = set()
        self.is_possible = self.can_place(roles)
        """Whether those that are there, or will come back, could serve a request."""

    def expect(self, instance: InstanceId, comes: bool) -> None:
        """An instance is there, or will be again; or it will not."""
        (self._hopeless.discard if comes else self._hopeless.add)(instance)
        self.is_possible = self.can_place(self._roles.keys() - self._hopeless)

    def can_place(self, instances: Collection[InstanceId]) -> bool:
        """Whether these instances could serve a request."""
        return self._policy.splitting.can_place({self._roles[instance] for instance in instances})

    @property
    def is_possible_now(self) -> bool:
        """Whether those that are there, and not silent, could serve a request."""
        return self._policy.splitting.can_place(self._members.roles)

    @property
    def missing(self) -> str:
        """Who would be needed besides, in words."""
        splitting, all_roles = self._policy.splitting, self._members.loads.all_roles
        return splitting.absence(self._members.roles, all_roles) or "no instance answers"

    def has_room(self) -> bool:
        """Whether some request could be placed now, on instances that have not enough to do yet."""
        members = self._members
        return self._policy.splitting.can_place(members.roles, members.free_roles)

    def nobody_ahead(self) -> Seconds:
        """[instances] For the first one of those that wait: see `place`."""
        return np.zeros(len(self._members.loads.instances))

    def place(
        self,
        active: Active,
        path: Path,
        match: Match,
        mean_generated: int,
        now: float,
        ahead_s: Seconds,
    ) -> Plan | None:
        """The plan for a request with this path; there must be room.

        None: it had better wait for an instance that has enough to do, or is fetching what it
        needs; its work is added to `ahead_s`, what waits for each instance before the next request.
        Else the work is noted in `active`; both decisions with their reasons in its timeline.
        """
        pending = self._members.pending
        coming = pending.match(path) if self._caching.prefill_keeps else None
        demand = self._demand(active, path, match, coming, mean_generated, now, ahead_s)
        placement = self._choose(demand)
        cost = self._members.loads.cost_of(placement.first)
        prefill_s = cost.exec_s(demand.num_tokens, placement.cached_tokens)
        if self._is_taken(demand, placement, coming):
            self._wait(active, placement, now, ahead_s)
            ahead_s[self._members.loads.slots[placement.first]] += prefill_s
            return None
        self._policy.placed(demand, placement)
        active.patient_until = None
        active.missing_tokens = demand.num_tokens - placement.cached_tokens
        active.prefill_s = prefill_s
        active.fetch_known_s = placement.fetch.known_s if placement.fetch is not None else None
        active.placed_at = now
        active.timeline.note("placed", now, placement.first, placement.reason)
        plan = self._plan(placement, demand.expected_tokens, now)
        if not plan.first_is_private:
            id = active.lifecycle.spec.id
            pending.add(id, placement.first, path, is_fetched=plan.fetch is not None)
        return plan

    def _demand(
        self,
        active: Active,
        path: Path,
        match: Match,
        coming: Coming | None,
        mean_generated: int,
        now: float,
        ahead_s: Seconds,
    ) -> Demand:
        session, block_size = active.lifecycle.spec.session, path.block_size
        return Demand(
            num_tokens=active.num_tokens,
            cached_tokens=match.cached_tokens,
            dram_tokens=match.dram_tokens,
            expected_tokens=min(active.lifecycle.remaining_tokens, mean_generated),
            session=session_key(session, active.packed, block_size * TOKEN_BYTES),
            now=now,
            coming_tokens=None if coming is None else coming.tokens,
            may_fetch=self._caching.fetches and self._fetching is not Fetching.NEVER,
            block_size=block_size,
            ahead_s=ahead_s,
            may_wait=active.patient_until is None or now < active.patient_until,
        )

    def _choose(self, demand: Demand) -> Placement:
        loads = self._members.loads
        placement = self._policy.place(demand, loads)
        if demand.may_fetch and self._fetching is Fetching.ALWAYS:
            return with_fetch(placement, demand, loads)
        return placement

    def _is_taken(self, demand: Demand, placement: Placement, coming: Coming | None) -> bool:
        """Whether its place is busy, or still fetches what it counts on."""
        loads = self._members.loads
        first = loads.slots[placement.first]
        if loads.is_busy[first]:
            return True
        if coming is None or placement.fetch is not None or not demand.may_wait:
            return False
        counts_on_it = placement.cached_tokens > demand.reusable()[first]
        return bool(counts_on_it and coming.is_fetched[first])

    def _wait(self, active: Active, placement: Placement, now: float, ahead_s: Seconds) -> None:
        """It is patient for as long as computing all of its prompt takes, and the queue beside.

        So an instance that hangs costs little, and nobody is refused who would have a place.
        """
        if active.patient_until is not None:
            return
        loads = self._members.loads
        first = loads.slots[placement.first]
        queue_s = float(loads.queue_s(now)[first] + ahead_s[first])
        computing_s = loads.cost_of(placement.first).exec_s(active.num_tokens)
        active.patient_until = now + computing_s + _PATIENCE * queue_s + _PATIENCE_S
        active.timeline.note("waits", now, placement.first, placement.reason)

    def _plan(self, placement: Placement, expected_tokens: int, now: float) -> Plan:
        caching = self._caching
        decode = placement.decode
        keeps = (
            caching.decode_keeps
            if self._roles[placement.first] is Role.DECODE
            else caching.prefill_keeps
        )
        return Plan(
            first=self._members.seat(placement.first),
            decode=self._members.seat(decode) if decode is not None else None,
            first_is_private=not keeps,
            decode_is_private=not caching.decode_keeps,
            returns=decode is not None and caching.decode_returns,
            fetch=self._fetch(placement, placement.fetch, now) if keeps else None,
            expected_tokens=expected_tokens,
        )

    def _fetch(self, placement: Placement, choice: FetchChoice | None, now: float) -> Fetch | None:
        """P waits for what it fetches as long as for computing it, and the predicted time beside.

        So a source that hangs, or began a long step meanwhile, costs at most about twice the time;
        while others are before it in P's queue, it costs nothing. What nobody predicted is waited
        for as for any reservation.
        """
        if choice is None:
            return None
        deadline_s = self._reservation_s
        if choice.predicted_s is not None:
            loads = self._members.loads
            queue_s = float(loads.queue_s(now)[loads.slots[placement.first]])
            computing_s = loads.cost_of(placement.first).exec_s(choice.num_tokens)
            deadline_s = queue_s + computing_s + _PATIENCE * choice.predicted_s + _PATIENCE_S
        return Fetch(self._members.seat(choice.source), choice.num_tokens, deadline_s)

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
from memserve.core.policies import make_policy
from memserve.core.policy import (
    Demand,
    FetchChoice,
    Fetching,
    Placement,
    can_place,
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
"""A fetch may take so many times what was predicted, and so much longer, beside the time that
computing would take: no machine is that exact."""


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
        self._split = settings.split
        self._reservation_s = settings.reservation_s
        self._fetching = settings.fetching
        self._caching = settings.caching
        self._cost = cost
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
        return can_place({self._roles[instance] for instance in instances}, self._split)

    def has_room(self) -> bool:
        """Whether some request could be placed now, on instances that have not enough to do yet."""
        return can_place(self._members.free_roles, self._split)

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
        Else the plan and the work
        are noted in `active`; both decisions with their reasons in its timeline.
        """
        spec, num_tokens = active.lifecycle.spec, active.num_tokens
        block_size, pending = path.block_size, self._members.pending
        coming = pending.match(path) if self._caching.prefill_keeps else None
        demand = Demand(
            num_tokens=num_tokens,
            cached_tokens=match.cached_tokens,
            dram_tokens=match.dram_tokens,
            expected_tokens=min(active.lifecycle.remaining_tokens, mean_generated),
            session=session_key(spec.session, active.packed, block_size * TOKEN_BYTES),
            now=now,
            coming_tokens=None if coming is None else coming.tokens,
            may_fetch=self._caching.fetches and self._fetching is not Fetching.NEVER,
            block_size=block_size,
            ahead_s=ahead_s,
        )
        loads = self._members.loads
        placement = self._policy.place(demand, loads)
        if demand.may_fetch and self._fetching is Fetching.ALWAYS:
            placement = with_fetch(placement, demand, loads)
        prefill_s = self._cost.exec_s(num_tokens, placement.cached_tokens)
        first = loads.slots[placement.first]
        relies_on_it = placement.cached_tokens > demand.reusable()[first]
        is_under_way = coming is not None and coming.is_fetched[first] and placement.fetch is None
        if loads.is_busy[first] or (is_under_way and relies_on_it):
            ahead_s[first] += prefill_s
            if not active.has_waited:
                active.has_waited = True
                active.timeline.note("waits", now, placement.first, placement.reason)
            return None
        self._policy.placed(demand, placement)
        active.missing_tokens = num_tokens - placement.cached_tokens
        active.prefill_s = prefill_s
        active.fetch_s = placement.fetch.predicted_s if placement.fetch is not None else None
        active.placed_at = now
        active.timeline.note("placed", now, placement.first, placement.reason)
        plan = self._plan(placement, now)
        if not plan.first_is_private:
            pending.add(spec.id, placement.first, path, is_fetched=plan.fetch is not None)
        return plan

    def _plan(self, placement: Placement, now: float) -> Plan:
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
            computing_s = self._cost.exec_s(choice.num_tokens)
            deadline_s = queue_s + computing_s + _PATIENCE * choice.predicted_s + _PATIENCE_S
        return Fetch(self._members.seat(choice.source), choice.num_tokens, deadline_s)

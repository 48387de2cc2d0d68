"""What every instance has to do at the moment, as arrays: the policy reads them in one go.

`accounting.py` keeps them in step with the requests' lifecycles, with heartbeats and with the
transfers under way. Work is counted in seconds, by the cost model: a queue of short prompts and one
of long ones are not the same. All arrays have one place per instance (`slots`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from memserve.core.cost_model import CostModel
from memserve.core.fetch_times import FetchTimes
from memserve.types import InstanceId, Role

Bools: TypeAlias = npt.NDArray[np.bool_]
Counts: TypeAlias = npt.NDArray[np.int64]
Seconds: TypeAlias = npt.NDArray[np.float64]

_UNKNOWN = np.iinfo(np.int64).max // 4


_PATIENCE = 2.0
_PATIENCE_S = 0.5
"""A prompt may take so many times what was predicted, and so much longer, before it counts as late:
machines that others use are two or three times as slow, and nothing is gained by fleeing them."""


class Share(msgspec.Struct, frozen=True):
    """What one request puts on one instance. It counts as prefilling while `prefill_s` is not 0."""

    context_tokens: int
    """Whose KV it holds there."""
    prefill_s: float = 0.0
    """Of computing its prompt, which has not ended."""
    queued_tokens: int = 0
    """Of the prompt, still to be computed."""
    is_fetching: bool = False
    """Before that can begin."""


class Loads:
    """Of all instances that there may be; those that are not ready count for nothing."""

    def __init__(
        self,
        roles: Mapping[InstanceId, Role],
        cost: CostModel,
        tp_of: Mapping[InstanceId, int] | None = None,
    ) -> None:
        """`tp_of`: whose prompts and steps are to be reckoned at a degree of their own."""
        self.instances = list(roles)
        self.slots = {instance: slot for slot, instance in enumerate(self.instances)}
        self.has_role: dict[Role, Bools] = {
            role: np.array([role is other for other in roles.values()], bool) for role in Role
        }
        self.all_roles = frozenset(roles.values())
        self._roles = [(role, self.has_role[role]) for role in self.all_roles]
        degrees = [(tp_of or {}).get(instance, cost.tp) for instance in self.instances]
        costs = {tp: CostModel(cost.profile, tp) for tp in {*degrees} - {cost.tp}} | {cost.tp: cost}
        self._costs = [costs[tp] for tp in degrees]
        self.by_cost: list[tuple[CostModel, Counts]] = [
            (costs[tp], np.flatnonzero([tp == other for other in degrees])) for tp in {*degrees}
        ]
        """Each cost model, and the instances (their places) that it is for."""
        count = len(self.instances)
        self.states: Bools = np.zeros((4, count), bool)
        """[4, instances] The next four: they change seldom."""
        self.is_ready, self.is_open, self.is_silent, self.is_owing = self.states
        """Open: ready, and may have more requests. Silent: ready, but it may hang (`hearing.py`).
        Owing: it may hang, for it was told to give up transfers, and has not."""
        self.is_busy: Bools = np.zeros(count, bool)
        """Has enough prompts to compute: what is to be computed there waits at the scheduler."""
        self.num_requests: Counts = np.zeros(count, np.int64)
        self.num_prefills: Counts = np.zeros(count, np.int64)
        """Of those: whose prompt is not computed yet."""
        self.num_fetching: Counts = np.zeros(count, np.int64)
        """Of those: who fetch, and are not in the engine's queue yet."""
        self.num_delayed: Counts = np.zeros(count, np.int64)
        """Requests that wait while a prompt is computed: those that generate, or fetch."""
        self.queued_tokens: Counts = np.zeros(count, np.int64)
        self.context_tokens: Counts = np.zeros(count, np.int64)
        self.free_tokens: Counts = np.full(count, _UNKNOWN, np.int64)
        """Room for KV, history that can be evicted included, by the last heartbeat."""
        self.empty_tokens: Counts = np.full(count, _UNKNOWN, np.int64)
        """Room that holds nothing, in DRAM too: what comes displaces no history."""
        self.sending_bytes: Counts = np.zeros(count, np.int64)
        self.receiving_bytes: Counts = np.zeros(count, np.int64)
        self.num_owed: Counts = np.zeros(count, np.int64)
        """Transfers that it was told to give up, and has not."""
        self.fetch_times = FetchTimes(count)
        self.step_s: Seconds = np.zeros(count)
        """Of a decode step with the requests that it has."""
        self.decode_s: Seconds = np.zeros(count)
        """The same where some of them generate by now; else 0."""
        self.added_s: Seconds = np.zeros(count)
        """What one request more, whose context is still empty, adds to the steps of all."""
        self.prefill_s: Seconds = np.zeros(count)
        """Of computing the prompts that were placed there, as if none had begun."""
        self.head_s: Seconds = np.zeros(count)
        """Of the prompt that is computed now: they count as equally long."""
        self._head_since: Seconds = np.zeros(count)
        self._patience_s: Seconds = np.full(count, np.inf)
        """After so long, that one is late."""
        for slot in range(count):
            self._reckon_generating(slot)

    # ── what changes them ─────────────────────────────────────────────────────────────────────

    def start(self, instance: InstanceId) -> None:
        """A new life: ready and open, with nothing to do."""
        slot = self.slots[instance]
        self.end(instance)
        self.fetch_times.forget(slot)
        self.is_ready[slot] = self.is_open[slot] = True

    def end(self, instance: InstanceId) -> None:
        """A life is over, and what it had to do; transfers end by themselves (`add_transfer`)."""
        slot = self.slots[instance]
        for mask in (self.is_ready, self.is_open, self.is_silent, self.is_busy):
            mask[slot] = False
        for counts in (
            self.num_requests,
            self.num_prefills,
            self.num_fetching,
            self.queued_tokens,
            self.context_tokens,
        ):
            counts[slot] = 0
        self.free_tokens[slot] = self.empty_tokens[slot] = _UNKNOWN
        self.prefill_s[slot] = 0.0
        self._reckon_head(slot)
        self._reckon_generating(slot)

    def add(self, instance: InstanceId, share: Share, now: float) -> None:
        """A request has something to do there. Time: O(1)."""
        slot = self.slots[instance]
        if share.prefill_s and not self.num_prefills[slot]:
            self._head_since[slot] = now
        self._count(slot, share, 1)

    def remove(self, instance: InstanceId, share: Share, now: float) -> None:
        """What was added before has been done, or given up."""
        slot = self.slots[instance]
        if share.prefill_s and not share.is_fetching:
            self._head_since[slot] = now
        self._count(slot, share, -1)

    def _count(self, slot: int, share: Share, sign: int) -> None:
        self.num_requests[slot] += sign
        self.context_tokens[slot] += sign * share.context_tokens
        self.queued_tokens[slot] += sign * share.queued_tokens
        self.num_fetching[slot] += sign * share.is_fetching
        if share.prefill_s:
            self.num_prefills[slot] += sign
            self.prefill_s[slot] += sign * share.prefill_s
            self._reckon_head(slot)
        self._reckon_generating(slot)

    def _reckon_head(self, slot: int) -> None:
        count = int(self.num_prefills[slot])
        if not count:
            self.prefill_s[slot] = 0.0  # no rounding error outlives its requests
        head_s = self.prefill_s[slot] / count if count else 0.0
        self.head_s[slot] = head_s
        self._patience_s[slot] = _PATIENCE * head_s + _PATIENCE_S if count else np.inf

    def _reckon_generating(self, slot: int) -> None:
        cost, tokens = self._costs[slot], self.context_tokens.item(slot)
        count = self.num_requests.item(slot)
        num_decoding = count - self.num_prefills.item(slot)
        step_s, next_s = cost.decode_step_s(count, tokens), cost.decode_step_s(count + 1, tokens)
        self.step_s[slot] = step_s
        self.decode_s[slot] = step_s if num_decoding else 0.0
        self.added_s[slot] = (count + 1) * next_s - count * step_s
        self.num_delayed[slot] = num_decoding + self.num_fetching[slot]

    def set_room(self, instance: InstanceId, free_tokens: int, empty_tokens: int) -> None:
        """What a heartbeat said of the pool, and of what is beneath it."""
        slot = self.slots[instance]
        self.free_tokens[slot] = free_tokens
        self.empty_tokens[slot] = empty_tokens

    def add_transfer(self, source: InstanceId, target: InstanceId, size_bytes: int) -> None:
        """KV is under way (negative: it has arrived, or will not)."""
        self.sending_bytes[self.slots[source]] += size_bytes
        self.receiving_bytes[self.slots[target]] += size_bytes

    def add_owed(self, source: InstanceId, count: int) -> None:
        """It owes so many answers more (negative: it has given them, or is lost)."""
        slot = self.slots[source]
        self.num_owed[slot] += count
        self.is_owing[slot] = self.num_owed[slot] > 0

    # ── what is read ──────────────────────────────────────────────────────────────────────────

    def roles_there(self) -> set[Role]:
        """Of those that are ready, and not silent."""
        is_there = self.is_ready & ~self.is_silent
        return {role for role, has_role in self._roles if np.count_nonzero(is_there & has_role)}

    def longest_step_s(self, instance: InstanceId) -> float:
        """The longest step that it may be in, by what it has to do. Does not mutate."""
        slot = self.slots[instance]
        seconds = self.step_s.item(slot)
        if self.num_prefills[slot]:
            cost = self._costs[slot]
            chunk = cost.profile.chunk_tokens
            context = max(self.context_tokens.item(slot), chunk)
            seconds += min(self.prefill_s.item(slot), cost.exec_s(context, context - chunk))
        return seconds

    def each_s(self, seconds: Callable[[CostModel], float]) -> Seconds:
        """[instances] By everyone's own cost model."""
        each_s = np.full(len(self.instances), seconds(self.by_cost[0][0]))
        for cost, slots in self.by_cost[1:]:
            each_s[slots] = seconds(cost)
        return each_s

    def cost_of(self, instance: InstanceId) -> CostModel:
        """At its degree of tensor parallelism."""
        return self._costs[self.slots[instance]]

    @property
    def can_send(self) -> Bools:
        """[instances] Whom to fetch from: those who answer. Being full is no reason against it."""
        is_able: Bools = self.is_ready & ~(self.is_silent | self.is_owing)
        return is_able

    def queue_s(self, now: float) -> Seconds:
        """[instances] Until the prompts placed there are computed. Does not mutate.

        The first one's share shrinks as time passes, but the others are still to come. One that is
        late beyond patience is taken to be late for as long again: its instance may hang.
        """
        elapsed_s = np.maximum(now - self._head_since, 0.0)
        left_s = np.maximum(self.head_s - elapsed_s, elapsed_s - self._patience_s)
        queue: Seconds = self.prefill_s - self.head_s + np.maximum(left_s, 0.0)
        return queue

    def check_integrity(self) -> None:
        """Raises: AssertionError if the arrays contradict each other."""
        assert not ((self.is_open | self.is_busy | self.is_silent) & ~self.is_ready).any()
        assert (self.num_prefills >= 0).all() and (self.num_prefills <= self.num_requests).all()
        assert (self.num_fetching >= 0).all() and (self.num_fetching <= self.num_prefills).all()
        for counts in (self.queued_tokens, self.context_tokens):
            assert (counts >= 0).all() and not counts[self.num_requests == 0].any()
        assert (self.sending_bytes >= 0).all() and (self.receiving_bytes >= 0).all()
        assert (self.num_owed >= 0).all() and (self.is_owing == (self.num_owed > 0)).all()
        num_decoding = self.num_requests - self.num_prefills
        assert (self.num_delayed == num_decoding + self.num_fetching).all()
        assert self.sending_bytes.sum() == self.receiving_bytes.sum()
        assert not self.prefill_s[self.num_prefills == 0].any()

"""Placement by time: the least that a request adds to what everybody waits for. Section 6.

For an instance p that computes a prompt of x tokens, of which y are cached there (or will be, once
p has worked off its queue), the paper's

    queue(p) + exec(x, y)                              queue(p) = Σ exec of what is placed there

and, where another instance s holds more, y' of them, the fetched form

    max(queue(p), fetch) + exec(x, y')                 fetch = wait(s, p) + transfer(y' - y)

whichever is less: what is fetched travels while p's queue is worked off; what it waits for is in
`fetch_cost.py`. So a hot prefix finds a second home as soon as queueing costs more than fetching.

What p lacks takes room in its pool, computed or fetched. Where none is empty, it displaces history,
which has to be computed again if it is asked for: as likely as tokens of the latest prompts were
held by somebody. So one prefix does not fill all pools, to the loss of others.

An instance that generates adds to its steps, for all of its n requests:

    load = expected tokens · ((n + 1) · step(n + 1) - n · step(n))

A request that runs whole also keeps the n requests of its instance waiting while it is computed;
any keeps those waiting that still fetch there, for it overtakes them. A split one has to hand over
what D lacks. Whoever comes later waits too while a prompt is computed:
about as many as an instance has to compute in the median now, the followers, so exec counts for
each of them. Idle instances may compute one prefix twice to save a moment; with work everywhere it
is better queued for, or fetched.

The least sum wins. Instances whose pool has no room for the request count only if none has. Near
ties go to who need not fetch, then to the fewest requests, then to the most empty room. Busy
instances count as others do: their queues, and what waits for them at the scheduler, are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from memserve.core.cost_model import CostModel
from memserve.core.fetch_cost import FetchCost, Offer, Waits
from memserve.core.loads import Bools, Counts, Loads, Seconds
from memserve.core.policy import (
    Demand,
    Eligibility,
    Eligible,
    FetchChoice,
    Placement,
    Split,
    Splitting,
)
from memserve.core.timeline import Detail, Number

_TIE = 0.01
_TIE_S = 50e-6
"""Differences below these (relative, seconds) are no reason: no prediction is that good."""
_FEW = 128
"""Instances up to which a dictionary is faster than arrays."""
_MOST = np.iinfo(np.int64).max
_LATEST = 0.02
"""Weight of the latest prompt among those that are remembered."""
_SHOWN = 3
"""Candidates of each kind that a reason shows."""


class _Fetch(msgspec.Struct, frozen=True):
    """A source, and what fetching from it takes, by target: [instances] each."""

    source: int
    num_tokens: int
    """That will be there."""
    late_s: float
    """What fetches from there were late lately."""
    known_s: Seconds
    """The sum of the other terms."""
    seconds: Seconds
    exec_s: Seconds
    """Of the rest of the prompt."""
    pays: Bools


class _Firsts(msgspec.Struct):
    """[instances] each: what computing the prompt there takes."""

    cached: Counts
    queue_s: Seconds
    exec_s: Seconds
    num_followers: int
    num_waiting: Counts
    """Requests that wait while the prompt is computed: its own, those that generate or fetch there,
    and the followers."""
    total_s: Seconds
    """For all of them."""
    displaced_s: Seconds
    """Of computing again what history its KV displaces."""
    swap_s: Seconds | None
    """Of bringing to HBM what is in DRAM alone; None: nothing is, anywhere."""
    is_fetched: Bools
    """Whether a fetch pays, and is in the total."""
    fetches: list[_Fetch]
    """Those that pay for some, each more than the ones before."""

    def fetch_of(self, slot: int) -> _Fetch | None:
        """The one that is in the total."""
        return next((fetch for fetch in reversed(self.fetches) if fetch.pays[slot]), None)


class CostPolicy:
    """See the module. Remembers how much of the latest prompts was held; the cost model is its
    owner's."""

    name = "cost"

    def __init__(self, cost: CostModel, link: str, split: Split, *, is_calibrated: bool) -> None:
        """`link`: the kind over which KV travels between instances.

        Raises: ValueError for a kind that the cost model does not know.
        """
        cost.transfer_s(1, link)  # raises
        self._cost = cost
        self._link = cost.profile.links[link]
        self._fetch_cost = FetchCost(cost, link)
        self.splitting = Splitting(split, can_tell=is_calibrated)
        self._eligibility = Eligibility(self.splitting)
        self._token_bytes = cost.kv_bytes(1)
        self._held = self._asked = 0.0
        """Tokens of the latest prompts, in the mean: those that somebody held when they were
        placed, and all."""

    def place(self, demand: Demand, loads: Loads) -> Placement:
        """See `Policy`."""
        can = self._eligibility.among(loads, may_wait=demand.may_wait)
        firsts = self._firsts(demand, loads, can)
        load_s = self._load_s(demand, loads)
        has_room = loads.free_tokens >= demand.num_tokens + demand.expected_tokens
        first, decode, least_s = -1, None, np.inf
        if np.count_nonzero(can.whole):  # several times as fast as `any`
            whole_s = firsts.total_s + load_s
            first = _least(whole_s, _preferred(can.whole, has_room), loads, firsts.is_fetched)
            least_s = whole_s[first]
        if np.count_nonzero(can.prefill):
            prefill = _least(firsts.total_s, can.prefill, loads, firsts.is_fetched)
            decode_s = self._hand_over_s(demand, loads) + load_s
            second = _least(decode_s, _preferred(can.decode, has_room), loads)
            if firsts.total_s[prefill] + decode_s[second] < least_s:
                first, decode = prefill, second
        explain = partial(self._reason, demand, loads, can, firsts, load_s, first, decode)
        return self._placement(loads, firsts, first, decode, explain)

    def placed(self, demand: Demand, placement: Placement) -> None:
        """See `Policy`."""
        found = demand.reusable()
        self._held += _LATEST * (found.item(found.argmax()) - self._held)
        self._asked += _LATEST * (demand.num_tokens - self._asked)

    # ── computing the prompt ──────────────────────────────────────────────────────────────────

    def _firsts(self, demand: Demand, loads: Loads, can: Eligible) -> _Firsts:
        cached = demand.found()
        queue_s = loads.queue_s(demand.now)
        swap_s = self._swap_s(demand) if np.count_nonzero(demand.dram_tokens) else None
        exec_s = _exec_cached_s(demand.num_tokens, cached, loads)
        if swap_s is not None:
            in_hbm = np.maximum(cached - demand.dram_tokens, 0)  # the rest is left where it is
            exec_s = np.minimum(exec_s + swap_s, _exec_cached_s(demand.num_tokens, in_hbm, loads))
        num_followers = _followers(loads, can)
        num_waiting = loads.num_delayed + (1 + num_followers)
        ahead_s = queue_s if demand.ahead_s is None else queue_s + demand.ahead_s
        displaced_s = self._displaced_s(demand, cached, loads)
        firsts = _Firsts(
            cached=cached,
            queue_s=ahead_s,
            exec_s=exec_s,
            num_followers=num_followers,
            num_waiting=num_waiting,
            total_s=ahead_s + exec_s * num_waiting + displaced_s,
            displaced_s=displaced_s,
            swap_s=swap_s,
            is_fetched=np.zeros(len(cached), bool),
            fetches=[],
        )
        if demand.may_fetch:
            self._fetch(firsts, queue_s, demand, loads, can)
        return firsts

    def _displaced_s(self, demand: Demand, cached: Counts, loads: Loads) -> Seconds:
        """[instances] Whatever way the rest comes: by computing it, or from another instance."""
        displaced = np.maximum(demand.num_tokens - cached - loads.empty_tokens, 0)
        reuse = self._held / self._asked if self._asked else 0.0
        all_s = loads.each_s(lambda cost: cost.exec_s(demand.num_tokens))
        displaced_s: Seconds = displaced * all_s * (reuse / max(demand.num_tokens, 1))
        return displaced_s

    def _swap_s(self, demand: Demand) -> Seconds:
        sizes = (demand.dram_tokens * self._token_bytes).tolist()
        return np.array([self._cost.swap_in_s(size_bytes) for size_bytes in sizes])

    def _fetch(
        self, firsts: _Firsts, queue_s: Seconds, demand: Demand, loads: Loads, can: Eligible
    ) -> None:
        """Let those fetch whom it makes faster. Mutates `firsts`."""
        reusable = firsts.cached if demand.coming_tokens is None else demand.reusable()
        usable = reusable * can.sending
        sources = self._sources(usable, demand, loads, is_swapping=firsts.swap_s is not None)
        if not sources:
            return
        waits = self._fetch_cost.waits(queue_s, loads)
        for source in sources:
            num_tokens, num_dram = usable.item(source), demand.dram_tokens.item(source)
            coming = 0 if demand.coming_tokens is None else demand.coming_tokens.item(source)
            offer = Offer(source, num_tokens, num_dram, coming >= num_tokens)
            self._consider(firsts, offer, waits, demand, loads)
            if 0 < num_dram < num_tokens:
                in_hbm = num_tokens - num_dram
                offer = Offer(source, in_hbm, 0, coming >= in_hbm)
                self._consider(firsts, offer, waits, demand, loads)

    def _sources(
        self, usable: Counts, demand: Demand, loads: Loads, *, is_swapping: bool
    ) -> list[int]:
        """Who holds most (of those, who has least to move before), and an idler one if that is
        busy. `is_swapping`: some of it is in DRAM, somewhere."""
        most = int(usable[usable.argmax()])
        if most == 0:
            return []
        before = loads.sending_bytes
        if is_swapping:
            before = before + demand.dram_tokens * self._token_bytes
        best = _argmin(np.where(usable == most, before, _MOST))
        if not before[best]:
            return [best]
        idlest = np.where(2 * usable >= most, before, _MOST)
        other = _argmin(idlest)
        return [best] if other == best else [best, other]

    def _consider(
        self, firsts: _Firsts, offer: Offer, waits: Waits, demand: Demand, loads: Loads
    ) -> None:
        """Let those fetch it whom that makes faster. Mutates `firsts`."""
        source, num_tokens = offer.source, offer.num_tokens
        missing = num_tokens - firsts.cached  # below 0: it does not pay, whatever it takes
        known_s, least_s = self._fetch_cost.seconds(offer, missing, waits, firsts.swap_s, loads)
        fetch_s = known_s
        if late_s := loads.fetch_times.late_s(source, demand.now):
            fetch_s = np.maximum(known_s + late_s, least_s)
        exec_s = loads.each_s(lambda cost: cost.exec_s(demand.num_tokens, num_tokens))
        total_s = np.maximum(firsts.queue_s, fetch_s) + exec_s * firsts.num_waiting
        total_s += firsts.displaced_s
        pays = (missing > 0) & (total_s < firsts.total_s)
        if not np.count_nonzero(pays):
            return
        np.copyto(firsts.total_s, total_s, where=pays)
        firsts.is_fetched |= pays
        firsts.fetches.append(_Fetch(source, num_tokens, late_s, known_s, fetch_s, exec_s, pays))

    # ── generating ────────────────────────────────────────────────────────────────────────────

    def _load_s(self, demand: Demand, loads: Loads) -> Seconds:
        """[instances] What generating there adds to the steps of all of its requests."""
        context_s = loads.each_s(
            lambda cost: cost.decode_step_s(1, demand.num_tokens) - cost.decode_step_s(1, 0)
        )
        added_s = loads.added_s + (loads.num_requests + 1) * context_s
        load_s: Seconds = demand.expected_tokens * added_s
        return load_s

    def _hand_over_s(self, demand: Demand, loads: Loads) -> Seconds:
        """[instances] For what the instance lacks of the prompt's full blocks, from P."""
        full = demand.num_tokens // demand.block_size * demand.block_size
        missing = np.maximum(full - demand.cached_tokens, 0)
        size_bytes = missing * self._token_bytes + loads.receiving_bytes
        hand_over_s: Seconds = self._link.seconds(0) + size_bytes / self._link.bytes_per_s
        return hand_over_s

    # ── the answer ────────────────────────────────────────────────────────────────────────────

    def _placement(
        self,
        loads: Loads,
        firsts: _Firsts,
        first: int,
        decode: int | None,
        explain: Callable[[], Detail],
    ) -> Placement:
        choice, cached_tokens = None, int(firsts.cached[first])
        if (fetch := firsts.fetch_of(first)) is not None:
            cached_tokens = fetch.num_tokens
            source = loads.instances[fetch.source]
            choice = FetchChoice(
                source, cached_tokens, fetch.seconds.item(first), fetch.known_s.item(first)
            )
        return Placement(
            first=loads.instances[first],
            decode=None if decode is None else loads.instances[decode],
            fetch=choice,
            cached_tokens=cached_tokens,
            explain=explain,
        )

    def _reason(
        self,
        demand: Demand,
        loads: Loads,
        can: Eligible,
        firsts: _Firsts,
        load_s: Seconds,
        first: int,
        decode: int | None,
    ) -> Detail:
        """The chosen ones and the best others of each kind, with their terms."""
        candidates: list[dict[str, Number]] = []
        for slot in _best(firsts.total_s, can.computing, first):
            terms = _first_terms(slot, firsts, loads)
            if decode is None:
                terms["load_s"] = load_s.item(slot)
            candidates.append(terms)
        if np.count_nonzero(can.generating):
            candidates += [
                {
                    "instance": loads.instances[slot],
                    "cached_tokens": demand.cached_tokens.item(slot),
                    "load_s": load_s.item(slot),
                }
                for slot in _best(load_s, can.generating, decode)
            ]
        return {
            "policy": self.name,
            "tokens": demand.num_tokens,
            "expected_tokens": demand.expected_tokens,
            "followers": firsts.num_followers,
            **can.reason,
            "candidates": candidates,
        }


def _exec_cached_s(num_tokens: int, cached: Counts, loads: Loads) -> Seconds:
    """[instances] exec(x, y), at everyone's degree of tensor parallelism."""
    if len(loads.by_cost) == 1:
        return _exec_many_s(num_tokens, cached, loads.by_cost[0][0])
    exec_s = np.empty(len(cached))
    for cost, slots in loads.by_cost:
        exec_s[slots] = _exec_many_s(num_tokens, cached[slots], cost)
    return exec_s


def _exec_many_s(num_tokens: int, cached: Counts, cost: CostModel) -> Seconds:
    """As `CostModel.exec_many`. Most hold equally much: nothing, or the system prompt."""
    least = cached.item(cached.argmin())
    exec_s = np.full(len(cached), cost.exec_s(num_tokens, least))
    more = (cached > least).nonzero()[0]
    if len(more) > _FEW:
        exec_s[more] = cost.exec_many(num_tokens, cached[more])
    elif len(more):
        each: list[int] = cached[more].tolist()
        known = {tokens: cost.exec_s(num_tokens, tokens) for tokens in set(each)}
        exec_s[more] = [known[tokens] for tokens in each]
    return exec_s


def _first_terms(slot: int, firsts: _Firsts, loads: Loads) -> dict[str, Number]:
    """What computing the prompt there was reckoned to take."""
    fetch = firsts.fetch_of(slot)
    terms: dict[str, Number] = {
        "instance": loads.instances[slot],
        "cached_tokens": firsts.cached.item(slot),
        "queue_s": firsts.queue_s.item(slot),
        "exec_s": (firsts if fetch is None else fetch).exec_s.item(slot),
        "total_s": firsts.total_s.item(slot),
    }
    if displaced_s := firsts.displaced_s.item(slot):
        terms["displaced_s"] = displaced_s
    if fetch is not None:
        terms["fetch_from"] = loads.instances[fetch.source]
        terms["fetch_tokens"] = fetch.num_tokens
        terms["fetch_s"] = fetch.seconds.item(slot)
        if fetch.late_s:
            terms["fetch_late_s"] = fetch.late_s
    return terms


def _followers(loads: Loads, can: Eligible) -> int:
    """Prompts that an instance which computes some has to compute: the (lower) median."""
    waiting = loads.num_prefills[can.computing]
    waiting.sort()  # of small numbers with many ties faster than `partition`
    return int(waiting[(len(waiting) - 1) // 2])


def _argmin(values: Seconds | Counts) -> int:
    return int(values.argmin())


def _preferred(mask: Bools, wish: Bools) -> Bools:
    """Those that also fulfil the wish, if there are any."""
    both = mask & wish
    return both if np.count_nonzero(both) else mask


def _least(seconds: Seconds, mask: Bools, loads: Loads, is_fetched: Bools | None = None) -> int:
    """The least of the masked ones; near ties as the module says."""
    masked = np.where(mask, seconds, np.inf)
    least = float(masked[masked.argmin()])
    close = (masked <= least + abs(least) * _TIE + _TIE_S).nonzero()[0]
    if len(close) == 1:
        return int(close[0])
    ranks = [close, -loads.empty_tokens[close], loads.num_requests[close]]  # the last counts first
    if is_fetched is not None:
        ranks.append(is_fetched[close].astype(np.int64))
    return int(close[np.lexsort(ranks)[0]])


def _best(seconds: Seconds, mask: Bools, chosen: int | None) -> list[int]:
    """The chosen one, and a few of the masked ones with the least seconds."""
    slots = mask.nonzero()[0]
    if len(slots) > _SHOWN:
        slots = slots[seconds[slots].argpartition(_SHOWN)[:_SHOWN]]
    order: list[int] = sorted(slots.tolist(), key=seconds.item)
    if chosen is None:
        return order
    return [chosen, *[slot for slot in order if slot != chosen][: _SHOWN - 1]]

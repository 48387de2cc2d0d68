"""Placement by time: the least that a request adds to what everybody waits for. Section 6.

For an instance p that computes a prompt of x tokens, of which y are cached there, the paper's

    queue(p) + exec(x, y)                              queue(p) = Σ exec of what is placed there

and, where another instance s holds more, y' of them, the fetched form

    max(queue(p), fetch) + exec(x, y')                 fetch = wait(s, p) + transfer(y' - y)

whichever is less: what is fetched travels while p's queue is worked off. `wait` is what the links
of both have under way, and the step that the sender's engine is in. So a hot prefix finds a second
home as soon as queueing costs more than fetching.

An instance that generates adds to its steps, for all of its n requests:

    load = expected tokens · ((n + 1) · step(n + 1) - n · step(n))

A request that runs whole also keeps the n requests of its instance waiting while it is computed; a
split one has to hand over what D lacks. The least sum wins. Instances whose pool has no room for
the request count only if none has. Near ties go to the fewest requests, then to the emptiest pool.
"""

from __future__ import annotations

import msgspec
import numpy as np

from memserve.core.cost_model import CostModel
from memserve.core.loads import Bools, Counts, Loads, Seconds
from memserve.core.policy import (
    Demand,
    Eligible,
    FetchChoice,
    Placement,
    Split,
    eligible,
)
from memserve.core.timeline import Detail, Number

_TIE = 0.01
_TIE_S = 50e-6
"""Differences below these (relative, seconds) are no reason: no prediction is that good."""
_SHOWN = 4
"""Candidates of each kind that a reason shows."""
_ROUND_TRIPS_S = 1e-3
"""Of a fetch: reserving and ordering, over the control channel."""


class _Firsts(msgspec.Struct):
    """[instances] each: what computing the prompt there takes."""

    cached: Counts
    queue_s: Seconds
    exec_s: Seconds
    total_s: Seconds
    fetch_s: Seconds
    fetched: Counts
    """Tokens that will be there after a fetch; 0: it does not pay."""
    source: Counts


class CostPolicy:
    """See the module. Remembers nothing; the cost model is its owner's."""

    name = "cost"

    def __init__(self, cost: CostModel, link: str, split: Split, *, is_calibrated: bool) -> None:
        """`link`: the kind over which KV travels between instances.

        Raises: ValueError for a kind that the cost model does not know.
        """
        cost.transfer_s(1, link)
        self._cost = cost
        self._link = cost.profile.links[link]
        self._split = split
        self._whole_on_decode = is_calibrated
        self._token_bytes = cost.kv_bytes(1)
        self._chunk_tokens = cost.profile.chunk_tokens

    def place(self, demand: Demand, loads: Loads) -> Placement:
        """See `Policy`."""
        can = eligible(loads, self._split, whole_on_decode=self._whole_on_decode)
        firsts = self._firsts(demand, loads)
        load_s = self._load_s(demand, loads)
        has_room = loads.free_tokens >= demand.num_tokens + demand.expected_tokens
        if can.whole.any():
            stall_s = (loads.num_requests - loads.num_prefills) * firsts.exec_s
            whole_s = firsts.total_s + stall_s + load_s
            whole = _least(whole_s, _preferred(can.whole, has_room), loads)
        if can.prefill.any():
            hand_over_s = self._hand_over_s(demand, loads)
            first = _least(firsts.total_s, can.prefill, loads)
            decode_s = hand_over_s + load_s
            decode = _least(decode_s, _preferred(can.decode, has_room), loads)
            split_s = firsts.total_s[first] + decode_s[decode]
            if not can.whole.any() or split_s < whole_s[whole]:
                reason = self._reason(demand, loads, can, firsts, load_s)
                return self._placement(loads, firsts, first, decode, reason)
        reason = self._reason(demand, loads, can, firsts, load_s)
        return self._placement(loads, firsts, whole, None, reason)

    # ── computing the prompt ──────────────────────────────────────────────────────────────────

    def _firsts(self, demand: Demand, loads: Loads) -> _Firsts:
        cached = demand.reusable()
        queue_s = loads.queue_s(demand.now)
        exec_s = self._exec_s(demand, cached)
        count = len(cached)
        firsts = _Firsts(
            cached=cached,
            queue_s=queue_s,
            exec_s=exec_s,
            total_s=queue_s + exec_s,
            fetch_s=np.zeros(count),
            fetched=np.zeros(count, np.int64),
            source=np.zeros(count, np.int64),
        )
        if demand.may_fetch:
            usable = np.where(loads.is_ready, cached, 0)
            if demand.dram_tokens.any():  # what a source holds in DRAM it cannot send
                usable = np.maximum(usable - demand.dram_tokens, 0)
            for source in self._sources(usable, loads):
                self._consider(firsts, source, int(usable[source]), demand, loads)
        return firsts

    def _exec_s(self, demand: Demand, cached: Counts) -> Seconds:
        """exec(x, y); with KV in DRAM, swapping it in or computing it, whichever is less."""
        exec_s = self._cost.exec_many(demand.num_tokens, cached)
        for slot in np.flatnonzero(demand.dram_tokens).tolist():
            in_dram = int(demand.dram_tokens[slot])
            swap_s = self._cost.swap_in_s(in_dram * self._token_bytes)
            in_hbm = max(int(cached[slot]) - in_dram, 0)
            computed_s = self._cost.exec_s(demand.num_tokens, in_hbm)
            exec_s[slot] = min(exec_s[slot] + swap_s, computed_s)
        return exec_s

    def _sources(self, usable: Counts, loads: Loads) -> list[int]:
        """Who holds most (of those, who sends least), and an idler one if that is busy."""
        most = int(usable.max(initial=0))
        if most == 0:
            return []
        best = _argmin(np.where(usable == most, loads.sending_bytes, np.iinfo(np.int64).max))
        if not loads.sending_bytes[best]:
            return [best]
        idlest = np.where(2 * usable >= most, loads.sending_bytes, np.iinfo(np.int64).max)
        other = _argmin(idlest)
        return [best] if other == best else [best, other]

    def _consider(
        self, firsts: _Firsts, source: int, num_tokens: int, demand: Demand, loads: Loads
    ) -> None:
        """Let those fetch from this source whom it makes faster. Mutates `firsts`."""
        missing = num_tokens - firsts.cached
        under_way = np.maximum(loads.sending_bytes[source], loads.receiving_bytes)
        size_bytes = np.maximum(missing, 0) * self._token_bytes + under_way
        fetch_s = self._turn_s(source, firsts, loads) + self._link.seconds(0)
        fetch_s = fetch_s + size_bytes / self._link.bytes_per_s
        exec_s = self._cost.exec_s(demand.num_tokens, num_tokens)
        total_s = np.maximum(firsts.queue_s, fetch_s) + exec_s
        pays = (missing > 0) & (total_s < firsts.total_s)
        pays[source] = False
        firsts.total_s = np.where(pays, total_s, firsts.total_s)
        firsts.fetch_s = np.where(pays, fetch_s, firsts.fetch_s)
        firsts.fetched = np.where(pays, num_tokens, firsts.fetched)
        firsts.source = np.where(pays, source, firsts.source)
        firsts.exec_s = np.where(pays, exec_s, firsts.exec_s)

    def _turn_s(self, source: int, firsts: _Firsts, loads: Loads) -> float:
        """Until the source's engine comes to sending: commands are served between its steps."""
        step_s = 0.0
        if loads.num_requests[source] > loads.num_prefills[source]:
            step_s = float(loads.step_s[source])
        if queue_s := float(firsts.queue_s[source]):
            step_s += min(queue_s, self._cost.exec_s(self._chunk_tokens))
        return _ROUND_TRIPS_S + step_s

    # ── generating ────────────────────────────────────────────────────────────────────────────

    def _load_s(self, demand: Demand, loads: Loads) -> Seconds:
        """[instances] What generating there adds to the steps of all of its requests."""
        context_s = self._cost.decode_step_s(1, demand.num_tokens) - self._cost.decode_step_s(1, 0)
        after = (loads.num_requests + 1) * (loads.next_step_s + context_s)
        load_s: Seconds = demand.expected_tokens * (after - loads.num_requests * loads.step_s)
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
        self, loads: Loads, firsts: _Firsts, first: int, decode: int | None, reason: Detail
    ) -> Placement:
        fetch = None
        if fetched := int(firsts.fetched[first]):
            fetch = FetchChoice(loads.instances[int(firsts.source[first])], fetched)
        return Placement(
            first=loads.instances[first],
            decode=None if decode is None else loads.instances[decode],
            fetch=fetch,
            cached_tokens=fetched or int(firsts.cached[first]),
            reason=reason,
        )

    def _reason(
        self, demand: Demand, loads: Loads, can: Eligible, firsts: _Firsts, load_s: Seconds
    ) -> Detail:
        """The best candidates of each kind, with their terms."""
        computing = _best(firsts.total_s, can.whole | can.prefill)
        generating = _best(load_s, can.decode & ~can.whole)
        return {
            "policy": self.name,
            "tokens": demand.num_tokens,
            "expected_tokens": demand.expected_tokens,
            "candidates": [
                *(self._first_terms(slot, loads, firsts, load_s) for slot in computing),
                *(self._decode_terms(slot, demand, loads, load_s) for slot in generating),
            ],
        }

    def _decode_terms(
        self, slot: int, demand: Demand, loads: Loads, load_s: Seconds
    ) -> dict[str, Number]:
        return {
            "instance": loads.instances[slot],
            "cached_tokens": int(demand.cached_tokens[slot]),
            "load_s": _rounded(load_s[slot]),
        }

    def _first_terms(
        self, slot: int, loads: Loads, firsts: _Firsts, load_s: Seconds
    ) -> dict[str, Number]:
        terms: dict[str, Number] = {
            "instance": loads.instances[slot],
            "cached_tokens": int(firsts.cached[slot]),
            "queue_s": _rounded(firsts.queue_s[slot]),
            "exec_s": _rounded(firsts.exec_s[slot]),
            "total_s": _rounded(firsts.total_s[slot]),
            "load_s": _rounded(load_s[slot]),
        }
        if firsts.fetched[slot]:
            terms["fetch_from"] = loads.instances[int(firsts.source[slot])]
            terms["fetch_tokens"] = int(firsts.fetched[slot])
            terms["fetch_s"] = _rounded(firsts.fetch_s[slot])
        return terms


def _argmin(values: Seconds | Counts) -> int:
    return int(values.argmin())


def _preferred(mask: Bools, wish: Bools) -> Bools:
    """Those that also fulfil the wish, if there are any."""
    both = mask & wish
    return both if both.any() else mask


def _least(seconds: Seconds, mask: Bools, loads: Loads) -> int:
    """The least of the masked ones; near ties by load and by the pool's emptiness."""
    masked = np.where(mask, seconds, np.inf)
    least = float(masked.min())
    close = np.flatnonzero(masked <= least * (1 + _TIE) + _TIE_S)
    if len(close) == 1:
        return int(close[0])
    order = np.lexsort((close, -loads.empty_tokens[close], loads.num_requests[close]))
    return int(close[order[0]])


def _best(seconds: Seconds, mask: Bools) -> list[int]:
    """The masked ones with the least seconds, a few."""
    slots = np.flatnonzero(mask)
    if len(slots) > _SHOWN:
        slots = slots[np.argpartition(seconds[slots], _SHOWN)[:_SHOWN]]
    order: list[int] = slots[np.argsort(seconds[slots], kind="stable")].tolist()
    return order


def _rounded(seconds: float) -> float:
    return round(float(seconds), 6)

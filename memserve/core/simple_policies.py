"""Policies to compare `cost` with: see `policy.py`. None of them knows costs, and none fetches.

Each ranks the instances that could compute the prompt (colocated, or prefill), and, if a prefill
instance wins, the decode instances. The least rank wins; every rank ends in the place, so that
there are no ties.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeAlias

import numpy as np

from memserve.core.loads import Bools, Loads
from memserve.core.policy import Demand, Placement, Split, Splitting, eligible
from memserve.core.timeline import Detail, Number
from memserve.types import InstanceId

Rank: TypeAlias = tuple[int | float, ...]

_MAX_SESSIONS = 65_536
_SHOWN = 8


class RankingPolicy:
    """What the simple policies share. Subclasses rank."""

    name = ""

    def __init__(self, split: Split) -> None:
        self.splitting = Splitting(split)

    def place(self, demand: Demand, loads: Loads) -> Placement:
        """See `Policy`."""
        can = eligible(loads, self.splitting, may_wait=demand.may_wait)
        firsts = _places(can.computing)
        first = min(firsts, key=lambda slot: (*self.first_rank(slot, demand, loads), slot))
        considered, decode = firsts, None
        if can.prefill[first]:
            decodes = _places(can.decode)
            decode = min(decodes, key=lambda slot: (*self.decode_rank(slot, demand, loads), slot))
            considered = firsts + decodes
        chosen = [slot for slot in (first, decode) if slot is not None]
        others = [slot for slot in considered if slot not in chosen]
        reason: Detail = {
            "policy": self.name,
            "tokens": demand.num_tokens,
            **can.reason,
            "candidates": [_terms(slot, demand, loads) for slot in [*chosen, *others][:_SHOWN]],
        }
        return Placement(
            first=loads.instances[first],
            decode=None if decode is None else loads.instances[decode],
            fetch=None,
            cached_tokens=int(demand.found()[first]),
            explain=lambda: reason,
        )

    def first_rank(self, slot: int, demand: Demand, loads: Loads) -> Rank:
        """As the instance that computes the prompt."""
        return _work(slot, loads)

    def decode_rank(self, slot: int, demand: Demand, loads: Loads) -> Rank:
        """As the instance that generates."""
        return _work(slot, loads)

    def placed(self, demand: Demand, placement: Placement) -> None:
        """See `Policy`."""


class LeastLoaded(RankingPolicy):
    """The fewest prompt tokens to compute, then the fewest tokens in its requests."""

    name = "least_loaded"


class LongestPrefix(RankingPolicy):
    """The longest cached prefix, then the least work: a hot prefix keeps one instance busy."""

    name = "prefix"

    def first_rank(self, slot: int, demand: Demand, loads: Loads) -> Rank:
        return (-min(int(demand.cached_tokens[slot]), demand.num_tokens), *_work(slot, loads))

    decode_rank = first_rank


class SessionAffinity(RankingPolicy):
    """The instances that served the session before, as long as they are open; else the least work.

    Remembers the latest sessions, up to a bound.
    """

    name = "session"

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._homes: OrderedDict[str, tuple[InstanceId, InstanceId | None]] = OrderedDict()

    def first_rank(self, slot: int, demand: Demand, loads: Loads) -> Rank:
        home = self._homes.get(demand.session)
        is_home = home is not None and home[0] == loads.instances[slot]
        return (not is_home, *_work(slot, loads))

    def decode_rank(self, slot: int, demand: Demand, loads: Loads) -> Rank:
        home = self._homes.get(demand.session)
        is_home = home is not None and home[1] == loads.instances[slot]
        return (not is_home, *_work(slot, loads))

    def placed(self, demand: Demand, placement: Placement) -> None:
        self._homes[demand.session] = placement.first, placement.decode
        self._homes.move_to_end(demand.session)
        if len(self._homes) > _MAX_SESSIONS:
            self._homes.popitem(last=False)


class RoundRobin(RankingPolicy):
    """Whose last turn is longest ago, each kind by itself."""

    name = "round_robin"

    def __init__(self, split: Split) -> None:
        super().__init__(split)
        self._turn = 0
        self._last_turns: dict[InstanceId, int] = {}

    def first_rank(self, slot: int, demand: Demand, loads: Loads) -> Rank:
        return (self._last_turns.get(loads.instances[slot], 0),)

    decode_rank = first_rank

    def placed(self, demand: Demand, placement: Placement) -> None:
        self._turn += 1
        for instance in (placement.first, placement.decode):
            if instance is not None:
                self._last_turns[instance] = self._turn


def _places(mask: Bools) -> list[int]:
    places: list[int] = np.flatnonzero(mask).tolist()
    return places


def _work(slot: int, loads: Loads) -> Rank:
    return (
        int(loads.queued_tokens[slot]),
        int(loads.context_tokens[slot]),
        int(loads.num_requests[slot]),
    )


def _terms(slot: int, demand: Demand, loads: Loads) -> dict[str, Number]:
    return {
        "instance": loads.instances[slot],
        "cached_tokens": int(demand.cached_tokens[slot]),
        "queued_tokens": int(loads.queued_tokens[slot]),
        "running_tokens": int(loads.context_tokens[slot]),
        "running_requests": int(loads.num_requests[slot]),
    }

"""What the cost policy of today chooses in cases that were measured earlier.

Collaborators: `fetch_or_recompute.py` measures the cases, with the choices of its day.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from memserve.core.cost_model import CostModel
from memserve.core.fetch_times import FetchTimes
from memserve.core.loads import Loads, Share
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Split
from memserve.core.profile import Profile
from memserve.types import InstanceId, Role

SOURCE, TARGET = InstanceId("PD0"), InstanceId("PD1")


class Asked(Protocol):
    """A case; see `fetch_or_recompute.Case`."""

    prompt: int
    held: int
    own: int
    busy: int
    elapsed: float
    generating: int


class Replay:
    """Two colocated instances, as the scheduler of `fetch_or_recompute` sees them, one request
    after the other: each is placed, and what it really took is learnt."""

    def __init__(self, profile: Profile, link: str, block_size: int) -> None:
        self._cost = CostModel(profile)
        self._policy = make_policy("cost", Split.AUTO, self._cost, link)
        self._block_size = block_size
        self._fetch_times = FetchTimes(2)
        self._now = 0.0

    def request(self, case: Asked, way: str, seconds: float) -> str:
        """What is chosen now, `fetch` or `recompute`; then it goes that `way` and takes so long."""
        roles = dict.fromkeys((SOURCE, TARGET), Role.COLOCATED)
        loads = Loads(roles, self._cost)
        loads.fetch_times = self._fetch_times
        for instance in roles:
            loads.start(instance)
        now = self._now
        if case.busy:
            exec_s = self._cost.exec_s(case.busy)
            loads.add(SOURCE, Share(case.busy, exec_s, case.busy), now)
            now += case.elapsed * exec_s
        for _ in range(case.generating):
            loads.add(SOURCE, Share(case.prompt), now)
        loads.is_open[loads.slots[SOURCE]] = False
        demand = Demand(
            num_tokens=case.prompt,
            expected_tokens=1,
            cached_tokens=np.array([case.held, case.own], np.int64),
            dram_tokens=np.zeros(2, np.int64),
            block_size=self._block_size,
            session="",
            now=now,
        )
        placement = self._policy.place(demand, loads)
        assert placement.first == TARGET
        self._now = now + seconds
        if way == "recompute":
            self._cost.observe(case.prompt, case.own, seconds)
        elif placement.fetch is not None and placement.fetch.known_s is not None:
            fetch_s = seconds - self._cost.exec_s(case.prompt, case.held)  # the time to its token
            source = loads.slots[SOURCE]
            self._fetch_times.observe(source, placement.fetch.known_s, fetch_s, self._now)
        return "recompute" if placement.fetch is None else "fetch"

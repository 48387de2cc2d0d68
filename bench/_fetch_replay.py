"""What the cost policy of today chooses in a case that was measured earlier.

Collaborators: `fetch_or_recompute.py` measures the cases, with the choices of its day.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memserve.core.cost_model import CostModel
from memserve.core.loads import Loads, Share
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Split
from memserve.core.profile import Profile
from memserve.types import InstanceId, Role

SOURCE, TARGET = InstanceId("PD0"), InstanceId("PD1")


class Replay:
    """Two colocated instances, as the scheduler of `fetch_or_recompute` sees them. What it learns
    from fetches is not replayed."""

    def __init__(self, profile: Profile, link: str, block_size: int) -> None:
        self._cost = CostModel(profile)
        self._policy = make_policy("cost", Split.AUTO, self._cost, link)
        self._block_size = block_size

    def learn(self, prefills: Iterable[tuple[int, int, float]]) -> None:
        """What prefills took, in order: tokens, cached tokens, seconds."""
        for num_tokens, cached_tokens, seconds in prefills:
            self._cost.observe(num_tokens, cached_tokens, seconds)

    def choice(self, prompt: int, held: int, own: int, busy: int, elapsed: float) -> str:
        """`fetch` or `recompute`, of a prompt on the target; see `Case` for the arguments."""
        roles = dict.fromkeys((SOURCE, TARGET), Role.COLOCATED)
        loads = Loads(roles, self._cost)
        for instance in roles:
            loads.start(instance)
        now = 0.0
        if busy:
            exec_s = self._cost.exec_s(busy)
            loads.add(SOURCE, Share(busy, exec_s, busy), now)
            now = elapsed * exec_s
        loads.is_open[loads.slots[SOURCE]] = False
        demand = Demand(
            num_tokens=prompt,
            expected_tokens=1,
            cached_tokens=np.array([held, own], np.int64),
            dram_tokens=np.zeros(2, np.int64),
            block_size=self._block_size,
            session="",
            now=now,
        )
        placement = self._policy.place(demand, loads)
        assert placement.first == TARGET
        return "fetch" if placement.fetch is not None else "recompute"

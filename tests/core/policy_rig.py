"""What the tests of placement share: a cluster, as a policy sees it. Imports no vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from memserve.core.cost_model import BUILT_IN, CostModel
from memserve.core.loads import Counts, Loads, Share
from memserve.core.policies import PolicyName, make_policy
from memserve.core.policy import (
    Demand,
    Placement,
    Policy,
    Split,
)
from memserve.core.profile import LinkFit, Profile
from memserve.types import InstanceId, Role

BLOCK_SIZE = 16
SMALL_STEPS = msgspec.structs.replace(BUILT_IN, chunk_tokens=128)
"""Queues are many steps long."""
CALIBRATED = msgspec.structs.replace(SMALL_STEPS, source="calibrated")
ALL = ("cost", "prefix", "session", "least_loaded", "round_robin")


def slow_link(bytes_per_s: float) -> Profile:
    return msgspec.structs.replace(SMALL_STEPS, links={"shm": LinkFit(0.0, bytes_per_s)})


class Cluster:
    """Ready instances, named by role and number, and one policy."""

    def __init__(
        self,
        *names: str,
        policy: PolicyName = "cost",
        split: Split = Split.ALWAYS,
        profile: Profile = SMALL_STEPS,
        tp_of: dict[str, int] | None = None,
    ) -> None:
        roles = {InstanceId(name): Role(name.rstrip("0123456789")) for name in names}
        self.cost = CostModel(profile)
        self.loads = Loads(roles, self.cost, {InstanceId(i): n for i, n in (tp_of or {}).items()})
        for instance in roles:
            self.loads.start(instance)
        self.policy: Policy = make_policy(policy, split, self.cost, "shm")

    def queue(self, instance: str, num_tokens: int, count: int = 1, now: float = 0.0) -> None:
        """So many prompts of that length wait there."""
        share = Share(num_tokens, self.cost.exec_s(num_tokens), num_tokens)
        for _ in range(count):
            self.loads.add(InstanceId(instance), share, now)

    def run(self, instance: str, num_tokens: int, count: int = 1) -> None:
        """So many requests generate there."""
        for _ in range(count):
            self.loads.add(InstanceId(instance), Share(num_tokens), 0.0)

    def close(self, instance: str) -> None:
        self.loads.is_open[self.loads.slots[InstanceId(instance)]] = False

    def demand(
        self,
        num_tokens: int = 1000,
        cached: dict[str, int] | None = None,
        dram: dict[str, int] | None = None,
        **changes: Any,
    ) -> Demand:
        fields: dict[str, Any] = {"expected_tokens": 64, "session": "s", "now": 0.0}
        return Demand(
            num_tokens=num_tokens,
            cached_tokens=self._array(cached),
            dram_tokens=self._array(dram),
            block_size=BLOCK_SIZE,
            **{**fields, **changes},
        )

    def _array(self, tokens: dict[str, int] | None) -> Counts:
        return np.array([(tokens or {}).get(i, 0) for i in self.loads.instances], np.int64)

    def place(self, *args: Any, **changes: Any) -> Placement:
        return self.policy.place(self.demand(*args, **changes), self.loads)

    def chosen(self, *args: Any, **changes: Any) -> tuple[str, str | None]:
        demand = self.demand(*args, **changes)
        placement = self.policy.place(demand, self.loads)
        self.policy.placed(demand, placement)
        return placement.first, placement.decode


def roles_of(placement: Placement) -> tuple[str, str | None]:
    decode = placement.decode
    return placement.first.rstrip("0123456789"), decode and decode.rstrip("0123456789")


def terms(placement: Placement, instance: str) -> dict[str, Any]:
    candidates = placement.reason["candidates"]
    assert isinstance(candidates, list)
    (found,) = [entry for entry in candidates if entry["instance"] == instance]
    return found

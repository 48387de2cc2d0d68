"""The policies by name (`[scheduler] policy`): see `policy.py`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from memserve.core.cost_model import CostModel
from memserve.core.cost_policy import CostPolicy
from memserve.core.policy import Policy, Split
from memserve.core.simple_policies import (
    LeastLoaded,
    LongestPrefix,
    RankingPolicy,
    RoundRobin,
    SessionAffinity,
)

PolicyName: TypeAlias = Literal["cost", "prefix", "session", "least_loaded", "round_robin"]

_SIMPLE: dict[str, type[RankingPolicy]] = {
    kind.name: kind for kind in (LongestPrefix, SessionAffinity, LeastLoaded, RoundRobin)
}


def make_policy(name: PolicyName, split: Split, cost: CostModel, link: str) -> Policy:
    """A policy that has seen nothing yet. `link`: the kind over which KV travels.

    Raises: ValueError for a kind of link that the cost model does not know.
    """
    if name == "cost":
        is_calibrated = cost.profile.source == "calibrated"
        return CostPolicy(cost, link, split, is_calibrated=is_calibrated)
    return _SIMPLE[name](split)

"""A `memserve` in which single requests can be told where to run and whether to fetch.

    python -m bench._steered up …           as `python -m memserve up …`

A request whose `X-Session-Id` is `steer PD1 always` runs whole on PD1, which fetches what it lacks
and another instance holds (`never`: computes it; `auto`: as the policy likes). The reason in its
timeline says what the policy would have chosen there at that moment (`own_choice`, and the seconds
that it predicted for the two ways). So both ways and the choice between them are measured in one
run, under the scheduler's own loads. Other requests are placed as ever.

`$MEMSERVE_BENCH_PROFILE` names a cost profile to use instead of the one in force.

Only for benchmarks: it puts another policy in the place of the scheduler's.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from memserve import placing, profiles
from memserve.cli import main
from memserve.core.cost_model import CostModel
from memserve.core.loads import Loads
from memserve.core.policies import PolicyName, make_policy
from memserve.core.policy import Demand, Fetching, Placement, Policy, Split, with_fetch
from memserve.types import InstanceId

PROFILE = "MEMSERVE_BENCH_PROFILE"
REQUEST_TIMEOUT_S = 120.0


def header(instance: InstanceId, fetching: Fetching) -> str:
    """The `X-Session-Id` that steers a request."""
    return f"steer {instance} {fetching.value}"


def complete(
    url: str,
    prompt: list[int],
    instance: InstanceId,
    fetching: Fetching,
    max_tokens: int,
    **fields: Any,
) -> dict[str, Any]:
    """The answer to a greedy completion of so many tokens, steered. `fields`: more of the body.

    Raises: OSError if it fails, or takes too long.
    """
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **fields,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Session-Id": header(instance, fetching)},
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


class SteeredPolicy:
    """The policy of the cluster, or what a request's session says."""

    def __init__(self, own: Policy, profile_source: str) -> None:
        self._own = own
        self._profile_source = profile_source
        self.name, self.splitting = own.name, own.splitting

    def place(self, demand: Demand, loads: Loads) -> Placement:
        words = demand.session.split()
        if len(words) != 3 or words[0] != "steer":
            return self._own.place(demand, loads)
        first, fetching = InstanceId(words[1]), Fetching(words[2])
        was_open = loads.is_open.copy()
        loads.is_open[:] = False
        loads.is_open[loads.slots[first]] = True
        try:
            own = self._own.place(demand, loads)
            computing = msgspec.structs.replace(demand, may_fetch=False)
            placement = self._own.place(computing, loads)
        finally:
            loads.is_open[:] = was_open
        reason: dict[str, Any] = {
            **own.reason,
            "own_choice": "recompute" if own.fetch is None else "fetch",
            "recompute_s": _total_s(placement, first),
            "least_s": _total_s(own, first),
            "profile": self._profile_source,
        }
        if fetching is Fetching.ALWAYS and own.fetch is None:
            placement = with_fetch(placement, demand, loads)
        elif fetching is not Fetching.NEVER:
            placement = own
        return msgspec.structs.replace(placement, explain=lambda: reason)

    def placed(self, demand: Demand, placement: Placement) -> None:
        """See `Policy`."""
        self._own.placed(demand, placement)


def _total_s(placement: Placement, first: InstanceId) -> float:
    candidates: Any = placement.reason["candidates"]
    return float(next(entry["total_s"] for entry in candidates if entry["instance"] == first))


def _make_steered(policy: PolicyName, split: Split, cost: CostModel, link: str) -> SteeredPolicy:
    return SteeredPolicy(make_policy(policy, split, cost, link), cost.source)


if __name__ == "__main__":
    vars(placing)["make_policy"] = _make_steered
    if path := os.environ.get(PROFILE):
        profile = profiles.load(Path(path))
        vars(profiles)["in_force"] = lambda *_args, **_options: profile
    main()

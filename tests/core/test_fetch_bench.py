"""The bench of fetching or computing: requests that are steered, and who counts as right."""

from __future__ import annotations

import numpy as np
import pytest

from bench._steered import SteeredPolicy, header
from bench.fetch_or_recompute import Case, Sample
from memserve.core.cost_model import BUILT_IN, CostModel
from memserve.core.loads import Loads
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Fetching, Placement, Split
from memserve.types import InstanceId, Role

PD0, PD1 = InstanceId("PD0"), InstanceId("PD1")


def place(session: str, held: int, loads: Loads | None = None) -> Placement:
    """On two idle instances, of which the first holds the beginning of 1,000 tokens."""
    cost = CostModel(BUILT_IN)
    if loads is None:
        loads = idle(cost)
    demand = Demand(
        num_tokens=1000,
        cached_tokens=np.array([held, 0], np.int64),
        dram_tokens=np.zeros(2, np.int64),
        expected_tokens=1,
        session=session,
        now=0.0,
        block_size=16,
    )
    own = make_policy("cost", Split.AUTO, cost, "shm")
    return SteeredPolicy(own, "somewhere").place(demand, loads)


def idle(cost: CostModel) -> Loads:
    loads = Loads({PD0: Role.COLOCATED, PD1: Role.COLOCATED}, cost)
    loads.start(PD0)
    loads.start(PD1)
    return loads


@pytest.mark.parametrize(
    ("fetching", "is_fetched"),
    [(Fetching.ALWAYS, True), (Fetching.NEVER, False), (Fetching.AUTO, True)],
)
def test_a_steered_request_goes_where_and_how_it_is_told(
    fetching: Fetching, is_fetched: bool
) -> None:
    placement = place(header(PD1, fetching), held=512)
    assert placement.first == PD1 and (placement.fetch is not None) == is_fetched
    assert placement.reason["own_choice"] == "fetch"
    assert placement.reason["profile"] == "somewhere"
    least_s, recompute_s = placement.reason["least_s"], placement.reason["recompute_s"]
    assert isinstance(least_s, float) and isinstance(recompute_s, float)
    assert least_s < recompute_s


def test_what_would_not_be_fetched_can_be() -> None:
    loads = idle(CostModel(BUILT_IN))
    loads.add_transfer(PD0, PD1, 10**13)
    placement = place(header(PD1, Fetching.ALWAYS), 512, loads)
    assert placement.fetch is not None and placement.fetch.num_tokens == 512
    assert placement.reason["own_choice"] == "recompute"
    assert place(header(PD1, Fetching.AUTO), 512, loads).fetch is None
    assert loads.is_open.all()


@pytest.mark.parametrize("session", ["", "steer", "anything else at all", "to PD1"])
def test_other_requests_are_placed_as_ever(session: str) -> None:
    placement = place(session, held=512)
    assert placement.first == PD0 and "own_choice" not in placement.reason


def case(fetch_s: list[float], recompute_s: list[float], choices: str) -> Case:
    """`choices`: f or r, one per sample."""
    made = Case(100, 64, 0, 0, 0.0)
    words = iter({"f": "fetch", "r": "recompute"}[letter] for letter in choices)
    for way, times in (("fetch", fetch_s), ("recompute", recompute_s)):
        made.samples += [Sample(way, seconds, next(words), 0.0, True) for seconds in times]
    return made


def test_every_decision_counts_against_the_faster_way() -> None:
    clear = case([1.0, 1.1, 0.9], [2.0, 2.1, 1.9], "ffrfff")
    assert clear.faster == clear.usual_choice == "fetch" and clear.num_right == 5
    assert clear.loss("recompute") == pytest.approx(1.95 / 0.95 - 1)
    assert clear.loss("fetch") == 0.0


def test_what_differs_by_less_than_its_spread_is_a_tie() -> None:
    close = case([1.0, 1.4, 0.6], [1.1, 1.5, 0.7], "rrrrrr")
    assert close.faster == "tie" and close.num_right == 6
    assert close.loss("recompute") == pytest.approx(0.1 / 0.8)

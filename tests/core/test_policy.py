"""Placement: what the cost policy weighs, against a naive reckoning too; the policies beside it."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.cost_model import BUILT_IN, CostModel
from memserve.core.loads import Loads, Share
from memserve.core.policies import PolicyName, make_policy
from memserve.core.policy import (
    Demand,
    Placement,
    Policy,
    Split,
    Splitting,
    session_key,
    with_fetch,
)
from memserve.core.profile import LinkFit, Profile
from memserve.errors import UnavailableError
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

    def _array(self, tokens: dict[str, int] | None) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([(tokens or {}).get(i, 0) for i in self.loads.instances], np.int32)

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


# ── where the prompt is computed ──────────────────────────────────────────────────────────────


def test_the_cached_prefix_wins_while_its_instance_is_idle() -> None:
    cluster = Cluster("P0", "P1", "D0")
    placement = cluster.place(cached={"P1": 512})
    assert (placement.first, placement.decode, placement.fetch) == ("P1", "D0", None)
    assert placement.cached_tokens == 512


def test_work_is_counted_in_seconds_not_in_requests() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 2000)
    cluster.queue("P1", 16, count=4)
    assert cluster.chosen() == ("P1", "D0")


def test_everyone_is_reckoned_at_its_own_degree() -> None:
    cluster = Cluster("P0", "P1", "P2", "D0", "D1", tp_of={"P1": 2, "D1": 2})
    placement = cluster.place(num_tokens=2000)
    assert placement.first == "P1"
    two = cluster.cost.with_tp(2)
    assert [terms(placement, name)["exec_s"] for name in ("P0", "P1", "P2")] == pytest.approx(
        [cost.exec_s(2000) for cost in (cluster.cost, two, cluster.cost)], abs=2e-6
    )
    cluster.close("P1")
    fetching = cluster.place(num_tokens=2000, cached={"P1": 1984})
    assert fetching.fetch is not None and fetching.first == "P0"
    assert terms(fetching, "P0")["exec_s"] == pytest.approx(
        cluster.cost.exec_s(2000, 1984), abs=2e-6
    )
    for name, cost in (("D0", cluster.cost), ("D1", two)):
        step_s = cost.decode_step_s(1, 2000)
        assert terms(placement, name)["load_s"] == pytest.approx(64 * step_s, rel=1e-3)


def test_the_queue_shrinks_as_time_passes_but_never_below_what_has_not_begun() -> None:
    cluster = Cluster("P0")
    cluster.queue("P0", 1000, count=2, now=50.0)
    one = cluster.cost.exec_s(1000)
    times = [50.0, 50.0 + one / 2, 50.0 + one, 50.0 + 2 * one]
    assert [cluster.loads.queue_s(now)[0] for now in times] == pytest.approx(
        [2 * one, 1.5 * one, one, one]
    )


def test_an_instance_that_hangs_draws_no_more_prompts() -> None:
    """What it holds does not make up for what nobody knows the end of."""
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 100, now=0.0)
    assert cluster.loads.queue_s(10.0)[0] > 5.0 and cluster.loads.queue_s(10.0)[1] == 0.0
    assert cluster.chosen(now=10.0, cached={"P0": 992}) == ("P1", "D0")
    assert cluster.chosen(now=0.0, cached={"P0": 992})[0] == "P0"


def test_a_hot_prefix_gets_a_second_home_by_a_fetch_instead_of_a_queue() -> None:
    cluster = Cluster("P0", "P1", "D0")
    hot = {"P0": 992}
    placements = []
    for _ in range(4):
        placement = cluster.place(cached=hot)
        placements.append(placement)
        # Each that is placed there has its share to compute.
        cluster.loads.add(placement.first, Share(1000, cluster.cost.exec_s(1000, 992), 8), 0.0)
    assert placements[0].first == "P0" and placements[0].fetch is None
    fetched = [p for p in placements if p.first == "P1"]
    assert fetched and all(p.fetch is not None for p in fetched)
    assert fetched[0].fetch is not None
    assert (fetched[0].fetch.source, fetched[0].fetch.num_tokens) == ("P0", 992)
    assert fetched[0].cached_tokens == 992


def test_what_is_slower_to_fetch_than_to_compute_is_computed() -> None:
    cluster = Cluster("P0", "P1", "D0", profile=slow_link(1e5))
    cluster.queue("P0", 2000, count=20)
    placement = cluster.place(cached={"P0": 992})
    assert (placement.first, placement.fetch) == ("P1", None)
    assert placement.cached_tokens == 0


def test_a_busy_link_is_a_reason_to_compute() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 100, count=12)
    assert cluster.place(cached={"P0": 992}).fetch is not None
    cluster.loads.add_transfer(InstanceId("P0"), InstanceId("D0"), 10**12)
    placement = cluster.place(cached={"P0": 992})
    assert (placement.first, placement.fetch) == ("P1", None)


def test_idle_instances_compute_a_prefix_twice_and_busy_ones_queue_for_it() -> None:
    for others, chosen, followers in ((0, "P1", 0), (1, "P0", 1)):
        cluster = Cluster("P0", "P1", "P2", "D0")
        cluster.queue("P0", 1100)
        cluster.queue("P1", 16, count=others)
        cluster.queue("P2", 1100, count=others)
        placement = cluster.place(cached={"P0": 992}, may_fetch=False)
        assert (placement.first, placement.reason["followers"]) == (chosen, followers)


def test_a_long_prompt_does_not_overtake_those_who_fetch() -> None:
    for is_fetching, chosen in ((False, "P0"), (True, "P1")):
        cluster = Cluster("P0", "P1", "D0")
        exec_s = cluster.cost.exec_s(1000, 992)
        cluster.loads.add(InstanceId("P0"), Share(1000, exec_s, 8, is_fetching), 0.0)
        cluster.queue("P1", 400)
        assert cluster.chosen() == (chosen, "D0")


def test_what_waits_for_an_instance_counts_as_its_queue() -> None:
    cluster = Cluster("P0", "P1", "D0")
    held = {"P0": 992}
    assert cluster.chosen(cached=held, may_fetch=False) == ("P0", "D0")
    ahead_s = np.array([1000.0, 0.0, 0.0])
    placement = cluster.place(cached=held, may_fetch=False, ahead_s=ahead_s)
    assert placement.first == "P1" and terms(placement, "P0")["queue_s"] == 1000.0


def test_the_queue_counts_for_those_who_fetch_as_well() -> None:
    cluster = Cluster("P0", "P1", "P2", "D0")
    cluster.close("P0")
    cluster.queue("P1", 100, count=4)
    placement = cluster.place(cached={"P0": 992})
    assert placement.first == "P2" and placement.fetch is not None
    busy = terms(placement, "P1")
    # What is fetched travels while the queue is worked off.
    assert busy["queue_s"] > busy["fetch_s"]
    assert busy["total_s"] == pytest.approx(busy["queue_s"] + busy["exec_s"], abs=2e-6)


def test_a_fetch_waits_for_the_steps_that_both_engines_are_in() -> None:
    idle, busy = (Cluster("P0", "P1", "D0") for _ in range(2))
    for cluster in (idle, busy):
        cluster.close("P0")
    busy.run("P0", 1000, count=5)
    busy.run("P1", 1000, count=3)
    steps_s = (busy.cost.decode_step_s(5, 5000) + busy.cost.decode_step_s(3, 3000)) / 2
    waits = [terms(cluster.place(cached={"P0": 992}), "P1")["fetch_s"] for cluster in (idle, busy)]
    assert waits[1] - waits[0] == pytest.approx(steps_s, abs=2e-6)


def test_large_and_background_transfers_take_more_of_the_source_s_steps() -> None:
    def fetch_s(link: str, num_tokens: int) -> float:
        links = {"shm": LinkFit(0.0, 1e15), "ipc": LinkFit(0.0, 1e15), "dram": LinkFit(0.0, 1e15)}
        cluster = Cluster(
            "P0", "P1", "D0", profile=msgspec.structs.replace(SMALL_STEPS, links=links)
        )
        cluster.policy = make_policy("cost", Split.ALWAYS, cluster.cost, link)
        cluster.close("P0")
        cluster.run("P0", 1000)
        held = num_tokens // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        placement = cluster.place(num_tokens=num_tokens, cached={"P0": held})
        return float(terms(placement, "P1")["fetch_s"])

    step_s = CostModel(SMALL_STEPS).decode_step_s(1, 1000)
    portion = (32 << 20) // CostModel(BUILT_IN).kv_bytes(1)
    trips_s = 2.5e-3
    assert fetch_s("shm", 320) == pytest.approx(trips_s + step_s / 2, abs=2e-6)
    assert fetch_s("shm", 2 * portion + 160) == pytest.approx(trips_s + 2.5 * step_s, abs=2e-6)
    assert fetch_s("ipc", 320) == pytest.approx(trips_s + 1.5 * step_s, abs=2e-6)


def test_an_idle_source_is_asked_rather_than_a_busy_one() -> None:
    cluster = Cluster("P0", "P1", "P2", "D0")
    for busy in ("P0", "P1"):
        cluster.queue(busy, 100, count=4)
    cluster.loads.add_transfer(InstanceId("P0"), InstanceId("D0"), 10**9)
    equal = cluster.place(cached={"P0": 992, "P1": 992})
    assert equal.first == "P2" and equal.fetch is not None and equal.fetch.source == "P1"
    less = cluster.place(cached={"P0": 992, "P1": 976})
    assert less.fetch is not None and less.fetch.source == "P1"


def test_decode_instances_are_sources_too() -> None:
    placement = Cluster("P0", "D0").place(cached={"D0": 992})
    assert placement.fetch is not None
    assert (placement.fetch.source, placement.fetch.num_tokens) == ("D0", 992)


def test_an_instance_that_is_full_still_gives_but_one_that_is_lost_does_not() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.close("P0")
    placement = cluster.place(cached={"P0": 992})
    assert placement.first == "P1"
    assert placement.fetch is not None and placement.fetch.source == "P0"
    cluster.loads.end(InstanceId("P0"))
    assert cluster.place(cached={"P0": 992}).fetch is None


def test_what_the_source_holds_in_dram_is_fetched_at_the_cost_of_bringing_it() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.close("P0")
    in_hbm = cluster.place(cached={"P0": 992})
    placement = cluster.place(cached={"P0": 992}, dram={"P0": 512})
    assert placement.fetch is not None and placement.fetch.num_tokens == 992
    swap_s = cluster.cost.swap_in_s(cluster.cost.kv_bytes(512))
    expected_s = terms(in_hbm, "P1")["fetch_s"] + swap_s
    assert terms(placement, "P1")["fetch_s"] == pytest.approx(expected_s, abs=2e-6)


def test_what_the_receiver_has_in_dram_is_brought_and_does_not_travel() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.close("P0")
    in_hbm = cluster.place(cached={"P0": 992, "P1": 512})
    placement = cluster.place(cached={"P0": 992, "P1": 512}, dram={"P1": 512})
    swap_s = cluster.cost.swap_in_s(cluster.cost.kv_bytes(512))
    expected_s = terms(in_hbm, "P1")["fetch_s"] + swap_s
    assert terms(placement, "P1")["fetch_s"] == pytest.approx(expected_s, abs=2e-6)


def test_where_dram_is_slow_only_the_part_in_hbm_is_fetched() -> None:
    links = {**BUILT_IN.links, "dram": LinkFit(99.0, 1.0)}
    cluster = Cluster("P0", "P1", "D0", profile=msgspec.structs.replace(SMALL_STEPS, links=links))
    cluster.close("P0")
    placement = cluster.place(cached={"P0": 992}, dram={"P0": 512})
    assert placement.fetch is not None and placement.fetch.num_tokens == 480
    assert cluster.place(cached={"P0": 992}, dram={"P0": 992}).fetch is None


def test_of_equal_sources_the_one_that_has_it_in_hbm_is_asked() -> None:
    cluster = Cluster("P0", "P1", "P2", "D0")
    cluster.close("P0")
    cluster.close("P1")
    placement = cluster.place(cached={"P0": 992, "P1": 992}, dram={"P0": 16})
    assert placement.fetch is not None and placement.fetch.source == "P1"


def test_a_source_that_owes_an_answer_is_not_asked_again() -> None:
    cluster = Cluster("P0", "P1", "P2", "D0")
    cluster.close("P0")
    cluster.loads.add_owed(InstanceId("P0"), 1)
    assert cluster.place(cached={"P0": 992}).fetch is None
    placement = with_fetch(cluster.place(cached={"P0": 992}), cluster.demand(), cluster.loads)
    assert placement.fetch is None
    cluster.loads.add_owed(InstanceId("P0"), -1)
    assert cluster.place(cached={"P0": 992}).fetch is not None


def test_fetches_that_were_late_count_until_that_is_long_ago() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.close("P0")
    before = cluster.place(cached={"P0": 992}).fetch
    assert before is not None and before.predicted_s is not None
    cluster.loads.fetch_times.observe(0, before.predicted_s, before.predicted_s + 0.005, 0.0)
    after = cluster.place(cached={"P0": 992}).fetch
    assert after is not None and after.predicted_s == pytest.approx(before.predicted_s + 0.001)
    assert terms(cluster.place(cached={"P0": 992}), "P1")["fetch_late_s"] == 0.001
    for number in range(200):
        cluster.loads.fetch_times.observe(0, 99.0, 999.0, number * 0.1)
    assert cluster.place(cached={"P0": 992}, now=20.0).fetch is None
    assert cluster.place(cached={"P0": 992}, now=20.0 + 1200.0).fetch is not None


def test_what_fetches_were_early_comes_off_the_steps_that_they_wait_for_alone() -> None:
    def total_s(cluster: Cluster) -> float:
        return float(terms(cluster.place(cached={"P0": 992}), "P1")["total_s"])

    idle, busy = (Cluster("P0", "P1", "D0") for _ in range(2))
    for cluster in (idle, busy):
        cluster.close("P0")
    busy.run("P0", 1000, count=5)
    least_s = total_s(idle)
    assert total_s(busy) > least_s
    for cluster in (idle, busy):
        for _ in range(200):
            cluster.loads.fetch_times.observe(0, 1.0, 0.0, 0.0)
        assert total_s(cluster) == least_s


def test_what_is_learnt_of_early_fetches_settles() -> None:
    """However many come sooner than messages and link should allow."""
    cluster = Cluster("P0", "P1", "D0")
    cluster.close("P0")
    for _ in range(200):
        fetch = cluster.place(cached={"P0": 992}).fetch
        assert fetch is not None and fetch.predicted_s is not None
        cluster.loads.fetch_times.observe(0, fetch.predicted_s, 0.004, 0.0)
    assert fetch.predicted_s == pytest.approx(0.004)


def test_the_last_step_of_a_prompt_is_waited_for_to_its_end() -> None:
    """What else the source has to do comes after the fetch, so no further step counts."""
    cluster = Cluster("P0", "P1", "D0", profile=CALIBRATED)
    cluster.close("P0")
    idle_s = terms(cluster.place(cached={"P0": 992}), "P1")["fetch_s"]
    cluster.queue("P0", 128)
    for now in (0.0, 0.01):
        queue_s = cluster.loads.queue_s(now)[0]
        placement = cluster.place(cached={"P0": 992}, now=now)
        waits_s = terms(placement, "P1")["fetch_s"] - idle_s
        assert waits_s == pytest.approx(queue_s, abs=2e-6)


def test_kv_in_dram_costs_its_way_back_or_is_computed() -> None:
    cluster = Cluster("P0", "P1", "D0")
    in_hbm, in_dram = (
        cluster.place(cached={"P0": 992}),
        cluster.place(cached={"P0": 992}, dram={"P0": 992}),
    )
    swapped = terms(in_dram, "P0")["exec_s"]
    swap_s = cluster.cost.swap_in_s(cluster.cost.kv_bytes(992))
    assert swapped == pytest.approx(terms(in_hbm, "P0")["exec_s"] + swap_s, abs=2e-6)
    slow = msgspec.structs.replace(
        SMALL_STEPS, links={**BUILT_IN.links, "dram": LinkFit(99.0, 1.0)}
    )
    cluster = Cluster("P0", "D0", profile=slow)
    computed = terms(cluster.place(cached={"P0": 992}, dram={"P0": 992}), "P0")["exec_s"]
    assert computed == pytest.approx(cluster.cost.exec_s(1000), abs=1e-6)


def test_the_last_token_is_computed_so_its_block_is_never_fetched() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.close("P0")
    placement = cluster.place(num_tokens=1008, cached={"P0": 1008})
    assert placement.fetch is not None and placement.fetch.num_tokens == 992
    assert cluster.place(num_tokens=16, cached={"P0": 16}).fetch is None


def test_no_fetch_where_nothing_may_be_kept() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 100, count=4)
    assert cluster.place(cached={"P0": 992}, may_fetch=False).fetch is None


def test_between_equals_the_emptier_pool_wins() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.loads.set_room(InstanceId("P0"), free_tokens=10_000, empty_tokens=100)
    cluster.loads.set_room(InstanceId("P1"), free_tokens=10_000, empty_tokens=9_000)
    assert cluster.chosen() == ("P1", "D0")


def test_a_prompt_that_is_being_computed_counts_where_it_is_but_cannot_be_fetched() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 500)
    coming = cluster.demand(coming_tokens=np.array([992, 0, 0], np.int64))
    placement = cluster.policy.place(coming, cluster.loads)
    assert (placement.first, placement.fetch, placement.cached_tokens) == ("P0", None, 992)
    assert cluster.chosen() == ("P1", "D0")
    cluster.close("P0")
    assert cluster.policy.place(coming, cluster.loads).fetch is None


# ── where it generates ────────────────────────────────────────────────────────────────────────


def test_decode_goes_where_it_adds_least_to_everybody_s_steps() -> None:
    cluster = Cluster("P0", "D0", "D1")
    cluster.run("D0", 1000, count=8)
    cluster.run("D1", 1000, count=7)
    assert cluster.chosen() == ("P0", "D1")


def test_load_is_what_a_request_adds_to_the_steps_of_all() -> None:
    cluster = Cluster("P0", "D0")
    cluster.run("D0", 500, count=3)
    step_s = cluster.cost.decode_step_s
    added_s = 64 * (4 * step_s(4, 1500 + 1000) - 3 * step_s(3, 1500))
    assert terms(cluster.place(), "D0")["load_s"] == pytest.approx(added_s, abs=2e-6)


def test_decode_goes_where_the_prompt_is_if_loads_are_equal() -> None:
    cluster = Cluster("P0", "D0", "D1", profile=slow_link(1e7))
    assert cluster.chosen(cached={"D1": 992, "P0": 992}) == ("P0", "D1")
    cluster.run("D1", 2000, count=200)
    assert cluster.chosen(cached={"D1": 992, "P0": 992}) == ("P0", "D0")


def test_decode_avoids_a_pool_without_room_unless_all_are_full() -> None:
    cluster = Cluster("P0", "D0", "D1")
    cluster.loads.set_room(InstanceId("D0"), free_tokens=1063, empty_tokens=1063)
    cluster.run("D1", 1000, count=20)
    assert cluster.chosen() == ("P0", "D1")
    cluster.loads.set_room(InstanceId("D1"), free_tokens=10, empty_tokens=10)
    assert cluster.chosen() == ("P0", "D0")
    cluster.loads.set_room(InstanceId("D0"), free_tokens=1064, empty_tokens=0)
    assert cluster.chosen() == ("P0", "D0")


# ── whole or split ────────────────────────────────────────────────────────────────────────────


def test_a_short_prompt_runs_whole_where_that_is_faster_if_the_costs_are_calibrated() -> None:
    short = {"num_tokens": 20, "cached": {"D0": 16}}
    auto = Cluster("P0", "D0", split=Split.AUTO, profile=CALIBRATED)
    auto.queue("P0", 1000)
    assert auto.chosen(**short) == ("D0", None)
    guess = Cluster("P0", "D0", split=Split.AUTO)
    guess.queue("P0", 1000)
    assert guess.chosen(**short) == ("P0", "D0")
    always = Cluster("P0", "D0", split=Split.ALWAYS, profile=CALIBRATED)
    always.queue("P0", 1000)
    assert always.chosen(**short) == ("P0", "D0")


def test_a_long_prompt_is_split_where_it_would_stall_others() -> None:
    cluster = Cluster("P0", "D0", split=Split.AUTO, profile=CALIBRATED)
    cluster.run("D0", 500, count=8)
    assert cluster.chosen(num_tokens=2000) == ("P0", "D0")


def test_colocated_instances_compete_with_pairs_by_time() -> None:
    cluster = Cluster("P0", "D0", "PD0")
    cluster.queue("P0", 2000, count=4)
    assert cluster.chosen() == ("PD0", None)
    cluster.run("PD0", 1000, count=30)
    cluster.queue("PD0", 2000, count=4)
    assert cluster.chosen() == ("P0", "D0")


@pytest.mark.parametrize("policy", ALL)
def test_never_split_leaves_prefill_instances_alone(policy: PolicyName) -> None:
    cluster = Cluster("P0", "D0", "D1", policy=policy, split=Split.NEVER)
    cluster.queue("D0", 1000)
    cached = {"P0": 992} if policy == "cost" else {}
    assert cluster.chosen(cached=cached) in (
        [("D0", None)] if policy == "round_robin" else [("D1", None)]
    )


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("split", [Split.AUTO, Split.NEVER])
@pytest.mark.parametrize(("lost", "left"), [("P", "D"), ("D", "P")])
def test_whoever_lives_stands_in_for_those_who_do_not(
    lost: str, left: str, split: Split, policy: PolicyName
) -> None:
    cluster = Cluster("P0", "P1", "D0", "D1", policy=policy, split=split)
    usual = ("D", None) if split is Split.NEVER else ("P", "D")
    assert roles_of(cluster.place()) == usual
    for name in (f"{lost}0", f"{lost}1"):
        cluster.loads.end(InstanceId(name))
    placement = cluster.place()
    assert roles_of(placement) == (left, None)
    is_missed = split is Split.AUTO or lost == "D"
    reason = placement.reason.get("runs whole")
    word = "prefill" if lost == "P" else "decode"
    assert reason == (f"no {word} instance answers" if is_missed else None)
    assert {terms(placement, f"{left}{i}")["instance"] for i in (0, 1)} == {f"{left}0", f"{left}1"}
    cluster.loads.start(InstanceId(f"{lost}0"))
    assert roles_of(cluster.place()) == usual


@pytest.mark.parametrize("lost", ["P0", "D0"])
def test_who_is_full_is_not_replaced(lost: str) -> None:
    """Without calibrated costs nobody can tell whether running whole is faster than waiting."""
    cluster = Cluster("P0", "D0", split=Split.AUTO)
    cluster.close(lost)
    with pytest.raises(UnavailableError):
        cluster.place()
    there, free = {Role.PREFILL, Role.DECODE}, {Role.PREFILL, Role.DECODE} - {Role(lost[0])}
    assert not Splitting(Split.AUTO).can_place(there, free)
    can_tell = Splitting(Split.AUTO, can_tell=True)
    assert can_tell.can_place(there, free) is (lost == "P0")


def test_the_better_stand_in_is_chosen_by_time() -> None:
    cluster = Cluster("P0", "D0", "PD0", split=Split.AUTO)
    cluster.loads.end(InstanceId("P0"))
    cluster.queue("D0", 2000)
    assert cluster.chosen() == ("PD0", None)
    cluster.queue("PD0", 2000, count=3)
    assert cluster.chosen() == ("D0", None)


@pytest.mark.parametrize(
    ("roles", "split", "expected"),
    [
        ({Role.COLOCATED}, Split.ALWAYS, True),
        ({Role.PREFILL, Role.DECODE}, Split.AUTO, True),
        ({Role.DECODE}, Split.AUTO, True),
        ({Role.PREFILL}, Split.AUTO, True),
        ({Role.DECODE}, Split.NEVER, True),
        ({Role.PREFILL}, Split.NEVER, True),
        ({Role.DECODE}, Split.ALWAYS, False),
        ({Role.PREFILL}, Split.ALWAYS, False),
        (set(), Split.NEVER, False),
        (set(), Split.AUTO, False),
    ],
)
def test_which_roles_can_serve(roles: set[Role], split: Split, expected: bool) -> None:
    assert Splitting(split).can_place(roles) is expected
    names = [f"{role.value}0" for role in roles]
    cluster = Cluster(*names, split=split)
    if expected:
        cluster.place()
    else:
        with pytest.raises(UnavailableError, match="no instance is ready"):
            cluster.place()


# ── every policy ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ALL)
def test_reasons_name_the_policy_and_the_candidates_and_travel_as_json(policy: PolicyName) -> None:
    cluster = Cluster(*(f"P{i}" for i in range(20)), "D0", "D1", "PD0", policy=policy)
    cluster.queue("P0", 2000, count=4)
    placement = cluster.place(cached={"P0": 992})
    assert placement.reason["policy"] == policy
    reason = msgspec.json.decode(msgspec.json.encode(placement.reason))
    shown = [entry["instance"] for entry in reason["candidates"]]
    assert placement.first in shown and placement.decode in [*shown, None]
    assert len(shown) <= 8


def test_the_cost_policy_explains_a_fetch_in_seconds() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 100, count=4)
    placement = cluster.place(cached={"P0": 992})
    assert placement.first == "P1"
    holder, chosen = terms(placement, "P0"), terms(placement, "P1")
    assert holder["queue_s"] == pytest.approx(4 * cluster.cost.exec_s(100), abs=1e-6)
    assert placement.reason["followers"] == 0, "half of them are idle"
    assert holder["total_s"] == pytest.approx(holder["queue_s"] + holder["exec_s"], abs=2e-6)
    assert (chosen["fetch_from"], chosen["fetch_tokens"]) == ("P0", 992)
    assert chosen["total_s"] == pytest.approx(chosen["fetch_s"] + chosen["exec_s"], abs=2e-6)
    assert terms(placement, "D0")["load_s"] > 0


def test_longest_prefix_keeps_to_the_holder_whatever_its_queue() -> None:
    cluster = Cluster("P0", "P1", "D0", policy="prefix")
    cluster.queue("P0", 2000, count=50)
    assert cluster.chosen(cached={"P0": 16}) == ("P0", "D0")
    assert cluster.chosen() == ("P1", "D0")


def test_least_loaded_does_not_look_at_caches() -> None:
    cluster = Cluster("P0", "P1", "D0", "D1", policy="least_loaded")
    cluster.queue("P0", 16)
    cluster.run("D0", 16)
    assert cluster.chosen(cached={"P0": 992, "D0": 992}) == ("P1", "D1")


def test_round_robin_takes_turns_and_skips_who_is_full() -> None:
    cluster = Cluster("P0", "P1", "P2", "D0", "D1", policy="round_robin")
    turns = [cluster.chosen() for _ in range(4)]
    assert turns == [("P0", "D0"), ("P1", "D1"), ("P2", "D0"), ("P0", "D1")]
    cluster.close("P1")
    assert [cluster.chosen()[0] for _ in range(2)] == ["P2", "P0"]


def test_a_session_stays_where_it_began_and_moves_when_it_must() -> None:
    cluster = Cluster("P0", "P1", "D0", "D1", policy="session")
    assert cluster.chosen(session="a") == ("P0", "D0")
    cluster.queue("P0", 2000, count=9)
    cluster.run("D0", 2000, count=9)
    assert cluster.chosen(session="b") == ("P1", "D1")
    assert cluster.chosen(session="a", cached={"P1": 992}) == ("P0", "D0")
    cluster.close("P0")
    assert cluster.chosen(session="a") == ("P1", "D0")


def test_sessions_are_told_apart_by_name_or_else_by_how_they_begin() -> None:
    block_bytes = BLOCK_SIZE * 4
    first, second = b"\1" * 10 * block_bytes, b"\1" * 9 * block_bytes + b"\2" * block_bytes
    assert session_key("name", first, block_bytes) == session_key("name", b"", block_bytes)
    assert session_key(None, first, block_bytes) == session_key("", second, block_bytes)
    assert session_key("", first, block_bytes) != session_key("", first[: -3 * block_bytes], 64)


# ── against a naive reckoning ─────────────────────────────────────────────────────────────────

NAMES = ["P0", "P1", "P2", "D0", "D1", "PD0"]
work = st.tuples(st.integers(0, 3), st.integers(0, 20))
holdings = st.integers(0, 62).map(lambda blocks: blocks * BLOCK_SIZE)


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(
    works=st.lists(work, min_size=6, max_size=6),
    cached=st.lists(holdings, min_size=6, max_size=6),
    busy=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    speed=st.sampled_from([1e5, 1e8, 1e10]),
    closed=st.sets(st.sampled_from(NAMES), max_size=3),
)
def test_nothing_that_the_policy_may_choose_is_faster(
    works: list[tuple[int, int]],
    cached: list[int],
    busy: list[int],
    speed: float,
    closed: set[str],
) -> None:
    profile = msgspec.structs.replace(
        CALIBRATED, links={"shm": LinkFit(1e-4, speed), "dram": LinkFit(0.0, 1e9)}
    )
    cluster = Cluster(*NAMES, profile=profile)
    for name, (queued, running), level in zip(NAMES, works, busy, strict=True):
        cluster.queue(name, 700, queued)
        cluster.run(name, 900, running)
        cluster.loads.add_transfer(InstanceId(name), InstanceId("D0"), level * 10**6)
    for name in closed:
        cluster.close(name)
    held = dict(zip(NAMES, cached, strict=True))
    naive = Naive(cluster, held)
    options = naive.options()
    if not options:
        with pytest.raises(UnavailableError):
            cluster.place(cached=held)
        return
    placement = cluster.place(cached=held)
    source = placement.fetch.source if placement.fetch is not None else None
    chosen = naive.seconds(placement.first, placement.decode, source)
    # Of the sources it looks only at those that hold most: a better one may be in a shorter step.
    tolerance = 3 * naive.longest_turn_s + 200e-6
    best = min(naive.seconds(*option) for option in options)
    assert chosen <= best * 1.03 + tolerance, (
        placement,
        min(options, key=lambda o: naive.seconds(*o)),
    )


class Naive:
    """The module's formulas, one instance at a time."""

    def __init__(self, cluster: Cluster, held: dict[str, int]) -> None:
        self.cluster, self.held = cluster, held
        self.longest_turn_s = max(map(self.step_s, NAMES))

    def options(self) -> list[tuple[str, str | None, str | None]]:
        is_open = {name for name in NAMES if self.cluster.loads.is_open[self.slot(name)]}
        pairs = list(
            itertools.product([n for n in NAMES if n[:1] == "P" and n != "PD0"], ["D0", "D1"])
        )
        places: list[tuple[str, str | None]] = [*pairs, ("PD0", None)]
        return [
            (first, decode, source)
            for first, decode in places
            if first in is_open and (decode is None or decode in is_open)
            for source in [None, *(n for n in NAMES if self.held[n] > self.held[first])]
        ]

    def slot(self, name: str) -> int:
        return self.cluster.loads.slots[InstanceId(name)]

    def step_s(self, name: str, part: float = 1.0) -> float:
        loads, slot = self.cluster.loads, self.slot(name)
        queue_s = min(float(loads.queue_s(0.0)[slot]), self.cluster.cost.exec_s(128) * part)
        has_decodes = loads.num_requests[slot] > loads.num_prefills[slot]
        return queue_s + (float(loads.step_s[slot]) * part if has_decodes else 0.0)

    def rest_s(self, name: str) -> float:
        return self.step_s(name, 0.5)

    def seconds(self, first: str, decode: str | None, source: str | None) -> float:
        loads, cost = self.cluster.loads, self.cluster.cost
        slot = self.slot(first)
        start = float(loads.queue_s(0.0)[slot])
        tokens = self.held[first]
        if source is not None:
            size = cost.kv_bytes(self.held[source] - tokens)
            before = max(loads.sending_bytes[self.slot(source)], loads.receiving_bytes[slot])
            link = cost.profile.links["shm"]
            turns = (size + before) // (32 << 20)
            turns_s = self.rest_s(source) + self.rest_s(first) + turns * self.step_s(source)
            fetch_s = 1e-3 + turns_s + link.seconds(float(size + before))
            start, tokens = max(start, fetch_s), self.held[source]
        exec_s = cost.exec_s(1000, tokens)
        runner = self.slot(decode or first)
        count, context = int(loads.num_requests[runner]), int(loads.context_tokens[runner])
        before_s = count * cost.decode_step_s(count, context)
        after_s = (count + 1) * cost.decode_step_s(count + 1, context + 1000)
        stalled = int(loads.num_requests[slot] - loads.num_prefills[slot])
        open_firsts = [n for n in NAMES if n[0] == "P" and loads.is_open[self.slot(n)]]
        waiting = sorted(int(loads.num_prefills[self.slot(n)]) for n in open_firsts)
        followers = waiting[(len(waiting) - 1) // 2]
        seconds = start + exec_s * (1 + stalled + followers) + 64 * (after_s - before_s)
        if decode is None:
            return seconds
        missing = max(992 - self.held[decode], 0)
        size = cost.kv_bytes(missing) + int(loads.receiving_bytes[runner])
        return seconds + cost.profile.links["shm"].seconds(float(size))


# ── loads ─────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9), st.booleans()), max_size=40))
def test_loads_add_up_whatever_comes_and_goes(
    moves: list[tuple[int, int, bool]],
) -> None:
    cluster = Cluster("P0", "D0")
    there: list[tuple[InstanceId, Share]] = []
    for now, (place, size, is_removal) in enumerate(moves):
        if is_removal and there:
            cluster.loads.remove(*there.pop(size % len(there)), float(now))
        else:
            instance = cluster.loads.instances[place]
            share = Share(size * 10, size * 0.1, size * 3 if size else 0, size % 3 == 1)
            there.append((instance, share))
            cluster.loads.add(instance, share, float(now))
        cluster.loads.check_integrity()
        for slot, instance in enumerate(cluster.loads.instances):
            shares = [share for holder, share in there if holder == instance]
            assert cluster.loads.num_requests[slot] == len(shares)
            assert cluster.loads.queued_tokens[slot] == sum(s.queued_tokens for s in shares)
            queue_s = cluster.loads.queue_s(float(now))[slot]
            assert queue_s <= sum(s.prefill_s for s in shares) + now + 1e-9
    for instance, share in there:
        cluster.loads.remove(instance, share, 99.0)
    assert not cluster.loads.queue_s(99.0).any() and not cluster.loads.num_requests.any()
    assert not cluster.loads.step_s.any()

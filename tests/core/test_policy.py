"""Where the cost policy has a prompt computed, and what of it is fetched."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from memserve.core.builtin import built_in
from memserve.core.cost_model import BUILT_IN
from memserve.core.loads import Share
from memserve.core.policies import make_policy
from memserve.core.policy import (
    Split,
    with_fetch,
)
from memserve.core.profile import LinkFit, Profile
from memserve.simulator.setup import MODELS
from memserve.types import InstanceId
from tests.core.policy_rig import (
    BLOCK_SIZE,
    CALIBRATED,
    SMALL_STEPS,
    Cluster,
    slow_link,
    terms,
)

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


def test_what_d_lacks_of_a_very_long_prompt_is_counted_in_full() -> None:
    """More bytes than 32 bits can count."""
    cluster = Cluster("P0", "D0", "D1", profile=slow_link(1e9))
    assert cluster.cost.kv_bytes(100_000) > 2**31
    assert cluster.chosen(num_tokens=100_000, cached={"D1": 90_000}) == ("P0", "D1")


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


def test_a_prefix_finds_no_second_home_where_it_displaces_what_is_asked_for() -> None:
    for empty, share, first in (
        (1000, 1.0, "P1"),
        (0, 0.0, "P1"),
        (0, 1.0, "P0"),
        (991, 1.0, "P1"),
    ):
        cluster = Cluster("P0", "P1", "D0")
        held = cluster.demand(cached={"P0": int(share * 992)})
        for _ in range(300):
            cluster.policy.placed(held, cluster.policy.place(held, cluster.loads))
        cluster.queue("P0", 400)
        cluster.loads.set_room(InstanceId("P1"), free_tokens=10**6, empty_tokens=empty)
        placement = cluster.place(cached={"P0": 992})
        assert placement.first == first, (empty, share)
        assert ("displaced_s" in terms(placement, "P1")) == (empty < 1000 and share > 0)


def test_short_prompts_say_little_of_what_the_pools_hold() -> None:
    cluster = Cluster("P0", "P1", "D0")
    document = cluster.demand(cached={"P0": 992})
    greeting = cluster.demand(num_tokens=10)
    for demand in (document, greeting) * 500:
        cluster.policy.placed(demand, cluster.policy.place(demand, cluster.loads))
    cluster.loads.set_room(InstanceId("P1"), free_tokens=10**6, empty_tokens=0)
    displaced_s = terms(cluster.place(cached={"P0": 992}), "P1")["displaced_s"]
    assert displaced_s == pytest.approx(992 / 1010 * cluster.cost.exec_s(1000), rel=0.03)


def test_a_cpu_s_engine_serves_between_its_steps_whatever_the_link() -> None:
    on_cpu = msgspec.structs.replace(SMALL_STEPS, device="cpu-1")
    waits = []
    for link in ("shm", "ipc"):
        cluster = at_once(link, on_cpu)
        cluster.run("P0", 1000)
        waits.append(fetch_s(cluster, 320) - TRIPS_S)
    step_s = cluster.cost.decode_step_s(1, 1000)
    assert waits == pytest.approx([step_s / 2, 1.5 * step_s], abs=2e-6)


def test_what_is_displaced_costs_what_computing_it_again_will() -> None:
    cluster = Cluster("P0", "P1", "D0")
    held = cluster.demand(cached={"P0": 500})
    for _ in range(1000):
        cluster.policy.placed(held, cluster.policy.place(held, cluster.loads))
    cluster.loads.set_room(InstanceId("P1"), free_tokens=10**6, empty_tokens=200)
    displaced_s = terms(cluster.place(cached={"P1": 400}), "P1")["displaced_s"]
    lost = (1000 - 400 - 200) / 1000
    assert displaced_s == pytest.approx(lost * 0.5 * cluster.cost.exec_s(1000), rel=0.01)


TRIPS_S = 0.5e-3
"""What a fetch takes where nobody has anything else to do, and the link takes no time."""


def at_once(link: str, profile: Profile = SMALL_STEPS) -> Cluster:
    """P0 is to be fetched from, over a link that takes no time."""
    links = {"shm": LinkFit(0.0, 1e15), "ipc": LinkFit(0.0, 1e15), "dram": LinkFit(0.0, 1e15)}
    cluster = Cluster("P0", "P1", "D0", profile=msgspec.structs.replace(profile, links=links))
    cluster.policy = make_policy("cost", Split.ALWAYS, cluster.cost, link)
    cluster.close("P0")
    return cluster


def fetch_s(cluster: Cluster, num_tokens: int, **changes: Any) -> float:
    held = num_tokens // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    placement = cluster.place(num_tokens=num_tokens, cached={"P0": held}, **changes)
    return float(terms(placement, "P1")["fetch_s"])


def test_large_transfers_take_more_of_the_source_s_steps_where_it_copies_itself() -> None:
    cluster = at_once("shm")
    cluster.run("P0", 1000)
    step_s = cluster.cost.decode_step_s(1, 1000)
    portion = (32 << 20) // cluster.cost.kv_bytes(1)
    assert fetch_s(cluster, 320) == pytest.approx(TRIPS_S + step_s / 2, abs=2e-6)
    waits_s = fetch_s(cluster, 2 * portion + 160) - TRIPS_S
    assert waits_s == pytest.approx(2.5 * step_s, abs=2e-6)


H200 = msgspec.structs.replace(built_in(MODELS["llama-3.1-8b"], "NVIDIA H200"), source="calibrated")


def test_an_engine_on_a_gpu_keeps_a_fetch_waiting_only_while_it_launches() -> None:
    cluster = at_once("ipc", H200)
    cluster.queue("P0", 30_000)
    chunk_s, launch_s = cluster.cost.exec_s(8192), cluster.cost.launch_s(8192)
    assert launch_s < chunk_s / 10
    launching_s = launch_s**2 / (2 * chunk_s)
    assert fetch_s(cluster, 8000) == pytest.approx(TRIPS_S + launching_s, abs=2e-6)
    cluster.run("P1", 1000)
    decode_s = cluster.cost.decode_step_s(1, 1000)
    waits_s = fetch_s(cluster, 8000) - TRIPS_S
    assert waits_s == pytest.approx(launching_s + decode_s / 8, abs=2e-6)


def test_a_short_prompt_is_launched_all_the_time() -> None:
    cluster = at_once("ipc", H200)
    exec_s, launch_s = cluster.cost.exec_s(256), cluster.cost.launch_s(256)
    assert exec_s < 1.5 * launch_s
    cluster.queue("P0", 256)
    waits_s = fetch_s(cluster, 8000) - TRIPS_S
    assert waits_s == pytest.approx(launch_s**2 / (2 * exec_s), rel=1e-3)


def test_what_the_source_is_computing_just_now_is_waited_for() -> None:
    cluster = at_once("ipc", H200)
    before_s = fetch_s(cluster, 20_000)
    cluster.queue("P0", 30_000)
    launching_s = fetch_s(cluster, 20_000) - before_s
    held = 20_000 // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
    for coming, rest_s in ((held - BLOCK_SIZE, 0.0), (held, cluster.cost.exec_s(8192) / 2)):
        tokens = np.array([coming, 0, 0], np.int64)
        waits_s = fetch_s(cluster, 20_000, coming_tokens=tokens) - before_s - launching_s
        assert waits_s == pytest.approx(rest_s, abs=2e-6)


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
    assert before is not None and before.known_s is not None
    for _ in range(5):
        cluster.loads.fetch_times.observe(0, before.known_s, before.known_s + 0.001, 0.0)
    after = cluster.place(cached={"P0": 992}).fetch
    assert after is not None and after.predicted_s == pytest.approx(before.known_s + 0.001)
    late_s = terms(cluster.place(cached={"P0": 992}), "P1")["fetch_late_s"]
    assert late_s == pytest.approx(0.001)
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
    late_s = []
    for _ in range(200):
        fetch = cluster.place(cached={"P0": 992}).fetch
        assert fetch is not None and fetch.known_s is not None
        cluster.loads.fetch_times.observe(0, fetch.known_s, 0.004, 0.0)
        late_s.append(cluster.loads.fetch_times.late_s(0, 0.0))
    assert fetch.known_s + late_s[9] == pytest.approx(0.004)
    assert late_s[-1] == pytest.approx(late_s[9])


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

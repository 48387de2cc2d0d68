"""Where a request generates, whether it runs whole, and the policies beside the cost policy."""

from __future__ import annotations

import msgspec
import pytest

from memserve.core.policies import PolicyName
from memserve.core.policy import (
    Split,
    Splitting,
    session_key,
)
from memserve.errors import UnavailableError
from memserve.types import InstanceId, Role
from tests.core.policy_rig import (
    ALL,
    BLOCK_SIZE,
    CALIBRATED,
    Cluster,
    roles_of,
    slow_link,
    terms,
)

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


def test_a_reason_is_that_of_the_moment_of_the_decision() -> None:
    cluster = Cluster("P0", "P1", "D0")
    cluster.queue("P0", 100, count=4)
    for _ in range(5):
        cluster.loads.fetch_times.observe(0, 1e-3, 2e-3, 0.0)
    asked_at_once, asked_later = (cluster.place(cached={"P0": 992}) for _ in range(2))
    reason = asked_at_once.reason
    assert "fetch_late_s" in terms(asked_at_once, "P1")
    for _ in range(5):
        cluster.loads.fetch_times.observe(0, 1e-3, 9e-3, 0.0)
    cluster.queue("P1", 500, count=3)
    cluster.run("D0", 900, count=3)
    cluster.close("P1")
    assert asked_later.reason == reason


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

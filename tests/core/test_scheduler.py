"""The global scheduler: who waits, who is refused, who is next, and books that always agree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.policy import Fetching, Split
from memserve.core.vocabulary import Seat
from memserve.errors import OverloadedError, UnavailableError
from memserve.messages import CacheChanged, SendSnapshot
from memserve.types import InstanceId, RequestId, Role
from tests.core.scheduler_rig import MANY, ONE, PAIR, PROMPT_S, TWO, Rig, rig_of


@pytest.mark.parametrize("roles", [ONE, PAIR, MANY])
def test_requests_run_to_their_end(roles: dict[str, Role]) -> None:
    rig = rig_of(roles)
    for number in range(4):
        rig.submit(str(number))
    rig.run()
    assert set(rig.ended.values()) == {"final"}
    rig.check_quiet()


def test_more_than_an_instance_may_run_waits_here() -> None:
    rig = rig_of(ONE)
    for number in range(4):
        rig.submit(str(number))
    assert rig.placed() == ["0", "1"]
    assert rig.scheduler.counters().waiting == 2
    rig.run()
    assert rig.placed() == ["0", "1", "2", "3"]
    rig.check_quiet()


def test_a_long_queue_of_prompts_is_kept_here_too() -> None:
    rig = rig_of(ONE, max_running=100, max_queued_s=1.5 * PROMPT_S)
    for number in range(4):
        rig.submit(str(number), length=7)
    assert rig.placed() == ["0", "1"], "one prompt is below the bound, two are not"
    rig.run()
    assert len(rig.placed()) == 4


def test_a_request_waits_for_a_busy_instance_if_that_is_better_and_lets_others_pass() -> None:
    rig = rig_of(TWO, policy="session", max_running=100, max_queued_s=0.5 * PROMPT_S)
    rig.submit("first")
    assert (rig.placed(), rig.instance_of("first")) == (["first"], "PD0")
    rig.submit("same session")
    rig.submit("other", first_token=50)
    assert rig.placed() == ["first", "other"]
    assert rig.instance_of("other") == "PD1"
    assert rig.scheduler.counters().waiting == 1
    rig.run()
    assert rig.instance_of("same session") == "PD0"
    timeline = rig.scheduler.timeline(RequestId("same session"))
    assert timeline is not None
    (waits,) = [step for step in timeline.steps if step.name == "waits"]
    assert waits.instance == "PD0" and waits.detail is not None
    assert waits.detail.keys() == {"policy", "tokens", "candidates"}
    assert set(rig.ended.values()) == {"final"}
    rig.check_quiet()


def test_who_waits_by_choice_in_vain_takes_another_place_in_the_end() -> None:
    rig = rig_of(TWO, policy="session", max_queued_s=0.5 * PROMPT_S)
    rig.hanging.add(InstanceId("PD0"))
    rig.submit("first")
    rig.submit("same session")
    rig.now = 0.1
    rig.scheduler.tick()
    assert rig.placed() == ["first"]
    rig.now = 1.0  # computing takes some ms
    rig.scheduler.tick()
    rig.run()
    assert rig.instance_of("same session") == "PD1"
    assert rig.ended == {"same session": "final"}


def test_nobody_gives_up_a_place_for_none() -> None:
    rig = rig_of(TWO, policy="session", max_queued_s=0.5 * PROMPT_S)
    rig.hanging |= {InstanceId("PD0"), InstanceId("PD1")}
    rig.submit("first")
    rig.submit("other", first_token=50)
    rig.submit("same session")
    rig.now = 1.0
    rig.scheduler.tick()
    assert rig.placed() == ["first", "other"]
    rig.hanging.clear()
    rig.run()
    assert set(rig.ended.values()) == {"final"}
    rig.check_quiet()


def test_a_request_waits_for_what_its_place_is_fetching_rather_than_to_overtake_it() -> None:
    rig = rig_of(TWO, policy="session", freshness="ttl", fetching=Fetching.ALWAYS, max_running=9)
    rig.submit("holds it", length=9, session="a")
    rig.run()
    rig.submit("keeps it busy", first_token=50, session="a")
    rig.submit("fetches", length=9, session="b")
    assert rig.placed() == ["holds it", "keeps it busy"]
    rig.submit("counts on it", length=9, session="b")
    assert rig.scheduler.counters().waiting == 1
    rig.run()
    assert rig.placed()[2:] == ["fetches", "counts on it"]
    assert rig.instance_of("fetches") == rig.instance_of("counts on it") == "PD1"
    rig.check_quiet()


def test_only_some_of_those_who_wait_are_looked_at_and_nobody_is_forgotten() -> None:
    rig = rig_of(
        TWO, policy="session", max_running=100, max_queued_s=0.5 * PROMPT_S, max_waiting=99
    )
    rig.submit("first")
    for number in range(20):
        rig.submit(f"same session {number}")
    rig.submit("other", first_token=50)
    assert rig.placed() == ["first"], "behind more than are looked at"
    rig.run()
    assert rig.placed()[1:3] == ["same session 0", "same session 1"], "in order"
    assert len(rig.placed()) == 22 and set(rig.ended.values()) == {"final"}
    rig.check_quiet()


def test_who_waits_by_choice_counts_for_the_bound() -> None:
    rig = rig_of(TWO, policy="session", max_queued_s=0.5 * PROMPT_S, max_waiting=1)
    rig.submit("first")
    rig.submit("same session")
    with pytest.raises(OverloadedError):
        rig.submit("other", first_token=50)
    rig.run()
    assert set(rig.ended.values()) == {"final"}


def test_a_prompt_above_the_bound_is_served_alone() -> None:
    rig = rig_of(ONE, max_queued_s=0.1 * PROMPT_S)
    rig.submit("long", length=50)
    rig.run()
    assert rig.ended == {"long": "final"}


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    rig = rig_of(ONE, max_waiting=1)
    for number in range(3):
        rig.submit(str(number))
    with pytest.raises(OverloadedError, match=r"1 requests are waiting already .*max_waiting"):
        rig.submit("one too many")
    rig.run()
    assert sorted(rig.ended) == ["0", "1", "2"]
    rig.check_quiet()


def test_without_a_queue_there_is_a_place_or_a_refusal() -> None:
    rig = rig_of(ONE, max_waiting=0)
    rig.submit("0")
    rig.submit("1")
    with pytest.raises(OverloadedError):
        rig.submit("2")


def test_priorities_and_turns_decide_who_is_next() -> None:
    rig = rig_of(ONE, max_running=1, max_waiting=10)
    rig.submit("first", client="a")
    for number in range(3):
        rig.submit(f"a{number}", client="a")
    rig.submit("b0", client="b")
    rig.submit("urgent", client="a", priority=-1)
    rig.run()
    assert rig.placed()[:2] == ["first", "urgent"]
    assert rig.placed().index("b0") == 2, "a was given more than b"
    assert rig.placed()[3:] == ["a0", "a1", "a2"]


def test_generated_tokens_count_as_given() -> None:
    rig = rig_of(ONE, max_running=1, max_waiting=10)
    rig.submit("a0", client="a", length=6)  # and 4 are generated for each: 10 for a
    for number in range(3):
        rig.submit(f"b{number}", client="b", length=2)  # 6 each: two of them are more
    rig.submit("a1", client="a")
    rig.run()
    assert rig.placed() == ["a0", "b0", "b1", "a1", "b2"]


def test_how_much_is_generated_is_told_by_finished_requests_alone() -> None:
    rig = rig_of(ONE, max_running=2)
    rig.submit("half done")
    while not rig.has_begun("half done"):
        rig.candidates()[0]()
    rig.cancel("half done")
    rig.submit("done")
    rig.run()
    assert rig.ended[RequestId("done")] == "final"
    assert rig.scheduler.counters().generated_tokens > 4
    assert rig.scheduler._totals.mean_generated_tokens == 4


def test_who_waits_too_long_is_told_why() -> None:
    rig = rig_of(ONE)
    for number in range(3):
        rig.submit(str(number))
    rig.now = 60.0
    rig.scheduler.tick()
    assert isinstance(rig.errors[RequestId("2")], OverloadedError)
    assert "no instance had room within 60 s" in str(rig.errors[RequestId("2")])
    timeline = rig.scheduler.timeline(RequestId("2"))
    assert timeline is not None and timeline.state == "failed"
    (failed,) = [step for step in timeline.steps if step.name == "failed"]
    assert "had room within 60 s" in str(failed.detail["error"])
    rig.run()
    rig.check_quiet()


def test_requests_wait_for_an_instance_that_comes_back_and_fail_if_it_does_not() -> None:
    rig = rig_of(PAIR)
    rig.lose("D0")
    rig.submit("1")
    assert rig.placed() == []
    rig.start("D0")
    rig.run()
    assert rig.ended == {"1": "final"}
    rig.lose("D0")
    rig.submit("2")
    rig.now = 60.0
    rig.scheduler.tick()
    assert isinstance(rig.errors[RequestId("2")], UnavailableError)
    rig.submit("3")
    rig.start("D0")
    rig.lose("D0", returns=False)
    assert isinstance(rig.errors[RequestId("3")], UnavailableError)
    with pytest.raises(UnavailableError):
        rig.submit("4")
    rig.run()
    rig.check_quiet()


def test_who_lost_its_instance_goes_before_those_who_wait() -> None:
    rig = rig_of(ONE, max_running=1)
    for number in range(3):
        rig.submit(str(number))
    rig.lose("PD0")
    rig.start("PD0")
    rig.run()
    assert rig.placed() == ["0", "0", "1", "2"]
    assert set(rig.ended.values()) == {"final"}


def test_a_waiting_request_can_be_cancelled() -> None:
    rig = rig_of(ONE, max_running=1)
    rig.submit("0")
    rig.submit("1")
    rig.cancel("1")
    assert rig.scheduler.counters().waiting == 0
    rig.submit("2")
    rig.cancel("0")
    assert rig.placed() == ["0", "2"], "its room is free at once"
    rig.run()
    rig.check_quiet()


def test_closing_refuses_those_who_wait_and_lets_the_others_end() -> None:
    rig = rig_of(ONE, max_running=1)
    rig.submit("0")
    rig.submit("1")
    rig.scheduler.close()
    rig.run()
    assert rig.ended == {"0": "final", "1": "error"}
    with pytest.raises(UnavailableError, match="shutting down"):
        rig.submit("2")
    rig.check_quiet()


def test_missed_changes_of_a_cache_are_asked_for() -> None:
    rig = rig_of(ONE)
    seat = Seat(InstanceId("PD0"), 1)
    event = CacheChanged(instance=seat.instance, epoch=1, sequence=2, changes=[])
    rig.scheduler.on_event(seat, event)
    assert rig.sent == [(seat, SendSnapshot(epoch=1))]


# ── any order of events ───────────────────────────────────────────────────────────────────────


@settings(max_examples=250, derandomize=True, deadline=None, database=None)
@given(st.binary(max_size=400), st.sampled_from(["events", "ttl"]), st.sampled_from(Split))
def test_the_books_agree_whatever_happens(data: bytes, freshness: str, split: Split) -> None:
    """Submits, cancels, deaths and returns at any moment; at the end nobody is owed anything."""
    bounds = {"max_running": 2, "max_queued_s": 0.5 * PROMPT_S}
    roles = PAIR if len(data) % 2 else MANY
    rig = Rig(roles, data, freshness=freshness, split=split, **bounds)
    rig.start()
    for worker in rig.workers.values():
        worker.faults_left = 2
    for number in range(len(data) * 2):
        trouble = rig.choices.pick(24)
        if trouble in (1, 5, 6, 7) and len(rig.truths) < 16:
            length = 1 + rig.choices.pick(11)
            try:
                rig.submit(str(number), client="ab"[number % 2], length=length)
            except (OverloadedError, UnavailableError):
                rig.ended[RequestId(str(number))] = "refused"
        elif trouble == 2 and rig.truths:
            rig.cancel(list(rig.truths)[rig.choices.pick(len(rig.truths))])
        elif trouble == 3:
            lost = [name for name in rig.roles if name not in rig.workers]
            if lost:
                rig.start(lost[0])
            else:
                rig.lose(list(rig.roles)[rig.choices.pick(len(rig.roles))])
        elif trouble == 4:
            rig.now += 7.0
            rig.scheduler.tick()
        elif trouble == 8:
            name = list(rig.roles)[rig.choices.pick(len(rig.roles))]
            rig.hanging ^= {name}
        elif trouble == 9:
            rig.wait(6.0)
        elif todo := rig.candidates():
            todo[rig.choices.pick(len(todo))]()
        rig.scheduler.check_integrity()
    for name in [name for name in rig.roles if name not in rig.workers]:
        rig.start(name)
    rig.hanging.clear()
    rig.wait(1.0)
    rig.run()
    assert rig.ended.keys() == rig.truths.keys(), "somebody was forgotten"
    rig.check_quiet()

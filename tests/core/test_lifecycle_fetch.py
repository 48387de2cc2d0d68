"""The lifecycle by example: fetching from another instance before the prefill."""

from __future__ import annotations

import pytest

from memserve.core.lifecycle import Phase
from memserve.core.vocabulary import Fetch, Plan, Seat, Send
from memserve.messages import Allocate, Started, TransmitFailed
from memserve.types import InstanceId, TransferId
from tests.core.lifecycle_story import Story


def test_p_fetches_what_another_instance_holds_before_its_prefill() -> None:
    story = Story()
    assert story.place("P0", "D0", fetch=("P1", 8)) == ["P0 Allocate fetch 0+8"]
    assert story.allocated("P0", "fetch", 1, 1) == ["P1 Transmit fetch [1:2] of 8 tokens"]
    assert story.sent("P1", "fetch", 1) == ["P0 Commit fetch 100 pin", "P0 Prefill 8+2 hold"]
    assert story.inserted("P0", "fetch", 8) == ["P0 has 8"]
    assert story.started("P0", 8) == ["D0 Allocate forward 0+10"]
    assert story.life.cached_tokens == 8
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_a_request_that_runs_whole_fetches_too() -> None:
    story = Story(prompt=8)
    assert story.place("PD0", fetch=("D0", 4)) == ["PD0 Allocate fetch 0+4"]
    assert story.allocated("PD0", "fetch", 0, 1) == ["D0 Transmit fetch [0:1] of 4 tokens"]
    assert story.sent("D0", "fetch", 1) == ["PD0 Commit fetch 100 pin", "PD0 Prefill 4+4 whole"]
    assert story.inserted("PD0", "fetch", 4) == ["PD0 has 4"]
    assert story.output("PD0", 5, "stop") == ["deliver prompt tokens final", "PD0 has 12"]
    assert story.finished("PD0") == ["PD0 Abort", "ended"]


def test_d_may_be_the_source_and_is_then_told_the_whole_prompt_later() -> None:
    story = Story().until_fetching(source="D0")
    assert story.sent("D0", "fetch", 1) == ["P0 Commit fetch 100 pin", "P0 Prefill 8+2 hold"]
    story.inserted("P0", "fetch", 8)
    assert story.started("P0", 8) == ["D0 Allocate forward 0+10"]


def test_nothing_is_sent_when_p_holds_it_all_by_now() -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    assert story.allocated("P0", "fetch", 2, 0) == ["P0 Commit fetch 0 pin", "P0 Prefill 8+2 hold"]
    assert story.inserted("P0", "fetch", 8) == ["P0 has 8"]


def test_no_room_for_the_fetch_is_a_plain_prefill() -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    assert story.refused("P0", "fetch") == ["P0 Prefill 8+2 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]


def test_a_source_that_has_it_no_more_leaves_a_plain_prefill() -> None:
    story = Story().until_fetching()
    assert story.transmit_failed("P1", "fetch") == ["P0 Cancel fetch", "P0 Prefill 8+2 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]


def test_lost_bytes_leave_a_plain_prefill() -> None:
    story = Story().until_fetching()
    story.sent("P1", "fetch", 1, size_bytes=99)
    assert story.insert_failed("P0", "fetch") == []
    assert story.started("P0") == ["D0 Allocate forward 0+10"]


def test_a_fetch_has_its_own_deadline() -> None:
    story = Story()
    source = Fetch(Seat(InstanceId("P1"), 1), 8, deadline_s=0.25)
    plan = Plan(Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 1), False, False, True, source)
    (allocate,) = [a.command for a in story.life.place(plan) if isinstance(a, Send)]
    assert isinstance(allocate, Allocate) and allocate.deadline_s == 0.25


def test_only_what_d_runs_on_is_waited_for() -> None:
    """And D is told how much is to be generated."""
    seats = Seat(InstanceId("P0"), 1), Seat(InstanceId("D0"), 1)
    source = Fetch(Seat(InstanceId("P1"), 1), 8, deadline_s=0.25)
    plan = Plan(*seats, False, False, True, source, expected_tokens=77)
    story = Story()
    story.epochs |= {"P0": 1, "D0": 1, "P1": 1}
    (fetched,) = [a.command for a in story.life.place(plan) if isinstance(a, Send)]
    story.refused("P0", "fetch")
    started = Started(
        instance=InstanceId("P0"),
        epoch=1,
        request_id=story.life.spec.id,
        attempt=1,
        cached_tokens=0,
    )
    (forward,) = [a.command for a in story.life.step(started) if isinstance(a, Send)]
    assert isinstance(fetched, Allocate) and isinstance(forward, Allocate)
    assert (fetched.patience_s, fetched.expected_tokens) == (0.0, 0)
    assert (forward.patience_s, forward.expected_tokens) == (300.0, 77)


def test_p_computes_what_a_hung_source_does_not_send() -> None:
    story = Story().until_fetching()
    assert story.expired("P0", "fetch") == ["P1 Cancel fetch", "P0 Prefill 8+2 hold"]
    assert story.expired("P0", "fetch") == [], "said again while the source has not answered"
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    story.allocated("D0", "forward", 0, 2)
    story.output("P0", 1, "length")
    story.sent("P0", "forward", 2)
    # What comes late is not taken, but only now are the blocks free.
    assert story.sent("P1", "fetch", 1) == ["P0 Cancel fetch"]
    assert story.output("D0", 4, "length") == ["deliver tokens final"]


def test_a_request_ends_when_its_hung_source_is_lost() -> None:
    story = Story()
    story.place("PD0", fetch=("PD1", 8))
    story.allocated("PD0", "fetch", 0, 2)
    assert story.expired("PD0", "fetch") == ["PD1 Cancel fetch", "PD0 Prefill 8+2 whole"]
    story.output("PD0", 5, "length")
    assert story.finished("PD0") == ["PD0 Abort"]
    assert story.life.phase is Phase.DRAIN
    assert story.lost("PD1") == ["PD0 Cancel fetch", "ended"]


def test_an_abandoned_fetch_may_outlive_its_attempt() -> None:
    story = Story().until_fetching()
    story.expired("P0", "fetch")
    assert story.lost("D0") == ["P0 Abort", "place again"]
    assert story.place("P0", "D1", fetch=("P1", 8)) == ["P0 Allocate fetch 0+8"]
    late = TransferId("r/fetch/1")
    event = TransmitFailed(**story._from("P1"), transfer_id=late, reason="cancelled")
    assert story.step(event) == ["P0 Cancel fetch"]
    assert story.allocated("P0", "fetch", 1, 1) == ["P1 Transmit fetch [1:2] of 8 tokens"]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_a_lost_source_leaves_a_plain_prefill(is_ordered: bool) -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    if is_ordered:
        story.allocated("P0", "fetch", 1, 1)
    assert story.lost("P1") == ["P0 Cancel fetch", "P0 Prefill 8+2 hold"]
    assert story.allocated("P0", "fetch", 1, 1) == []


def test_a_source_lost_after_the_fetch_matters_to_nobody() -> None:
    story = Story().until_fetching()
    story.sent("P1", "fetch", 1)
    assert story.lost("P1") == []
    assert story.inserted("P0", "fetch", 8) == ["P0 has 8"]
    assert story.started("P0", 8) == ["D0 Allocate forward 0+10"]


def test_p_lost_in_the_fetch_is_a_new_placement_and_the_source_stops() -> None:
    story = Story().until_fetching()
    assert story.lost("P0") == ["P1 Cancel fetch", "place again"]
    assert story.place("P1", "D0") == ["P1 Prefill 10 hold"]


def test_d_lost_in_the_fetch_is_a_new_placement() -> None:
    story = Story().until_fetching()
    assert story.lost("D0") == ["P1 Cancel fetch", "P0 Abort", "place again"]
    assert story.place("P0", "D1") == ["P0 Prefill 10 hold"]


def test_d_lost_as_the_source_is_a_new_placement_at_once() -> None:
    story = Story().until_fetching(source="D0")
    assert story.lost("D0") == ["P0 Cancel fetch", "P0 Abort", "place again"]


def test_a_client_that_leaves_before_anything_is_sent() -> None:
    story = Story()
    story.place("P0", "D0", fetch=("P1", 8))
    assert story.cancel() == ["P0 Cancel fetch", "P0 Abort", "ended"]


def test_a_client_that_leaves_in_the_fetch_frees_the_blocks_when_the_source_is_quiet() -> None:
    story = Story().until_fetching()
    assert story.cancel() == ["P1 Cancel fetch", "P0 Abort"]
    assert story.transmit_failed("P1", "fetch") == ["P0 Cancel fetch", "ended"]
    story = Story().until_fetching()
    story.cancel()
    assert story.sent("P1", "fetch", 1) == ["P0 Cancel fetch", "ended"]

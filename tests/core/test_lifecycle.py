"""The lifecycle by example: the plain courses of a request, and being placed again."""

from __future__ import annotations

import pytest

from memserve.core.lifecycle import Phase
from memserve.types import Caching
from tests.core.lifecycle_story import Story, lines

# ── plain courses ─────────────────────────────────────────────────────────────────────────────


def test_full_caching_gives_the_generated_kv_back() -> None:
    story = Story(Caching.FULL)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.finished("P0", held_tokens=10) == []
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+1 (1 generated) hold",
    ]
    assert story.inserted("D0", "forward", 8) == ["D0 has 8"]
    assert story.started("D0", 8) == []
    assert story.output("D0", 1) == ["deliver tokens"]
    assert story.output("D0", 3, "length") == ["deliver tokens final"]
    # 15 tokens, of which the last has no KV: three full blocks.
    assert story.finished("D0", held_tokens=14) == ["D0 has 14", "P0 Allocate back 10+2"]
    assert story.allocated("P0", "back", 2, 1) == ["D0 Transmit back [2:3]"]
    assert story.sent("D0", "back", 1) == ["P0 Commit back 100"]
    assert story.inserted("P0", "back", 12) == ["P0 has 12", "P0 Abort", "D0 Abort", "ended"]


def test_decode_caching_keeps_the_kv_on_both_and_returns_nothing() -> None:
    story = Story(Caching.DECODE)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    assert story.allocated("D0", "forward", 1, 1) == ["P0 Transmit forward [1:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.sent("P0", "forward", 1) == [
        "D0 Commit forward 100 pin",
        "D0 Decode 10+1 (1 generated)",
    ]
    assert story.inserted("D0", "forward", 8) == ["D0 has 8"]
    assert story.output("D0", 4, "length") == ["deliver tokens final", "D0 has 14"]
    assert story.finished("D0") == ["P0 Abort", "D0 Abort", "ended"]


@pytest.mark.parametrize(
    ("caching", "learned"), [(Caching.PREFILL, ["P0 has 10"]), (Caching.NONE, [])]
)
def test_below_decode_caching_only_p_may_be_believed_to_keep_anything(
    caching: Caching, learned: list[str]
) -> None:
    story = Story(caching)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    assert story.started("P0") == ["D0 Allocate forward 0+10"]
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", *learned]
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+1 (1 generated)",
    ]
    assert story.inserted("D0", "forward", 8) == []
    assert story.output("D0", 4, "length") == ["deliver tokens final"]
    assert story.finished("D0") == ["P0 Abort", "D0 Abort", "ended"]


def test_colocated_runs_whole() -> None:
    story = Story(Caching.FULL)
    assert story.place("PD0") == ["PD0 Prefill 10 whole"]
    assert story.started("PD0") == []
    assert story.output("PD0", 1) == ["deliver prompt tokens"]
    assert story.output("PD0", 4, "length") == ["deliver prompt tokens final", "PD0 has 14"]
    assert story.finished("PD0") == ["PD0 Abort", "ended"]


def test_the_kv_waits_for_the_reservation() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert story.life.phase is Phase.HANDOFF
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]


def test_a_stop_token_as_the_first_token_ends_on_p() -> None:
    story = Story().until_ordered()
    assert story.output("P0", 1, "stop") == [
        "deliver prompt tokens final",
        "P0 has 10",
        "P0 Abort",
        "D0 Abort",
    ]
    # P may be writing by then: D keeps the blocks until P has answered.
    assert story.sent("P0", "forward", 2) == ["D0 Cancel forward", "ended"]


def test_d_samples_the_first_token_itself_where_p_s_must_not_be_taken_for_prompt() -> None:
    story = Story(resample=True)
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold resample"]
    story.started("P0")
    story.allocated("D0", "forward", 0, 2)
    assert story.output("P0", 1, "length") == ["deliver prompt", "P0 has 10"]
    assert story.sent("P0", "forward", 2) == [
        "D0 Commit forward 200 pin",
        "D0 Decode 10+0 (0 generated) hold",
    ]
    assert story.output("D0", 5, "length") == ["deliver tokens final"]


def test_prompt_logprobs_come_ahead_of_the_first_token() -> None:
    story = Story().until_ordered()
    assert story.output("P0", 0) == ["deliver prompt"]
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]


def test_a_stop_string_lets_d_finish_early_and_give_back() -> None:
    story = Story().until_decode()
    assert story.stop() == ["D0 Abort hold"]
    assert story.output("D0", 1) == [], "the engine had one step in flight"
    assert story.finished("D0", held_tokens=13) == ["D0 has 12", "P0 Allocate back 10+2"]


def test_a_stop_string_on_a_colocated_instance_teaches_the_tree() -> None:
    story = Story()
    story.place("PD0")
    story.output("PD0", 3)
    assert story.stop() == ["PD0 Abort hold"]
    assert story.finished("PD0", held_tokens=12) == ["PD0 has 12", "PD0 Abort", "ended"]


def test_a_stop_string_where_nothing_is_kept_frees_at_once() -> None:
    story = Story(Caching.PREFILL).until_decode()
    assert story.stop() == ["P0 Abort", "D0 Abort", "ended"]


def test_a_stop_string_in_the_first_token_frees_both() -> None:
    story = Story().until_handoff()
    assert story.stop() == ["P0 Abort", "D0 Abort"]
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_nothing_is_returned_that_p_has_computed_itself() -> None:
    story = Story(prompt=10, max_tokens=2).until_handoff()
    story.sent("P0", "forward", 2)
    story.inserted("D0", "forward", 8)
    assert story.output("D0", 1, "length") == ["deliver tokens final"]
    assert story.finished("D0", held_tokens=11) == ["D0 has 11", "P0 Abort", "D0 Abort", "ended"]


def test_a_second_attempt_returns_only_beyond_its_own_prefill() -> None:
    story = Story(prompt=10, max_tokens=12).until_decode()
    story.output("D0", 6)
    story.lost("D0")
    assert story.place("P0", "D1") == ["P0 Prefill 18 (8 generated) hold"]
    story.started("P0")
    story.allocated("D1", "forward", 0, 4)
    story.output("P0", 1, "length")
    assert story.sent("P0", "forward", 4) == [
        "D1 Commit forward 400 pin",
        "D1 Decode 18+1 (9 generated) hold",
    ]
    story.inserted("D1", "forward", 16)
    story.output("D1", 1, "stop")
    # 19 tokens are held: the four full blocks were all in P's second prefill.
    assert story.finished("D1", held_tokens=19) == ["D1 has 19", "P0 Abort", "D1 Abort", "ended"]


def test_no_place_fails_the_request() -> None:
    story = Story()
    assert lines(story.life.give_up("no instance")) == ["fail: no instance", "ended"]
    assert story.cancel() == []


def test_a_cancel_while_it_waits_for_a_place_ends_it() -> None:
    assert Story().cancel() == ["ended"]


# ── placed again ──────────────────────────────────────────────────────────────────────────────


def test_the_prompt_goes_on_with_what_the_client_has() -> None:
    story = Story().until_decode()
    assert story.lost("D0") == ["P0 Abort", "place again"]
    assert story.life.phase is Phase.UNPLACED
    assert story.place("P0", "D1") == ["P0 Prefill 12 (2 generated) hold"]


def test_it_is_not_placed_more_often_than_allowed() -> None:
    story = Story(max_attempts=2).until_decode()
    story.lost("D0")
    story.place("P0", "D1")
    assert story.lost("P0") == ["fail: instance P0 was lost, at attempt 2", "ended"]


def test_resampled_requests_cannot_go_on_elsewhere() -> None:
    story = Story(resample=True).until_handoff()
    story.sent("P0", "forward", 2)
    story.output("D0", 1)
    assert story.lost("D0") == ["fail: instance D0 was lost in mid-generation", "P0 Abort", "ended"]
    story = Story(resample=True).until_handoff()
    assert story.lost("D0")[-1] == "place again", "the client has no token yet"


@pytest.mark.parametrize("lost", ["P0", "D0"])
def test_a_loss_during_the_return_only_ends_it(lost: str) -> None:
    other = {"P0": "D0", "D0": "P0"}[lost]
    story = Story().until_return()
    story.allocated("P0", "back", 2, 1)
    assert story.lost(lost) == [f"{other} Cancel back", f"{other} Abort", "ended"]


def test_a_worker_that_starts_a_request_twice_is_asked_for_one_reservation() -> None:
    story = Story().until_ordered()
    assert story.started("P0") == []


def test_a_prefill_that_never_reported_its_start_is_decoded_cold() -> None:
    story = Story()
    story.place("P0", "D0")
    assert story.output("P0", 1, "length") == [
        "deliver prompt tokens",
        "P0 has 10",
        "P0 Abort",
        "D0 Decode 0+11 (1 generated) hold",
    ]


def test_who_waits_for_room_at_d_does_not_wait_for_a_silent_p() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    story.output("P0", 1, "length")
    assert story.silent("P0") == []
    assert story.allocated("D0", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]
    assert story.silent("P0") == ["P0 Abort", "D0 Decode 10+1 (1 generated) hold"]
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward"]

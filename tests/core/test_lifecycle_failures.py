"""The lifecycle by example: failures that users of comparable systems reported.

They go by the numbers that they were reported under.
"""

from __future__ import annotations

import pytest

from memserve.core.lifecycle import Phase
from memserve.messages import Allocated
from memserve.types import Caching, InstanceId, TransferId
from tests.core.lifecycle_story import BLOCK_SIZE, Story


def test_01_an_aborted_transfer_frees_the_reservation() -> None:
    story = Story().until_ordered()
    assert story.cancel() == ["P0 Abort", "D0 Abort"]
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_02_a_sender_that_cannot_write_lets_d_start_at_once() -> None:
    story = Story().until_handoff()
    assert story.transmit_failed("P0", "forward") == [
        "D0 Cancel forward",
        "P0 Abort",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_02_also_when_it_fails_before_the_first_token() -> None:
    story = Story().until_ordered()
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward"]
    assert story.output("P0", 1, "length") == [
        "deliver prompt tokens",
        "P0 has 10",
        "P0 Abort",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_04_transfer_ids_are_the_scheduler_s_and_new_at_each_attempt() -> None:
    story = Story().until_handoff()
    story.lost("D0")
    story.place("P0", "D1")
    story.started("P0")
    stale = Allocated(
        instance=InstanceId("D1"),
        epoch=1,
        transfer_id=TransferId("r/forward/1"),
        hit_blocks=0,
        block_ids=[],
    )
    assert story.step(stale) == []
    assert story.allocated("D1", "forward", 0, 2) == ["P0 Transmit forward [0:2]"]


@pytest.mark.parametrize("answer", ["sent", "failed"])
def test_05_blocks_are_not_freed_while_the_sender_may_write(answer: str) -> None:
    story = Story().until_handoff()
    assert "D0 Cancel forward" not in story.cancel()
    assert story.life.phase is Phase.DRAIN
    if answer == "sent":
        assert story.sent("P0", "forward", 2) == ["D0 Cancel forward", "ended"]
    else:
        assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_05_a_dead_sender_is_quiet() -> None:
    story = Story().until_handoff()
    story.cancel()
    assert story.lost("P0") == ["D0 Cancel forward", "ended"]


def test_05_an_expired_reservation_stops_the_sender_first() -> None:
    story = Story().until_handoff()
    goes_on = ["P0 Abort", "D0 Decode 10+1 (1 generated) hold"]  # which makes P answer
    assert story.expired("D0", "forward") == goes_on
    assert story.expired("D0", "forward") == [], "said again while P has not answered"
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward"]


def test_05_the_end_waits_for_a_sender_that_was_late() -> None:
    story = Story(Caching.PREFILL).until_handoff()
    story.expired("D0", "forward")
    story.started("D0")
    story.output("D0", 4, "length")
    assert story.finished("D0") == ["D0 Abort"]
    assert story.sent("P0", "forward", 2) == ["D0 Cancel forward", "ended"]


def test_07_a_prompt_refused_on_p_fails_and_both_are_told() -> None:
    story = Story()
    story.place("P0", "D0")
    assert story.rejected("P0") == ["fail: too long", "P0 Abort", "ended"]
    story = Story().until_ordered()
    assert story.output("P0", 0, "error") == [
        "fail: instance P0 gave up the request",
        "P0 Abort",
        "D0 Abort",
    ]
    assert story.finished("P0") == []
    assert story.transmit_failed("P0", "forward") == ["D0 Cancel forward", "ended"]


def test_07_what_no_token_fits_is_the_client_s_mistake() -> None:
    fails = "fail: response_format: nothing fits it"
    story = Story(resample=True, grammar_field="response_format")
    story.place("PD0")
    assert story.output("PD0", 0, "error")[0] == fails
    story = Story(resample=True, grammar_field="response_format")
    story.place("PD0")
    story.output("PD0", 2)
    assert story.output("PD0", 0, "error")[0] == f"{fails} after 2 tokens"
    story = Story(resample=True, grammar_field="response_format")
    story.place("PD0")
    assert story.output("PD0", 0, "abort")[0] == "fail: instance PD0 gave up the request"


def test_08_the_receiver_is_told_how_many_bytes_must_be_there() -> None:
    story = Story().until_handoff()
    assert "D0 Commit forward 150 pin" in story.sent("P0", "forward", 2, size_bytes=150)
    # D counts, frees the blocks and computes the prompt itself; the tree learns nothing.
    assert story.insert_failed("D0", "forward") == []
    assert story.output("D0", 4, "length") == ["deliver tokens final"]


def test_09_a_dead_d_frees_p_at_once() -> None:
    story = Story().until_handoff()
    assert story.lost("D0") == ["P0 Cancel forward", "P0 Abort", "place again"]


def test_10_a_cancel_between_prefill_and_decode_tells_whoever_holds_something() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    story.output("P0", 1, "length")
    # D was asked, P was not ordered to send: nobody can be writing.
    assert story.cancel() == ["D0 Cancel forward", "P0 Abort", "D0 Abort", "ended"]
    assert story.allocated("D0", "forward", 0, 2) == []


def test_12_a_failed_transfer_never_ends_in_garbage() -> None:
    story = Story().until_handoff()
    story.transmit_failed("P0", "forward")
    assert story.output("D0", 4, "length") == ["deliver tokens final"]
    assert story.finished("P0", held_tokens=10) == [], "late, and not about D"
    assert story.finished("D0", held_tokens=14) == ["D0 has 14", "D0 Abort", "ended"]


def test_13_a_full_hit_on_d_still_ends_p_s_pin() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.allocated("D0", "forward", 2, 0) == ["P0 Transmit forward [2:2]"]
    story.output("P0", 1, "length")
    assert story.sent("P0", "forward", 0) == [
        "D0 Commit forward 0 pin",
        "D0 Decode 10+1 (1 generated) hold",
    ]


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 7, 8, 9])
def test_15_16_17_positions_at_block_boundaries(prompt: int) -> None:
    """What is returned begins where P's own tokens end and stops at the last full block."""
    story = Story(prompt=prompt, max_tokens=6)
    story.place("P0", "D0")
    story.started("P0")
    blocks = prompt // BLOCK_SIZE
    story.allocated("D0", "forward", 0, blocks)
    story.output("P0", 1, "length")
    assert story.sent("P0", "forward", blocks)[1] == f"D0 Decode {prompt}+1 (1 generated) hold"
    story.inserted("D0", "forward", blocks * BLOCK_SIZE)
    story.output("D0", 5, "length")
    held = prompt + 5
    full = held // BLOCK_SIZE * BLOCK_SIZE
    assert story.finished("D0", held) == [
        f"D0 has {held}",
        f"P0 Allocate back {prompt}+{full - prompt}",
    ]


def test_17_one_token_needs_no_decode() -> None:
    story = Story(max_tokens=1)
    assert story.place("P0", "D0") == ["P0 Prefill 10 whole"]
    assert story.started("P0") == []
    assert story.output("P0", 1, "length") == ["deliver prompt tokens final", "P0 has 10"]
    assert story.finished("P0") == ["P0 Abort", "ended"]


def test_18_nobody_is_believed_to_hold_more_than_there_is() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.inserted("D0", "forward", 4096) == ["D0 has 11"]
    story.output("D0", 1)
    story.stop()
    assert story.finished("D0", held_tokens=4096) == ["D0 has 12", "P0 Allocate back 10+2"]


def test_19_d_goes_on_when_p_dies() -> None:
    story = Story().until_decode()
    assert story.lost("P0") == []
    assert story.output("D0", 3, "length") == ["deliver tokens final"]
    # P's next life knows nothing of the request: there is nobody to give the KV back to.
    assert story.finished("D0", held_tokens=14) == ["D0 has 14", "D0 Abort", "ended"]


def test_19_d_computes_the_prompt_when_p_dies_with_it() -> None:
    story = Story().until_handoff()
    assert story.lost("P0") == ["D0 Cancel forward", "D0 Decode 10+1 (1 generated) hold"]


def test_19_bytes_that_have_arrived_outlive_their_sender() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.lost("P0") == []
    assert story.inserted("D0", "forward", 8) == ["D0 has 8"]


def test_20_when_d_cannot_take_the_request_p_is_told() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.rejected("D0") == ["fail: too long", "P0 Abort", "D0 Abort", "ended"]


def test_20_a_rejection_that_crosses_with_a_stop_string_ends_it() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.stop() == ["D0 Abort hold"]
    assert story.rejected("D0") == ["P0 Abort", "D0 Abort", "ended"]


def test_20_no_room_on_d_is_no_reason_to_fail() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.refused("D0", "forward") == []
    assert story.output("P0", 1, "length") == [
        "deliver prompt tokens",
        "P0 has 10",
        "P0 Abort",
        "D0 Decode 10+1 (1 generated) hold",
    ]


def test_20_no_room_on_p_ends_the_return() -> None:
    story = Story().until_return()
    assert story.refused("P0", "back") == ["P0 Abort", "D0 Abort", "ended"]


def test_21_d_is_told_of_a_cancel_at_once() -> None:
    story = Story().until_decode()
    assert story.cancel() == ["P0 Abort", "D0 Abort", "ended"]


def test_22_a_failed_prefill_reaches_the_client() -> None:
    story = Story()
    story.place("P0", "D0")
    story.started("P0")
    assert story.output("P0", 0, "error") == [
        "fail: instance P0 gave up the request",
        "D0 Cancel forward",
        "P0 Abort",
        "D0 Abort",
        "ended",
    ]


def test_23_events_of_an_earlier_attempt_change_nothing() -> None:
    story = Story().until_handoff()
    story.lost("D0")
    assert story.finished("P0", held_tokens=10) == [], "crossed with the loss of D"
    story.place("P0", "D0", epoch=2)
    assert story.output("P0", 1, "length", attempt=1) == []
    assert story.finished("P0", held_tokens=10, attempt=1) == []
    assert story.lost("D0", epoch=1) == [], "that life is over already"
    assert story.life.phase is Phase.PREFILL


def test_23_a_dead_sender_is_not_told_when_its_receiver_dies_too() -> None:
    story = Story().until_handoff()
    story.sent("P0", "forward", 2)
    assert story.lost("P0") == []
    assert story.lost("D0") == ["place again"]


def test_24_the_time_of_a_long_prefill_does_not_count_against_the_transfer() -> None:
    story = Story()
    # D is asked when P has begun, not while the request waits in P's queue.
    assert story.place("P0", "D0") == ["P0 Prefill 10 hold"]
    story.started("P0")
    story.allocated("D0", "forward", 0, 2)
    assert story.expired("D0", "forward") == [], "the reservation is still wanted"
    assert story.output("P0", 1, "length") == ["deliver prompt tokens", "P0 has 10"]
    assert "D0 Commit forward 200 pin" in story.sent("P0", "forward", 2)


def test_26_a_disconnect_frees_both_in_every_phase() -> None:
    story = Story()
    story.place("P0", "D0")
    assert story.cancel() == ["P0 Abort", "ended"]
    assert Story().until_handoff().cancel() == ["P0 Abort", "D0 Abort"]
    assert Story().until_decode().cancel() == ["P0 Abort", "D0 Abort", "ended"]
    assert Story().until_return().cancel() == [], "the client had everything"


def test_36_only_the_first_attempt_speaks_of_the_prompt() -> None:
    story = Story().until_handoff()
    story.lost("D0")
    story.place("P1", "D1")
    assert story.started("P1", cached_tokens=8) == ["D1 Allocate forward 0+11"]
    assert story.life.cached_tokens == 0
    assert story.output("P1", 1, "length") == ["deliver tokens", "P1 has 11"]


def test_37_a_hung_p_does_not_keep_d_s_memory() -> None:
    story = Story().until_return()
    assert story.silent("P0") == ["P0 Cancel back", "P0 Abort", "D0 Abort", "ended"]
    assert story.allocated("P0", "back", 2, 1) == []


def test_37_what_d_is_sending_ends_by_itself() -> None:
    story = Story().until_return()
    story.allocated("P0", "back", 2, 1)
    assert story.silent("P0") == story.silent("D0") == []
    assert story.sent("D0", "back", 1) == ["P0 Commit back 100"]

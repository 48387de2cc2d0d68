"""The global scheduler while instances are away, or say nothing: who stands in for whom."""

from __future__ import annotations

import pytest

from memserve.core.policy import Split
from memserve.core.vocabulary import Seat
from memserve.errors import UnavailableError
from memserve.messages import Decode, Refused
from memserve.types import InstanceId, RequestId, Role, TransferId
from tests.core.scheduler_rig import PAIR, PROMPT_S, Rig, placed_by, rig_of

# ── standing in ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("lost", "left"), [("P0", "D0"), ("D0", "P0")])
@pytest.mark.parametrize("num_events", range(12))
def test_whoever_lives_goes_on_alone_until_the_other_is_back(
    lost: str, left: str, num_events: int
) -> None:
    """Requests at any stage, one that waits for room, and one that comes later."""
    rig = rig_of(PAIR, split=Split.AUTO, max_running=2, max_waiting=9)
    for name in ("under way", "beside", "waits"):
        rig.submit(name)
    for _ in range(num_events):
        rig.candidates()[0]()
    assert rig.scheduler.counters().waiting == 1
    rig.lose(lost)
    rig.submit("later")
    assert rig.scheduler.is_ready
    rig.run()
    assert set(rig.ended.values()) == {"final"} and len(rig.ended) == 4
    assert rig.instance_of("waits") == rig.instance_of("later") == left
    assert placed_by(rig, "later")["runs whole"] == (
        f"no {'prefill' if lost == 'P0' else 'decode'} instance answers"
    )
    rig.check_quiet()
    rig.start(lost)
    rig.submit("as before")
    rig.run()
    assert rig.instance_of("as before") == "P0" and "runs whole" not in placed_by(rig, "as before")
    assert rig.ended[RequestId("as before")] == "final"
    rig.check_quiet()


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_only_who_knows_the_costs_passes_a_busy_prefill_instance(is_calibrated: bool) -> None:
    bounds = {"max_running": 9, "max_queued_s": 0.5 * PROMPT_S}
    rig = rig_of(PAIR, split=Split.AUTO, is_calibrated=is_calibrated, **bounds)
    rig.submit("beside")
    while not rig.has_begun("beside"):
        rig.candidates()[0]()
    rig.submit("long", length=3000)  # it would stall the one that generates
    rig.submit("short", first_token=5000)
    assert rig.placed()[1:] == (["long", "short"] if is_calibrated else ["long"])
    rig.run()
    assert rig.instance_of("long") == "P0"
    assert rig.instance_of("short") == ("D0" if is_calibrated else "P0")
    assert set(rig.ended.values()) == {"final"}
    rig.check_quiet()


def test_always_split_waits_and_says_for_whom() -> None:
    rig = rig_of(PAIR, split=Split.ALWAYS)
    rig.lose("P0")
    rig.submit("1")
    assert rig.placed() == [] and not rig.scheduler.is_ready
    rig.now = 60.0
    rig.scheduler.tick()
    error = rig.errors[RequestId("1")]
    assert isinstance(error, UnavailableError) and "no prefill instance answers" in str(error)
    rig.start("P0")
    rig.lose("P0", returns=False)
    with pytest.raises(UnavailableError, match="no prefill instance answers"):
        rig.submit("2")
    rig.check_quiet()


# ── silence ───────────────────────────────────────────────────────────────────────────────────


def hang(rig: Rig, name: str) -> None:
    rig.hanging.add(InstanceId(name))


def wake(rig: Rig, name: str) -> None:
    """It goes on, and finds what it was told meanwhile."""
    rig.hanging.discard(InstanceId(name))
    rig.run()
    rig.wait(0.5)
    rig.run()


def test_who_waits_for_a_silent_instance_goes_on_elsewhere() -> None:
    rig = rig_of(PAIR | {"P1": Role.PREFILL})
    hang(rig, "P0")
    rig.submit("sits on it")
    assert rig.instance_of("sits on it") == "P0"
    rig.wait(5.0)
    assert rig.instance_of("sits on it") == "P0", "that may be a pause"
    assert not rig.scheduler.is_silent(InstanceId("P0"))
    rig.wait(1.0)
    assert rig.instance_of("sits on it") == "P1"
    rig.submit("later")
    assert rig.instance_of("later") == "P1"
    rig.run()
    assert rig.ended == {"sits on it": "final", "later": "final"}
    assert rig.scheduler.counters().replaced == 1
    assert rig.scheduler.is_silent(InstanceId("P0"))
    wake(rig, "P0")
    rig.check_quiet()
    rig.wait(1.0)
    assert not rig.scheduler.is_silent(InstanceId("P0"))
    for name in ("one", "another"):
        rig.submit(name)
    assert {rig.instance_of("one"), rig.instance_of("another")} == {"P0", "P1"}
    rig.run()
    rig.check_quiet()


def test_who_answers_from_inside_a_step_may_hang_in_it() -> None:
    """Its device stands still; its host reserves blocks as before."""
    rig = rig_of(PAIR | {"D1": Role.DECODE})
    rig.submit("sits on it")
    while not (at := [seat for seat, command in rig.sent if isinstance(command, Decode)]):
        rig.candidates()[0]()
    [(stuck, epoch)] = [(seat.instance, seat.epoch) for seat in at]
    hang(rig, stuck)
    others = Refused(instance=stuck, epoch=epoch, transfer_id=TransferId("t"), reason="no room")
    for _ in range(12):
        rig.scheduler.on_event(Seat(stuck, epoch), others)
        rig.wait(0.5)
    rig.run()
    assert rig.ended == {"sits on it": "final"}
    wake(rig, stuck)
    rig.check_quiet()


@pytest.mark.parametrize("num_events", range(20))
@pytest.mark.parametrize("silent", ["P0", "D0"])
def test_whatever_it_waits_for_somebody_takes_over(silent: str, num_events: int) -> None:
    """The only one of its role hangs, at any stage of a request."""
    rig = rig_of(PAIR, split=Split.AUTO)
    rig.submit("1")
    for _ in range(num_events):
        if todo := rig.candidates():
            todo[0]()
    was_done = "1" in rig.ended
    hang(rig, silent)
    rig.run()
    rig.wait(6.0)
    rig.run()
    assert rig.ended == {"1": "final"}
    assert rig.scheduler.is_ready and (was_done or rig.scheduler.counters().replaced <= 1)
    rig.submit("2")
    rig.run()
    assert rig.ended[RequestId("2")] == "final"
    left = "D0" if silent == "P0" else "P0"
    assert rig.instance_of("2") == left and "answers" in str(placed_by(rig, "2")["runs whole"])
    wake(rig, silent)
    rig.check_quiet()


def test_nobody_leaves_a_silent_instance_for_none() -> None:
    rig = rig_of(PAIR, split=Split.ALWAYS)
    hang(rig, "P0")
    rig.submit("sits on it")
    rig.wait(10.0)
    rig.submit("waits")
    assert rig.placed() == ["sits on it"] and rig.scheduler.counters().waiting == 1
    wake(rig, "P0")
    assert rig.ended == {"sits on it": "final", "waits": "final"}
    rig.check_quiet()


def test_the_last_attempt_is_kept_for_a_loss() -> None:
    rig = rig_of(PAIR | {"P1": Role.PREFILL}, max_attempts=2)
    hang(rig, "P0")
    rig.submit("1")
    rig.wait(10.0)
    assert rig.placed() == ["1"]
    rig.hanging.clear()
    rig.lose("P0")
    rig.run()
    assert rig.placed() == ["1", "1"] and rig.ended == {"1": "final"}


def test_a_pause_of_the_scheduler_s_own_moves_nobody() -> None:
    rig = rig_of(PAIR | {"P1": Role.PREFILL})
    rig.submit("1")
    rig.now += 30.0
    rig.scheduler.tick()
    rig.run()
    assert rig.placed() == ["1"] and rig.ended == {"1": "final"}

"""Timelines: relative times, one line for the first token, one end, bounded memory."""

from __future__ import annotations

from memserve.core.timeline import Step, Timeline, TimelineStore
from memserve.types import InstanceId, RequestId

R = RequestId("r")
P0, D0 = InstanceId("P0"), InstanceId("D0")


def test_a_request_s_lines_in_order_with_times_since_it_was_submitted() -> None:
    timeline = Timeline(R, 10, 100.0)
    timeline.note("queued", 100.0)
    timeline.note("placed", 100.5, P0, {"tokens": 10})
    timeline.note_tokens(1, 101.0, P0)
    timeline.note_tokens(4, 102.0, D0)
    timeline.cached_tokens = 8
    timeline.end("finished", 102.0)
    timeline.note("returned", 103.0, P0)
    told = timeline.snapshot()
    assert told.steps == [
        Step("queued", 0.0),
        Step("placed", 0.5, P0, {"tokens": 10}),
        Step("first token", 1.0, P0),
        Step("finished", 2.0, None, {"generated_tokens": 5}),
        Step("returned", 3.0, P0),
    ]
    assert (told.id, told.state, told.prompt_tokens) == (R, "finished", 10)
    assert (told.generated_tokens, told.cached_tokens) == (5, 8)


def test_the_first_end_counts() -> None:
    timeline = Timeline(R, 1, 0.0)
    assert not timeline.is_over
    timeline.end("failed", 1.0)
    timeline.end("finished", 2.0)
    assert timeline.is_over
    assert timeline.snapshot().state == "failed"
    assert len(timeline.snapshot().steps) == 1


def test_a_snapshot_does_not_grow() -> None:
    timeline = Timeline(R, 1, 0.0)
    detail: dict[str, str | int | float] = {"a": 1}
    timeline.note("queued", 0.0, None, detail)
    told = timeline.snapshot()
    timeline.note("placed", 1.0)
    detail["a"] = 2
    assert told.steps == [Step("queued", 0.0, None, {"a": 1})]
    assert told.state == "running"


def test_details_are_shown_to_the_microsecond() -> None:
    timeline = Timeline(R, 1, 0.0)
    timeline.note("placed", 0.0, P0, {"tokens": 7, "candidates": [{"queue_s": 0.12345678}]})
    (step,) = timeline.snapshot().steps
    assert step.detail == {"tokens": 7, "candidates": [{"queue_s": 0.123457}]}


def test_the_store_forgets_the_oldest() -> None:
    store = TimelineStore(2)
    timelines = [Timeline(RequestId(f"r{i}"), i, 0.0) for i in range(3)]
    for timeline in timelines:
        store.add(timeline)
    assert len(store) == 2
    assert store.get(RequestId("r0")) is None
    timelines[1].note("queued", 1.0)
    told = store.get(RequestId("r1"))
    assert told is not None
    assert told.steps == [Step("queued", 1.0)]


def test_a_store_of_none_keeps_none() -> None:
    store = TimelineStore(0)
    store.add(Timeline(R, 1, 0.0))
    assert store.get(R) is None

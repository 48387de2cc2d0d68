"""What is learnt from fetches that took other times than predicted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.fetch_times import FetchTimes


def test_a_steady_lateness_is_learnt_and_belongs_to_its_source() -> None:
    times = FetchTimes(2)
    for number in range(40):
        now = number * 0.1
        times.observe(0, 0.002 + times.late_s(0, now), 0.010, now)
    assert times.late_s(0, 4.0) == pytest.approx(0.008, rel=0.05)
    assert times.late_s(1, 4.0) == 0.0


def test_fetches_that_take_less_are_learnt_too() -> None:
    times = FetchTimes(1)
    for number in range(40):
        now = number * 0.1
        times.observe(0, 0.005 + times.late_s(0, now), 0.003, now)
    assert times.late_s(0, 4.0) == pytest.approx(-0.002, rel=0.05)


def test_what_some_fetches_met_with_says_nothing_of_the_next() -> None:
    """A third of them come upon a step that nobody could foresee."""
    times = FetchTimes(1)
    for number in range(60):
        now = number * 0.1
        actual_s = 0.002 + (0.009 if number % 3 == 0 else 0.0)
        times.observe(0, 0.002 + times.late_s(0, now), actual_s, now)
        assert times.late_s(0, now) == pytest.approx(0.0, abs=1e-6)


def test_what_was_seen_fades_so_that_the_source_is_tried_again() -> None:
    times = FetchTimes(1)
    for _ in range(5):
        times.observe(0, 0.010, 0.020, 0.0)
    assert times.late_s(0, 0.0) == pytest.approx(0.010)
    assert times.late_s(0, 60.0) == pytest.approx(0.005)
    assert times.late_s(0, 600.0) < 0.010 / 1000


def test_another_life_starts_without_a_past() -> None:
    times = FetchTimes(1)
    for _ in range(5):
        times.observe(0, 0.010, 0.020, 0.0)
    times.forget(0)
    assert times.late_s(0, 0.0) == 0.0


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    actual_s=st.floats(1e-4, 10.0),
    predicted_s=st.floats(1e-4, 10.0),
    gaps_s=st.lists(st.floats(0.0, 1.0), min_size=150, max_size=150),
)
def test_predictions_come_ever_closer(
    actual_s: float, predicted_s: float, gaps_s: list[float]
) -> None:
    times, now = FetchTimes(1), 0.0
    errors = []
    for gap_s in gaps_s:
        now += gap_s
        expected_s = max(predicted_s + times.late_s(0, now), 1e-5)
        errors.append(abs(expected_s - actual_s))
        times.observe(0, expected_s, actual_s, now)
    # What fades between two observations is not learnt: a second of a minute, of five kept.
    assert errors[-1] <= 0.1 * errors[0] + 1e-9

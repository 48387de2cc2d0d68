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
        times.observe(0, 0.002, 0.010, now)
    assert times.late_s(0, 3.9) == pytest.approx(0.008, rel=1e-6)
    assert times.late_s(1, 4.0) == 0.0


def test_fetches_that_take_less_are_learnt_too() -> None:
    times = FetchTimes(1)
    for number in range(40):
        now = number * 0.1
        times.observe(0, 0.005, 0.003, now)
    assert times.late_s(0, 3.9) == pytest.approx(-0.002, rel=1e-6)


def test_what_some_fetches_met_with_says_nothing_of_the_next() -> None:
    """A third of them come upon a step that nobody could foresee."""
    times = FetchTimes(1)
    for number in range(60):
        now = number * 0.1
        actual_s = 0.002 + (0.009 if number % 3 == 0 else 0.0)
        times.observe(0, 0.002, actual_s, now)
        assert times.late_s(0, now) == pytest.approx(0.0, abs=1e-6)


def test_what_was_seen_fades_so_that_the_source_is_tried_again() -> None:
    times = FetchTimes(1)
    for _ in range(5):
        times.observe(0, 0.010, 0.020, 0.0)
    assert times.late_s(0, 0.0) == pytest.approx(0.010)
    assert times.late_s(0, 60.0) == pytest.approx(0.005)
    assert times.late_s(0, 600.0) < 0.010 / 1000


def test_what_has_faded_is_not_brought_back_by_the_next_fetch() -> None:
    times = FetchTimes(1)
    for _ in range(9):
        times.observe(0, 0.010, 1.010, 0.0)
    times.observe(0, 0.010, 0.010, 600.0)
    assert times.late_s(0, 600.0) < 0.001


def test_another_life_starts_without_a_past() -> None:
    times = FetchTimes(1)
    for _ in range(5):
        times.observe(0, 0.010, 0.020, 0.0)
    times.forget(0)
    assert times.late_s(0, 0.0) == 0.0


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(
    known_s=st.floats(1e-4, 10.0),
    late_s=st.floats(-1.0, 10.0),
    floor_s=st.floats(0.0, 10.0),
    waves=st.lists(st.integers(5, 30), min_size=1, max_size=10),
)
def test_it_settles_however_many_are_under_way_and_whatever_is_made_of_it(
    known_s: float, late_s: float, floor_s: float, waves: list[int]
) -> None:
    """All of a wave are predicted before the first of them has ended, and not below `floor_s`."""
    times = FetchTimes(1)
    for now, count in enumerate(waves):
        predicted_s = max(known_s + times.late_s(0, now), floor_s)
        for _ in range(count):
            times.observe(0, known_s, known_s + late_s, now)
        faded_s = 0.02 * abs(late_s) + 1e-9  # in the second since the last wave
        expected_s = max(known_s + late_s, floor_s)
        assert now == 0 or predicted_s == pytest.approx(expected_s, abs=faded_s)
        assert times.late_s(0, now) == pytest.approx(late_s, abs=1e-9)

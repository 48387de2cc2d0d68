"""Who counts as silent, and since when."""

from __future__ import annotations

from memserve.core.hearing import Hearing
from memserve.types import InstanceId

A, B = InstanceId("A"), InstanceId("B")


class Ears:
    """Asked every half a second, while nobody says otherwise; A is heard at 0, B always."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now = 0.0
        self._step_s = step_s
        self.hearing = Hearing(silence_s=3.0)
        self.hearing.heard(A, 0.0)

    def until(self, now: float) -> list[InstanceId]:
        while self.now < now:
            self.now += 0.5
            self.hearing.heard(B, self.now)
            silent = self.ask()
        return silent

    def ask(self) -> list[InstanceId]:
        return self.hearing.silent(lambda instance: self._step_s, self.now)


def test_who_gives_no_sign_is_silent_until_the_next_one() -> None:
    ears = Ears()
    assert ears.until(3.0) == []
    assert ears.until(3.5) == [A]
    ears.hearing.heard(A, 3.6)
    assert ears.until(6.5) == []
    assert ears.until(7.0) == [A]
    ears.hearing.forget(A)
    assert ears.ask() == []


def test_a_long_step_is_no_silence() -> None:
    ears = Ears(step_s=10.0)
    assert ears.until(23.0) == []
    assert ears.until(23.5) == [A]


def test_who_did_not_listen_blames_nobody() -> None:
    ears = Ears()
    ears.until(2.0)
    ears.now = 30.0
    assert ears.ask() == []
    assert ears.until(33.0) == []
    assert ears.until(33.5) == [A], "and B was heard meanwhile"

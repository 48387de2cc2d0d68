"""What fetches from each source really take, against what was predicted: learnt as they go.

Pure arithmetic. `scheduler.py` tells every fetch that has ended, or was given up; `cost_policy.py`
adds `late_s` to its next prediction. The terms that it predicts (round trips, the rest of both
engines' steps, the link) are the same for all pairs of instances; what they leave out (a source on
a slower core, an engine between two steps for longer) shows here, and is added as a constant.
"""

from __future__ import annotations

_WEIGHT = 0.2
_MOST_SURPRISE = 4.0
_SURPRISE_S = 5e-3
"""One fetch counts as at most so many times, and so many seconds, more than was predicted: it may
have met a step that nobody could foresee."""
_HALF_LIFE_S = 60.0
"""A source that is not asked any more, for it was late, gets another chance."""


class FetchTimes:
    """By source. Times are the caller's clock, in seconds."""

    def __init__(self, num_sources: int) -> None:
        self._late_s = [0.0] * num_sources
        self._observed_at = [0.0] * num_sources

    def late_s(self, source: int, now: float) -> float:
        """How much longer than the sum of its known terms a fetch takes (negative: shorter).

        Fades while nothing is fetched. Does not mutate.
        """
        late_s = self._late_s[source]
        if not late_s:
            return 0.0
        age_s = max(now - self._observed_at[source], 0.0)
        return float(late_s * 0.5 ** (age_s / _HALF_LIFE_S))

    def observe(self, source: int, predicted_s: float, actual_s: float, now: float) -> None:
        """Mutates: a fetch took so long; `predicted_s` had `late_s` in it."""
        most_s = predicted_s * (_MOST_SURPRISE - 1) + _SURPRISE_S
        surprise_s = min(max(actual_s - predicted_s, -most_s), most_s)
        self._late_s[source] = self.late_s(source, now) + _WEIGHT * surprise_s
        self._observed_at[source] = now

    def forget(self, source: int) -> None:
        """Another life begins."""
        self._late_s[source] = 0.0

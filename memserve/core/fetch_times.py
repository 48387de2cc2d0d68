"""What fetches from each source take beyond what is known of them: learnt as they go.

Pure arithmetic. `scheduler.py` tells every fetch that has ended, or was given up; `cost_policy.py`
adds `late_s` to its next prediction. The terms that it knows (round trips, what both engines are in
the middle of, the link) are the same for all pairs of instances; what they leave out (a source on
a slower core, an engine between two steps for longer) shows here, and is added as a constant: the
median of the last few, for some meet a step that nobody could foresee, and say nothing of the next.
"""

from __future__ import annotations

from collections import deque

_REMEMBERED = 9
"""Fetches of a source. It begins with as many that were on time: five late ones count."""
_HALF_LIFE_S = 60.0
"""A source that is not asked any more, for it was late, gets another chance."""


class FetchTimes:
    """By source. Times are the caller's clock, in seconds."""

    def __init__(self, num_sources: int) -> None:
        self._sources = [_Source() for _ in range(num_sources)]

    def late_s(self, source: int, now: float) -> float:
        """How much longer than the sum of its known terms a fetch takes (negative: shorter).

        Fades while nothing is fetched. Does not mutate.
        """
        return self._sources[source].late_s(now)

    def observe(self, source: int, known_s: float, actual_s: float, now: float) -> None:
        """Mutates: a fetch took so long; `known_s` is the sum of its terms, without `late_s`."""
        self._sources[source].observe(actual_s - known_s, now)

    def forget(self, source: int) -> None:
        """Another life begins."""
        self._sources[source] = _Source()


class _Source:
    def __init__(self) -> None:
        self._last_s = deque([0.0] * _REMEMBERED, _REMEMBERED)
        """How late the last were, the oldest first."""
        self._median_s = 0.0
        self._observed_at = 0.0

    def late_s(self, now: float) -> float:
        if not self._median_s:
            return 0.0
        age_s = max(now - self._observed_at, 0.0)
        return float(self._median_s * 0.5 ** (age_s / _HALF_LIFE_S))

    def observe(self, late_s: float, now: float) -> None:
        if now > self._observed_at + _HALF_LIFE_S:  # else one that was on time would bring it back
            self._last_s.extend([self.late_s(now)] * _REMEMBERED)
        self._last_s.append(late_s)
        self._median_s = sorted(self._last_s)[_REMEMBERED // 2]
        self._observed_at = now

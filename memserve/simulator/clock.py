"""Simulated time: a clock and what happens next.

Events of the same moment happen in the order in which they were entered, so that a run is the same
every time.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """The present moment, and everything that will happen."""

    def __init__(self) -> None:
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.num_done = 0

    def now(self) -> float:
        """Seconds since the start."""
        return self._now

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` then, or after what happens now if that has passed."""
        heapq.heappush(self._events, (max(when, self._now), next(self._numbers), action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        """Call `action` when so many seconds have passed."""
        self.at(self._now + delay, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self._now, _, action = heapq.heappop(self._events)
            self.num_done += 1
            action()

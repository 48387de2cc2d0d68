"""Which CPU cores a measurement should run on: the launches of a step go by the speed of one core.

For `probe.py`. A virtual machine's cores differ, with what else runs on their hardware, and a
thread that the kernel moves between them changes its speed by half in the middle of a measurement.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

_LOOPS = 4000
_PASSES = 9


def host_work() -> None:
    """A fixed piece of interpreted work, about 0.2 ms: how long it takes tells a slow host."""
    total = 0
    for number in range(_LOOPS):
        total += number


def timed_host_work() -> float:
    """Seconds of it now, here."""
    begun = time.perf_counter()
    host_work()
    return time.perf_counter() - begun


def fastest_cores(count: int) -> tuple[int, ...]:
    """That many of the cores that this thread may use, the quickest first; fewer if there are
    fewer. Of a core with several hardware threads only one counts. Takes a fraction of a second.
    """
    allowed = os.sched_getaffinity(0)
    candidates = one_thread_each(allowed)

    def on(core: int) -> float:
        os.sched_setaffinity(0, {core})
        timed_host_work()
        return timed_host_work()

    try:
        return quickest_first(candidates, on)[:count]
    finally:
        os.sched_setaffinity(0, allowed)


def quickest_first(cores: Sequence[int], measure: Callable[[int], float]) -> tuple[int, ...]:
    """By the median of several passes over all of them."""
    passes = [[measure(core) for core in cores] for _ in range(_PASSES)]
    medians = [sorted(times)[_PASSES // 2] for times in zip(*passes, strict=True)]
    return tuple(core for _, core in sorted(zip(medians, cores, strict=True)))


def one_thread_each(cores: Iterable[int], root: Path = Path("/")) -> list[int]:
    """The first hardware thread of each physical core; all of them where that is not told."""
    found: dict[str, int] = {}
    for core in sorted(cores):
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            siblings = path.read_text().strip()
        except OSError:
            siblings = f"cpu{core}"
        found.setdefault(siblings, core)
    return list(found.values())

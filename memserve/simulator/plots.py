"""Pictures of a run in a terminal: how its times are spread, and how it went over time.

Collaborator: `report.py` prints them, and saves them as a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from rich.table import Table

from memserve.simulator.objectives import Objectives
from memserve.simulator.simulation import Outcome, Result
from memserve.units import format_rate, format_size

_BAR, _BINS = 40, 10
_INTERVALS = 32
_LEVELS = " ▁▂▃▄▅▆▇█"


# ── how times are spread ──────────────────────────────────────────────────────────────────────


def histogram(values: Sequence[float]) -> list[str]:
    """Bars over bins that grow by a factor, from the least to the largest value (in seconds)."""
    least, most = max(min(values), 1e-4), max(max(values), 1e-4)
    edges = np.geomspace(least, most * (1 + 1e-9) if most > least else least * 2, _BINS + 1)
    counts = np.histogram(np.clip(values, least, most), edges)[0]
    highest = int(counts.max())
    return [
        f"{format_seconds(float(low)):>9} – {format_seconds(float(high)):>9} "
        f"{'█' * math.ceil(_BAR * int(count) / highest):<{_BAR}} {int(count)}"
        for low, high, count in zip(edges, edges[1:], counts, strict=False)
    ]


def format_seconds(seconds: float | None) -> str:
    """`12.3 ms`, `4.56 s`; `–` of nothing."""
    if seconds is None:
        return "–"
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


# ── over time ─────────────────────────────────────────────────────────────────────────────────


class Series(msgspec.Struct, frozen=True):
    """A value for each interval; None where there is none."""

    name: str
    values: list[float | None]
    text: Callable[[float], str]


def over_time(result: Result, objectives: Objectives) -> Table:
    """A line for each quantity, by when requests were sent; the highest bar is its largest value.

    Does not mutate.
    """
    begin = min((outcome.sent_at for outcome in result.outcomes), default=0.0)
    width = max(result.duration_s, 1e-9) / _INTERVALS
    table = Table(
        f"{_INTERVALS} intervals of {format_seconds(width)}", "", "least", "most", box=None
    )
    table.columns[1].no_wrap = True
    for column in table.columns[2:]:
        column.justify = "right"
    for series in _all_series(result, objectives, begin, width):
        known = [value for value in series.values if value is not None]
        if known:
            ends = (series.text(min(known)), series.text(max(known)))
            table.add_row(series.name, _bars(series.values, max(known)), *ends)
    return table


def _all_series(result: Result, objectives: Objectives, begin: float, width: float) -> list[Series]:
    groups: list[list[Outcome]] = [[] for _ in range(_INTERVALS)]
    for outcome in result.outcomes:
        groups[_place(outcome.sent_at, begin, width)].append(outcome)
    moved = [0.0] * _INTERVALS
    for at, size_bytes in result.traffic.moved:
        moved[_place(at, begin, width)] += size_bytes / width

    def of_each(value: Callable[[list[Outcome]], float | None]) -> list[float | None]:
        return [value(group) if group else None for group in groups]

    series = [
        Series("requests/s", [len(group) / width for group in groups], format_rate),
        Series("TTFT, mean", of_each(lambda g: _mean([o.ttft_s for o in g])), format_seconds),
        Series("TPOT, mean", of_each(lambda g: _mean([o.tpot_s for o in g])), format_seconds),
        Series("JCT, mean", of_each(lambda g: _mean([o.jct_s for o in g])), format_seconds),
        Series("from the cache", of_each(_cached), _percent),
        Series("moved, bytes/s", [*moved], format_size),
    ]
    if objectives.are_any:
        kept = of_each(lambda g: sum(map(objectives.are_met, g)) / len(g))
        series.append(Series("goodput", kept, _percent))
    return series


def _place(at: float, begin: float, width: float) -> int:
    return min(max(int((at - begin) / width), 0), _INTERVALS - 1)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cached(outcomes: Sequence[Outcome]) -> float:
    return sum(o.cached_tokens for o in outcomes) / sum(o.prompt_tokens for o in outcomes)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"


def _bars(values: Sequence[float | None], most: float) -> str:
    top = len(_LEVELS) - 1
    return "".join(
        _LEVELS[0] if not value or not most else _LEVELS[math.ceil(top * value / most)]
        for value in values
    )

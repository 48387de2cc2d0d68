"""What a run is summed up as: figures, tables and pictures (`plots.py`), JSON, CSV.

Terms as the field defines them: TTFT (until the first token), TPOT (per token after it), JCT (until
the last one), goodput (requests that meet both objectives).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from memserve.simulator.objectives import Objectives
from memserve.simulator.plots import format_seconds, histogram, over_time
from memserve.simulator.simulation import Outcome, Result
from memserve.units import format_count, format_ratio, format_size


class Spread(msgspec.Struct, frozen=True):
    """Of one quantity over all requests; all None if there were none."""

    mean: float | None
    p50: float | None
    p99: float | None


class Summary(msgspec.Struct, frozen=True):
    """The figures of one run; times are simulated unless they say otherwise."""

    requests: int
    failed: int
    duration_s: float
    requests_per_s: float
    generated_per_s: float
    ttft_s: Spread
    tpot_s: Spread
    jct_s: Spread
    goodput: float
    """Share of the requests that kept the objectives."""
    goodput_per_s: float
    prompt_tokens: int
    cached_tokens: int
    hit_ratio: float
    """Prompt tokens that were found in a cache where the prompt was computed."""
    transfers: dict[str, int]
    """By direction: forward (P → D), back (D → P), fetch."""
    moved_bytes: dict[str, int]
    evicted_blocks: int
    preempted: int
    busy_mean: float
    """Share of the time in which an engine computed, over all instances."""
    busy_most: float
    busy_by_role: dict[str, float]
    """The same mean over the instances of a role, as the mode calls it: P, D, PD."""
    events: int
    submit_p50_s: float
    """Of the scheduler's own work per request, on this machine's clock."""
    submit_p99_s: float
    scheduler_s: float
    """All of the scheduler's work, on this machine's clock."""
    scheduler_events: int


def summarize(result: Result, objectives: Objectives) -> Summary:
    """Does not mutate."""
    outcomes = result.outcomes
    ended = [outcome for outcome in outcomes if outcome.ended_at is not None]
    duration_s = result.duration_s
    kept = sum(map(objectives.are_met, outcomes))
    prompt_tokens = sum(outcome.prompt_tokens for outcome in ended)
    cached_tokens = sum(outcome.cached_tokens for outcome in ended)
    submit_s = result.work.submit_s or [0.0]
    return Summary(
        requests=len(outcomes),
        failed=len(outcomes) - len(ended),
        duration_s=duration_s,
        requests_per_s=_per(len(ended), duration_s),
        generated_per_s=_per(sum(outcome.reply_tokens for outcome in ended), duration_s),
        ttft_s=spread(outcome.ttft_s for outcome in ended),
        tpot_s=spread(outcome.tpot_s for outcome in ended),
        jct_s=spread(outcome.jct_s for outcome in ended),
        goodput=_per(kept, len(outcomes)),
        goodput_per_s=_per(kept, duration_s),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        hit_ratio=_per(cached_tokens, prompt_tokens),
        transfers=result.traffic.transfers,
        moved_bytes=result.traffic.bytes,
        evicted_blocks=result.traffic.evicted_blocks,
        preempted=result.num_preempted,
        busy_mean=float(np.mean(list(result.busy.values()))),
        busy_most=max(result.busy.values()),
        busy_by_role=_by_role(result.busy),
        events=result.num_events,
        submit_p50_s=float(np.percentile(submit_s, 50)),
        submit_p99_s=float(np.percentile(submit_s, 99)),
        scheduler_s=sum(result.work.submit_s) + sum(result.work.events_s.values()),
        scheduler_events=sum(result.work.num_events.values()),
    )


def _by_role(busy: Mapping[str, float]) -> dict[str, float]:
    roles: dict[str, list[float]] = {}
    for instance, share in busy.items():
        roles.setdefault(instance.rstrip("0123456789"), []).append(share)
    return {role: sum(shares) / len(shares) for role, shares in roles.items()}


def spread(values: Iterable[float | None]) -> Spread:
    """Of those that are there."""
    known = np.array([value for value in values if value is not None])
    if not known.size:
        return Spread(None, None, None)
    return Spread(float(known.mean()), *(float(np.percentile(known, p)) for p in (50, 99)))


# ── for people ────────────────────────────────────────────────────────────────────────────────


def show(summary: Summary, result: Result, objectives: Objectives, console: Console) -> None:
    """Print the figures, how the times are spread, and how the run went over time."""
    table = Table("", "mean", "p50", "p99")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, quantity in (
        ("TTFT", summary.ttft_s),
        ("TPOT", summary.tpot_s),
        ("JCT", summary.jct_s),
    ):
        table.add_row(name, *map(format_seconds, (quantity.mean, quantity.p50, quantity.p99)))
    console.print(table)
    for line in _facts(summary, objectives):
        console.print(line, highlight=False)
    for name in ("ttft", "tpot", "jct"):
        values = [getattr(outcome, f"{name}_s") for outcome in result.outcomes]
        known = [value for value in values if value is not None]
        if len(known) > 1:
            console.print(f"\n{name.upper()} of the requests")
            for line in histogram(known):
                console.print(line, highlight=False)
    if len(result.outcomes) > 1:
        console.print()
        console.print(over_time(result, objectives), highlight=False)


def _facts(summary: Summary, objectives: Objectives) -> list[str]:
    moved = [
        f"{name} {format_size(size)} in {format_count(summary.transfers[name])}"
        for name, size in sorted(summary.moved_bytes.items())
    ]
    requests = (
        f"{format_count(summary.requests)} requests, {summary.failed} failed, in "
        f"{summary.duration_s:.1f} s: {summary.requests_per_s:.2f} requests/s, "
        f"{summary.generated_per_s:,.0f} tokens/s"
    )
    cached = format_ratio(summary.cached_tokens, summary.prompt_tokens)
    scheduler = (
        f"scheduler, on this machine: {1e3 * summary.submit_p50_s:.2f} ms to place a request "
        f"(p99 {1e3 * summary.submit_p99_s:.2f}), {summary.scheduler_s:.1f} s in all"
    )
    busy = ", ".join(f"{role} {100 * share:.0f}%" for role, share in summary.busy_by_role.items())
    goodput = (
        f"goodput ({objectives}): {100 * summary.goodput:.1f}%, "
        f"{summary.goodput_per_s:.2f} requests/s"
    )
    return [
        requests,
        *([goodput] if objectives.are_any else []),
        f"from the cache: {cached} of {format_count(summary.prompt_tokens)} prompt tokens",
        f"moved: {', '.join(moved) or 'nothing'}",
        f"evicted {format_count(summary.evicted_blocks)} blocks, preempted {summary.preempted}",
        f"engines busy, mean by role: {busy}; the busiest {100 * summary.busy_most:.0f}%",
        scheduler,
    ]


def _per(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# ── for machines ──────────────────────────────────────────────────────────────────────────────


def write_csv(outcomes: Iterable[Outcome], path: Path) -> None:
    """A line for each request. Raises: OSError."""
    names = ("ttft_s", "tpot_s", "jct_s")
    fields = Outcome.__struct_fields__
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*fields, *names])
        for outcome in outcomes:
            writer.writerow([getattr(outcome, name) for name in (*fields, *names)])

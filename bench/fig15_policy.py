"""Figure 15: p99 TTFT of scheduling by prompt trees and cost, against other policies.

    python -m bench.fig15_policy [--size "13B, 18k"] [--kind cold] [--seeds 5] [--out FILE]
    python -m bench.fig15_policy --real [--out FILE]

Simulated (`memserve/simulator`; the scheduler is the real one): 3P1D-CC, 80 sessions with 250
requests, caches empty at the beginning. The paper says no more of its load than this and LooGLE; so
this is a reading of it:

- LooGLE has about 14 questions a document, replies of 21 tokens in the mean, and documents of
  18,500 tokens: 18 documents. A session asks three or four questions about one of them, drawn
  evenly: several sessions share a document. A prompt is the document, and all of the session's
  questions and replies so far.
- Requests arrive by a Poisson process, each from one of the sessions at random. All sessions are
  open from the beginning, or (`think`) only as many as make a request every so many seconds.
- Sizes: what fits Llama-2-13B's context of 4,096, and whole documents (as if it had been
  stretched), both on the paper's machine (8 H800, TP=2); whole ones with Llama-3.1-8B on H200s.
- `load`: the work of computing the documents once per session, over what three instances can do.

`router` is session affinity as a router in front of engines has it, the paper's baseline: a request
is bound to its session's instance when it arrives. `prefix` and `least_loaded` wait in the
scheduler as `cost` does. What p99 can be: of 250 requests it is nearly the third worst, and 18
are the first on their document, which nobody can have cached. So it cannot be less than the time of
one such prefill (`floor`); `asked before` leaves those requests out, for all policies alike. `JCT`
shows where D is the bottleneck: a 13B's D has room for seven whole documents.

Then the same with one hot document, which 70% of the sessions are about: there the cost policy must
not be worse than the best of the simple ones.

`--real`: instead, a smaller load of the same kind through `memserve up` on CPU, SmolLM2.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench._load import play
from bench._report import Scalar, parser, publish
from bench._serve import serving
from memserve import config
from memserve.simulator import setup
from memserve.simulator.objectives import Objectives
from memserve.simulator.report import spread, summarize
from memserve.simulator.simulation import Outcome, Simulation
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import Call, poisson

MODE = "3P1D-CC"
PREFILLS = 3
SESSIONS, REQUESTS = 80, 250
DOCUMENTS = 18
POLICIES = ("cost", "router", "prefix", "least_loaded")
UNBOUNDED = 604_800
LOADS = (0.1, 0.2, 0.3, 0.6, 0.9)
THINK_LOADS = (0.2, 0.3)
THINK_S = 10.0
HOT_LOADS = (0.2, 0.9)
HOT = 0.7


class Size(msgspec.Struct, frozen=True):
    """A model on a device, and documents that fit it."""

    model: str
    device: str
    tp: int
    document_tokens: int


SIZES = {
    "13B, 3.5k": Size("llama-2-13b", "H800", 2, 3500),
    "13B, 18k": Size("llama-2-13b", "H800", 2, 18_500),
    "8B, 18k": Size("llama-3.1-8b", "H200", 1, 18_500),
}


class Point(msgspec.Struct, frozen=True):
    """One load on one size."""

    size: str
    load: float
    hot: float = 0.0
    think_s: float | None = None
    policies: tuple[str, ...] = ("cost", "router")

    @property
    def name(self) -> str:
        parts = [self.size, f"load {self.load:g}"]
        parts += [f"hot {self.hot:g}"] if self.hot else []
        parts += [f"think {self.think_s:g} s"] if self.think_s else []
        return ", ".join(parts)


KINDS: dict[str, Callable[[str], list[Point]]] = {
    "cold": lambda size: [Point(size, load) for load in LOADS],
    "think": lambda size: [Point(size, load, think_s=THINK_S) for load in THINK_LOADS],
    "hot": lambda size: [Point(size, load, HOT, policies=POLICIES) for load in HOT_LOADS],
}


def main() -> None:
    """Simulate all, or run some, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--size", choices=SIZES, action="append", help="only this; again: more")
    arguments.add_argument("--kind", choices=KINDS, action="append", help="only this; again: more")
    arguments.add_argument("--seeds", type=int, default=5, help="loads for each point")
    arguments.add_argument("--real", action="store_true", help="real engines on CPU instead")
    args = arguments.parse_args()
    if args.real:
        publish_real(asyncio.run(run_for_real()), args.out)
        return
    names = args.size or list(SIZES)
    points = [p for name in names for kind in args.kind or KINDS for p in KINDS[kind](name)]
    found = [measure(point, range(args.seeds)) for point in points]
    publish(
        "fig15_policy",
        settings={
            "mode": MODE,
            "sessions": SESSIONS,
            "requests": REQUESTS,
            "documents": DOCUMENTS,
            "seeds": args.seeds,
            "sizes": {name: msgspec.to_builtins(SIZES[name]) for name in names},
        },
        metrics=metrics(found),
        raw=found,
        out=args.out,
        rows=[_row(one) for one in found],
    )


# ── the load ──────────────────────────────────────────────────────────────────────────────────


def make_calls(tokens: int, point: Point, rate: float, seed: int) -> list[Call]:
    """80 sessions, 250 requests: three or four questions each."""
    shape = Shape(
        documents=DOCUMENTS,
        document_tokens=tokens,
        hot=point.hot,
        system_tokens=16,
        turns=-(-REQUESTS // SESSIONS),
        user_tokens=32,
        reply_tokens=21,
    )
    calls = list(sessions(shape, SESSIONS, seed))
    return poisson(calls, rate=rate, requests=REQUESTS, think_s=point.think_s, seed=seed)


def rate_of(size: Size, load: float) -> float:
    """Requests a second at which computing each session's document once is so much work."""
    costs = setup.costs(_options(size))
    work_s = costs.exec_s(size.document_tokens) * SESSIONS / REQUESTS
    work_s += costs.exec_s(size.document_tokens, size.document_tokens - 64)
    return load * PREFILLS / work_s


def _options(size: Size) -> setup.Options:
    return setup.Options(mode=MODE, model=size.model, device=size.device, tp=size.tp)


# ── simulated ─────────────────────────────────────────────────────────────────────────────────


def measure(point: Point, seeds: Sequence[int]) -> dict[str, Any]:
    """Its policies on the same loads."""
    size = SIZES[point.size]
    rate = rate_of(size, point.load)
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in point.policies}
    for seed in seeds:
        calls = make_calls(size.document_tokens, point, rate, seed)
        for policy in point.policies:
            found[policy].append(simulate(size, policy, calls))
    floor_s = setup.costs(_options(size)).exec_s(size.document_tokens)
    described = msgspec.structs.asdict(point) | {"name": point.name, "policies": found}
    return described | {"rate": rate, "floor_s": floor_s}


def simulate(size: Size, policy: str, calls: Sequence[Call]) -> dict[str, float]:
    """One load with one policy."""
    options = _options(size)
    costs = setup.costs(options)
    flags = {key: (policy, str(value)) for key, value in _settings(policy).items()}
    settings = config.load(flags=flags).config
    cluster = setup.cluster(options, settings, costs, calls)
    result = Simulation(cluster, calls, costs, time.perf_counter).run()
    summary = summarize(result, Objectives())
    return {
        "ttft_mean_s": summary.ttft_s.mean or 0.0,
        "ttft_p99_s": summary.ttft_s.p99 or 0.0,
        "asked_before_p99_s": spread(_asked_before(result.outcomes, calls)).p99 or 0.0,
        "jct_mean_s": summary.jct_s.mean or 0.0,
        "hit_ratio": summary.hit_ratio,
        "fetches": summary.transfers.get("fetch", 0),
        "failed": summary.failed,
    }


def _settings(policy: str) -> dict[str, object]:
    """What makes the scheduler work by this policy; `router` knows no queue in the scheduler."""
    if policy == "router":
        return {"scheduler.policy": "session", "scheduler.max_queued_s": UNBOUNDED}
    return {"scheduler.policy": policy}


def _asked_before(outcomes: Sequence[Outcome], calls: Sequence[Call]) -> list[float | None]:
    """TTFT of the requests on documents that an earlier one was about."""
    document_of = {call.session: call.prompt[1] for call in calls}
    seen: set[Any] = set()
    ttfts: list[float | None] = []
    for outcome in sorted(outcomes, key=lambda outcome: outcome.sent_at):
        document = document_of[outcome.session]
        if document in seen:
            ttfts.append(outcome.ttft_s)
        seen.add(document)
    return ttfts


def _median(point: dict[str, Any], policy: str, key: str) -> float:
    runs: list[dict[str, float]] = point["policies"][policy]
    return statistics.median(run[key] for run in runs)


def _row(point: dict[str, Any]) -> dict[str, Scalar]:
    """Medians over the seeds: p99 TTFT in milliseconds, and the cost policy's change."""
    row: dict[str, Scalar] = {
        "point": point["name"],
        "requests/s": round(point["rate"], 2),
        "floor": round(1e3 * point["floor_s"]),
    }
    for policy in POLICIES:
        has = policy in point["policies"]
        row[policy] = round(1e3 * _median(point, policy, "ttft_p99_s")) if has else None
    low, middle, high = _quartiles(_changes(point, "router", "ttft_p99_s"))
    row["p99 / router"] = f"{100 * middle:+.0f}% ({100 * low:+.0f}, {100 * high:+.0f})"
    for name, policy, key in (
        ("asked before", "router", "asked_before_p99_s"),
        ("mean", "router", "ttft_mean_s"),
        ("p99 / best other", _best(point, "ttft_p99_s"), "ttft_p99_s"),
        ("mean / best", _best(point, "ttft_mean_s"), "ttft_mean_s"),
    ):
        row[name] = f"{100 * statistics.median(_changes(point, policy, key)):+.0f}%"
    for policy in ("cost", "router"):
        row[f"JCT {policy}"] = round(1e3 * _median(point, policy, "jct_mean_s"))
    return row


def _changes(point: dict[str, Any], policy: str, key: str) -> list[float]:
    """Of the cost policy against another, load by load."""
    ours: list[dict[str, float]] = point["policies"]["cost"]
    theirs: list[dict[str, float]] = point["policies"][policy]
    return [a[key] / b[key] - 1 for a, b in zip(ours, theirs, strict=True)]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _best(point: dict[str, Any], key: str) -> str:
    """The simple policy that is best over all seeds."""
    others: list[str] = [policy for policy in point["policies"] if policy != "cost"]
    return min(others, key=lambda policy: _median(point, policy, key))


def metrics(found: Sequence[dict[str, Any]]) -> dict[str, Scalar]:
    """The figures to quote: medians of the changes, and the quartiles of the one that is asked."""
    made: dict[str, Scalar] = {}
    for point in found:
        name = point["name"]
        low, middle, high = _quartiles(_changes(point, "router", "ttft_p99_s"))
        made[f"{name}: ttft_p99_s / router"] = middle
        made[f"{name}: lower quartile"] = low
        made[f"{name}: upper quartile"] = high
        for key in ("asked_before_p99_s", "ttft_mean_s"):
            made[f"{name}: {key} / router"] = statistics.median(_changes(point, "router", key))
        for key in ("ttft_p99_s", "ttft_mean_s"):
            changes = _changes(point, _best(point, key), key)
            made[f"{name}: {key} / best other"] = statistics.median(changes)
    return made


# ── for real ──────────────────────────────────────────────────────────────────────────────────

REAL_MODE = "2P1D-CC"
REAL_SETTINGS: dict[str, object] = {"engine.block_size": 32, "mempool.hbm_mb": 64}
REAL_SHAPE = Shape(
    documents=5, document_tokens=500, system_tokens=16, turns=3, user_tokens=24, reply_tokens=8
)
REAL_REQUESTS, REAL_RATE = 48, 1.2
REAL_POLICIES = ("cost", "router")


def publish_real(rows: list[dict[str, Scalar]], out: Path | None) -> None:
    """A table, and perhaps a file."""
    publish(
        "fig15_policy_real",
        settings={
            "mode": REAL_MODE,
            **msgspec.to_builtins(REAL_SHAPE),
            "requests": REAL_REQUESTS,
            "rate": REAL_RATE,
        },
        metrics={f"{row['policy']}: {key}": row[key] for row in rows for key in row if "_s" in key},
        raw=rows,
        out=out,
        rows=rows,
    )


async def run_for_real() -> list[dict[str, Scalar]]:
    """48 requests of 16 sessions on 5 documents of 500 tokens, once with each policy."""
    calls = list(sessions(REAL_SHAPE, REAL_REQUESTS // REAL_SHAPE.turns, 0))
    calls = poisson(calls, rate=REAL_RATE, requests=REAL_REQUESTS, think_s=None, seed=0)
    return [await _run(policy, calls) for policy in REAL_POLICIES]


async def _run(policy: str, calls: Sequence[Call]) -> dict[str, Scalar]:
    flags = ["--mode", REAL_MODE, "--device", "cpu"]
    chosen = _settings(policy)
    with serving(flags, REAL_SETTINGS | chosen) as url:
        warm = sessions(Shape(turns=1, user_tokens=200, reply_tokens=4), 6, 99)
        await play(url, poisson(warm, rate=4.0, requests=6, think_s=None, seed=99))
        answers = await play(url, calls)
    ttft = spread(answer.outcome.ttft_s for answer in answers)
    jct = spread(answer.outcome.jct_s for answer in answers)
    return {
        "policy": policy,
        "ttft_mean_s": ttft.mean,
        "ttft_p50_s": ttft.p50,
        "ttft_p99_s": ttft.p99,
        "jct_mean_s": jct.mean,
        "failed": sum(answer.outcome.error is not None for answer in answers),
    }


if __name__ == "__main__":
    main()

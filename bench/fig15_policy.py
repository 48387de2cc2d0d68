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
scheduler as `cost` does.

What p99 can be: of 250 requests it is nearly the third worst, and 18 are the first on their
document, which nobody can have cached. `ideal` is what is left if each document is computed once,
on an instance that is idle, and all else is cached everywhere, at once. No policy gets below that;
where it is more than 41% of the router's p99, none reaches the paper's −59% (`could be`). `ideal on
3` lets those first requests queue for the three instances, and nothing else. `asked before` leaves
them out, for all policies alike. `P busy` says how near the router's instances are to having no
time left: where they have a lot, there is little to gain.

D's memory bounds what is served: a 13B's has room for seven whole documents. JCT and the goodput
(requests a second whose first token takes 2 s, and whose others 0.2 s each, at most) show that.

Then the same with one hot document, which 70% of the sessions are about: there the cost policy must
not be worse than the best of the simple ones.

`--real`: instead, a smaller load of the same kind through `memserve up` on CPU, SmolLM2.
"""

from __future__ import annotations

import asyncio
import heapq
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
LOADS = (0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)
THINK_LOADS = (0.2, 0.3)
THINK_S = 10.0
HOT_LOADS = (0.2, 0.9)
HOT = 0.7
IDEALS = {"ideal": REQUESTS, f"ideal on {PREFILLS}": PREFILLS}
"""See `ideal_p99_s`: as many instances as could be wanted, and as many as there are."""
KEPT = Objectives(ttft_s=2.0, tpot_s=0.2)


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
    found: dict[str, list[dict[str, float]]] = {name: [] for name in (*point.policies, *IDEALS)}
    for seed in seeds:
        calls = make_calls(size.document_tokens, point, rate, seed)
        for policy in point.policies:
            found[policy].append(simulate(size, policy, calls))
        for name, instances in IDEALS.items():
            found[name].append({"ttft_p99_s": ideal_p99_s(size, calls, instances)})
    described = msgspec.structs.asdict(point) | {"name": point.name, "policies": found}
    return described | {"rate": rate}


def ideal_p99_s(size: Size, calls: Sequence[Call], instances: int) -> float:
    """p99 TTFT if each document is computed once, in turn, on the first free one of so many
    instances; nobody waits for anything but that, and what was ever said is cached everywhere.
    """
    options = _options(size)
    costs = setup.costs(options)
    said: set[tuple[object, ...]] = {()}
    free_at = [0.0] * instances
    ready_at: dict[object, float] = {}
    asked: set[str] = set()
    ttfts = []
    for call in calls:
        prompt, now = call.prompt, call.arrival_s or 0.0
        known = next(n for n in range(len(prompt), -1, -1) if prompt[:n] in said)
        cached = min(sum(piece.length for piece in prompt[:known]), call.prompt_tokens - 1)
        exec_s = costs.exec_s(call.prompt_tokens, cached)
        document, begin = prompt[1], now
        if document not in ready_at:
            begin = max(now, heapq.heappop(free_at))
            ready_at[document] = begin + exec_s
            heapq.heappush(free_at, begin + exec_s)
        elif call.session not in asked:  # else it is sent when the earlier one has ended
            begin = max(now, ready_at[document])
        asked.add(call.session)
        ttfts.append(options.front_end_s + 2 * options.message_s + begin + exec_s - now)
        all_of_it = (*prompt, call.reply)
        said |= {all_of_it[:n] for n in range(len(all_of_it) + 1)}
    return spread(ttfts).p99 or 0.0


def simulate(size: Size, policy: str, calls: Sequence[Call]) -> dict[str, float]:
    """One load with one policy."""
    options = _options(size)
    costs = setup.costs(options)
    flags = {key: (policy, str(value)) for key, value in _settings(policy).items()}
    settings = config.load(flags=flags).config
    cluster = setup.cluster(options, settings, costs, calls)
    result = Simulation(cluster, calls, costs, time.perf_counter).run()
    summary = summarize(result, KEPT)
    return {
        "ttft_mean_s": summary.ttft_s.mean or 0.0,
        "ttft_p99_s": summary.ttft_s.p99 or 0.0,
        "asked_before_p99_s": spread(_asked_before(result.outcomes, calls)).p99 or 0.0,
        "jct_mean_s": summary.jct_s.mean or 0.0,
        "jct_p99_s": summary.jct_s.p99 or 0.0,
        "goodput_per_s": summary.goodput_per_s,
        "busy_p": summary.busy_by_role["P"],
        "busy_d": summary.busy_by_role["D"],
        "preempted": summary.preempted,
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
        **{name: round(1e3 * _median(point, name, "ttft_p99_s")) for name in IDEALS},
    }
    for policy in (policy for policy in POLICIES if policy in point["policies"]):
        row[policy] = round(1e3 * _median(point, policy, "ttft_p99_s"))
    low, middle, high = _quartiles(_changes(point, "router", "ttft_p99_s"))
    row["p99 / router"] = f"{100 * middle:+.0f}% ({100 * low:+.0f}, {100 * high:+.0f})"
    row["could be"] = f"{100 * _could_be(point):+.0f}%"
    for name, policy, key in (
        ("asked before", "router", "asked_before_p99_s"),
        ("mean", "router", "ttft_mean_s"),
        ("p99 / best other", _best(point, "ttft_p99_s"), "ttft_p99_s"),
        ("mean / best", _best(point, "ttft_mean_s"), "ttft_mean_s"),
    ):
        row[name] = f"{100 * statistics.median(_changes(point, policy, key)):+.0f}%"
    row["P busy"] = f"{100 * _median(point, 'router', 'busy_p'):.0f}%"
    for key in ("jct_mean_s", "goodput_per_s"):
        both = [f"{_median(point, policy, key):.2f}" for policy in ("cost", "router")]
        row[key] = " / ".join(both)
    return row


def _could_be(point: dict[str, Any]) -> float:
    """The least that p99 could be, against the router's."""
    return statistics.median(_changes(point, "router", "ttft_p99_s", ours="ideal"))


def _changes(point: dict[str, Any], policy: str, key: str, *, ours: str = "cost") -> list[float]:
    """Of the cost policy against another, load by load."""
    runs: list[dict[str, float]] = point["policies"][ours]
    theirs: list[dict[str, float]] = point["policies"][policy]
    return [a[key] / b[key] - 1 for a, b in zip(runs, theirs, strict=True)]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _best(point: dict[str, Any], key: str) -> str:
    """The simple policy that is best over all seeds."""
    others: list[str] = [p for p in point["policies"] if p != "cost" and p not in IDEALS]
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
        made[f"{name}: could be"] = _could_be(point)
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

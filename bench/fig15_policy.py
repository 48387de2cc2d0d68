"""Figure 15: p99 TTFT of scheduling by prompt trees and cost, against other policies.

    python -m bench.fig15_policy [--seeds 3] [--real] [--out FILE]

Simulated (`memserve/simulator`; the scheduler is the real one): 80 sessions with 250 requests on 18
documents, 3P1D-CC, as LooGLE has them: about 14 questions a document, replies of 21 tokens in the
mean. Several sessions ask about one document, so there is something to share between sessions. A
prompt is its document, and all of the session's questions and replies so far. Caches are empty at
the beginning. Three sizes: what fits Llama-2-13B's context and LooGLE's whole documents, both on
the paper's machine (8 H800, TP=2), and whole documents with Llama-3.1-8B on H200s. `load`: the work
of computing the documents once per session, over what three instances can do.

`router` is session affinity as a router in front of engines has it, the paper's baseline: a request
is bound when it arrives; `cost_now` is the cost policy with the same. All others run as they are
served by default: what finds no open instance waits in the scheduler. 7% of the requests are the
first on their document, which nobody can have in a cache: `asked before` leaves these out, for all
policies alike.

Then the same with one hot document, which 70% of the sessions are about: there the cost policy must
not be worse than the best of the simple ones.

`--real`: instead, a smaller load of the same kind through `memserve up` on CPU, SmolLM2, with each
of four policies.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench._load import play
from bench._report import Scalar, parser, publish
from bench._serve import serving
from memserve import config
from memserve.simulator import setup
from memserve.simulator.report import Objectives, spread, summarize
from memserve.simulator.simulation import Outcome, Simulation
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import Call, poisson

MODE = "3P1D-CC"
PREFILLS = 3
SESSIONS, REQUESTS = 80, 250
DOCUMENTS = 18
POLICIES = ("cost", "cost_now", "router", "session", "prefix", "least_loaded")
BOUND_NOW = {"router": "session", "cost_now": "cost"}
"""Those that know no queue in the scheduler."""
UNBOUNDED = 604_800
LOADS = (0.2, 0.4, 0.9)
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


def main() -> None:
    """Simulate all, perhaps run some, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=3, help="loads for each point")
    arguments.add_argument("--real", action="store_true", help="real engines on CPU instead")
    args = arguments.parse_args()
    if args.real:
        publish_real(asyncio.run(run_for_real()), args.out)
        return
    points = [
        point
        for name, size in SIZES.items()
        for hot, loads in ((0.0, LOADS), (HOT, HOT_LOADS))
        for load in loads
        for point in [measure(name, size, hot, load, range(args.seeds))]
    ]
    publish(
        "fig15_policy",
        settings={
            "mode": MODE,
            "sessions": SESSIONS,
            "requests": REQUESTS,
            "documents": DOCUMENTS,
            "hot": HOT,
            "seeds": args.seeds,
            "sizes": msgspec.to_builtins(SIZES),
        },
        metrics=metrics(points),
        raw=points,
        out=args.out,
        rows=[_row(point) for point in points],
    )


# ── the load ──────────────────────────────────────────────────────────────────────────────────


def make_calls(documents: int, tokens: int, hot: float, rate: float, seed: int) -> list[Call]:
    """80 sessions, 250 requests: three or four questions each."""
    shape = Shape(
        documents=documents,
        document_tokens=tokens,
        hot=hot,
        system_tokens=16,
        turns=-(-REQUESTS // SESSIONS),
        user_tokens=32,
        reply_tokens=21,
    )
    calls = list(sessions(shape, SESSIONS, seed))
    return poisson(calls, rate=rate, requests=REQUESTS, think_s=None, seed=seed)


def rate_of(size: Size, load: float) -> float:
    """Requests a second at which computing each session's document once is so much work."""
    costs = setup.costs(_options(size))
    work_s = costs.exec_s(size.document_tokens) * SESSIONS / REQUESTS
    work_s += costs.exec_s(size.document_tokens, size.document_tokens - 64)
    return load * PREFILLS / work_s


def _options(size: Size) -> setup.Options:
    return setup.Options(mode=MODE, model=size.model, device=size.device, tp=size.tp)


# ── simulated ─────────────────────────────────────────────────────────────────────────────────


def measure(name: str, size: Size, hot: float, load: float, seeds: Sequence[int]) -> dict[str, Any]:
    """All policies on the same loads."""
    rate = rate_of(size, load)
    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for seed in seeds:
        calls = make_calls(DOCUMENTS, size.document_tokens, hot, rate, seed)
        for policy in POLICIES:
            found[policy].append(simulate(size, policy, calls))
    return {
        "size": name,
        "hot": hot,
        "load": load,
        "rate": rate,
        "policies": found,
    }


def simulate(size: Size, policy: str, calls: Sequence[Call]) -> dict[str, float]:
    """One load with one policy."""
    options = _options(size)
    costs = setup.costs(options)
    name, is_bound_now = BOUND_NOW.get(policy, policy), policy in BOUND_NOW
    flags = {"scheduler.policy": ("policy", name)}
    if is_bound_now:
        flags["scheduler.max_queued_s"] = (policy, str(UNBOUNDED))
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
        "size": point["size"],
        "hot": point["hot"],
        "load": point["load"],
        "requests/s": round(point["rate"], 2),
    }
    for policy in POLICIES:
        row[policy] = round(1e3 * _median(point, policy, "ttft_p99_s"))
    row["p99 / router"] = f"{100 * _change(point, 'router', 'ttft_p99_s'):+.0f}%"
    row["asked before"] = f"{100 * _change(point, 'router', 'asked_before_p99_s'):+.0f}%"
    row["mean"] = f"{100 * _change(point, 'router', 'ttft_mean_s'):+.0f}%"
    at_once = _median(point, "cost_now", "ttft_p99_s") / _median(point, "router", "ttft_p99_s")
    row["now / router"] = f"{100 * (at_once - 1):+.0f}%"
    row["p99 / best other"] = f"{100 * _against_best(point, 'ttft_p99_s'):+.0f}%"
    row["mean / best"] = f"{100 * _against_best(point, 'ttft_mean_s'):+.0f}%"
    return row


def _change(point: dict[str, Any], policy: str, key: str) -> float:
    """Of the cost policy against another: the median over the loads, each compared with itself."""
    ours: list[dict[str, float]] = point["policies"]["cost"]
    theirs: list[dict[str, float]] = point["policies"][policy]
    return statistics.median(a[key] / b[key] - 1 for a, b in zip(ours, theirs, strict=True))


def _against_best(point: dict[str, Any], key: str) -> float:
    """Of the cost policy against the simple one that is best over all seeds."""
    best = min(
        (p for p in POLICIES if not p.startswith("cost")), key=lambda p: _median(point, p, key)
    )
    return _change(point, best, key)


def metrics(points: Sequence[dict[str, Any]]) -> dict[str, Scalar]:
    """The figures to quote."""
    made: dict[str, Scalar] = {}
    for point in points:
        where = f"{point['size']}, hot {point['hot']:g}, load {point['load']:g}"
        for key in ("ttft_p99_s", "asked_before_p99_s", "ttft_mean_s"):
            made[f"{where}: {key} / router"] = _change(point, "router", key)
            made[f"{where}: {key} / best other"] = _against_best(point, key)
    return made


# ── for real ──────────────────────────────────────────────────────────────────────────────────

REAL_SETTINGS: dict[str, object] = {"engine.block_size": 32}
REAL_DOCUMENTS, REAL_TOKENS, REAL_REQUESTS, REAL_RATE = 6, 600, 60, 1.0


def publish_real(rows: list[dict[str, Scalar]], out: Path | None) -> None:
    """A table, and perhaps a file."""
    publish(
        "fig15_policy_real",
        settings={
            "mode": MODE,
            "documents": REAL_DOCUMENTS,
            "document_tokens": REAL_TOKENS,
            "requests": REAL_REQUESTS,
            "rate": REAL_RATE,
        },
        metrics={f"{row['policy']}: ttft p99_s": row["ttft p99_s"] for row in rows},
        raw=rows,
        out=out,
        rows=rows,
    )


async def run_for_real() -> list[dict[str, Scalar]]:
    """60 requests of 20 sessions on 6 documents of 600 tokens, once with each policy."""
    rows: list[dict[str, Scalar]] = []
    shape = Shape(
        documents=REAL_DOCUMENTS,
        document_tokens=REAL_TOKENS,
        system_tokens=16,
        turns=3,
        user_tokens=24,
        reply_tokens=8,
    )
    calls = list(sessions(shape, REAL_REQUESTS // 3, 0))
    calls = poisson(calls, rate=REAL_RATE, requests=REAL_REQUESTS, think_s=None, seed=0)
    for policy in ("cost", "session", "prefix", "least_loaded"):
        flags = ["--mode", MODE, "--device", "cpu"]
        with serving(flags, REAL_SETTINGS | {"scheduler.policy": policy}) as url:
            warm = sessions(Shape(turns=1, user_tokens=200, reply_tokens=4), 12, 99)
            await play(url, poisson(warm, rate=4.0, requests=12, think_s=None, seed=99))
            answers = await play(url, calls)
        ttft = spread(answer.outcome.ttft_s for answer in answers)
        jct = spread(answer.outcome.jct_s for answer in answers)
        rows.append(
            {
                "policy": policy,
                "ttft mean_s": ttft.mean,
                "ttft p99_s": ttft.p99,
                "jct mean_s": jct.mean,
                "failed": sum(answer.outcome.error is not None for answer in answers),
            }
        )
    return rows


if __name__ == "__main__":
    main()

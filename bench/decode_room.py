"""What comes of a decode instance whose memory is too small for all that is to run there.

    python -m bench.decode_room [--out FILE]

Simulated (`memserve/simulator`; the scheduler, pools and transfers are the real ones), Llama-3.1-8B
on H200s with small pools: prompts of 1,500 tokens that nobody shares, four turns a session, and
replies of a few hundred tokens, faster than D can generate. And the documents of figure 15.

`waits` is what MemServe does: what P has computed stays there until D has room, also for a part of
what D's requests will generate. `refused`: D refuses what it has no room for, almost at once
(`transfer.room_wait_s`), and computes those prompts itself when their turn comes. TTFT can be lower
so, for P is free at once; but what D computes again it does not generate in the meantime.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from bench import fig15_policy
from bench._report import Scalar, parser, publish
from memserve import config
from memserve.simulator import setup
from memserve.simulator.objectives import Objectives
from memserve.simulator.report import summarize
from memserve.simulator.simulation import Simulation
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import Call, poisson

REQUESTS = 400
WAITS_S = {"waits": 300.0, "refused": 1e-3}


class Load(msgspec.Struct, frozen=True):
    """Long replies on small pools."""

    mode: str
    blocks: int
    reply_tokens: int
    rate: float

    @property
    def name(self) -> str:
        return f"8B, {self.mode}, {self.blocks} blocks, {self.reply_tokens} tokens, {self.rate:g}/s"


LOADS = (
    Load("1P1D-CC", 2000, 400, 1.5),
    Load("1P1D-CC", 2000, 400, 3.0),
    Load("3P1D-CC", 2000, 400, 3.0),
    Load("3P1D-CC", 2000, 400, 12.0),
    Load("3P1D-CC", 4000, 1000, 6.0),
)
DOCUMENTS = "13B, 18k"
DOCUMENT_LOADS = (0.3, 0.6, 0.9, 1.5)


def main() -> None:
    """Simulate all, print, write."""
    args = parser(__doc__).parse_args()
    rows = [row for load in LOADS for row in compare(load.name, *_replies(load))]
    rows += [row for load in DOCUMENT_LOADS for row in compare(*_documents(load))]
    publish(
        "decode_room",
        settings={"requests": REQUESTS, "room_wait_s": WAITS_S},
        metrics={
            f"{row['load']}, {row['D']}: {key}": row[key]
            for row in rows
            for key in row
            if key not in ("load", "D")
        },
        raw=rows,
        out=args.out,
        rows=rows,
    )


def compare(name: str, options: setup.Options, calls: Sequence[Call]) -> list[dict[str, Scalar]]:
    """The same load, waiting and refused."""
    return [
        {"load": name, "D": way, **simulate(options, calls, wait_s)}
        for way, wait_s in WAITS_S.items()
    ]


def simulate(options: setup.Options, calls: Sequence[Call], wait_s: float) -> dict[str, Scalar]:
    """One run. Times in seconds."""
    costs = setup.costs(options)
    settings = config.load(flags={"transfer.room_wait_s": ("bench", str(wait_s))}).config
    cluster = setup.cluster(options, settings, costs, calls)
    result = Simulation(cluster, calls, costs, time.perf_counter).run()
    summary = summarize(result, Objectives())
    return {
        "TTFT mean": _rounded(summary.ttft_s.mean),
        "TTFT p99": _rounded(summary.ttft_s.p99),
        "JCT mean": _rounded(summary.jct_s.mean),
        "JCT p99": _rounded(summary.jct_s.p99),
        "tokens/s": round(summary.generated_per_s),
        "handed over": summary.transfers.get("forward", 0),
        "of": sum(call.reply.length > 1 for call in calls),
        "preempted": summary.preempted,
        "failed": summary.failed,
    }


def _rounded(seconds: float | None) -> float:
    return round(seconds or 0.0, 3)


def _replies(load: Load) -> tuple[setup.Options, list[Call]]:
    shape = Shape(
        documents=REQUESTS,
        document_tokens=1500,
        turns=4,
        user_tokens=64,
        reply_tokens=load.reply_tokens,
    )
    calls = list(sessions(shape, REQUESTS // shape.turns, 0))
    calls = poisson(calls, rate=load.rate, requests=REQUESTS, think_s=None, seed=0)
    return setup.Options(mode=load.mode, blocks=load.blocks), calls


def _documents(load: float) -> tuple[str, setup.Options, list[Call]]:
    size = fig15_policy.SIZES[DOCUMENTS]
    point = fig15_policy.Point(DOCUMENTS, load)
    rate = fig15_policy.rate_of(size, load)
    calls = fig15_policy.make_calls(size.document_tokens, point, rate, 0)
    options = setup.Options(
        mode=fig15_policy.MODE, model=size.model, device=size.device, tp=size.tp
    )
    return f"figure 15: {point.name} ({rate:.1f}/s)", options, calls


if __name__ == "__main__":
    main()

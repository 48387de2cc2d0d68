"""From the first token to the second while P is busy: a worker that serves inside steps, or not.

    python -m bench.handoff_latency [--out FILE]
    python -m bench.handoff_latency --device cuda --model FOLDER --prompt 2048 --chunk 8192 \\
        --rate 8 --requests 80 --set engine.load_format=dummy …

1P1D-CC, asked at a rate at which P computes a prompt most of the time (Poisson, prompts that no
cache knows), once with workers that serve commands and links while their engine waits inside a
step (ADR 0028), once with workers that do so between steps alone (`_between_steps.py`): the same
requests and arrivals, in one run. On the CPU a single rank computes inside its executor's call, so
the two are the same there; with `--set cluster.tp=P=3` P waits for its ranks.

The table, median and p99 in ms: `sent`, from the first token until the hub heard that all KV is at
D; `link`, what the link says that it took, seen by P's loop; `insert`, from then until D had it in
its index; `join`, from then to the second token; `gap`, all of it; TPOT of the tokens that follow.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence

import msgspec
import numpy as np

from bench._load import Answer, play
from bench._report import Scalar, parser, publish
from bench._serve import get, pin_instances, released, serving
from bench.fig12_styles import calls, time_limit

PROGRAMS = {"inside": "memserve", "between": "bench._between_steps"}
"""Where the worker serves → what is run."""
WARM_UP = 4


class Sample(msgspec.Struct):
    """One request, in seconds."""

    sent_s: float
    link_s: float
    insert_s: float
    join_s: float
    gap_s: float
    tpot_s: float


class Variant(msgspec.Struct):
    """One way to serve."""

    name: str
    samples: list[Sample] = []
    faults: list[str] = []


def sample(url: str, answer: Answer) -> Sample:
    """Raises: ValueError for a request that did not go the whole way."""
    times = answer.token_times
    if answer.outcome.error is not None or len(times) < 4:
        raise ValueError(answer.outcome.error or f"{len(times)} tokens")
    released(url, answer.id)
    found = get(f"{url}/v1/requests/{answer.id}")
    (timeline,) = found.get("requests", [found])
    # What D gives back is sent as well: the first is P's.
    steps = {step["name"]: step for step in reversed(timeline["steps"])}
    if missing := {"first token", "sent", "inserted"} - steps.keys():
        raise ValueError(f"no {' and no '.join(sorted(missing))}")
    first_s, sent_s, inserted_s = (
        steps[name]["at_s"] for name in ("first token", "sent", "inserted")
    )
    gap_s = times[1] - times[0]
    return Sample(
        sent_s=sent_s - first_s,
        link_s=steps["sent"]["detail"]["seconds"],
        insert_s=inserted_s - sent_s,
        join_s=gap_s - (inserted_s - first_s),
        gap_s=gap_s,
        tpot_s=(times[-1] - times[1]) / (len(times) - 2),
    )


def measure(variant: Variant, args: argparse.Namespace) -> None:
    """Raises: SystemExit (no server); what sending requests raises."""
    settings: dict[str, object] = dict(word.split("=", 1) for word in args.set)
    settings |= {
        "engine.max_num_batched_tokens": args.chunk,
        "scheduler.split": "always",
        "cluster.device": args.device,
    }
    if args.model:
        settings["models.model"] = args.model
    with serving(["--mode", "1P1D-CC"], settings, program=PROGRAMS[variant.name]) as url:
        if args.device == "cpu":
            pin_instances(url)
        asyncio.run(play(url, calls("warm up", WARM_UP, 1.0, args)))
        load = calls("busy", args.requests, args.rate, args)
        for answer in asyncio.run(play(url, load)):
            try:
                variant.samples.append(sample(url, answer))
            except ValueError as error:
                variant.faults.append(str(error))


def figures(variant: Variant) -> dict[str, tuple[float, float]]:
    """Median and p99 of each, in ms."""
    found = {}
    for field in Sample.__struct_fields__:
        values = [getattr(one, field) * 1e3 for one in variant.samples]
        p99 = float(np.percentile(values, 99))
        found[field.removesuffix("_s")] = (statistics.median(values), p99)
    return found


def row(variant: Variant) -> dict[str, Scalar]:
    """A line of the table."""
    found: dict[str, Scalar] = {"serves": variant.name, "n": len(variant.samples)}
    return found | {name: f"{p50:.1f} {p99:.1f}" for name, (p50, p99) in figures(variant).items()}


def metrics(variants: Sequence[Variant]) -> dict[str, Scalar]:
    """All figures, and the ratios of the medians where both ways were measured."""
    known = {variant.name: figures(variant) for variant in variants if variant.samples}
    found: dict[str, Scalar] = {"faults": sum(len(variant.faults) for variant in variants)}
    for name, values in known.items():
        for title, (p50, p99) in values.items():
            found[f"{name}/{title}_p50_ms"] = round(p50, 3)
            found[f"{name}/{title}_p99_ms"] = round(p99, 3)
    if len(known) == len(PROGRAMS):
        for title in ("sent", "gap", "tpot"):
            ratio = known["inside"][title][0] / max(known["between"][title][0], 1e-6)
            found[f"{title}_ratio"] = round(ratio, 3)
    return found


def main() -> None:
    args = _arguments()
    variants = [Variant(name) for name in args.variants]
    for variant in variants:
        try:
            with time_limit(args.limit):
                measure(variant, args)
        except (SystemExit, Exception) as error:  # noqa: BLE001 (the other may do better)
            variant.faults.append(" ".join(f"{type(error).__name__}: {error}".split())[-500:])
        for fault in sorted(set(variant.faults)):
            print(f"{variant.name}, {variant.faults.count(fault)} times: {fault}")
    rows = [row(variant) for variant in variants if variant.samples]
    publish(
        "handoff_latency",
        settings={
            "device": args.device,
            "model": args.model.rstrip("/").rpartition("/")[2] or "bundled",
            "prompt": args.prompt,
            "reply": args.reply,
            "chunk": args.chunk,
            "rate": args.rate,
            "set": args.set,
        },
        metrics=metrics(variants),
        raw=msgspec.to_builtins(variants),
        rows=rows,
        out=args.out,
    )
    if not rows:
        sys.exit("nothing could be measured")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder or a name; default: the bundled one")
    made.add_argument("--variants", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    made.add_argument("--prompt", type=int, default=256, help="tokens")
    made.add_argument("--reply", type=int, default=8, help="tokens")
    made.add_argument("--chunk", type=int, default=2048, help="prompt tokens in one step")
    made.add_argument("--rate", type=float, default=1.5, help="requests/s")
    made.add_argument("--requests", type=int, default=10)
    made.add_argument("--limit", type=float, default=130.0, help="seconds for one way, start too")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings")
    args: argparse.Namespace = made.parse_args()
    return args


if __name__ == "__main__":
    main()

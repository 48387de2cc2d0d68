"""When a prompt's KV is sent, and in what pieces: time to the second token and TPOT of four styles.

    python -m bench.fig12_styles [--out FILE]
    python -m bench.fig12_styles --device cuda --model FOLDER --prompt 2048 --chunk 512 \\
        --rates 2 8 --requests 20 64 --set engine.load_format=dummy …

The paper's figure 12. Each style is a running `memserve up` in 1P1D-CC, asked at every rate, with
the same prompts and the same arrivals (Poisson) for all styles; prompts are new to every cache::

    request    all of the prompt's KV, when its prefill has ended: one copy per block
    discrete   the same moment, one copy per page: a layer of a block
    chunk      full blocks after each step of the prefill
    layer      each layer of a step's blocks, as soon as it is computed

The early styles need a prefill of several steps, so all engines compute at most `--chunk` tokens of
prompts in one. What happened in between comes from the requests' timelines: when P's prefill had
ended and the first token was out, when all KV was at D, and how long the link itself took for it.
The table, median and p99 in ms: `second` is the time to the second token, `gap` the longest time
between two tokens of a request, `sent` how long after the first token the hub heard that all KV is
at D, `link` what the link took for it. A style that fails or takes too long is named with its
reason, and the others go on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from bench._load import Answer, play
from bench._report import Scalar, parser, publish
from bench._serve import get, pin_instances, released, serving
from memserve.simulator.workload import Call, Piece, key_of

STYLES = ("request", "discrete", "chunk", "layer")
WARM_UP = 4


class Sample(msgspec.Struct):
    """One request, in seconds."""

    first_token_s: float
    """Since it was sent; so is the second."""
    second_token_s: float
    tpot_s: float
    """Between the tokens after the first one, on average."""
    gap_s: float
    """The longest time between two tokens."""
    sent_after_first_s: float
    """From the first token until the hub heard that all KV is at D."""
    link_s: float
    """What the link took for all of it, summed over parts."""


class Point(msgspec.Struct):
    """One style at one rate."""

    style: str
    rate: float
    samples: list[Sample] = []
    faults: list[str] = []


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises: SystemExit inside, in the main thread; an event loop lets nothing else through."""

    def over(*_: object) -> None:
        sys.exit(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def calls(name: str, count: int, rate: float, args: argparse.Namespace) -> list[Call]:
    """The same for every style."""
    rng = random.Random(key_of(args.seed, name))
    arrival_s = 0.0
    made = []
    for number in range(count):
        prompt = Piece(key_of(args.seed, name, number), args.prompt)
        reply = Piece(key_of("reply", name, number), args.reply)
        made.append(Call(f"{name}/{number}", (prompt,), reply, arrival_s))
        arrival_s += rng.expovariate(rate)
    return made


def sample(url: str, answer: Answer) -> Sample:
    """Raises: ValueError for a request that did not go the whole way."""
    if answer.outcome.error is not None or len(answer.token_times) < 3:
        raise ValueError(answer.outcome.error or f"{len(answer.token_times)} tokens")
    released(url, answer.id)
    found = get(f"{url}/v1/requests/{answer.id}")
    (timeline,) = found.get("requests", [found])
    # D sends, too, when it gives KV back: the first is P's.
    steps = {step["name"]: step for step in reversed(timeline["steps"])}
    if steps.get("sent", {}).get("instance") != "P0":
        raise ValueError(f"P did not send its KV: {', '.join(steps)}")
    times = answer.token_times
    return Sample(
        first_token_s=times[0] - answer.outcome.sent_at,
        second_token_s=times[1] - answer.outcome.sent_at,
        tpot_s=(times[-1] - times[0]) / (len(times) - 1),
        gap_s=max(b - a for a, b in itertools.pairwise(times)),
        sent_after_first_s=steps["sent"]["at_s"] - steps["first token"]["at_s"],
        link_s=steps["sent"]["detail"]["seconds"],
    )


def measure(points: Sequence[Point], args: argparse.Namespace) -> None:
    """One style at all rates. Raises: SystemExit (no server); what sending requests raises."""
    settings: dict[str, object] = dict(word.split("=", 1) for word in args.set)
    settings |= {
        "transfer.style": points[0].style,
        "engine.max_num_batched_tokens": args.chunk,
        "scheduler.split": "always",
        "cluster.device": args.device,
    }
    if args.model:
        settings["models.model"] = args.model
    began = time.monotonic()
    with serving(["--mode", "1P1D-CC"], settings) as url:
        print(f"{points[0].style}: ready after {time.monotonic() - began:.0f} s", flush=True)
        if args.device == "cpu":
            pin_instances(url)
        asyncio.run(play(url, calls("warm up", WARM_UP, 1.0, args)))
        for point, count in zip(points, args.requests, strict=True):
            load = calls(f"rate {point.rate}", count, point.rate, args)
            for answer in asyncio.run(play(url, load)):
                try:
                    point.samples.append(sample(url, answer))
                except ValueError as error:
                    point.faults.append(str(error))


FIGURES = {
    "ttft": "first_token_s",
    "second": "second_token_s",
    "tpot": "tpot_s",
    "gap": "gap_s",
    "sent": "sent_after_first_s",
    "link": "link_s",
}


def figures(point: Point) -> dict[str, tuple[float, float]]:
    """Median and p99 of each, in ms."""
    found = {}
    for title, name in FIGURES.items():
        values = [getattr(one, name) * 1e3 for one in point.samples]
        found[title] = (statistics.median(values), float(np.percentile(values, 99)))
    return found


def row(point: Point) -> dict[str, Scalar]:
    """A line of the table: median and p99, in ms."""
    found: dict[str, Scalar] = {"style": point.style, "per s": point.rate}
    found["n"] = len(point.samples)
    return found | {title: f"{p50:.1f} {p99:.1f}" for title, (p50, p99) in figures(point).items()}


def main() -> None:
    args = _arguments()
    points: list[Point] = []
    for style in args.styles:
        own = [Point(style, rate) for rate in args.rates]
        points += own
        try:
            with time_limit(args.limit):
                measure(own, args)
        except (SystemExit, Exception) as error:  # noqa: BLE001 (the others may do better)
            own[-1].faults.append(" ".join(f"{type(error).__name__}: {error}".split())[-500:])
    for point in points:
        for fault in sorted(set(point.faults)):
            print(f"{point.style}, {point.rate}/s, {point.faults.count(fault)} times: {fault}")
    measured = [point for point in points if point.samples]
    metrics: dict[str, Scalar] = {"faults": sum(len(point.faults) for point in points)}
    for point in measured:
        for title, (p50, p99) in figures(point).items():
            metrics[f"{point.style}/{point.rate}/{title}_p50_ms"] = round(p50, 3)
            metrics[f"{point.style}/{point.rate}/{title}_p99_ms"] = round(p99, 3)
    publish(
        "fig12_styles",
        settings={
            "device": args.device,
            "model": args.model.rstrip("/").rpartition("/")[2] or "bundled",
            "prompt": args.prompt,
            "reply": args.reply,
            "chunk": args.chunk,
            "requests": args.requests,
            "set": args.set,
        },
        metrics=metrics,
        raw=msgspec.to_builtins(points),
        rows=[row(point) for point in measured],
        out=args.out,
    )
    if not measured:
        sys.exit("no style could be measured")


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder or a name; default: the bundled one")
    made.add_argument("--styles", nargs="+", choices=STYLES, default=list(STYLES))
    made.add_argument("--prompt", type=int, default=512, help="tokens")
    made.add_argument("--reply", type=int, default=16, help="tokens")
    made.add_argument("--chunk", type=int, default=128, help="prompt tokens in one step")
    made.add_argument("--rates", type=float, nargs="+", default=[0.4, 1.2], help="requests/s")
    made.add_argument("--requests", type=int, nargs="+", default=[6, 16], help="for each rate")
    made.add_argument("--limit", type=float, default=100.0, help="seconds for one style, start too")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings")
    args: argparse.Namespace = made.parse_args()
    if len(args.rates) != len(args.requests):
        made.error("--requests needs one number for each of --rates")
    return args


if __name__ == "__main__":
    main()

"""TTFT against the cached share of a prompt, its length, and where the cached KV is.

    python -m bench.fig13_cached_ratio [--lengths 256 512 1024 1920] [--out FILE]
    python -m bench.fig13_cached_ratio --device cuda --model FOLDER --lengths 1024 4096 8192 …

The paper's figure 13. Every point is asked of a running `memserve up`: first a prompt that ends
where the share ends, then (for DRAM) other prompts until the instance's HBM pool has taken nothing
but them, then the whole prompt, whose TTFT counts: from sending the HTTP request to having the
answer of one token. Whether the KV was where it should be is read from the request's timeline and
the instance's counters, never assumed::

    hbm        1PD-CC; the prefix was computed just before
    dram       the same server; the prefix has left HBM, and is swapped in if that pays
    instance   2PD-CC; the prefix was computed by the other instance, and is fetched

Prompts are random tokens, new for each sample; the shares of one length are asked in random order.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import urllib.request
from typing import Any

import msgspec

from bench._report import Scalar, parser, publish
from bench._serve import get, released, serving

REQUEST_TIMEOUT_S = 120.0
FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
"""Prompts are random ids between these: no special tokens, in any vocabulary."""
MEDIA = ("hbm", "dram", "instance")


class Point(msgspec.Struct):
    """One medium, prompt length and cached share."""

    medium: str
    prompt_tokens: int
    prefix_tokens: int
    ttft_s: list[float] = []
    cached_tokens: list[int] = []
    """What the instance found when it started the request."""

    @property
    def is_as_meant(self) -> bool:
        """Whether all of the prefix was served from the medium, in every sample."""
        return all(cached == self.prefix_tokens for cached in self.cached_tokens)


class Server:
    """The server under test; requests go one after the other."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = get(f"{url}/v1/models")["data"][0]["id"]

    def ask(self, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """(TTFT in seconds, the timeline's steps by name), once nobody holds anything for it."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            answer = json.load(response)
        ttft_s = time.perf_counter() - begin
        return ttft_s, released(self._url, answer["id"])

    def pool(self) -> tuple[int, int]:
        """(HBM blocks of one instance, blocks swapped in so far by all)."""
        stats = [instance["stats"] for instance in get(f"{self._url}/v1/status")["instances"]]
        return stats[0]["total_blocks"], sum(s["swapped_in_blocks"] for s in stats)


def measure(server: Server, points: list[Point], args: argparse.Namespace) -> None:
    """Fill in the samples of these points, which one server can serve."""
    rng = random.Random(args.seed)
    longest = max(args.lengths)
    for _ in range(4):  # every instance has run, and every link, and all shapes are compiled
        prompt = _prompt(longest, rng)
        server.ask(prompt[: longest // 2])
        server.ask(prompt)
    pool_tokens = server.pool()[0] * args.block_size
    for _ in range(args.repeats):
        for point in rng.sample(points, len(points)):
            prompt = _prompt(point.prompt_tokens, rng)
            if point.prefix_tokens:
                # The token after the prefix differs, and so does every later block.
                server.ask([*prompt[: point.prefix_tokens], LAST_TOKEN])
                if point.medium == "dram":
                    _push_out(server, pool_tokens, longest, rng)
            elif point.medium == "instance":
                server.ask(_prompt(args.block_size, rng))  # keeps the turns of the two instances
            ttft_s, steps = server.ask(prompt)
            point.ttft_s.append(ttft_s)
            point.cached_tokens.append(steps["started"]["detail"]["cached_tokens"])


def _push_out(server: Server, pool_tokens: int, longest: int, rng: random.Random) -> None:
    """Fill the HBM pool with other prompts."""
    left = pool_tokens
    while left > 0:
        server.ask(_prompt(longest, rng))
        left -= longest


def _prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def _points(args: argparse.Namespace) -> list[Point]:
    """Prefixes are full blocks, and leave at least one token to compute."""
    found = {
        (medium, length, int(min(share * length, length - 1)) // args.block_size * args.block_size)
        for medium in args.media
        for length in args.lengths
        for share in args.shares
    }
    return [Point(*key) for key in sorted(found)]


def main() -> None:
    args = _arguments()
    points = _points(args)
    settings = dict(word.split("=", 1) for word in args.set)
    settings |= {"cluster.device": args.device, "engine.block_size": str(args.block_size)}
    if args.model:
        settings["models.model"] = args.model
    own = [point for point in points if point.medium != "instance"]
    if own:
        tiered = {"mempool.dram_gb": args.dram_gb} if "dram" in args.media else {}
        with serving(["--mode", "1PD-CC"], settings | tiered) as url:
            measure(Server(url), own, args)
    other = [point for point in points if point.medium == "instance"]
    if other:
        turns = {"scheduler.policy": "round_robin", "scheduler.fetch": "always"}
        with serving(["--mode", "2PD-CC"], settings | turns) as url:
            measure(Server(url), other, args)
    _publish(points, args)


def _publish(points: list[Point], args: argparse.Namespace) -> None:
    rows: list[dict[str, Scalar]] = []
    metrics: dict[str, Scalar] = {}
    for length in args.lengths:
        for medium in args.media:
            line = [p for p in points if p.medium == medium and p.prompt_tokens == length]
            whole = statistics.median(line[0].ttft_s)
            for point in line:
                ttft_s = statistics.median(point.ttft_s)
                rows.append(
                    {
                        "tokens": length,
                        "medium": medium,
                        "cached": f"{point.prefix_tokens / length:.0%}",
                        "ttft_ms": round(ttft_s * 1e3, 2),
                        "of_uncached": round(ttft_s / whole, 3),
                        "as meant": "yes" if point.is_as_meant else f"no: {point.cached_tokens}",
                    }
                )
            metrics[f"{medium}_{length}_uncached_ms"] = whole * 1e3
            metrics[f"{medium}_{length}_most_cached_ratio"] = ttft_s / whole
    metrics["points"] = len(points)
    metrics["points_as_meant"] = sum(point.is_as_meant for point in points)
    publish(
        "fig13_cached_ratio",
        settings={
            "device": args.device,
            "model": args.model.rstrip("/").rpartition("/")[2] or "bundled",
            "repeats": args.repeats,
            "block_size": args.block_size,
            "dram_gb": args.dram_gb,
            "set": args.set,
        },
        metrics=metrics,
        raw=[msgspec.to_builtins(point) for point in points],
        rows=rows,
        out=args.out,
    )


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder or a name; default: the bundled one")
    made.add_argument("--media", nargs="+", choices=MEDIA, default=list(MEDIA))
    made.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 1920])
    made.add_argument("--shares", type=float, nargs="+", default=[0, 0.25, 0.5, 0.75, 1.0])
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--block-size", type=int, default=32)
    made.add_argument("--dram-gb", type=float, default=0.5, help="large enough for all prompts")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings")
    args: argparse.Namespace = made.parse_args()
    return args


if __name__ == "__main__":
    main()

"""How far one scheduler goes: its work and its memory with up to 1,000 instances.

    python -m bench.scale --dataset mooncake_conversation.jsonl.gz [--instances 10,100,1000]
        [--requests-each 4] [--out FILE]

The Mooncake trace, as many crowds of it at once as the instances can serve, on simulated instances
(half prefill, half decode; Llama-3.1-8B on H200); the scheduler is the real one, and hears of every
engine step. Its work is processor time of this machine: placing a request, answering events by
their kind, and, on a sample of what was really sent, encoding commands and decoding events. Its
memory is that of the prompt tree, filled again from the same events.
"""

from __future__ import annotations

import bisect
import gc
import random
import statistics
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench._report import Scalar, parser, publish
from memserve.config import Config
from memserve.core.cache_follower import CacheFollower
from memserve.core.following_tree import FollowingTree
from memserve.core.vocabulary import Seat
from memserve.messages import (
    AnyCommand,
    AnyEvent,
    CacheChanged,
    decode_command,
    decode_event,
    encode,
)
from memserve.simulator import datasets, setup
from memserve.simulator.objectives import Objectives
from memserve.simulator.report import summarize
from memserve.simulator.simulation import Result, Simulation
from memserve.simulator.workload import Call, of_crowd
from memserve.types import InstanceId

BLOCKS, BLOCK_SIZE = 20_000, 16
RATE_EACH = 0.35
"""Requests a second for each instance: prefill instances are then about 40% busy."""
LEAST_REQUESTS = 400
MAX_CONTEXT = 131_072
SAMPLE_ONE_IN = 50
TREE_BLOCKS = 50_000_000


class Recording(Simulation):
    """Keeps a sample of the messages, and all changes of the caches."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.commands: list[AnyCommand] = []
        self.events: list[AnyEvent] = []
        self.changes: list[tuple[Seat, CacheChanged]] = []
        self.num_commands: Counter[str] = Counter()
        self._rng = random.Random(1)

    def _send(self, seat: Seat, command: AnyCommand) -> None:
        self.num_commands[type(command).__name__] += 1
        if self._rng.randrange(SAMPLE_ONE_IN) == 0:
            self.commands.append(command)
        super()._send(seat, command)

    def _emit(self, seat: Seat, event: AnyEvent) -> None:
        if isinstance(event, CacheChanged):
            self.changes.append((seat, event))
        if self._rng.randrange(SAMPLE_ONE_IN) == 0:
            self.events.append(event)
        super()._emit(seat, event)


def main() -> None:
    """Simulate each size, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--dataset", type=Path, required=True, help="the Mooncake trace")
    arguments.add_argument("--instances", default="10,100,1000", help="how many, even numbers")
    arguments.add_argument("--requests-each", type=int, default=4, help="for each instance")
    args = arguments.parse_args()
    rows = [
        measure(args.dataset, int(text), args.requests_each) for text in args.instances.split(",")
    ]
    publish(
        "scale",
        settings={"rate_each": RATE_EACH, "blocks": BLOCKS, "requests_each": args.requests_each},
        metrics={
            f"{row['instances']} instances: {key}": row[key]
            for row in rows
            for key in ("place_p50_us", "scheduler_us", "wire_us", "requests/s a core", "tree_mb")
        },
        raw=rows,
        out=args.out,
        rows=[
            {"": key, **{f"{row['instances']} instances": row[key] for row in rows}}
            for key in SHOWN
        ],
    )


SHOWN = (
    "requests",
    "place_p50_us",
    "place_p99_us",
    "tokens_us",
    "cache_us",
    "others_us",
    "wire_us",
    "scheduler_us",
    "requests/s a core",
    "tree_blocks",
    "tree_mb",
    "ttft_p50_s",
    "busy",
)


def measure(dataset: Path, instances: int, requests_each: int) -> dict[str, Scalar]:
    """One size. All `…_us` are per request, processor time."""
    half = instances // 2
    rate = RATE_EACH * instances
    options = setup.Options(mode=f"{half}P{half}D-CC", blocks=BLOCKS, block_size=BLOCK_SIZE)
    costs = setup.costs(options)
    calls = trace(dataset, rate, max(LEAST_REQUESTS, instances * requests_each))
    cluster = setup.cluster(options, _config(), costs, calls)
    limits = msgspec.structs.replace(cluster.hardware.limits, steps_together=1)
    hardware = msgspec.structs.replace(cluster.hardware, limits=limits)
    cluster = msgspec.structs.replace(cluster, hardware=hardware)
    simulation = Recording(cluster, calls, costs, time.process_time)
    begun = time.process_time()
    result = simulation.run()
    wall_s = time.process_time() - begun
    return row(instances, simulation, result, wall_s)


def trace(dataset: Path, rate: float, requests: int) -> list[Call]:
    """So many crowds as make the rate, each with another stretch of the trace at its own speed.

    A crowd's requests share prefixes with each other, as in the trace, and with no other crowd's.
    """
    calls = setup.fitting(datasets.read(dataset), MAX_CONTEXT)
    arrivals = [call.arrival_s or 0.0 for call in calls]
    length = arrivals[-1] - arrivals[0]
    crowds = max(1, round(rate * length / len(calls)))
    stretch = rate * length / len(calls) / crowds  # so many seconds of the trace in one of the run
    seconds = requests / rate * stretch
    rng = random.Random(2)
    found = []
    for crowd in range(crowds):
        begin = arrivals[0] + rng.random() * (length - seconds)
        first, last = (bisect.bisect(arrivals, at) for at in (begin, begin + seconds))
        found += [
            msgspec.structs.replace(of_crowd(call, crowd), arrival_s=(at - begin) / stretch)
            for call, at in zip(calls[first:last], arrivals[first:last], strict=True)
        ]
    return sorted(found, key=lambda call: call.arrival_s or 0.0)


def _config() -> Config:
    config = Config()
    scheduler = msgspec.structs.replace(config.scheduler, tree_max_blocks=TREE_BLOCKS)
    return msgspec.structs.replace(config, scheduler=scheduler)


def row(instances: int, simulation: Recording, result: Result, wall_s: float) -> dict[str, Scalar]:
    """What one run says."""
    summary = summarize(result, Objectives())
    count = summary.requests
    work = result.work
    submit = sorted(work.submit_s)
    events = {kind: 1e6 * seconds / count for kind, seconds in work.events_s.items()}
    tokens_us = events.pop("Tokens", 0.0)
    cache_us = events.pop("CacheChanged", 0.0)
    wire_us = 1e6 * wire_s(simulation, work.num_events) / count
    scheduler_us = 1e6 * summary.scheduler_s / count
    blocks, size = tree_memory(simulation, [InstanceId(name) for name in result.busy])
    return {
        "instances": instances,
        "requests": count,
        "failed": summary.failed,
        "requests_per_s": summary.requests_per_s,
        "place_p50_us": 1e6 * submit[len(submit) // 2],
        "place_p99_us": 1e6 * submit[int(0.99 * len(submit))],
        "place_mean_us": 1e6 * statistics.mean(submit),
        "tokens_us": tokens_us,
        "cache_us": cache_us,
        "others_us": sum(events.values()),
        "wire_us": wire_us,
        "scheduler_us": scheduler_us,
        "requests/s a core": 1e6 / (scheduler_us + wire_us),
        "token_outputs_per_s a core": _tokens_per_s(result),
        "tree_blocks": blocks,
        "tree_mb": size / 1e6,
        "ttft_p50_s": summary.ttft_s.p50,
        "ttft_p99_s": summary.ttft_s.p99,
        "hit_ratio": summary.hit_ratio,
        "fetches": summary.transfers.get("fetch", 0),
        "busy": summary.busy_mean,
        "simulated_events_per_s": result.num_events / wall_s,
        "prompt_tokens_mean": summary.prompt_tokens / count,
    }


def _tokens_per_s(result: Result) -> float:
    tokens = sum(outcome.reply_tokens for outcome in result.outcomes)
    return tokens / result.work.events_s["Tokens"]


def wire_s(simulation: Recording, num_events: dict[str, int]) -> float:
    """Seconds to encode all commands and decode all events, from the sample of each kind."""
    frames = [encode(event) for event in simulation.events]
    decoding = _per_kind(
        [(type(e).__name__, f) for e, f in zip(simulation.events, frames, strict=True)],
        decode_event,
    )
    encoding = _per_kind([(type(c).__name__, c) for c in simulation.commands], encode)
    assert decode_command(encode(simulation.commands[0])) == simulation.commands[0]
    total = sum(seconds * num_events.get(kind, 0) for kind, seconds in decoding.items())
    return total + sum(s * simulation.num_commands[kind] for kind, s in encoding.items())


def _per_kind(
    items: Sequence[tuple[str, Any]], action: Callable[[Any], object]
) -> dict[str, float]:
    """Mean seconds of the action, by kind."""
    spent: dict[str, list[float]] = {}
    for kind, item in items:
        begun = time.process_time()
        action(item)
        spent.setdefault(kind, []).append(time.process_time() - begun)
    return {kind: statistics.mean(seconds) for kind, seconds in spent.items()}


def tree_memory(simulation: Recording, instances: Sequence[InstanceId]) -> tuple[int, int]:
    """Blocks in the prompt tree, and its bytes: filled again from the same changes."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree = FollowingTree(BLOCK_SIZE, instances, TREE_BLOCKS)
    followers = {instance: CacheFollower(tree, instance, 3600.0, 0.0) for instance in instances}
    for seat, event in simulation.changes:
        followers[seat.instance].changed(event, 0.0)
    gc.collect()
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return tree.num_blocks, size


if __name__ == "__main__":
    main()

"""How long the scheduler takes to place a request, and to follow what the instances hold.

    python -m bench.place_latency [--repeats 400] [--out FILE]

A tree of up to 10⁶ blocks of 16 tokens, told by 64 and by 1,024 instances: 32 system prompts of 64
blocks that every instance holds, documents of 128 blocks on 8 instances each, and conversations
that grow under them to 512 blocks (8,192 tokens), turn by turn, on two instances each; every other
one forks off the one before it at some turn. Timed with the garbage collector as it is: the walk,
the policy on what it found (`cost`, with load on every instance), and both (`place`); the walk by
length of the prompt; and what the instances' events cost the event loop.

All times are the thread's own (CPU time): nothing here waits, so they are what a free core takes.
`place wall` is what the clock on the wall said, with whatever else ran on the machine. `explain`:
the placement's reason, which the scheduler asks for once a request has a place, or begins to wait;
`decision`: `place` and `explain`, of one request.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench._report import Scalar, parser, publish
from memserve.changes import AnyChange, Evicted, Inserted
from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.following_tree import FollowingTree
from memserve.core.loads import Loads, Share
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Split
from memserve.core.tokens import Path, pack
from memserve.core.tree_parts import Match
from memserve.simulator.setup import MODELS
from memserve.types import InstanceId, Medium, Namespace, Role

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 4
SYSTEM, DOCUMENT, PROMPT, TURN = 64, 192, 512, 40
"""Blocks: where the system prompt, the document and the conversation end, and one turn."""
NUM_SYSTEMS, CONVERSATIONS = 32, 4
PART = 2048
"""Blocks in one part of a snapshot."""
PLAIN = Namespace()


class Teller:
    """One instance, as far as it takes to tell the tree about its index."""

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.told: list[Inserted] = []
        self.tails: list[tuple[int, int]] = []
        """Keys (first, how many) of the last run of each conversation: nothing is below it."""
        self._keys: dict[bytes, int] = {}
        """The beginning of a prompt → key of its last block."""
        self._next_key = 1

    def insert(self, packed: bytes, begin: int, end: int) -> Inserted | None:
        """Blocks `begin` to `end` of a prompt; None if they are held already."""
        whole = packed[: end * BLOCK_BYTES]
        if whole in self._keys:
            return None
        parent = self._keys[packed[: begin * BLOCK_BYTES]] if begin else None
        tokens = packed[begin * BLOCK_BYTES : end * BLOCK_BYTES]
        change = Inserted(PLAIN, parent, self._next_key, tokens, Medium.HBM)
        if end == PROMPT:
            self.tails.append((self._next_key, end - begin))
        self._next_key += end - begin
        self._keys[whole] = self._next_key - 1
        self.told.append(change)
        return change


class Load:
    """Prompts, and a tree that was told who holds them."""

    def __init__(self, num_instances: int, num_blocks: int) -> None:
        self.rng = np.random.default_rng(1)
        self.instances = [InstanceId(f"PD{number}") for number in range(num_instances)]
        self.tellers = [Teller(instance) for instance in self.instances]
        self.tree = FollowingTree(BLOCK_SIZE, self.instances, 4_000_000)
        self.prompts: list[bytes] = []
        self.apply_us: list[float] = []
        """Per block, of each turn that was told."""
        systems = [self.tokens(SYSTEM) for _ in range(NUM_SYSTEMS)]
        for system in systems:
            for teller in self.tellers:
                self._tell(teller, system, [SYSTEM])
        while self.tree.num_blocks < num_blocks:
            system = systems[len(self.prompts) // CONVERSATIONS % NUM_SYSTEMS]
            self._add_document(system + self.tokens(DOCUMENT - SYSTEM))

    def _add_document(self, document: bytes) -> None:
        holders = self.rng.choice(len(self.tellers), 8, replace=False)
        for number in holders:
            self._tell(self.tellers[number], document, [SYSTEM, DOCUMENT])
        prompt = document
        for number in range(CONVERSATIONS):
            fork = DOCUMENT
            if number % 2:
                fork += TURN * int(self.rng.integers(1, (PROMPT - DOCUMENT) // TURN))
            prompt = prompt[: fork * BLOCK_BYTES] + self.tokens(PROMPT - fork)
            ends = [SYSTEM, *range(DOCUMENT, PROMPT, TURN), PROMPT]
            for holder in self.rng.choice(holders, 2, replace=False):
                self._tell(self.tellers[holder], prompt, ends)
            self.prompts.append(prompt)

    def _tell(self, teller: Teller, packed: bytes, ends: list[int]) -> None:
        begin = 0
        for end in ends:
            change = teller.insert(packed, begin, end)
            if change is not None:
                seconds = timed(self.tree.apply, teller.instance, [change], 0.0)
                self.apply_us.append(seconds * 1e6 / (end - begin))
            begin = end

    def tokens(self, num_blocks: int) -> bytes:
        return self.rng.integers(0, 128_000, num_blocks * BLOCK_SIZE, dtype=np.int32).tobytes()

    def path(self, num_blocks: int = PROMPT) -> Path:
        """A known prompt's beginning and, at its end, blocks that nobody holds."""
        prompt = self.prompts[self.rng.integers(len(self.prompts))]
        known = num_blocks - min(8, num_blocks // 4)
        return Path(prompt[: known * BLOCK_BYTES] + self.tokens(num_blocks - known), BLOCK_SIZE)


def timed(work: Callable[..., object], *arguments: object) -> float:
    """Seconds."""
    begin = time.thread_time()
    work(*arguments)
    return time.thread_time() - begin


def microseconds(samples: list[float]) -> dict[str, float]:
    """p50, p99 and the longest, of seconds."""
    in_us = sorted(sample * 1e6 for sample in samples)
    p99 = in_us[min(len(in_us) - 1, int(len(in_us) * 0.99))]
    return {"p50_us": statistics.median(in_us), "p99_us": p99, "max_us": in_us[-1]}


def busy(load: Load, cost: CostModel) -> Loads:
    """Some requests on every instance."""
    loads = Loads(dict.fromkeys(load.instances, Role.COLOCATED), cost)
    for number, instance in enumerate(load.instances):
        loads.start(instance)
        for request in range(number % 5):
            loads.add(instance, Share(2000, 0.1 * (request % 2), 1000 * (request % 2)), 0.0)
    return loads


def demand(match: Match) -> Demand:
    return Demand(
        num_tokens=PROMPT * BLOCK_SIZE,
        cached_tokens=match.cached_tokens,
        dram_tokens=match.dram_tokens,
        expected_tokens=128,
        session="",
        now=1.0,
        block_size=BLOCK_SIZE,
        ahead_s=np.zeros(len(match.cached_tokens)),
    )


def place_times(load: Load, repeats: int) -> dict[str, dict[str, float]]:
    """The walk, the policy, both; the reason, and both with it."""
    cost = CostModel(built_in(MODELS["llama-3.1-8b"], "NVIDIA H200"))
    policy = make_policy("cost", Split.ALWAYS, cost, "ipc")
    loads = busy(load, cost)
    walk, decide, both, wall, explain = [], [], [], [], []
    for _ in range(repeats):
        path = load.path()
        begin_wall, begin = time.perf_counter(), time.thread_time()
        match = load.tree.match(path)
        walked = time.thread_time()
        placement = policy.place(demand(match), loads)
        end = time.thread_time()
        wall.append(time.perf_counter() - begin_wall)
        walk.append(walked - begin)
        decide.append(end - walked)
        both.append(end - begin)
        explain.append(timed(placement.explain))
    samples = {
        "walk": walk,
        "policy": decide,
        "place": both,
        "place wall": wall,
        "explain": explain,
        "decision": [sum(parts) for parts in zip(both, explain, strict=True)],
    }
    return {name: microseconds(times) for name, times in samples.items()}


def walk_by_length(load: Load, repeats: int) -> dict[str, float]:
    """Tokens of the prompt → p50 of the walk, µs."""
    figures = {}
    for blocks in (32, 64, 128, 256, 512):
        paths = [load.path(blocks) for _ in range(repeats)]
        times = [timed(load.tree.match, path) for path in paths]
        figures[str(blocks * BLOCK_SIZE)] = microseconds(times)["p50_us"]
    return figures


def follow(load: Load) -> dict[str, float]:
    """What the events of instances cost. Changes the tree."""
    evict = [
        timed(load.tree.apply, load.instances[0], [Evicted([(first + count - 8, 8)])], 0.0) / 8
        for first, count in load.tellers[0].tails
        if count >= 8
    ]
    return {
        "turn_us_per_block": statistics.median(load.apply_us),
        "evict_us_per_block": statistics.median(evict) * 1e6,
        "decode_us_per_block": decode_us(load),
        **snapshot(load),
    }


def decode_us(load: Load) -> float:
    """64 requests that grow by a block each, in one event, µs per block."""
    instance, key = InstanceId("PD3"), 1_000_000_000
    parents: list[int | None] = [None] * 64
    samples = []
    for _ in range(32):
        changes: list[AnyChange] = []
        for number, parent in enumerate(parents):
            changes.append(Inserted(PLAIN, parent, key, load.tokens(1), Medium.HBM))
            parents[number] = key
            key += 1
        samples.append(timed(load.tree.apply, instance, changes, 0.0))
    return statistics.median(samples) / len(parents) * 1e6


def parts(teller: Teller) -> Iterator[list[Inserted]]:
    """What a snapshot of its index would say, in parts of at most `PART` blocks."""
    part: list[Inserted] = []
    size = 0
    for change in teller.told:
        num_blocks = len(change.token_ids) // BLOCK_BYTES
        if size + num_blocks > PART:
            yield part
            part, size = [], 0
        part.append(change)
        size += num_blocks
    yield part


def snapshot(load: Load) -> dict[str, float]:
    """An instance's whole index, told anew; then its loss, cleared away bit by bit."""
    tree, teller = load.tree, load.tellers[1]
    num_blocks = sum(len(change.token_ids) for change in teller.told) // BLOCK_BYTES
    tree.drop(teller.instance)
    part_s = [timed(tree.apply, teller.instance, part, 0.0) for part in parts(teller)]
    drop_s = timed(tree.drop, teller.instance)
    tidy_s = []
    is_left = True
    while is_left:
        begin = time.thread_time()
        is_left = tree.tidy(1000)
        tidy_s.append(time.thread_time() - begin)
    return {
        "snapshot_blocks": num_blocks,
        "snapshot_us_per_block": sum(part_s) / num_blocks * 1e6,
        "snapshot_longest_part_ms": max(part_s) * 1e3,
        "loss_us": drop_s * 1e6,
        "loss_tidy_longest_ms": max(tidy_s) * 1e3,
    }


def row(load: Load, times: dict[str, dict[str, float]]) -> dict[str, Scalar]:
    figures = {f"{name} {key}": v for name, by in times.items() for key, v in by.items()}
    shown = ("walk p50_us", "place p50_us", "explain p50_us", "decision p50_us", "decision p99_us")
    size: dict[str, Scalar] = {"instances": len(load.instances), "blocks": load.tree.num_blocks}
    return size | {name: figures[name] for name in shown}


def main(args: argparse.Namespace) -> None:
    metrics: dict[str, Scalar] = {}
    raw: dict[str, Any] = {}
    rows: list[dict[str, Scalar]] = []
    for num_instances in (64, 1024):
        for num_blocks in (10_000, 100_000, 1_000_000):
            load = Load(num_instances, num_blocks)
            gc.collect()
            times = place_times(load, args.repeats)
            raw[f"{num_instances} instances, {load.tree.num_blocks} blocks"] = times
            rows.append(row(load, times))
        for name, by in times.items():
            label = name.replace(" ", "_")
            metrics |= {f"{label}_{num_instances}_{key}": v for key, v in by.items()}
        raw[f"walk by tokens, {num_instances} instances"] = walk_by_length(load, args.repeats)
        if num_instances == 64:
            metrics |= follow(load)
    tokens = np.frombuffer(load.prompts[0], np.int32).tolist()
    metrics["pack_us"] = statistics.median(timed(pack, tokens) for _ in range(100)) * 1e6
    publish(
        "place_latency",
        settings={"repeats": args.repeats, "block_size": BLOCK_SIZE, "prompt_blocks": PROMPT},
        metrics=metrics,
        raw=raw,
        rows=rows,
        out=args.out,
    )
    for name, value in (metrics | raw).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=400, help="prompts per figure")
    main(options.parse_args())

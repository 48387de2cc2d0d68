"""How long the scheduler takes to place a request, and to follow what the instances hold.

    python -m bench.place_latency [--repeats 300] [--out FILE]

A tree of 10⁶ blocks of 16 tokens, told by 64 and by 1,024 instances: 32 system prompts of 64 blocks
that every instance holds, documents of 128 blocks on 8 instances each, and conversations that grow
under them to 512 blocks (8,192 tokens), turn by turn, on two instances each. Timed on the event
loop's thread, with the garbage collector as it is: the walk, the policy on what it found, and both
(`place`); the walk by length of the prompt and by size of the tree; and what the instances' events
cost: whole turns, single blocks of decoding, evictions, a snapshot part by part, a loss.
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
from memserve.accounting import Members
from memserve.changes import AnyChange, Evicted, Inserted
from memserve.core import policy
from memserve.core.following_tree import FollowingTree
from memserve.core.tokens import Path, pack
from memserve.core.vocabulary import Seat
from memserve.types import InstanceId, Medium, Namespace, Role

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 4
SYSTEM, DOCUMENT, PROMPT = 64, 192, 512
"""Blocks from the beginning: the end of the system prompt, of the document, of the conversation."""
NUM_SYSTEMS, CONVERSATIONS_PER_DOCUMENT, TURN = 32, 4, 40
PART = 1024
"""Blocks in one part of a snapshot."""
PLAIN = Namespace()


class Teller:
    """One instance's index, as far as it takes to tell the tree about it."""

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.keys: dict[bytes, int] = {}
        """Hash of a prefix of whole runs → key of its last block."""
        self.next_key = 1
        self.told: list[Inserted] = []

    def insert(self, packed: bytes, begin: int, end: int, rng_label: bytes) -> Inserted:
        """Blocks `begin` to `end` of a prompt, whose first `begin` are known by `rng_label`."""
        parent = self.keys.get(rng_label)
        tokens = packed[begin * BLOCK_BYTES : end * BLOCK_BYTES]
        change = Inserted(PLAIN, parent, self.next_key, tokens, Medium.HBM)
        self.next_key += end - begin
        self.told.append(change)
        return change

    def knows(self, label: bytes) -> bool:
        return label in self.keys

    def remember(self, label: bytes) -> None:
        self.keys[label] = self.next_key - 1


class Load:
    """Prompts, and a tree that was told who holds them."""

    def __init__(self, num_instances: int, num_blocks: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.instances = [InstanceId(f"PD{number}") for number in range(num_instances)]
        self.tellers = [Teller(instance) for instance in self.instances]
        self.tree = FollowingTree(BLOCK_SIZE, self.instances, 4_000_000)
        self.prompts: list[bytes] = []
        self.apply_us: list[float] = []
        """Per block, of each turn that was told."""
        systems = [self._tokens(SYSTEM) for _ in range(NUM_SYSTEMS)]
        while self.tree.num_blocks < num_blocks:
            document = systems[len(self.prompts) % NUM_SYSTEMS] + self._tokens(DOCUMENT - SYSTEM)
            self._tell_document(document)

    def _tell_document(self, document: bytes) -> None:
        holders = self.rng.choice(len(self.tellers), 8, replace=False)
        for teller in self.tellers if len(self.prompts) < 4 * NUM_SYSTEMS else ():
            self._tell(teller, document, [SYSTEM])
        for number in holders:
            self._tell(self.tellers[number], document, [SYSTEM, DOCUMENT])
        for _ in range(CONVERSATIONS_PER_DOCUMENT):
            prompt = document + self._tokens(PROMPT - DOCUMENT)
            ends = [SYSTEM, *range(DOCUMENT, PROMPT, TURN), PROMPT]
            for number in self.rng.choice(holders, 2, replace=False):
                self._tell(self.tellers[number], prompt, ends)
            self.prompts.append(prompt)

    def _tell(self, teller: Teller, packed: bytes, ends: list[int]) -> None:
        begin = 0
        for end in ends:
            label = packed[: end * BLOCK_BYTES]
            key = label[-BLOCK_BYTES:] + label[:BLOCK_BYTES]
            if not teller.knows(key):
                before = packed[: begin * BLOCK_BYTES]
                change = teller.insert(
                    packed, begin, end, before[-BLOCK_BYTES:] + before[:BLOCK_BYTES]
                )
                teller.remember(key)
                seconds = timed(lambda: self.tree.apply(teller.instance, [change], 0.0))  # noqa: B023
                self.apply_us.append(seconds * 1e6 / (end - begin))
            begin = end

    def _tokens(self, num_blocks: int) -> bytes:
        return self.rng.integers(0, 128_000, num_blocks * BLOCK_SIZE, dtype=np.int32).tobytes()

    def path(self, num_blocks: int = PROMPT) -> Path:
        """A known prompt's beginning and, at its end, blocks that nobody holds."""
        prompt = self.prompts[self.rng.integers(len(self.prompts))]
        known = num_blocks - min(8, num_blocks // 4)
        return Path(prompt[: known * BLOCK_BYTES] + self._tokens(num_blocks - known), BLOCK_SIZE)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def microseconds(samples: list[float]) -> dict[str, float]:
    """p50, p99 and the longest, of seconds."""
    in_us = sorted(sample * 1e6 for sample in samples)
    p99 = in_us[min(len(in_us) - 1, int(len(in_us) * 0.99))]
    return {"p50_us": statistics.median(in_us), "p99_us": p99, "max_us": in_us[-1]}


def place_times(load: Load, repeats: int) -> dict[str, dict[str, float]]:
    """The walk, the policy, both; with some load on every instance."""
    members = Members(max_running=256, max_queued_tokens=1 << 30)
    for number, instance in enumerate(load.instances):
        members.add(Seat(instance, 1), Role.COLOCATED)
        member = members.get(instance)
        assert member is not None
        member.queued_tokens = member.running_tokens = number * 37 % 1000
    walk, decide, both = [], [], []
    for _ in range(repeats):
        path = load.path()
        begin = time.perf_counter()
        match = load.tree.match(path)
        walked = time.perf_counter()
        policy.place(PROMPT * BLOCK_SIZE, members.views(match))
        end = time.perf_counter()
        walk.append(walked - begin)
        decide.append(end - walked)
        both.append(end - begin)
    return {
        "walk": microseconds(walk),
        "policy": microseconds(decide),
        "place": microseconds(both),
    }


def by_length(load: Load, repeats: int) -> dict[int, float]:
    """Tokens of the prompt → p50 of the walk, µs."""
    lengths = (32, 64, 128, 256, 512)
    return {
        blocks * BLOCK_SIZE: microseconds(
            [timed(lambda p=load.path(blocks): load.tree.match(p)) for _ in range(repeats)]  # type: ignore[misc]
        )["p50_us"]
        for blocks in lengths
    }


def decode_us(load: Load) -> float:
    """One block at a time at the ends of 64 conversations in turn, µs per block."""
    teller = load.tellers[0]
    tops = [load._tokens(1) for _ in range(64)]
    parents = []
    for top in tops:
        parents.append(teller.next_key)
        change = Inserted(PLAIN, None, teller.next_key, top, Medium.HBM)
        teller.next_key += 1
        load.tree.apply(teller.instance, [change], 0.0)
    samples = []
    for _ in range(32):
        changes: list[AnyChange] = []
        for number, parent in enumerate(parents):
            token = load._tokens(1)
            changes.append(Inserted(PLAIN, parent, teller.next_key, token, Medium.HBM))
            parents[number] = teller.next_key
            teller.next_key += 1
        samples.append(timed(lambda c=changes: load.tree.apply(teller.instance, c, 0.0)))  # type: ignore[misc]
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


def following(load: Load) -> dict[str, float]:
    """What the events cost. Changes the tree."""
    tree, teller = load.tree, load.tellers[1]
    num_blocks = sum(len(change.token_ids) for change in teller.told) // BLOCK_BYTES
    lost_s = timed(lambda: tree.drop(teller.instance))
    part_s = [
        timed(lambda p=part: tree.apply(teller.instance, p, 0.0))  # type: ignore[misc]
        for part in parts(teller)
    ]
    tidy_s = []
    tree.drop(teller.instance)
    while not tidy_s or not done:
        begin = time.perf_counter()
        done = not tree.tidy(1000)
        tidy_s.append(time.perf_counter() - begin)
    evict_us = evict(load)
    return {
        "turn_us_per_block": statistics.median(load.apply_us),
        "decode_us_per_block": decode_us(load),
        "evict_us_per_block": evict_us,
        "snapshot_blocks": num_blocks,
        "snapshot_us_per_block": sum(part_s) / num_blocks * 1e6,
        "snapshot_longest_part_ms": max(part_s) * 1e3,
        "drop_us": lost_s * 1e6,
        "tidy_longest_ms": max(tidy_s) * 1e3,
    }


def evict(load: Load) -> float:
    """The last 8 blocks of conversations, one event each, µs per block."""
    teller = load.tellers[2]
    samples = []
    for change in teller.told:
        count = len(change.token_ids) // BLOCK_BYTES
        if count == PROMPT - DOCUMENT - (PROMPT - DOCUMENT) // TURN * TURN or count == TURN:
            last = change.first_key + count
            if (
                load.tree.index_of
                and (change.first_key + count - 1) in teller.keys.values()
                and len(samples) < 50
                and not any(other.parent == last - 1 for other in teller.told)
            ):
                event: list[AnyChange] = [Evicted([(last - 8, 8)])]
                samples.append(timed(lambda e=event: load.tree.apply(teller.instance, e, 0.0)))  # type: ignore[misc]
    return statistics.median(samples) / 8 * 1e6


def main(args: argparse.Namespace) -> None:
    metrics: dict[str, Scalar] = {}
    raw: dict[str, Any] = {}
    rows: list[dict[str, Scalar]] = []
    for num_instances in (64, 1024):
        for num_blocks in (10_000, 100_000, 1_000_000):
            load = Load(num_instances, num_blocks, seed=1)
            gc.collect()
            times = place_times(load, args.repeats)
            raw[f"{num_instances}/{num_blocks}"] = times
            rows.append(
                {"instances": num_instances, "blocks": load.tree.num_blocks}
                | {
                    f"{name} {key}": value
                    for name, figures in times.items()
                    for key, value in figures.items()
                }
            )
        metrics |= {f"{n}_{num_instances}_{k}": v for n, f in times.items() for k, v in f.items()}
        raw[f"{num_instances}/walk by tokens, µs"] = by_length(load, args.repeats)
        if num_instances == 64:
            tokens = np.frombuffer(load.prompts[0], np.int32).tolist()
            metrics["pack_8192_tokens_us"] = statistics.median(
                timed(lambda: pack(tokens)) for _ in range(100)
            ) * 1e6
            metrics |= following(load)
    publish(
        "place_latency",
        settings={"repeats": args.repeats, "block_size": BLOCK_SIZE, "prompt_blocks": PROMPT},
        metrics=metrics,
        raw=raw,
        rows=rows,
        out=args.out,
    )
    print(raw["64/walk by tokens, µs"], raw["1024/walk by tokens, µs"])
    for name, value in metrics.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=300, help="prompts per figure")
    main(options.parse_args())

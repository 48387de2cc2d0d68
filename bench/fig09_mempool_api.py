"""What MemPool's calls cost (the paper's figure 9): the index by prompt, by share cached, by size.

    python -m bench.fig09_mempool_api [--samples 200] [--sizes 10000,100000,1000000] [--out FILE]

Blocks of 16 tokens. A tree is grown to each size in turn from prompts of 256 blocks, of which every
second one leaves an earlier one somewhere in its middle. In each tree, samples of `insert` (a new
prompt of 4,096 tokens, of which a share is known), `match` (such a prompt, all of it known, with
its tokens packed already), and growth and eviction block by block. `alloc` and `free`: MemPool over
a pool of its own. Memory is what tracemalloc says of whole trees, without the tokens themselves.
Ends with status 1 if a limit is not kept.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator

from bench._report import Scalar, parser, publish
from memserve.core.radix import RadixIndex
from memserve.core.tokens import TOKEN_BYTES, Path, unpack
from memserve.types import Medium
from memserve.workers.mempool import MemPool
from memserve.workers.pools import PlainPool

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
PROMPT_BLOCKS = 256
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
MEMORY_BLOCKS = 100_000

LIMITS = {
    "alloc, us per block": 0.8,
    "free, us per block": 0.8,
    "insert, ms": 0.15,
    "match, ms": 0.05,
    "insert, largest / smallest tree": 2.0,
    "match, largest / smallest tree": 2.0,
    "insert, most / least cached": 2.0,
    "match, most / least cached": 2.0,
    "bytes per block: prompts": 200.0,
    "bytes per block: conversations": 200.0,
}


class Trees:
    """An index in which prompts fork, with places given out in order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.index = RadixIndex(BLOCK_SIZE, time.monotonic, lambda _: True)
        self.prompts: list[bytes] = []
        self.places = itertools.count()

    def tokens(self, num_blocks: int) -> bytes:
        """Random ones, packed."""
        return self.rng.randbytes(num_blocks * BLOCK_BYTES)

    def take(self, num: int) -> list[int]:
        """Places that were not given out yet."""
        return list(itertools.islice(self.places, num))

    def prompt(self, known: int | None = None) -> bytes:
        """A prompt whose first `known` blocks are those of an earlier one."""
        if not self.prompts or known == 0:
            return self.tokens(PROMPT_BLOCKS)
        known = self.rng.randrange(PROMPT_BLOCKS) if known is None else known
        head = self.rng.choice(self.prompts)[: known * BLOCK_BYTES]
        return head + self.tokens(PROMPT_BLOCKS - known)

    def grow_to(self, num_blocks: int) -> None:
        """Until the index has so many blocks."""
        while self.index.num_blocks < num_blocks:
            prompt = self.prompt(0 if len(self.prompts) % 2 else None)
            path = Path(prompt, BLOCK_SIZE)
            known = self.index.match(path).num_blocks
            self.index.insert(path, self.take(PROMPT_BLOCKS - known), known)
            self.prompts.append(prompt)
            self.index.take_changes()


def seconds(call: Callable[[], object]) -> float:
    """Of one call."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def sample(trees: Trees, share: float) -> dict[str, float]:
    """One prompt of which this share is known; the tree is the same afterwards but for splits."""
    index = trees.index
    known = int(PROMPT_BLOCKS * share)
    prompt = trees.prompt(known)
    as_list = unpack(prompt)
    times = {"pack": seconds(lambda: Path(as_list, BLOCK_SIZE))}
    path = Path(prompt, BLOCK_SIZE)
    times["match_part"] = seconds(lambda: index.match(path))
    places = index.match(path).hbm_prefix() + trees.take(PROMPT_BLOCKS - known)
    times["insert"] = seconds(lambda: index.insert(path, places))
    times["match"] = seconds(lambda: index.match(path))
    if known < PROMPT_BLOCKS:
        times["delete"] = seconds(lambda: index.delete(path, known))
    index.take_changes()
    return times


def decode_and_evict(trees: Trees) -> dict[str, float]:
    """A prompt that grows by one block at a time and is evicted in the same way: per block."""
    index = trees.index
    path = Path(trees.tokens(1), BLOCK_SIZE)
    index.insert(path, trees.take(1))
    cursor = index.match(path).end
    assert cursor is not None
    blocks = [(trees.tokens(1), trees.take(1)) for _ in range(PROMPT_BLOCKS)]
    begun = time.perf_counter()
    for packed, places in blocks:
        cursor = index.append(cursor, packed, places).end
        assert cursor is not None
    appended = time.perf_counter()
    for _, places in reversed(blocks):
        index.drop(places, Medium.HBM)
    dropped = time.perf_counter()
    index.delete(path)
    index.take_changes()
    return {
        "append, one block": (appended - begun) / PROMPT_BLOCKS,
        "drop, one block": (dropped - appended) / PROMPT_BLOCKS,
    }


def evict_in_bulk(trees: Trees, num_blocks: int) -> float:
    """The oldest blocks leave, and come back: seconds per block."""
    index = trees.index
    took = seconds(lambda: index.evict(num_blocks, Medium.HBM)) / num_blocks
    trees.grow_to(index.num_blocks + num_blocks)
    return took


def measure(sizes: list[int], samples: int) -> dict[str, dict[str, list[float]]]:
    """Seconds: size (and share) → call → samples."""
    raw: dict[str, dict[str, list[float]]] = {}
    trees = Trees(seed=9)
    for size in sizes:
        trees.grow_to(size)
        for share in SHARES:
            kept = raw.setdefault(f"{size} blocks, {share:.0%} known", {})
            for _ in range(samples):
                for call, took in sample(trees, share).items():
                    kept.setdefault(call, []).append(took)
        kept = raw.setdefault(f"{size} blocks", {})
        for _ in range(max(3, samples // 20)):
            for call, took in decode_and_evict(trees).items():
                kept.setdefault(call, []).append(took)
    for _ in range(max(3, samples // 20)):
        took = evict_in_bulk(trees, PROMPT_BLOCKS)
        raw[f"{sizes[-1]} blocks"].setdefault("evict, per block", []).append(took)
    return raw


def alloc_and_free(samples: int) -> dict[str, list[float]]:
    """MemPool by itself: so many blocks at once, of a pool of 40 times as many. Per block."""
    mempool = MemPool(PlainPool(40 * PROMPT_BLOCKS), BLOCK_SIZE)
    rng = random.Random(11)
    raw: dict[str, list[float]] = {"alloc": [], "free": [], "alloc, of history": []}
    for _ in range(samples):
        raw["alloc"].append(seconds(lambda: mempool.alloc_mem(PROMPT_BLOCKS, "bench")))
        raw["free"].append(seconds(lambda: mempool.free_all("bench")))
    for number in range(40 + samples):  # the first ones fill the pool with history
        took = seconds(lambda: mempool.alloc_mem(PROMPT_BLOCKS, "bench"))
        tokens = unpack(rng.randbytes(PROMPT_BLOCKS * BLOCK_BYTES))
        mempool.insert(tokens, mempool.held("bench"), "bench")
        mempool.free_all("bench")
        if number >= 40:
            raw["alloc, of history"].append(took)
    return {name: [took / PROMPT_BLOCKS for took in times] for name, times in raw.items()}


def prompts(rng: random.Random) -> Iterator[list[bytes]]:
    """Long ones that share nothing."""
    while True:
        yield [rng.randbytes(PROMPT_BLOCKS * BLOCK_BYTES)]


def conversations(rng: random.Random) -> Iterator[list[bytes]]:
    """One of 8 beginnings of 32 blocks, then 6 turns of 2 to 16 blocks; a third are asked again."""
    heads = [rng.randbytes(32 * BLOCK_BYTES) for _ in range(8)]
    while True:
        prompt, turns = rng.choice(heads), []
        for _ in range(6):
            turn = prompt + rng.randbytes(rng.randrange(2, 17) * BLOCK_BYTES)
            turns.append(turn)
            prompt = prompt if rng.random() < 1 / 3 else turn
        yield turns


def single_blocks(rng: random.Random) -> Iterator[list[bytes]]:
    """The worst shape: every node is one block."""
    head = rng.randbytes(BLOCK_BYTES)
    while True:
        yield [head + rng.randbytes(BLOCK_BYTES)]


def bytes_per_block(shape: Callable[[random.Random], Iterator[list[bytes]]]) -> tuple[float, float]:
    """Of an index of MEMORY_BLOCKS without its tokens; and blocks per node."""
    trees = Trees(seed=10)
    source = shape(trees.rng)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    while trees.index.num_blocks < MEMORY_BLOCKS:
        for prompt in next(source):
            path = Path(prompt, BLOCK_SIZE)
            known = trees.index.match(path).num_blocks
            trees.index.insert(path, trees.take(path.num_blocks - known), known)
        trees.index.take_changes()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    num_blocks, num_nodes = trees.index.num_blocks, trees.index.num_nodes
    return used / num_blocks - BLOCK_BYTES, num_blocks / num_nodes


def summary(raw: dict[str, dict[str, list[float]]], sizes: list[int]) -> dict[str, Scalar]:
    """Medians, and the ratios that have to be flat."""

    def middle(size: int, share: float, call: str) -> float:
        return statistics.median(raw[f"{size} blocks, {share:.0%} known"][call])

    largest = sizes[-1]
    metrics: dict[str, Scalar] = {
        f"{call}, us per block": 1e6 * statistics.median(times)
        for call, times in raw["pool"].items()
    }
    metrics["pack a list, ms"] = 1e3 * middle(largest, 0.0, "pack")
    for call in ("insert", "match"):
        all_sizes = [middle(size, share, call) for size in sizes for share in SHARES]
        metrics[f"{call}, ms"] = 1e3 * max(all_sizes)
    for call in ("insert", "match"):
        metrics[f"{call}, largest / smallest tree"] = max(
            middle(largest, share, call) / middle(sizes[0], share, call) for share in SHARES
        )
        metrics[f"{call}, most / least cached"] = max(
            middle(size, share, call) / middle(size, 0.0, call)
            for size in sizes
            for share in SHARES
        )
    for call, times in raw[f"{largest} blocks"].items():
        metrics[f"{call}, us"] = 1e6 * statistics.median(times)
    return metrics


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=200, help="for each size and share")
    arguments.add_argument("--sizes", default="10000,100000,1000000", help="blocks, rising")
    options = arguments.parse_args()
    sizes = [int(text) for text in options.sizes.split(",")]
    raw = {"pool": alloc_and_free(options.samples), **measure(sizes, options.samples)}
    metrics = summary(raw, sizes)
    for shape in (prompts, conversations, single_blocks):
        name = shape.__name__.replace("_", " ")
        used, blocks_per_node = bytes_per_block(shape)
        metrics[f"bytes per block: {name}"] = used
        metrics[f"blocks per node: {name}"] = blocks_per_node
    is_kept = {name: float(metrics[name] or 0.0) <= limit for name, limit in LIMITS.items()}
    publish(
        "fig09_mempool_api",
        settings={"samples": options.samples, "sizes": sizes, "block_size": BLOCK_SIZE},
        metrics=metrics,
        raw=raw,
        out=options.out,
        rows=[
            {"measured": name, "value": value, "limit": LIMITS.get(name), "kept": is_kept.get(name)}
            for name, value in metrics.items()
        ],
    )
    if not all(is_kept.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The local index against vLLM's block hashing, for the same prompts (the paper's figure 10).

    python -m bench.fig10_index [--samples 50] [--lengths 512,1024,…,32768] [--out FILE]

Both sides find a prompt of which every block is cached, in blocks of 16 tokens, and start from what
the front end has: a list of token ids. vLLM hashes the list block by block (SHA-256, its default)
and looks each hash up in its BlockPool; MemServe packs the list and walks its radix tree, and makes
the list of block ids. Each side has every prompt of the run in it. Ends with status 1 if the whole
of ours is not 8 times as fast as the whole of theirs at every length.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from bench._report import Scalar, parser, publish
from memserve.core.radix import RadixIndex
from memserve.core.tokens import Path
from memserve.types import BlockId

BLOCK_SIZE = 16
PROMPTS = 4
"""Of each length."""
WANTED_RATIO = 8.0
_GROUP = 0

T = TypeVar("T")


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what it returned."""
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


class Theirs:
    """vLLM's hashes and its pool of blocks."""

    def __init__(self, num_blocks: int) -> None:
        init_none_hash(sha256)
        self._hash = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=BLOCK_SIZE)

    def request(self, tokens: Sequence[int]) -> Request:
        """Not hashed yet."""
        return Request(
            request_id="bench",
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=0.0,
        )

    def insert(self, tokens: Sequence[int]) -> list[int]:
        """Cache all full blocks of a prompt; returns their ids."""
        request = self.request(tokens)
        request.block_hashes.extend(self._hash(request))
        blocks = self._pool.get_new_blocks(len(request.block_hashes))
        self._pool.cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=0,
            num_full_blocks=len(blocks),
            block_size=BLOCK_SIZE,
            kv_cache_group_id=_GROUP,
        )
        return [block.block_id for block in blocks]

    def find(self, tokens: Sequence[int]) -> tuple[dict[str, float], list[int]]:
        """Seconds for each part, and the block ids."""
        request = self.request(tokens)
        hashing, hashes = timed(lambda: self._hash(request))
        looking_up, block_ids = timed(lambda: self._look_up(hashes))
        return {"vllm hash": hashing, "vllm look-up": looking_up}, block_ids

    def _look_up(self, hashes: Sequence[bytes]) -> list[int]:
        block_ids: list[int] = []
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, [_GROUP])
            if found is None:
                break
            block_ids.append(found[0].block_id)
        return block_ids


class Ours:
    """The radix index."""

    def __init__(self) -> None:
        self._index = RadixIndex(BLOCK_SIZE, time.monotonic)

    def insert(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """All full blocks of a prompt."""
        self._index.insert(Path(tokens, BLOCK_SIZE), block_ids)

    def find(self, tokens: Sequence[int]) -> tuple[dict[str, float], list[BlockId]]:
        """As `Theirs.find`."""
        packing, path = timed(lambda: Path(tokens, BLOCK_SIZE))
        matching, block_ids = timed(lambda: self._index.match(path).hbm_prefix())
        return {"pack": packing, "match": matching}, block_ids


def measure(lengths: Sequence[int], samples: int) -> dict[str, dict[str, list[float]]]:
    """Seconds: length → part → samples. One prompt after the other, both sides in turn."""
    rng = random.Random(10)
    prompts = {
        n: [[rng.randrange(50_000) for _ in range(n)] for _ in range(PROMPTS)] for n in lengths
    }
    theirs = Theirs(PROMPTS * sum(lengths) // BLOCK_SIZE)
    ours = Ours()
    for same_length in prompts.values():
        for tokens in same_length:
            ours.insert(tokens, theirs.insert(tokens))
    raw: dict[str, dict[str, list[float]]] = {}
    for length, same_length in prompts.items():
        kept = raw.setdefault(str(length), {})
        for number in range(samples):
            tokens = same_length[number % PROMPTS]
            their_times, their_ids = theirs.find(tokens)
            our_times, our_ids = ours.find(tokens)
            assert list(our_ids) == their_ids and len(our_ids) == length // BLOCK_SIZE
            for part, took in (their_times | our_times).items():
                kept.setdefault(part, []).append(took)
    return raw


def summary(raw: dict[str, dict[str, list[float]]]) -> list[dict[str, Scalar]]:
    """A row for each length: medians in ms, and how many times faster."""
    rows: list[dict[str, Scalar]] = []
    for length, parts in raw.items():
        middle = {part: 1e3 * statistics.median(times) for part, times in parts.items()}
        rows.append(
            {
                "tokens": int(length),
                **{f"{part}, ms": value for part, value in middle.items()},
                "hash / match": middle["vllm hash"] / middle["match"],
                "hash + look-up / pack + match": (
                    (middle["vllm hash"] + middle["vllm look-up"])
                    / (middle["pack"] + middle["match"])
                ),
            }
        )
    return rows


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--samples", type=int, default=50, help="for each length")
    arguments.add_argument("--lengths", default="512,1024,2048,4096,8192,16384,32768")
    options = arguments.parse_args()
    lengths = [int(text) for text in options.lengths.split(",")]
    raw = measure(lengths, options.samples)
    rows = summary(raw)
    metrics: dict[str, Scalar] = {
        f"{row['tokens']} tokens: {name}": value
        for row in rows
        for name, value in row.items()
        if name != "tokens"
    }
    publish(
        "fig10_index",
        settings={"samples": options.samples, "block_size": BLOCK_SIZE, "prompts": PROMPTS},
        metrics=metrics,
        raw=raw,
        out=options.out,
        rows=rows,
    )
    if min(float(row["hash + look-up / pack + match"] or 0.0) for row in rows) < WANTED_RATIO:
        sys.exit(1)


if __name__ == "__main__":
    main()

"""What it costs to move a prompt's KV to another instance on the same host, without a GPU.

    python -m bench.transfer_cpu [--repeats 15] [--tokens 32,256,600,2048] [--out FILE]

Two instances' pools and shared-memory buffers in SmolLM2-135M's shape (30 layers, 3 KV heads of 64,
bf16, blocks of 32 tokens), scattered blocks, the real `Transfers` on both sides. Timed: allocate
(with hashing the prompt), push, commit. Beside them, in the same run: the same push in the
layer-first layout (60 KiB pages apart), and one contiguous copy of as many bytes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from bench._report import parser, publish
from memserve.messages import (
    Allocate,
    Allocated,
    AnyEvent,
    Commit,
    Inserted,
    PeerJoined,
    Sent,
    Transmit,
)
from memserve.types import Geometry, InstanceId, Namespace, RequestId, TransferId, TransferStyle
from memserve.workers.engine_pool import EnginePool, resume_hashing
from memserve.workers.kvbuffer import KvBuffer
from memserve.workers.links.base import rank_peer
from memserve.workers.links.shm import KIND, open_shm
from memserve.workers.mempool import MemPool
from memserve.workers.transfer import Transfers

LAYERS, HEADS, HEAD_SIZE, ELEMENT_BYTES, BLOCK_SIZE = 30, 3, 64, 2, 32
PAGE_BYTES = 2 * BLOCK_SIZE * HEADS * HEAD_SIZE * ELEMENT_BYTES
NUM_BLOCKS = 192

_EventT = TypeVar("_EventT", bound=AnyEvent)


def geometry(layout: str) -> Geometry:
    """The same pages, block by block or layer by layer."""
    is_block_first = layout == "block_first"
    return Geometry(
        model="smollm2-135m",
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_kv_heads=HEADS,
        page_bytes=PAGE_BYTES,
        block_stride=PAGE_BYTES * (LAYERS if is_block_first else 1),
        layer_offsets=tuple(
            layer * PAGE_BYTES * (1 if is_block_first else NUM_BLOCKS) for layer in range(LAYERS)
        ),
    )


class NoSteps:
    """Of an engine that computes nothing: see `engine_pool.Steps`."""

    composed, num_ended = None, 0


class Side:
    """One instance: buffer, pool, transfers, and the events that came out."""

    def __init__(self, name: str, layout: str) -> None:
        self.id = InstanceId(name)
        self.geometry = geometry(layout)
        self.buffer = KvBuffer.create(NUM_BLOCKS * LAYERS * PAGE_BYTES)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)

        def make_request(
            token_ids: Sequence[int], namespace: Namespace, known_hashes: Sequence[BlockHash]
        ) -> Request:
            return Request(
                request_id="key",
                prompt_token_ids=list(token_ids),
                sampling_params=SamplingParams(max_tokens=1),
                pooling_params=None,
                arrival_time=0.0,
                cache_salt=namespace.cache_salt,
                block_hasher=resume_hashing(hasher, known_hashes),
            )

        pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=BLOCK_SIZE)
        engine_pool = EnginePool(pool, make_request, NoSteps())
        self.mempool = MemPool(engine_pool, BLOCK_SIZE, reserve_blocks=1)
        self.events: list[AnyEvent] = []
        self.transfers = Transfers(
            self.mempool,
            self.geometry,
            lambda peer: open_shm(self.buffer, self.geometry, rank_peer(KIND, peer, 0)),
            self.id,
            1,
            self.events.append,
            TransferStyle.REQUEST,
        )

    def last(self, kind: type[_EventT]) -> _EventT:
        """The newest event, which has to be of this kind."""
        event = self.events[-1]
        assert isinstance(event, kind), event
        return event

    def close(self) -> None:
        self.transfers.close()
        self.buffer.close()


def once(sender: Side, receiver: Side, num_tokens: int, run: int, seed: int) -> dict[str, float]:
    """One prompt that the receiver has nothing of; seconds per step."""
    rng = random.Random(seed)
    tokens = [rng.randrange(40_000) for _ in range(num_tokens)]
    request, transfer = RequestId(f"r{run}"), TransferId(f"r{run}/forward/1")
    num_blocks = num_tokens // BLOCK_SIZE
    source_ids = sender.mempool.alloc_mem(num_blocks, "prefill")
    rng.shuffle(source_ids)
    sender.transfers.hold_source(request, source_ids, num_tokens)
    sender.transfers.source_ready(request)
    allocate = Allocate(
        epoch=1,
        transfer_id=transfer,
        request_id=request,
        known_tokens=0,
        token_ids=tokens,
        namespace=Namespace(),
        is_private=False,
        deadline_s=30.0,
    )
    times = [time.perf_counter()]
    receiver.transfers.allocate(allocate, tokens)
    times.append(time.perf_counter())
    allocated = receiver.last(Allocated)
    transmit = Transmit(
        epoch=1,
        transfer_id=transfer,
        request_id=request,
        peer=receiver.id,
        first_block=allocated.hit_blocks,
        block_ids=allocated.block_ids,
    )
    sender.transfers.transmit(transmit)
    while sender.transfers.is_active:
        sender.transfers.poll()
    times.append(time.perf_counter())
    sent = sender.last(Sent)
    commit = Commit(epoch=1, transfer_id=transfer, size_bytes=sent.size_bytes, pin=False)
    receiver.transfers.commit(commit)
    times.append(time.perf_counter())
    receiver.last(Inserted)
    sender.mempool.free_all("prefill")
    receiver.mempool.reset()
    spans = [after - before for before, after in pairwise(times)]
    return dict(zip(("allocate", "push", "commit"), spans, strict=True)) | {"total": sum(spans)}


def plain_copy(num_bytes: int, source: KvBuffer, target: KvBuffer) -> float:
    """Seconds for one contiguous copy."""
    begun = time.perf_counter()
    np.copyto(target.array[:num_bytes], source.array[:num_bytes])
    return time.perf_counter() - begun


def pair(layout: str) -> tuple[Side, Side]:
    """Two instances, the first with a link to the second."""
    sender, receiver = Side("P0", layout), Side("D0", layout)
    joined = PeerJoined(
        epoch=1,
        peer=receiver.id,
        peer_epoch=1,
        geometry=receiver.geometry,
        addresses={"shm": (receiver.buffer.address,)},
    )
    sender.transfers.peer_joined(joined)
    return sender, receiver


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--tokens", default="32,256,600,2048")
    options = arguments.parse_args()
    init_none_hash(sha256)
    lengths = [int(text) for text in options.tokens.split(",")]
    pairs = {layout: pair(layout) for layout in ("block_first", "layer_first")}
    raw: dict[str, dict[str, list[float]]] = {}
    run = 0
    for num_tokens in lengths:
        samples: dict[str, list[float]] = {}
        for repeat in range(options.repeats + 1):  # the first is a warm-up
            measured: dict[str, float] = {}
            for layout, (sender, receiver) in pairs.items():
                run += 1
                steps = once(sender, receiver, num_tokens, run, seed=run)
                measured |= {f"{layout}_{step}_s": value for step, value in steps.items()}
            size = num_tokens // BLOCK_SIZE * LAYERS * PAGE_BYTES
            sender, receiver = pairs["block_first"]
            measured["plain_copy_s"] = plain_copy(size, sender.buffer, receiver.buffer)
            if repeat:
                for name, value in measured.items():
                    samples.setdefault(name, []).append(value)
        raw[str(num_tokens)] = samples
    for sender, receiver in pairs.values():
        sender.close()
        receiver.close()
    publish(
        "transfer_cpu",
        settings={"repeats": options.repeats, "block_size": BLOCK_SIZE, "page_bytes": PAGE_BYTES},
        metrics=summary(raw, statistics.median),
        raw=raw,
        out=options.out,
    )


def summary(
    raw: dict[str, dict[str, list[float]]], middle: Callable[[list[float]], float]
) -> dict[str, float]:
    """Milliseconds per length and step, and the push as a ratio to the plain copy."""
    metrics: dict[str, float] = {}
    for length, samples in raw.items():
        for name in ("allocate", "push", "commit", "total"):
            value = middle(samples[f"block_first_{name}_s"])
            metrics[f"{length} tokens: {name}, ms"] = round(value * 1e3, 3)
        copy = middle(samples["plain_copy_s"])
        for layout in ("block_first", "layer_first"):
            ratio = middle(samples[f"{layout}_push_s"]) / copy
            metrics[f"{length} tokens: {layout} push / plain copy"] = round(ratio, 2)
    return metrics


if __name__ == "__main__":
    main()

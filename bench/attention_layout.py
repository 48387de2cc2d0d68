"""Whether attention on a CPU is slower over aggregated blocks than over vLLM's own layout.

    python -m bench.attention_layout [--runs 20] [--out FILE]

The engine's CPU kernels alone, one thread, SmolLM2's heads: attention, and writing new KV, of all
layers in turn, over a KV cache whose blocks hold all layers (block-first), and over one cache per
layer (layer-first). Both have the same blocks of a request in the same scattered order. The two
take turns, and which comes first changes; counted is the thread's processor time. The ratio is the
median over the pairs.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench._report import Scalar, parser, publish
from memserve.workers.environment import set_engine_environment

set_engine_environment(os.environ, num_threads=1, log_level="error")  # before vllm is imported

import torch  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm import envs  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
BLOCK_SIZE, NUM_BLOCKS = 32, 181
CASES = (
    *((1500, 0, 1), (512, 0, 1), (128, 0, 1), (64, 1400, 1)),
    *((1, 1500, 1), (1, 1000, 4), (1, 500, 8)),
)
"""New tokens, cached ones, requests."""
LONG = 300
"""Prompts from here on are repeated less often: they take long, and vary little."""

Layer = tuple[torch.Tensor, torch.Tensor]
"""Where keys and values of a layer are, as the kernels want them."""


def caches() -> dict[str, list[Layer]]:
    """Layout → its layers."""
    page = (KV_HEADS, 2 * BLOCK_SIZE, HEAD_DIM)
    blocks_first = (torch.rand(NUM_BLOCKS, LAYERS, *page) - 0.5).bfloat16()
    layers_first = (torch.rand(LAYERS, NUM_BLOCKS, *page) - 0.5).bfloat16()
    return {
        "block_first": [_halves(blocks_first[:, layer]) for layer in range(LAYERS)],
        "layer_first": [_halves(layers_first[layer]) for layer in range(LAYERS)],
    }


def _halves(cache: torch.Tensor) -> Layer:
    keys, values = cache.chunk(2, 2)
    return keys, values


class Case:
    """Some requests: what the kernels are called with, but for the cache."""

    def __init__(self, new: int, cached: int, requests: int, isa: str) -> None:
        self._isa, length = isa, new + cached
        per_request = -(-length // BLOCK_SIZE)
        order = torch.randperm(NUM_BLOCKS)[: per_request * requests].to(torch.int32)
        self._table = order.view(requests, per_request)
        positions = torch.arange(cached, length)
        blocks = self._table.long()[:, positions // BLOCK_SIZE]
        self._slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        self._query = (torch.rand(requests * new, HEADS, HEAD_DIM) - 0.5).bfloat16()
        self._new = (torch.rand(requests * new, KV_HEADS, HEAD_DIM) - 0.5).bfloat16()
        self._starts = torch.arange(0, (requests + 1) * new, new, dtype=torch.int32)
        self._lengths = torch.full((requests,), length, dtype=torch.int32)
        self._out = torch.empty_like(self._query)
        self._schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=requests,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            seq_lens=self._lengths,
            dtype=torch.bfloat16,
            query_start_loc=self._starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )

    def write(self, layers: Sequence[Layer]) -> float:
        """New keys and values into all layers; seconds."""
        begun = time.thread_time()
        for keys, values in layers:
            ops.cpu_attn_reshape_and_cache(
                self._new, self._new, keys, values, self._slots, self._isa
            )
        return time.thread_time() - begun

    def attend(self, layers: Sequence[Layer]) -> float:
        """The attention of all layers; seconds."""
        begun = time.thread_time()
        for keys, values in layers:
            ops.cpu_attention_with_kv_cache(
                query=self._query,
                key_cache=keys,
                value_cache=values,
                output=self._out,
                query_start_loc=self._starts,
                seq_lens=self._lengths,
                scale=HEAD_DIM**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=self._table,
                softcap=0,
                scheduler_metadata=self._schedule,
                s_aux=None,
            )
        return time.thread_time() - begun


def compare(
    measure: Callable[[Sequence[Layer]], float], layouts: dict[str, list[Layer]], runs: int
) -> dict[str, list[float]]:
    """Layout → seconds of each run; the first run is not counted."""
    found: dict[str, list[float]] = {layout: [] for layout in layouts}
    names = list(layouts)
    for run in range(runs + 1):
        for layout in names if run % 2 else reversed(names):
            seconds = measure(layouts[layout])
            if run:
                found[layout].append(seconds)
    return found


def row(case: str, found: dict[str, list[float]]) -> dict[str, Scalar]:
    """Medians, and the ratio with its quartiles."""
    ratios = [
        one / other for one, other in zip(found["block_first"], found["layer_first"], strict=True)
    ]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "case": case,
        "layer-first, ms": 1e3 * statistics.median(found["layer_first"]),
        "block-first / layer-first": middle,
        "lower quartile": low,
        "upper quartile": high,
    }


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=20, help="at least 2")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    isa = _get_attn_isa(torch.bfloat16, BLOCK_SIZE, HEAD_DIM)
    layouts = caches()
    raw: dict[str, Any] = {}
    for new, cached, requests in CASES:
        case = Case(new, cached, requests, isa)
        runs = options.runs if new < LONG else max(2, options.runs // 4)
        for name, measure in (("write", case.write), ("attend", case.attend)):
            raw[f"{name} {new} after {cached} × {requests}"] = compare(measure, layouts, runs)
    rows = [row(name, found) for name, found in raw.items()]
    publish(
        "attention_layout",
        settings={"runs": options.runs, "isa": isa, "layers": LAYERS, "block_size": BLOCK_SIZE},
        metrics={
            f"{found['case']}: {name}": value
            for found in rows
            for name, value in found.items()
            if name != "case"
        },
        raw=raw,
        out=options.out,
        rows=rows,
    )


if __name__ == "__main__":
    main()

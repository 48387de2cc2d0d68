"""Copies of KV blocks on GPUs: to a peer, gathered, of head slices, and to host memory.

Every figure stands beside the plain copy of the same size in the same run: one contiguous copy by
the copy engines (`plain`). Source and target blocks are drawn anew for each repetition, so that
nothing is found in a cache. Times are device times between two events, medians; `host_us` is what
the call costs the caller (it shows in the device time once it is above half a millisecond). Needs
one GPU, two for the copies to a peer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch

from bench._report import Scalar, parser, publish
from memserve.ops.blocks import BlockOps, CudaBlockOps, Method
from memserve.ops.build import BlockCopyLibrary, open_library
from memserve.ops.views import BlockView, PageOrder, head_rows
from memserve.types import Geometry

BLOCK_SIZE = 16
REPEATS = 9
WARM_UP = 2
POOL_BYTES = 9 << 30
HOST_BYTES = 3 << 30
DELAY_CYCLES = 1_000_000
"""Half a millisecond, in which the GPU waits: so that the call's own time is not in the copy's."""
KERNELS = (Method.VECTOR, Method.BULK)

Times: TypeAlias = tuple[list[float], list[float]]
"""Device and host microseconds of each repetition."""


class Shape(msgspec.Struct, frozen=True):
    """A model's KV cache on one GPU, in bf16."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int = 128

    @property
    def page_bytes(self) -> int:
        return BLOCK_SIZE * self.num_kv_heads * 2 * self.head_dim * 2


LLAMA_2_13B = Shape("Llama-2-13B", 40, 40)
LLAMA_3_1_8B = Shape("Llama-3.1-8B", 32, 8)


class Way(msgspec.Struct, frozen=True):
    """How a copy is made."""

    method: Method
    max_sms: int | None = None
    """For kernels; the copy engines need no multiprocessor."""
    num_streams: int = 1
    """The blocks are divided among them."""

    @property
    def name(self) -> str:
        streams = f"_{self.num_streams}_streams" if self.num_streams > 1 else ""
        return self.method.name.lower() + streams


class Result(msgspec.Struct):
    what: str
    shape: str
    tokens: int
    way: str
    max_sms: int | None
    size_bytes: int
    device_us: list[float]
    """Of each repetition."""
    host_us: list[float]
    ratio: float = 0.0
    """Of the plain copy's bandwidth."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.size_bytes / statistics.median(self.device_us) * 1e6

    def row(self) -> dict[str, Scalar]:
        return {
            "what": self.what,
            "shape": self.shape,
            "tokens": self.tokens,
            "way": self.way,
            "SMs": self.max_sms,
            "GB/s": round(self.bandwidth / 1e9, 1),
            "of plain": round(self.ratio, 3),
            "host_us": statistics.median(self.host_us),
        }


class Bench:
    """The buffers, the stream, and the results so far."""

    def __init__(self, library: BlockCopyLibrary, sm_limits: Sequence[int]) -> None:
        self.library = library
        self.sm_limits = sm_limits
        self.stream = torch.cuda.Stream(0)
        self.more_streams = [torch.cuda.Stream(0) for _ in range(4)]
        self.results: list[Result] = []
        self.random = np.random.default_rng(0)
        self.source = torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda:0").random_(0, 256)

    def ways(self, methods: Sequence[Method]) -> Iterator[Way]:
        for method in methods:
            limits = self.sm_limits if method in KERNELS else (None,)
            yield from (Way(method, limit) for limit in limits)

    def compare(
        self,
        what: str,
        shape: Shape,
        tokens: int,
        source: BlockView,
        target: BlockView,
        ways: Sequence[Way],
    ) -> None:
        """Measure the plain copy and all `ways` for this many tokens."""
        count = -(-tokens // BLOCK_SIZE)
        size = count * source.block_bytes

        def add(way: str, max_sms: int | None, times: Times) -> Result:
            result = Result(what, shape.name, tokens, way, max_sms, size, *times)
            self.results.append(result)
            return result

        plain = add("plain", None, self._measure_plain(source, target, size))
        plain.ratio = 1.0
        for way in ways:
            result = add(way.name, way.max_sms, self._measure(source, target, count, way))
            result.ratio = result.bandwidth / plain.bandwidth

    def _measure(self, source: BlockView, target: BlockView, count: int, way: Way) -> Times:
        ops: BlockOps = CudaBlockOps(
            self.library,
            max_sms=way.max_sms or 1,
            swap_sms=way.max_sms or 1,
            method=way.method,
            swap_method=way.method,
        )
        is_swap = source.memory.is_cuda != target.memory.is_cuda
        run = ops.swap_blocks if is_swap else ops.copy_blocks
        source_ids: list[int] = []
        target_ids: list[int] = []

        def draw() -> None:
            source_ids[:] = self._draw(source, count)
            target_ids[:] = self._draw(target, count)

        def copy() -> None:
            if way.num_streams == 1:
                run(source, target, source_ids, target_ids, stream=self.stream)
                return
            begun = self.stream.record_event()
            for part, stream in enumerate(self.more_streams[: way.num_streams]):
                stream.wait_event(begun)
                ids = [side[part :: way.num_streams] for side in (source_ids, target_ids)]
                run(source, target, *ids, stream=stream)
                self.stream.wait_stream(stream)

        times = self._repeat(draw, copy)
        require_equal(source, target, source_ids, target_ids)
        return times

    def _measure_plain(self, source: BlockView, target: BlockView, size: int) -> Times:
        starts = [0, 0]

        def draw() -> None:
            for side, view in enumerate((source, target)):
                starts[side] = int(self.random.integers(0, view.memory.numel() - size + 1)) & ~15

        def run() -> None:
            with torch.cuda.stream(self.stream):
                target.memory[starts[1] : starts[1] + size].copy_(
                    source.memory[starts[0] : starts[0] + size], non_blocking=True
                )

        return self._repeat(draw, run)

    def _repeat(self, draw: Callable[[], None], run: Callable[[], object]) -> Times:
        device_us, host_us = [], []
        for _ in range(WARM_UP + REPEATS):
            draw()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.stream.synchronize()
            with torch.cuda.stream(self.stream):
                torch.cuda._sleep(DELAY_CYCLES)
            start.record(self.stream)
            before = time.perf_counter()
            run()
            host_s = time.perf_counter() - before
            end.record(self.stream)
            end.synchronize()
            device_us.append(round(start.elapsed_time(end) * 1e3, 2))
            host_us.append(round(host_s * 1e6, 1))
        return device_us[WARM_UP:], host_us[WARM_UP:]

    def _draw(self, view: BlockView, count: int) -> list[int]:
        blocks = self.random.permutation(view.num_blocks)[:count]
        return [int(block) for block in blocks]


def require_equal(
    source: BlockView, target: BlockView, source_ids: Sequence[int], target_ids: Sequence[int]
) -> None:
    """A fast copy of the wrong bytes is worth nothing: the first and the last layer must agree."""
    for layer in {0, source.num_layers - 1}:
        sent, arrived = (
            view.layer(layer)[torch.tensor(ids, device=view.memory.device)].cpu()
            for view, ids in ((source, source_ids), (target, target_ids))
        )
        if not torch.equal(sent, arrived):
            raise SystemExit(f"layer {layer} did not arrive")


def view_of(
    memory: torch.Tensor,
    shape: Shape,
    *,
    layer_first: bool = False,
    heads: tuple[int, int, PageOrder] | None = None,
    tp_size: int = 1,
) -> BlockView:
    """All of `memory` as a KV cache of one rank; `heads`: first, number, order of the page."""
    page = shape.page_bytes // tp_size
    blocks = memory.numel() // (page * shape.num_layers)
    step = blocks * page if layer_first else page
    geometry = Geometry(
        model=shape.name,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        num_kv_heads=shape.num_kv_heads // tp_size,
        page_bytes=page,
        block_stride=page if layer_first else page * shape.num_layers,
        layer_offsets=tuple(layer * step for layer in range(shape.num_layers)),
        tp_size=tp_size,
    )
    return BlockView.of(geometry, memory, head_rows(geometry, *heads) if heads else None)


def copy_to_peer(bench: Bench, target: torch.Tensor) -> None:
    """Aggregated blocks of all sizes; other layouts and head slices at 2,048 tokens."""
    own = bench.source
    ways = [
        *bench.ways(list(Method)[1:]),
        *(Way(Method.BATCH, num_streams=num_streams) for num_streams in (2, 4)),
    ]
    for shape in (LLAMA_2_13B, LLAMA_3_1_8B):
        for tokens in (16, 128, 512, 2048, 8192):
            views = view_of(own, shape), view_of(target, shape)
            bench.compare("peer, aggregated", shape, tokens, *views, ways)
        by_layer = view_of(own, shape, layer_first=True), view_of(target, shape, layer_first=True)
        bench.compare("peer, layer-first", shape, 2048, *by_layer, ways)
        kernels = list(bench.ways(KERNELS))
        half = shape.num_kv_heads // 2
        for order in PageOrder:
            whole_rank = view_of(own, shape, heads=(0, half, order), tp_size=2)
            slice_of_rank = view_of(target, shape, heads=(half, half, order))
            what = f"peer, TP 2 to 1, {order.value}"
            bench.compare(what, shape, 2048, whole_rank, slice_of_rank, kernels)


def copy_locally(bench: Bench, target: torch.Tensor) -> None:
    """Layer-first blocks packed for a send, and back."""
    ways = list(bench.ways(KERNELS))
    for shape in (LLAMA_2_13B, LLAMA_3_1_8B):
        scattered = view_of(bench.source, shape, layer_first=True)
        packed = view_of(target, shape)
        bench.compare("gather, layer-first", shape, 2048, scattered, packed, ways)
        bench.compare(
            "scatter, layer-first",
            shape,
            2048,
            view_of(bench.source, shape),
            view_of(target, shape, layer_first=True),
            ways,
        )


def swap(bench: Bench, host: torch.Tensor) -> None:
    """HBM to pinned DRAM and back, aggregated and layer-first."""
    ways = list(bench.ways(list(Method)[1:]))
    for shape in (LLAMA_2_13B, LLAMA_3_1_8B):
        for layer_first in (False, True):
            hbm = view_of(bench.source, shape, layer_first=layer_first)
            dram = view_of(host, shape, layer_first=layer_first)
            layout = "layer-first" if layer_first else "aggregated"
            bench.compare(f"swap out, {layout}", shape, 2048, hbm, dram, ways)
            bench.compare(f"swap in, {layout}", shape, 2048, dram, hbm, ways)


PARTS = ("peer", "local", "swap")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--sms", type=int, nargs="+", default=[4, 8, 12, 16, 132])
    arguments.add_argument("--parts", choices=PARTS, nargs="+", default=PARTS)
    args = arguments.parse_args()
    if not torch.cuda.is_available():
        print("ops_blocks: no GPU on this machine, nothing to measure")
        return
    major, minor = torch.cuda.get_device_capability(0)
    bench = Bench(open_library(f"sm_{major}{minor}"), args.sms)
    if "peer" in args.parts and torch.cuda.device_count() > 1:
        copy_to_peer(bench, torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda:1"))
    if "local" in args.parts:
        copy_locally(bench, torch.empty(POOL_BYTES, dtype=torch.uint8, device="cuda:0"))
    if "swap" in args.parts:
        swap(bench, bench.source[:HOST_BYTES].cpu().pin_memory())
    publish(
        "ops_blocks",
        settings={"block_size": BLOCK_SIZE, "repeats": REPEATS, "sm_limits": args.sms},
        metrics=figures(bench.results),
        raw=msgspec.to_builtins(bench.results),
        out=args.out,
        rows=[result.row() for result in bench.results],
    )


def figures(results: Sequence[Result]) -> dict[str, Scalar]:
    """The figures to quote: 2,048 tokens, every way."""
    found: dict[str, Scalar] = {}
    for result in results:
        if result.tokens == 2048:
            way = f"{result.way}_{result.max_sms}_sms" if result.max_sms else result.way
            name = f"{result.what}/{result.shape}/{way}".replace(", ", "_").replace(" ", "_")
            found[f"{name}/bytes_per_s"] = round(result.bandwidth)
            found[f"{name}/of_plain_ratio"] = round(result.ratio, 4)
    return found


if __name__ == "__main__":
    main()

"""Figure 11: the KV of a prompt from one instance's GPU memory into another's, over the ipc link.

A second process owns the target, on the second GPU if there is one, else on the same GPU. Blocks
are drawn anew for each repetition on both sides. Every repetition measures all ways in turn:

    plain       one contiguous copy of as many bytes, which no transfer can be faster than
    aggregated  the link with block-first blocks: what MemServe does
    layers      the link with layer-first blocks: a kernel gathers the pieces of L layers
    pieces      layer-first blocks, one copy call for each piece: what discrete transfers cost

Times are from the call until its end is seen by polling, as the engine's loop would. The paper
sends 2,048 tokens of Llama-2-13B.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from bench._report import Scalar, parser, publish
from bench.ops_blocks import BLOCK_SIZE, LLAMA_2_13B, LLAMA_3_1_8B, Shape
from memserve.ops.blocks import BlockOps, CudaBlockOps, Method
from memserve.ops.build import BlockCopyLibrary, open_library
from memserve.ops.device_memory import CudaDeviceMemory
from memserve.ops.views import BlockView
from memserve.types import BlockId, Geometry, TransferId
from memserve.workers.gpu_memory import GpuBuffer, PeerGpuBuffer
from memserve.workers.links.ipc import NUM_STREAMS, IpcLink, ipc_ops

ROOT = Path(__file__).resolve().parent.parent
POOL_BYTES = 9 << 30
TOKENS = (16, 128, 512, 2048, 8192)
PIECES_UP_TO = 2048
"""Tokens; beyond that discrete pieces take seconds."""
REPEATS = 9
WARM_UP = 2
DEADLINE_S = 30.0
GPU = torch.device("cuda", 0)


class Result(msgspec.Struct):
    shape: str
    tokens: int
    way: str
    size_bytes: int
    wall_us: list[float]
    ratio: float = 0.0
    """Of the plain copy's bandwidth."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.size_bytes / statistics.median(self.wall_us) * 1e6

    def row(self) -> dict[str, Scalar]:
        return {
            "shape": self.shape,
            "tokens": self.tokens,
            "MB": round(self.size_bytes / 1e6, 1),
            "way": self.way,
            "ms": statistics.median(self.wall_us) / 1e3,
            "GB/s": round(self.bandwidth / 1e9, 1),
            "of plain": round(self.ratio, 3),
        }


class Way(Protocol):
    """How the blocks get there: queue the copies; a function that says whether they are done."""

    def __call__(self, source_ids: list[BlockId], target_ids: list[BlockId]) -> Callable[[], bool]:
        """Blocks of both sides."""
        ...


def geometry(shape: Shape, *, is_layer_first: bool) -> Geometry:
    """As many blocks as the pool holds."""
    page = shape.page_bytes
    count = POOL_BYTES // (page * shape.num_layers)
    stride, step = page * shape.num_layers, page
    if is_layer_first:
        stride, step = page, page * count
    return Geometry(
        model=shape.name,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=count,
        num_kv_heads=shape.num_kv_heads,
        page_bytes=page,
        block_stride=stride,
        layer_offsets=tuple(layer * step for layer in range(shape.num_layers)),
    )


class Bench:
    """Both buffers, and the results so far."""

    def __init__(self, library: BlockCopyLibrary, address: str, plain: torch.Tensor) -> None:
        """`plain`: memory of this process on the target's GPU, of the same size."""
        self._library = library
        self._memory = CudaDeviceMemory(GPU)
        self._address = address
        self._plain = plain
        self._source = GpuBuffer(self._memory, POOL_BYTES)
        self._source.tensor.view(torch.uint8).random_(0, 256)
        self._random = np.random.default_rng(0)
        self.results: list[Result] = []

    def run(self, shape: Shape) -> None:
        """All numbers of tokens of one shape."""
        first = geometry(shape, is_layer_first=False)
        apart = geometry(shape, is_layer_first=True)
        with self._link(first) as aggregated, self._link(apart) as layers, self._mapped() as target:
            torch.cuda.synchronize()
            for tokens in TOKENS:
                ways: dict[str, tuple[Geometry, Way]] = {
                    "plain": (first, self._copy(first)),
                    "aggregated": (first, by_link(aggregated)),
                    "layers": (apart, by_link(layers)),
                }
                if tokens <= PIECES_UP_TO:
                    ops = CudaBlockOps(self._library, method=Method.COPIES)
                    ways["pieces"] = (apart, self._by_ops(ops, apart, target))
                self._compare(shape, tokens, ways, target)

    def _compare(
        self,
        shape: Shape,
        tokens: int,
        ways: dict[str, tuple[Geometry, Way]],
        target: torch.Tensor,
    ) -> None:
        count = -(-tokens // BLOCK_SIZE)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(WARM_UP + REPEATS):
            for name, (blocks, way) in ways.items():
                ids = [self._draw(blocks, count) for _ in range(2)]
                begun = time.perf_counter()
                is_done = way(*ids)
                while not is_done():
                    if time.perf_counter() - begun > DEADLINE_S:
                        sys.exit(f"{name}: {tokens} tokens have not arrived in {DEADLINE_S:.0f} s")
                times[name].append(round((time.perf_counter() - begun) * 1e6, 1))
                if name != "plain":
                    self._require_equal(blocks, target, *ids)
        size = count * shape.page_bytes * shape.num_layers
        found = [Result(shape.name, tokens, n, size, t[WARM_UP:]) for n, t in times.items()]
        for result in found:
            result.ratio = result.bandwidth / found[0].bandwidth
        self.results += found

    def _copy(self, blocks: Geometry) -> Way:
        """One contiguous piece, by torch."""
        stream = torch.cuda.Stream(GPU)

        def way(source_ids: list[BlockId], target_ids: list[BlockId]) -> Callable[[], bool]:
            size = len(source_ids) * blocks.block_bytes
            room = POOL_BYTES - size + 1
            start, to = (int(self._random.integers(0, room)) & ~4095 for _ in range(2))
            with torch.cuda.stream(stream):
                source = self._source.tensor[start : start + size]
                self._plain[to : to + size].copy_(source, non_blocking=True)
            done: Any = stream.record_event().query
            return done

        return way

    def _by_ops(self, ops: BlockOps, blocks: Geometry, target: torch.Tensor) -> Way:
        stream = torch.cuda.Stream(GPU)
        views = [BlockView.of(blocks, memory) for memory in (self._source.tensor, target)]

        def way(source_ids: list[BlockId], target_ids: list[BlockId]) -> Callable[[], bool]:
            ops.copy_blocks(*views, source_ids, target_ids, stream=stream)
            done: Any = stream.record_event().query
            return done

        return way

    @contextmanager
    def _link(self, blocks: Geometry) -> Iterator[IpcLink]:
        link = IpcLink(
            self._source.tensor,
            blocks,
            PeerGpuBuffer(self._memory, self._address),
            blocks,
            ops=ipc_ops(GPU, blocks, blocks),
            streams=[torch.cuda.Stream(GPU) for _ in range(NUM_STREAMS)],
        )
        link.warm_up()
        try:
            yield link
        finally:
            link.close()

    @contextmanager
    def _mapped(self) -> Iterator[torch.Tensor]:
        buffer = PeerGpuBuffer(self._memory, self._address)
        try:
            yield buffer.tensor
        finally:
            buffer.close()

    def _draw(self, blocks: Geometry, count: int) -> list[BlockId]:
        return [BlockId(int(b)) for b in self._random.permutation(blocks.num_blocks)[:count]]

    def _require_equal(
        self,
        blocks: Geometry,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
    ) -> None:
        """A fast copy of the wrong bytes is worth nothing: the first and the last layer."""
        views = [BlockView.of(blocks, memory) for memory in (self._source.tensor, target)]
        for layer in {0, blocks.num_layers - 1}:
            sent, arrived = (
                view.layer(layer)[torch.tensor(ids, device=GPU)].cpu()
                for view, ids in zip(views, (source_ids, target_ids), strict=True)
            )
            if not torch.equal(sent, arrived):
                sys.exit(f"layer {layer} did not arrive as it was sent")


def by_link(link: IpcLink) -> Way:
    def way(source_ids: list[BlockId], target_ids: list[BlockId]) -> Callable[[], bool]:
        link.send(TransferId("t"), source_ids, target_ids)
        return lambda: has_ended(link)

    return way


def has_ended(link: IpcLink) -> bool:
    done = link.poll()
    if done and done[0].error is not None:
        sys.exit(f"the transfer failed: {done[0].error}")
    return bool(done)


@contextmanager
def owner(device: int) -> Iterator[str]:
    """A process that owns the target; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.fig11_transfer", "--own", str(device)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        if not address:
            sys.exit("the process that was to own the target has ended")
        yield address
    finally:
        process.stdin.close()
        try:
            process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def be_owner(device: int) -> None:
    """Until the other process closes the pipe."""
    buffer = GpuBuffer(CudaDeviceMemory(torch.device("cuda", device)), POOL_BYTES)
    torch.cuda.synchronize(device)
    print(buffer.address, flush=True)
    sys.stdin.read()


def figures(results: Sequence[Result]) -> dict[str, Scalar]:
    """2,048 tokens, every way."""
    found: dict[str, Scalar] = {}
    for result in results:
        if result.tokens == 2048:
            name = f"{result.shape}/{result.way}"
            found[f"{name}/bytes_per_s"] = round(result.bandwidth)
            found[f"{name}/of_plain_ratio"] = round(result.ratio, 4)
            found[f"{name}/median_ms"] = statistics.median(result.wall_us) / 1e3
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--own", type=int, help=argparse.SUPPRESS)
    args = options.parse_args()
    if not torch.cuda.is_available():
        print("fig11_transfer: no GPU on this machine, nothing to measure")
        return
    if args.own is not None:
        be_owner(args.own)
        return
    peer = 1 if torch.cuda.device_count() > 1 else 0
    major, minor = torch.cuda.get_device_capability(GPU)
    with owner(peer) as address:
        plain = torch.empty(POOL_BYTES, dtype=torch.int8, device=f"cuda:{peer}")
        bench = Bench(open_library(f"sm_{major}{minor}"), address, plain)
        for shape in (LLAMA_2_13B, LLAMA_3_1_8B):
            bench.run(shape)
    publish(
        "fig11_transfer",
        settings={"block_size": BLOCK_SIZE, "repeats": REPEATS, "gpus": peer + 1},
        metrics=figures(bench.results),
        raw=msgspec.to_builtins(bench.results),
        out=args.out,
        rows=[result.row() for result in bench.results],
    )


if __name__ == "__main__":
    main()

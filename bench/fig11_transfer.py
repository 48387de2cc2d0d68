"""Figure 11: the KV of a prompt from one instance's GPU memory into another's, by both links.

A second process owns the target, on the second GPU if there is one, else on the same GPU (without
NCCL, which cannot join two ranks there). Blocks are drawn anew for each repetition on both sides.
Every repetition measures all ways in turn:

    plain             one contiguous copy of as many bytes, which no transfer can be faster than
    ipc aggregated    the ipc link with block-first blocks: what MemServe does
    ipc layers        the same with layer-first blocks: a kernel gathers the pieces of L layers
    ipc pieces        layer-first blocks, one copy call for each piece: what discrete transfers cost
    nccl aggregated   the nccl link with block-first blocks: gathered, sent and scattered in chunks
    nccl grouped      block-first blocks without staging, the sends of a chunk in one launch
    nccl pieces       layer-first blocks, one send for each piece

Times are from the call until its end is seen by polling, as the engine's loop would. The paper
sends 2,048 tokens of Llama-2-13B. `--sweep` compares chunk sizes and multiprocessors of the nccl
link instead, at that size. `--device cpu` rehearses with a tiny model, shared memory and a fake
NCCL: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch

from bench._report import Scalar, parser, publish
from bench._transfer import (
    TINY,
    CpuPlatform,
    CudaPlatform,
    Done,
    geometry,
    peer_of,
    platform,
)
from bench.ops_blocks import BLOCK_SIZE, LLAMA_2_13B, LLAMA_3_1_8B, Shape
from memserve.errors import MemServeError, TransferError
from memserve.ops.blocks import Method
from memserve.ops.nccl import MAX_CTAS
from memserve.ops.nccl_pipe import Pieces
from memserve.ops.views import BlockView
from memserve.types import BlockId, Geometry, InstanceId, TransferId
from memserve.workers.links.base import Link, Rank
from memserve.workers.links.nccl_pipe import CHUNK_BYTES, EDGE_BYTES
from memserve.workers.links.nccl_worker import NcclSettings
from memserve.workers.sleeps import sleep_exactly

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60.0
PIECES_UP_TO = 2048
"""Tokens; beyond that discrete pieces take seconds."""
SLOW_S = 0.2
"""A way that takes longer than this is measured three times only."""
LOOK_S = 20e-6
"""Between two polls: the links' threads need the interpreter too."""
SWEPT_MIB = ((32, 384), (64, 384), (96, 384), (128, 384), (64, 256), (64, 512))
"""Of the chunks at the ends, and of the others at most."""
SWEPT_CTAS = (16, 32)
PLAIN = "plain"


class Plan(msgspec.Struct, frozen=True):
    """What a run is about."""

    shapes: tuple[Shape, ...]
    tokens: tuple[int, ...]
    pool_bytes: int
    repeats: int
    warm_up: int = 2


ON_GPUS = Plan((LLAMA_2_13B, LLAMA_3_1_8B), (16, 128, 512, 2048, 8192), 9 << 30, 9)
SWEEP = Plan((LLAMA_2_13B,), (2048,), 9 << 30, 9)
REHEARSAL = Plan((TINY,), (16, 128), 4 << 20, 2, 1)


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


class Start(Protocol):
    """How the blocks get there: queue the copies; a function that says whether they are done."""

    def __call__(self, source_ids: list[BlockId], target_ids: list[BlockId]) -> Done:
        """Blocks of both sides. Either call raises TransferError if the way fails."""
        ...


class Way(msgspec.Struct):
    """One way, ready."""

    blocks: Geometry
    start: Start
    up_to: int = sys.maxsize
    """Tokens."""


class Owner:
    """The process that owns the target."""

    def __init__(self, device: str, pool_bytes: int, folder: Path) -> None:
        command = [sys.executable, "-m", "bench.fig11_transfer", "--own", device]
        self._process = subprocess.Popen(
            [*command, "--pool-bytes", str(pool_bytes), "--folder", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = self._answer()

    def endpoint(self, name: str, blocks: Geometry, max_ctas: int) -> str:
        """Have one made; returns its address."""
        order = {"name": name, "blocks": msgspec.to_builtins(blocks), "max_ctas": max_ctas}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if not answer:
            sys.exit("the process that was to own the target has ended")
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def be_owner(device: str, pool_bytes: int, folder: Path) -> None:
    """Until the other process closes the pipe."""
    here = platform(device)
    buffer = here.own(pool_bytes)
    here.finish()
    print(buffer.address, flush=True)
    with ExitStack() as stack:
        for line in sys.stdin:
            order = json.loads(line)
            blocks = msgspec.convert(order["blocks"], Geometry)
            own = Rank(InstanceId(order["name"]), 1, 0)
            endpoint = here.endpoint(own, buffer, blocks, folder, NcclSettings(), order["max_ctas"])
            stack.callback(endpoint.close)
            print(endpoint.address, flush=True)


class Bench:
    """Both buffers, and the results so far."""

    def __init__(
        self, here: CudaPlatform | CpuPlatform, owner: Owner, plan: Plan, folder: Path, plain: str
    ) -> None:
        """`plain`: the device that the plain copy goes to."""
        self._here = here
        self._owner = owner
        self._plan = plan
        self._folder = folder
        self._plain = torch.empty(plan.pool_bytes, dtype=torch.int8, device=plain)
        self._source = here.own(plan.pool_bytes)
        self._source.tensor.view(torch.uint8).random_(0, 256)
        self._target = here.map(owner.address)
        self._random = np.random.default_rng(0)
        self.results: list[Result] = []
        self.problems: dict[str, str] = {}

    def close(self) -> None:
        self._target.close()
        self._source.close()

    def run(self, has_nccl: bool) -> None:
        """All shapes and numbers of tokens, all ways."""
        for shape in self._plan.shapes:
            first = geometry(shape, self._plan.pool_bytes)
            apart = geometry(shape, self._plan.pool_bytes, is_layer_first=True)
            makers: dict[str, Callable[[ExitStack], Way]] = {
                PLAIN: lambda _, g=first: Way(g, self._copy(g)),  # type: ignore[misc]
                "ipc aggregated": lambda s, g=first: self._by_ipc(s, g),  # type: ignore[misc]
                "ipc layers": lambda s, g=apart: self._by_ipc(s, g),  # type: ignore[misc]
                "ipc pieces": lambda _, g=apart: self._by_ops(g),  # type: ignore[misc]
            }
            nccl = {
                "nccl aggregated": (first, Pieces.STAGED),
                "nccl grouped": (first, Pieces.BLOCKS),
                "nccl pieces": (apart, Pieces.PAGES),
            }
            for name, (blocks, pieces) in nccl.items() if has_nccl else ():
                settings = NcclSettings(pieces=pieces)
                makers[name] = self._nccl_maker(name, blocks, settings, MAX_CTAS)
            self._run_shape(shape, makers)

    def sweep(self) -> None:
        """The nccl link's chunk sizes and multiprocessors."""
        for shape in self._plan.shapes:
            blocks = geometry(shape, self._plan.pool_bytes)
            for max_ctas in SWEPT_CTAS:
                makers: dict[str, Callable[[ExitStack], Way]] = {
                    PLAIN: lambda _, g=blocks: Way(g, self._copy(g))  # type: ignore[misc]
                }
                for edge, chunk in SWEPT_MIB:
                    name = f"nccl {edge} to {chunk} MiB, {max_ctas} CTAs"
                    settings = NcclSettings(chunk_bytes=chunk << 20, edge_bytes=edge << 20)
                    makers[name] = self._nccl_maker(name, blocks, settings, max_ctas)
                self._run_shape(shape, makers)

    # ── the ways ──────────────────────────────────────────────────────────────────────────────

    def _copy(self, blocks: Geometry) -> Start:
        """One contiguous piece, by torch."""
        stream = self._here.stream()

        def start(source_ids: list[BlockId], target_ids: list[BlockId]) -> Done:
            size = len(source_ids) * blocks.block_bytes
            room = self._plan.pool_bytes - size + 1
            begin, to = (int(self._random.integers(0, room)) & ~4095 for _ in range(2))
            with torch.cuda.stream(stream):
                source = self._source.tensor[begin : begin + size]
                self._plain[to : to + size].copy_(source, non_blocking=True)
            return _event(stream)

        return start

    def _by_ops(self, blocks: Geometry) -> Way:
        """Piece by piece, without a link."""
        stream, ops = self._here.stream(), self._here.ops(Method.COPIES)
        source = BlockView.of(blocks, self._source.tensor)
        target = BlockView.of(blocks, self._target.tensor)

        def start(source_ids: list[BlockId], target_ids: list[BlockId]) -> Done:
            ops.copy_blocks(source, target, source_ids, target_ids, stream=stream)
            return _event(stream)

        return Way(blocks, start, PIECES_UP_TO)

    def _by_ipc(self, stack: ExitStack, blocks: Geometry) -> Way:
        link = self._here.open(self._source, blocks, peer_of("D0", blocks, self._owner.address))
        stack.callback(link.close)
        return Way(blocks, by_link(link))

    def _nccl_maker(
        self, name: str, blocks: Geometry, settings: NcclSettings, max_ctas: int
    ) -> Callable[[ExitStack], Way]:
        # An instance of its own for each: one instance has one way to a peer.
        instance = name.replace(" ", "-").replace(",", "") + f"-{blocks.model}"

        def make(stack: ExitStack) -> Way:
            target = f"D-{instance}"
            address = self._owner.endpoint(target, blocks, max_ctas)
            endpoint = self._here.endpoint(
                Rank(InstanceId(f"P-{instance}"), 1, 0),
                self._source,
                blocks,
                self._folder,
                settings,
                max_ctas,
            )
            stack.callback(endpoint.close)
            link = endpoint.open(peer_of(target, blocks, address))
            stack.callback(link.close)
            up_to = sys.maxsize if settings.pieces is not Pieces.PAGES else PIECES_UP_TO
            return Way(blocks, by_link(link), up_to)

        return make

    # ── measuring ─────────────────────────────────────────────────────────────────────────────

    def _run_shape(self, shape: Shape, makers: dict[str, Callable[[ExitStack], Way]]) -> None:
        with ExitStack() as stack:
            ways: dict[str, Way] = {}
            for name, make in makers.items():
                begun = time.perf_counter()
                try:
                    ways[name] = make(stack)
                except (MemServeError, RuntimeError) as error:
                    self._give_up(f"{shape.name}: {name}", error)
                else:
                    print(f"{name}: ready after {time.perf_counter() - begun:.1f} s", flush=True)
            self._here.finish()
            for tokens in self._plan.tokens:
                self._compare(shape, tokens, ways)

    def _compare(self, shape: Shape, tokens: int, ways: dict[str, Way]) -> None:
        """Measure each way that goes as far; one that fails is dropped from `ways`."""
        count = -(-tokens // BLOCK_SIZE)
        times: dict[str, list[float]] = {n: [] for n, w in ways.items() if tokens <= w.up_to}
        for repeat in range(self._plan.warm_up + self._plan.repeats):
            for name in list(times):
                is_slow = any(us > SLOW_S * 1e6 for us in times[name])
                if is_slow and repeat >= self._plan.warm_up + 3:
                    continue
                way = ways[name]
                ids = [self._draw(way.blocks, count) for _ in range(2)]
                try:
                    times[name].append(self._time(name, way, *ids))
                    if name != PLAIN:
                        self._require_equal(way.blocks, *ids)
                except (MemServeError, RuntimeError) as error:
                    self._give_up(f"{shape.name}: {name}, {tokens} tokens", error)
                    del ways[name], times[name]
        size = count * shape.page_bytes * shape.num_layers
        found = [
            Result(shape.name, tokens, name, size, taken[self._plan.warm_up :])
            for name, taken in times.items()
        ]
        for result in found:
            result.ratio = result.bandwidth / found[0].bandwidth
        self.results += found

    def _time(
        self, name: str, way: Way, source_ids: list[BlockId], target_ids: list[BlockId]
    ) -> float:
        """Microseconds."""
        begun = time.perf_counter()
        is_done = way.start(source_ids, target_ids)
        while not is_done():
            if time.perf_counter() - begun > DEADLINE_S:
                raise TransferError(f"it has not arrived in {DEADLINE_S:.0f} s")
            time.sleep(LOOK_S)
        return round((time.perf_counter() - begun) * 1e6, 1)

    def _draw(self, blocks: Geometry, count: int) -> list[BlockId]:
        """Not the null block."""
        drawn = self._random.permutation(blocks.num_blocks - 1)[:count] + 1
        return [BlockId(int(block)) for block in drawn]

    def _require_equal(
        self, blocks: Geometry, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        """A fast copy of the wrong bytes is worth nothing: the first and the last layer."""
        memories = (self._source.tensor, self._target.tensor)
        views = [BlockView.of(blocks, memory) for memory in memories]
        for layer in {0, blocks.num_layers - 1}:
            sent, arrived = (
                view.layer(layer)[torch.tensor(ids, device=self._here.device)]
                for view, ids in zip(views, (source_ids, target_ids), strict=True)
            )
            if not torch.equal(sent, arrived):
                raise TransferError(f"layer {layer} did not arrive as it was sent")

    def _give_up(self, what: str, error: Exception) -> None:
        self.problems[what] = str(error)
        print(f"{what}: {error}", file=sys.stderr, flush=True)


def by_link(link: Link) -> Start:
    def start(source_ids: list[BlockId], target_ids: list[BlockId]) -> Done:
        link.send(TransferId("t"), source_ids, target_ids)
        return lambda: has_ended(link)

    return start


def has_ended(link: Link) -> bool:
    done = link.poll()
    if done and done[0].error is not None:
        raise TransferError(done[0].error)
    return bool(done)


def _event(stream: torch.cuda.Stream | None) -> Done:
    if stream is None:
        return lambda: True
    query: Any = stream.record_event().query
    return lambda: bool(query())


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


@contextmanager
def bench_of(plan: Plan, here: str, there: str) -> Iterator[Bench]:
    """Both processes, their memory, and a folder for their sockets."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fig11-")))
        owner = Owner(there, plan.pool_bytes, folder)
        stack.callback(owner.close)
        bench = Bench(platform(here), owner, plan, folder, there)
        stack.callback(bench.close)
        yield bench


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse")
    options.add_argument("--sweep", action="store_true", help="chunks and CTAs of the nccl link")
    options.add_argument("--tokens", type=int, nargs="+", help="only these numbers of tokens")
    options.add_argument("--own", help=argparse.SUPPRESS)
    options.add_argument("--pool-bytes", type=int, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    sleep_exactly()
    if args.own is not None:
        be_owner(args.own, args.pool_bytes, args.folder)
        return
    num_gpus = torch.cuda.device_count()
    if args.device == "cuda" and not num_gpus:
        print("fig11_transfer: no GPU on this machine, nothing to measure")
        return
    if args.device == "cpu":
        plan, here, there, has_nccl = REHEARSAL, "cpu", "cpu", True
    else:
        plan, here, has_nccl = SWEEP if args.sweep else ON_GPUS, "cuda:0", num_gpus > 1
        there = "cuda:1" if has_nccl else "cuda:0"
        if not has_nccl:
            print("fig11_transfer: one GPU, so without NCCL, which cannot join two ranks there")
    if args.tokens is not None:
        plan = msgspec.structs.replace(plan, tokens=tuple(args.tokens))
    with bench_of(plan, here, there) as bench:
        if args.sweep:
            bench.sweep()
        else:
            bench.run(has_nccl)
    publish(
        "fig11_transfer_sweep" if args.sweep else "fig11_transfer",
        settings={
            "block_size": BLOCK_SIZE,
            "repeats": plan.repeats,
            "device": args.device,
            "gpus": num_gpus,
            "chunk_bytes": CHUNK_BYTES,
            "edge_bytes": EDGE_BYTES,
            "max_ctas": MAX_CTAS,
            "problems": bench.problems,
        },
        metrics=figures(bench.results),
        raw=msgspec.to_builtins(bench.results),
        out=args.out,
        rows=[result.row() for result in bench.results],
    )


if __name__ == "__main__":
    main()

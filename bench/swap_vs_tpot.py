"""TPOT while KV moves between HBM and DRAM at the host link's rate, beside TPOT without.

    python -m bench.swap_vs_tpot --device cuda --model FOLDER --load-format dummy [--out FILE]
    python -m bench.swap_vs_tpot --device cpu

One instance with a real engine decodes a few requests all the time, and the same loop that steps it
moves blocks, in phases of so many steps each, with a phase of nothing between any two::

    out        blocks go to DRAM without a pause, by the tier's own copies
    in         they come from there
    both       at once
    pressure   prompts that only DRAM has are asked for in turn, more of them than HBM has room for:
               everything that swapping in and out does besides, index and pool included

A phase's TPOT is compared with the phases before and after it, and its rate with a plain copy of
contiguous pinned memory in the same process. Rounds repeat all phases; figures are medians of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bench._report import Scalar, parser, publish
from bench.working_set import greedy_request
from memserve.core.cost_model import built_in
from memserve.core.profile import ModelShape
from memserve.messages import (
    Abort,
    AnyCommand,
    AnyEvent,
    Audit,
    Audited,
    Finished,
    Prefill,
    Ready,
    Rejected,
    Started,
    StartFailed,
    Tokens,
)
from memserve.models import resolve_model
from memserve.types import BlockId, Geometry, InstanceId, Namespace, RequestId, Role, SlotId
from memserve.workers.environment import set_engine_environment
from memserve.workers.spec import WorkerSpec

VARIANTS = ("out", "in", "both", "pressure")
FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
OUTSTANDING = 6
"""Copies of a direction that are begun or wait, so that the link never has none."""


MEANINGS = {
    "rounds": "times that every phase is measured",
    "steps": "decode steps of a phase",
    "warm_up": "decode steps before",
    "requests": "that decode",
    "prompt": "tokens of each of their prompts",
    "answer": "their tokens: more than all steps together",
    "histories": "prompts for `pressure`",
    "history_tokens": "tokens of each",
    "batch": "blocks of one copy",
    "block_size": "tokens of a block",
    "plain_mb": "size of a plain copy",
    "threads": "of torch's operators on the CPU",
}
SIZES = {
    "cuda": (3, 60, 100, 8, 512, 2400, 20, 4096, 128, 16, 1024, 1),
    "cpu": (1, 10, 5, 2, 64, 300, 16, 256, 4, 32, 16, 1),
}


class Phase(msgspec.Struct):
    """Some decode steps in a row."""

    variant: str
    tpot_s: float = 0.0
    longest_s: float = 0.0
    out_bytes_per_s: float = 0.0
    in_bytes_per_s: float = 0.0
    lost: int = 0
    """Blocks that neither HBM nor DRAM had when they were asked for."""
    error: str = ""


class Mover(Protocol):
    """What moves blocks in a phase."""

    def turn(self) -> None:
        """Between two steps."""
        ...

    def end(self, phase: Phase) -> None:
        """No more; say how much it was."""
        ...

    @property
    def is_active(self) -> bool: ...


class Idle:
    is_active = False

    def turn(self) -> None:
        pass

    def end(self, phase: Phase) -> None:
        pass


class Rate:
    """Bytes a second from the first copy that ends to the last one."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, int]] = []

    def add(self, size_bytes: int) -> None:
        self._ends.append((time.perf_counter(), size_bytes))

    @property
    def bytes_per_s(self) -> float:
        if len(self._ends) < 2 or self._ends[-1][0] == self._ends[0][0]:
            return 0.0
        seconds = self._ends[-1][0] - self._ends[0][0]
        return sum(size for _, size in self._ends[1:]) / seconds


class Copies:
    """A tier of its own over blocks of its own, and copies that follow each other."""

    def __init__(self, tier: Any, block_ids: list[BlockId], batch: int) -> None:
        self._tier = tier
        self._batches = [block_ids[i : i + batch] for i in range(0, len(block_ids), batch)]
        self._is_open: set[str] = set()
        self._running: set[str] = set()
        self._number = 0
        self._slots: dict[str, list[SlotId]] = {}
        self._kept: list[SlotId] = []
        self._rates = {"out": Rate(), "in": Rate()}

    def fill(self) -> Iterator[None]:
        """Let one batch lie in DRAM, for those that come in."""
        self._kept = self._tier.copy_out("kept", self._batches[0])
        while self._tier.is_active:
            self._tier.poll()
            yield

    def begin(self, *directions: str) -> Copies:
        self._is_open = set(directions)
        self._rates = {"out": Rate(), "in": Rate()}
        return self

    @property
    def is_active(self) -> bool:
        return bool(self._tier.is_active)

    def turn(self) -> None:
        for direction in self._is_open:
            while sum(name.startswith(direction) for name in self._running) < OUTSTANDING:
                self._start(direction)
        for end in self._tier.poll():
            if end.error:
                raise RuntimeError(end.error)
            self._rates[end.owner.split()[0]].add(end.size_bytes)
            self._tier.free(self._slots.pop(end.owner, []))
            self._running.remove(end.owner)

    def end(self, phase: Phase) -> None:
        self._is_open = set()
        phase.out_bytes_per_s = self._rates["out"].bytes_per_s
        phase.in_bytes_per_s = self._rates["in"].bytes_per_s

    def _start(self, direction: str) -> None:
        self._number += 1
        owner = f"{direction} {self._number}"
        block_ids = self._batches[self._number % len(self._batches)]
        if direction == "out":
            self._slots[owner] = self._tier.copy_out(owner, block_ids)
        else:
            self._tier.copy_in(owner, self._kept, block_ids)
        self._running.add(owner)


class Pressure:
    """Prompts are brought one after the other, and let go at once."""

    def __init__(
        self, swaps: Any, mempool: Any, prompts: list[list[int]], block_bytes: int
    ) -> None:
        self._swaps = swaps
        self._mempool = mempool
        self._prompts = prompts
        self._block_bytes = block_bytes
        self._number = 0
        self._is_waiting = False
        self._is_open = False
        self._lost = 0
        self._began = 0.0
        self._before: Any = None

    def begin(self) -> Pressure:
        self._is_open, self._lost = True, 0
        self._began, self._before = time.perf_counter(), self._swaps.stats()
        return self

    @property
    def is_active(self) -> bool:
        return self._is_waiting

    def turn(self) -> None:
        for _ in self._prompts:
            if self._is_waiting or not self._is_open:
                return
            self._bring()

    def _bring(self) -> None:
        self._number += 1
        tokens = self._prompts[self._number % len(self._prompts)]
        path = self._mempool.path(tokens)
        self._lost += path.num_blocks - self._mempool.find(path).num_blocks
        self._is_waiting = True
        self._swaps.bring(
            f"bench {self._number}",
            tokens,
            Namespace(),
            self._arrived,
            keeps=False,
            is_prompt=False,
        )

    def _arrived(self) -> None:
        self._is_waiting = False

    def end(self, phase: Phase) -> None:
        self._is_open = False
        seconds, now = time.perf_counter() - self._began, self._swaps.stats()
        moved_out = now.swapped_out - self._before.swapped_out
        moved_in = now.swapped_in - self._before.swapped_in
        phase.out_bytes_per_s = moved_out * self._block_bytes / seconds
        phase.in_bytes_per_s = moved_in * self._block_bytes / seconds
        phase.lost = self._lost


class Driver:
    """The worker's channel. A turn of the engine's loop lets the script go on by one step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._rng = random.Random(options.seed)
        self._commands: deque[AnyCommand] = deque()
        self._running: set[str] = set()
        self._has_tokens = self._has_started = False
        self._script = self._run()
        self._deadline = time.monotonic() + options.max_seconds
        self.geometry: Geometry | None = None
        self.worker: Any = None
        self.phases: list[Phase] = []
        self.plain: dict[str, float] = {}
        self.problems: list[str] | None = None

    # What the worker calls.

    def send(self, event: AnyEvent) -> None:
        match event:
            case Ready():
                self.geometry = event.geometry
            case StartFailed() | Rejected():
                raise RuntimeError(event.message)
            case Started():
                self._has_started = True
            case Tokens():
                self._has_tokens = True
            case Finished():
                self._running.discard(event.request_id)
                self._commands.append(Abort(epoch=1, request_id=event.request_id))
            case Audited():
                self.problems = event.problems
            case _:
                pass

    def wait(self, timeout_s: float) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"not done after {self._options.max_seconds:g} s")
        next(self._script, None)
        if not self._commands and timeout_s > 0.0:
            time.sleep(min(timeout_s, 0.001))

    def receive(self) -> AnyCommand | None:
        return self._commands.popleft() if self._commands else None

    def wake_on(self, fd: int) -> None:
        pass

    def close(self) -> None:
        pass

    # What it does: each `yield` is a turn of the loop.

    def _run(self) -> Iterator[None]:
        options = self._options
        yield
        prompts = [self._prompt(options.history_tokens) for _ in range(options.histories)]
        copies, pressure = self._movers(prompts)  # takes blocks, while there is no history
        for number, prompt in enumerate(prompts):
            self._start(f"history {number}", prompt, 1)
            while self._running:
                yield
        yield from copies.fill()
        self.plain = plain_copies(self.worker, options.plain_mb << 20)
        for number in range(options.requests):
            self._start(f"decode {number}", self._prompt(options.prompt), options.answer)
        yield from self._steps(Phase("warm-up"), Idle(), options.warm_up)
        for _ in range(options.rounds):
            for variant in options.variants:
                yield from self._phase("nothing", Idle())
                yield from self._phase(variant, _mover(variant, copies, pressure))
        yield from self._phase("nothing", Idle())
        yield from self._finish(copies)

    def _movers(self, prompts: list[list[int]]) -> tuple[Copies, Pressure]:
        from memserve.ops.blocks import block_ops
        from memserve.workers.copies import BlockCopies
        from memserve.workers.dram import DramTier
        from memserve.workers.hostmemory import HostMemory

        assert self.geometry is not None
        hbm, loop = self.worker._host.tensor, self.worker.loop
        block_bytes, batch = self.geometry.block_bytes, self._options.batch
        block_ids = loop._mempool.alloc_mem(2 * OUTSTANDING * batch, "bench")
        memory = HostMemory((OUTSTANDING + 2) * batch * block_bytes, pin=hbm.is_cuda)
        ops = block_ops(hbm.device)
        tier = DramTier(BlockCopies(self.geometry, hbm, memory, ops, time.monotonic))
        self._tier = tier
        pressure = Pressure(loop._swaps, loop._mempool, prompts, block_bytes)
        return Copies(tier, block_ids, batch), pressure

    def _phase(self, variant: str, mover: Mover) -> Iterator[None]:
        phase = Phase(variant)
        try:
            yield from self._steps(phase, mover, self._options.steps)
        except Exception as error:  # noqa: BLE001 -- the next variant may work
            traceback.print_exc()
            phase.error = f"{type(error).__name__}: {error}"
        self.phases.append(phase)

    def _steps(self, phase: Phase, mover: Mover, count: int) -> Iterator[None]:
        """Decode so many steps, and measure them; what is still moving then ends unmeasured."""
        yield from self._until_tokens(mover)
        began = last = time.perf_counter()
        for _ in range(count):
            yield from self._until_tokens(mover)
            now = time.perf_counter()
            phase.longest_s = max(phase.longest_s, now - last)
            last = now
        phase.tpot_s = (last - began) / count
        mover.end(phase)
        while mover.is_active:
            mover.turn()
            yield

    def _until_tokens(self, mover: Mover) -> Iterator[None]:
        self._has_tokens = self._has_started = False
        while not self._has_tokens or self._has_started:
            if not any(name.startswith("decode") for name in self._running):
                raise RuntimeError("the requests have ended: --answer is too small")
            self._has_tokens = self._has_started = False
            mover.turn()
            yield

    def _finish(self, copies: Copies) -> Iterator[None]:
        for name in sorted(self._running):
            self._commands.append(Abort(epoch=1, request_id=RequestId(name)))
        self._running.clear()
        yield
        self.worker.loop._mempool.free_all("bench")
        self._tier.close()
        self._commands.append(Audit(epoch=1, audit_id=1))
        while self.problems is None:
            yield
        self.worker.loop.stop()

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]

    def _start(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self._running.add(name)
        self._commands.append(
            Prefill(
                epoch=1,
                request_id=RequestId(name),
                attempt=1,
                request=greedy_request(max_tokens),
                known_tokens=0,
                token_ids=prompt,
                whole=True,
                hold=False,
                is_private=False,
            )
        )


def _mover(variant: str, copies: Copies, pressure: Pressure) -> Mover:
    if variant == "pressure":
        return pressure.begin()
    return copies.begin(*(("out", "in") if variant == "both" else (variant,)))


def plain_copies(worker: Any, size_bytes: int) -> dict[str, float]:
    """Bytes a second of contiguous copies, with nothing else to do; `both`: of each direction."""
    import torch

    hbm = worker._host.tensor
    size_bytes = min(size_bytes, hbm.numel() // 2)
    near, far = hbm[:size_bytes].clone(), hbm[:size_bytes].clone()  # the engine's KV stays as it is
    host = [torch.empty(size_bytes, dtype=hbm.dtype, pin_memory=hbm.is_cuda) for _ in range(2)]
    streams = [torch.cuda.Stream(hbm.device) for _ in range(2)] if hbm.is_cuda else [None, None]

    def rate(*directions: str) -> float:
        best = float("inf")
        for _ in range(4):
            began = time.perf_counter()
            for direction, stream in zip(directions, streams, strict=False):
                with torch.cuda.stream(stream):
                    if direction == "out":
                        host[0].copy_(near, non_blocking=True)
                    else:
                        far.copy_(host[1], non_blocking=True)
            if hbm.is_cuda:
                torch.cuda.synchronize(hbm.device)
            best = min(best, time.perf_counter() - began)
        return size_bytes / best

    with torch.inference_mode():
        return {"out": rate("out"), "in": rate("in"), "both": rate("out", "in")}


# ── the run ───────────────────────────────────────────────────────────────────────────────────


def serve(options: argparse.Namespace) -> Driver:
    """Everything happens in this process."""
    set_engine_environment(os.environ, num_threads=options.threads, log_level="warning")
    import torch

    from memserve.workers.main import Worker

    torch.set_num_threads(options.threads)
    is_cuda = options.device == "cuda"
    model = options.model or str(resolve_model("smollm2-135m-instruct"))
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    shape = ModelShape.from_config(config, 2 if is_cuda else 4)
    block_bytes = shape.kv_bytes_per_token * options.block_size
    hbm_blocks, dram_blocks, longest = sizes(options)
    engine: dict[str, Any] = {
        "dtype": "bfloat16" if is_cuda else "float32",
        "max_model_len": longest,
        "block_size": options.block_size,
        "load_format": options.load_format,
    }
    if options.eager or not is_cuda:
        engine["enforce_eager"] = True
    driver = Driver(options)
    with tempfile.TemporaryDirectory(prefix="memserve-bench-") as run_dir:
        spec = WorkerSpec(
            instance=InstanceId("PD0"),
            epoch=1,
            role=Role.COLOCATED,
            hub_address="",
            run_dir=run_dir,
            log_path="",
            model=model,
            engine=engine,
            kv_bytes=(hbm_blocks + 1) * block_bytes,
            dram_bytes=dram_blocks * block_bytes,
            profile=built_in(
                ModelShape.from_config(config),
                torch.cuda.get_device_name() if is_cuda else "cpu",
            ),
            num_threads=options.threads,
            device=options.device,
        )
        driver.worker = Worker(spec, driver)  # type: ignore[arg-type]
        try:
            driver.worker.run()
        except TimeoutError as error:
            print(f"FAULT {error}: what was measured until then")
    return driver


def sizes(options: argparse.Namespace) -> tuple[int, int, int]:
    """Blocks of HBM and of DRAM, and the longest request in tokens.

    HBM has room for half of the histories, when the requests that decode have become as long as
    they can, and DRAM for three quarters.
    """
    size = options.block_size
    decode = options.requests * -(-(options.prompt + options.answer) // size)
    histories = options.histories * (options.history_tokens // size)
    moved = 2 * OUTSTANDING * options.batch
    longest = max(options.prompt + options.answer, options.history_tokens) + size
    return decode + moved + histories // 2 + options.batch, histories * 3 // 4, longest


def summary(driver: Driver) -> tuple[dict[str, Scalar], list[dict[str, Scalar]]]:
    """Figures to quote, and a row for each variant."""
    phases, plain = driver.phases, driver.plain
    nothing = [p.tpot_s for p in phases if p.variant == "nothing" and not p.error]
    metrics: dict[str, Scalar] = {
        "tpot_without_ms": statistics.median(nothing) * 1e3,
        "plain_out_GB_per_s": plain["out"] / 1e9,
        "plain_in_GB_per_s": plain["in"] / 1e9,
        "plain_both_GB_per_s": plain["both"] / 1e9,
        "audit_problems": len(driver.problems or []),
    }
    rows: list[dict[str, Scalar]] = []
    for variant in VARIANTS:
        found = [
            n
            for n in range(1, len(phases) - 1)
            if phases[n].variant == variant and not any(p.error for p in phases[n - 1 : n + 2])
        ]
        if not found:
            continue
        ratios = [
            2 * phases[n].tpot_s / (phases[n - 1].tpot_s + phases[n + 1].tpot_s) for n in found
        ]
        out = statistics.median(phases[n].out_bytes_per_s for n in found)
        into = statistics.median(phases[n].in_bytes_per_s for n in found)
        longest = statistics.median(phases[n].longest_s / phases[n].tpot_s for n in found)
        key = "both" if variant == "both" else ""
        row: dict[str, Scalar] = {
            "variant": variant,
            "tpot ratio": round(statistics.median(ratios), 4),
            "least, most": f"{min(ratios):.3f}, {max(ratios):.3f}",
            "longest step / tpot": round(longest, 2),
            "out GB/s": round(out / 1e9, 2),
            "of plain out": round(out / plain[key or "out"], 3),
            "in GB/s": round(into / 1e9, 2),
            "of plain in": round(into / plain[key or "in"], 3),
            "lost": sum(phases[n].lost for n in found),
        }
        rows.append(row)
        metrics |= {f"{variant}: {name}": v for name, v in row.items() if name != "variant"}
    return metrics, rows


def main() -> None:
    options = _options()
    driver = serve(options)
    metrics, rows = summary(driver)
    settings = {k: str(v) for k, v in vars(options).items() if k != "out"}
    publish(
        "swap_vs_tpot",
        settings=settings | {"model": Path(options.model).name or "bundled"},
        metrics=metrics,
        raw={
            "phases": [msgspec.to_builtins(phase) for phase in driver.phases],
            "plain": driver.plain,
            "problems": driver.problems,
        },
        rows=rows,
        out=options.out,
    )
    print(
        f"TPOT without swapping: {metrics['tpot_without_ms']:.3f} ms; plain copies: {driver.plain}"
    )
    for phase in driver.phases:
        if phase.error:
            print(f"FAULT {phase.variant}: {phase.error}")
    for problem in driver.problems or []:
        print(f"FAULT audit: {problem}")


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder; default: the bundled model")
    made.add_argument("--load-format", default="auto")
    made.add_argument("--eager", action="store_true", help="neither compile nor graphs")
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    for name, meaning in MEANINGS.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, help=meaning)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--max-seconds", type=float, default=300.0)
    device = made.parse_known_args()[0].device
    made.set_defaults(**dict(zip(MEANINGS, SIZES[device], strict=True)))
    options: argparse.Namespace = made.parse_args()
    return options


if __name__ == "__main__":
    main()

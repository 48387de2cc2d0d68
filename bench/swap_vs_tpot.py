"""TPOT while KV moves between HBM and DRAM at the host link's rate, beside TPOT without.

    python -m bench.swap_vs_tpot --device cuda --model FOLDER --load-format dummy [--out FILE]
    python -m bench.swap_vs_tpot --device cpu

One instance with a real engine, whose loop also moves blocks, between two steps, in phases::

    out, in, both   by the DRAM tier's own copies, without a pause
    swapping        prompts that only DRAM has are asked for in turn, more of them than HBM has room
                    for: index, pool and the copies to DRAM that make room have their part in it

The first three are measured without requests, and then all four while a few requests decode; a
phase of nothing lies before and after each of these, and a phase's TPOT is compared with that of
both. Rates stand beside those of plain copies of pinned memory in the same process. Every phase has
some steps first that do not count, so that KV is on its way in all that do. Rounds repeat the
phases with requests; figures are medians of them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bench._instance import Hub, serve, shape_of
from bench._report import Scalar, parser, publish, settings_of
from memserve.messages import (
    AnyEvent,
    Audited,
    Finished,
    Ready,
    Rejected,
    Started,
    StartFailed,
    Tokens,
)
from memserve.models import resolve_model
from memserve.types import Geometry

if TYPE_CHECKING:
    from bench._swapping import Mover

BY_TIER = ("out", "in", "both")
SWAPPING, NOTHING = "swapping", "nothing"
VARIANTS = (*BY_TIER, SWAPPING)
_FIRST_TOKEN, _LAST_TOKEN = 1000, 10_000
_GRACE_S = 30.0
"""For the phase that the end of the time falls into, and for what follows it."""


class Sizes(msgspec.Struct, frozen=True):
    """How much of everything; on a GPU, unless something else is said."""

    rounds: int = 3
    steps: int = 80
    """Of a phase."""
    lead: int = 8
    """Before they count."""
    idle_turns: int = 600
    """Of the loop, in place of steps, where nothing decodes."""
    requests: int = 8
    """That decode."""
    prompt: int = 512
    """Tokens of each."""
    histories: int = 30
    """Prompts to be swapped in."""
    history_tokens: int = 4096
    every: int = 10
    """One of them is asked for each so many steps: backing up takes 8 for as much."""
    batch: int = 128
    """Blocks of one of the tier's copies."""
    batches: int = 12
    """Copies of both directions that are under way at a time."""
    block_size: int = 16
    plain_bytes: int = 1 << 30

    @property
    def answer(self) -> int:
        """More tokens than there are steps, even if those between the phases are many."""
        phases = 2 * len(VARIANTS) * self.rounds + 2
        return 2 * phases * (self.steps + self.lead)

    @property
    def longest(self) -> int:
        """Of all requests, in tokens."""
        return max(self.prompt + self.answer, self.history_tokens) + self.block_size

    @property
    def hbm_blocks(self) -> int:
        """Room for half of the histories, when the requests have become as long as they can."""
        decoding = self.requests * -(-(self.prompt + self.answer) // self.block_size)
        return decoding + self.batches * self.batch + self._history_blocks // 2

    @property
    def dram_blocks(self) -> int:
        """Together with HBM more than all histories, so that none is lost."""
        return self._history_blocks * 3 // 4

    @property
    def _history_blocks(self) -> int:
        return self.histories * (self.history_tokens // self.block_size)


ON_CPU = Sizes(
    rounds=1,
    steps=8,
    lead=2,
    idle_turns=20,
    requests=2,
    prompt=64,
    histories=16,
    history_tokens=256,
    every=2,
    batch=4,
    block_size=32,
    plain_bytes=16 << 20,
)


class Phase(msgspec.Struct):
    """Some steps in a row."""

    variant: str
    decodes: bool = True
    seconds: float = 0.0
    steps: int = 0
    longest_s: float = 0.0
    moving_steps: int = 0
    """Those at whose end bytes were on their way."""
    out_bytes: float = 0.0
    in_bytes: float = 0.0
    lost_blocks: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float:
        return self.seconds / self.steps


class Script(Hub):
    """Everything that happens, in order; each `yield` is a turn of the engine's loop."""

    def __init__(self, sizes: Sizes, seed: int, max_seconds: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.phases: list[Phase] = []
        self.plain: dict[str, float] = {}
        self.problems: list[str] | None = None
        self._rng = random.Random(seed)
        self._max_seconds = max_seconds
        self._ends_at: float | None = None
        """When to begin no more phases; None: the engine is still being built."""
        self._geometry: Geometry | None = None
        self._running: set[str] = set()
        self._started: set[str] = set()
        self._has_tokens = False
        self._turns = self._run()

    def on_event(self, event: AnyEvent) -> None:
        match event:
            case Ready():
                self._geometry = event.geometry
            case StartFailed() | Rejected():
                raise RuntimeError(event.message)
            case Started():
                self._started.add(event.request_id)
            case Tokens():
                self._has_tokens = True
            case Finished():
                self._running.discard(event.request_id)
                self.forget(event.request_id)
            case Audited():
                self.problems = event.problems
            case _:
                pass

    def on_turn(self) -> None:
        if self._ends_at is not None and time.monotonic() > self._ends_at + _GRACE_S:
            raise TimeoutError(f"not done {_GRACE_S:g} s after it should have been")
        next(self._turns, None)

    # ── what happens ──────────────────────────────────────────────────────────────────────────

    def _run(self) -> Iterator[None]:
        yield
        self._ends_at = time.monotonic() + self._max_seconds
        yield from self._prepare()
        for variant in BY_TIER:
            yield from self._phase(variant, decodes=False)
        decoding = {f"decode {number}" for number in range(self.sizes.requests)}
        for name in sorted(decoding):
            self._ask(name, self._prompt(self.sizes.prompt), self.sizes.answer)
        while not decoding <= self._started:
            yield
        for _ in range(self.sizes.rounds):
            for variant in VARIANTS:
                if time.monotonic() < self._ends_at:
                    yield from self._phase(NOTHING)
                    yield from self._phase(variant)
        yield from self._phase(NOTHING)
        yield from self._finish()

    def _prepare(self) -> Iterator[None]:
        from bench._swapping import SwapIns, TierCopies, hbm_of, plain_rates

        assert self._geometry is not None
        sizes = self.sizes
        self.plain = plain_rates(hbm_of(self.worker), sizes.plain_bytes)
        # It takes its blocks now, while there is no history.
        self._copies = TierCopies(self.worker, self._geometry, sizes.batch, sizes.batches)
        yield from self._copies.fill()
        prompts = [self._prompt(sizes.history_tokens) for _ in range(sizes.histories)]
        for number, prompt in enumerate(prompts):
            self._ask(f"history {number}", prompt, 1)
            while self._running:
                yield
        self._swaps = SwapIns(self.worker, prompts, sizes.every)

    def _finish(self) -> Iterator[None]:
        for name in sorted(self._running):
            self.forget(name)
        yield
        self._copies.close()
        self.audit()
        while self.problems is None:
            yield
        self.worker.loop.stop()

    # ── a phase ───────────────────────────────────────────────────────────────────────────────

    def _phase(self, variant: str, *, decodes: bool = True) -> Iterator[None]:
        """What is still moving at its end is waited for, and counts in no phase."""
        phase = Phase(variant, decodes)
        mover = self._mover(variant)
        try:
            yield from self._measure(phase, mover)
        except Exception as error:  # noqa: BLE001 -- the next variant may work
            traceback.print_exc()
            phase.error = f"{type(error).__name__}: {error}"
        self.phases.append(phase)
        mover.stop()
        while mover.is_active:
            mover.turn()
            yield

    def _mover(self, variant: str) -> Mover:
        if variant == SWAPPING:
            return self._swaps.begin()
        return self._copies.begin(variant)

    def _measure(self, phase: Phase, mover: Mover) -> Iterator[None]:
        for _ in range(self.sizes.lead):
            yield from self._step(phase, mover)
        lost, (out_bytes, in_bytes) = self._swaps.lost_blocks, self._moved()
        began = last = time.perf_counter()
        for _ in range(self.sizes.steps if phase.decodes else self.sizes.idle_turns):
            yield from self._step(phase, mover)
            now = time.perf_counter()
            phase.longest_s = max(phase.longest_s, now - last)
            phase.moving_steps += mover.is_active
            phase.steps += 1
            last = now
        phase.seconds = last - began
        phase.lost_blocks = self._swaps.lost_blocks - lost
        ended_out, ended_in = self._moved()
        phase.out_bytes, phase.in_bytes = ended_out - out_bytes, ended_in - in_bytes

    def _step(self, phase: Phase, mover: Mover) -> Iterator[None]:
        """Until the engine has given tokens; without requests, one turn of its loop."""
        self._has_tokens = False
        while True:
            if phase.decodes and not self._running:
                raise RuntimeError("the requests have ended")
            mover.turn()
            yield
            if self._has_tokens or not phase.decodes:
                return

    def _moved(self) -> tuple[int, int]:
        """Bytes out and in since the start, by the bench's tier and by the instance's."""
        assert self._geometry is not None
        copies, stats = self._copies.moved, self.worker.loop.stats()
        block_bytes = self._geometry.block_bytes
        return (
            copies["out"] + stats.swapped_out_blocks * block_bytes,
            copies["in"] + stats.swapped_in_blocks * block_bytes,
        )

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(length)]

    def _ask(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self._running.add(name)
        self.start(name, prompt, max_tokens)


# ── what it makes of them ─────────────────────────────────────────────────────────────────────


def summary(
    phases: Sequence[Phase], plain: Mapping[str, float]
) -> tuple[dict[str, Scalar], list[dict[str, Scalar]]]:
    """Figures to quote, and a row for each variant, without requests (`alone`) and with."""
    metrics: dict[str, Scalar] = {f"plain_{k}_GB_per_s": v / 1e9 for k, v in plain.items()}
    groups: dict[str, list[int]] = {}
    for number, phase in enumerate(phases):
        if not phase.error:
            name = phase.variant if phase.decodes else f"{phase.variant} alone"
            groups.setdefault(name, []).append(number)
    rows: list[dict[str, Scalar]] = []
    for name, numbers in groups.items():
        found = _figures([phases[n] for n in numbers], plain)
        ratios = [r for n in numbers if (r := tpot_ratio(phases, n)) is not None]
        if ratios:
            found["tpot_ratio"] = statistics.median(ratios)
            found |= {"tpot_ratio_least": min(ratios), "tpot_ratio_most": max(ratios)}
        metrics |= {f"{name}: {key}": value for key, value in found.items()}
        rows.append(
            {
                "variant": name,
                "tpot": found.get("tpot_ratio"),
                "out GB/s": f"{found['out_GB_per_s']:.2f} ({found['out_of_plain']:.3f})",
                "in GB/s": f"{found['in_GB_per_s']:.2f} ({found['in_of_plain']:.3f})",
                "GB": found["moved_GB"],
                "moving": found["moving"],
                "lost": found["lost_blocks"],
            }
        )
    return metrics, rows


def tpot_ratio(phases: Sequence[Phase], number: int) -> float | None:
    """Of the phase to the quiet ones before and after it; None: it has no such, or they failed."""
    around = [phases[n] for n in (number - 1, number + 1) if 0 <= n < len(phases)]
    if len(around) < 2 or any(p.variant != NOTHING or p.error for p in around):
        return None
    return phases[number].tpot_s / statistics.mean(p.tpot_s for p in around)


def _figures(phases: Sequence[Phase], plain: Mapping[str, float]) -> dict[str, Any]:
    """Of one variant: medians, and what all of its phases moved."""
    is_both = phases[0].variant == "both"
    figures: dict[str, Any] = {}
    for way in ("out", "in"):
        rate = statistics.median(getattr(p, f"{way}_bytes") / p.seconds for p in phases)
        figures[f"{way}_GB_per_s"] = rate / 1e9
        figures[f"{way}_of_plain"] = rate / plain["both" if is_both else way]
    figures["moved_GB"] = sum(p.out_bytes + p.in_bytes for p in phases) / 1e9
    figures["moving"] = sum(p.moving_steps for p in phases) / sum(p.steps for p in phases)
    figures["lost_blocks"] = sum(p.lost_blocks for p in phases)
    if phases[0].decodes:
        figures["tpot_ms"] = statistics.median(p.tpot_s for p in phases) * 1e3
        figures["longest_step_to_tpot"] = statistics.median(p.longest_s / p.tpot_s for p in phases)
    return figures


# ── the run ───────────────────────────────────────────────────────────────────────────────────


def run(script: Script, options: argparse.Namespace) -> str:
    """Serve in this process. Returns what ended it too early, or nothing."""
    sizes, is_cuda = script.sizes, options.device == "cuda"
    model = options.model or str(resolve_model("smollm2-135m-instruct"))
    dtype = "bfloat16" if is_cuda else "float32"
    engine: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": sizes.longest,
        "block_size": sizes.block_size,
        "load_format": options.load_format,
        "enforce_eager": options.eager or not is_cuda,
    }
    try:
        serve(
            script,
            model=model,
            device=options.device,
            engine=engine,
            block_bytes=shape_of(model, dtype).kv_bytes_per_token * sizes.block_size,
            hbm_blocks=sizes.hbm_blocks,
            dram_blocks=sizes.dram_blocks,
        )
    except Exception as error:  # noqa: BLE001 -- what was measured until now is kept
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder; default: the bundled model")
    made.add_argument("--load-format", default="auto")
    made.add_argument("--eager", action="store_true", help="neither compile nor graphs")
    made.add_argument("--rounds", type=int, help="default: 3 on a GPU, else 1")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument(
        "--max-seconds", type=float, default=300.0, help="of measuring: then no more phases"
    )
    options = made.parse_args()
    sizes = Sizes() if options.device == "cuda" else ON_CPU
    if options.rounds is not None:
        sizes = msgspec.structs.replace(sizes, rounds=options.rounds)
    script = Script(sizes, options.seed, options.max_seconds)
    faults = [run(script, options)]
    faults += [f"{phase.variant}: {phase.error}" for phase in script.phases if phase.error]
    faults += script.problems or []
    metrics, rows = summary(script.phases, script.plain)
    publish(
        "swap_vs_tpot",
        settings=settings_of(options) | {"sizes": msgspec.to_builtins(sizes)},
        metrics=metrics,
        raw={
            "phases": [msgspec.to_builtins(phase) for phase in script.phases],
            "plain": script.plain,
            "problems": script.problems,
        },
        rows=rows,
        out=options.out,
    )
    print(
        "tpot: against the phases of nothing around; GB/s: (of the plain copy's, in this process:",
        ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in script.plain.items()) + ");",
        "GB: moved while it was measured; moving: share of steps at whose end some was on its way",
    )
    if faults := [fault for fault in faults if fault]:
        sys.exit("\n".join(f"FAULT {fault}" for fault in faults))


if __name__ == "__main__":
    main()

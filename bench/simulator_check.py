"""Whether the simulator says what a real run of the same load takes.

    python -m bench.simulator_check [--device cpu|cuda] [--profile FILE] [--budget-s S] [--out FILE]
    python -m bench.simulator_check --replay FILE [--profile FILE]

Starts `memserve up --mode 1P1D-CC`, on CPU with a core of its own for each instance, and runs loads
of sessions: at one utilisation after the other, again and again until the time is over. Before and
after every load single requests and fixed batches are timed (`_probes.py`); the operators of the
profile (what `memserve calibrate` measured on this machine, else the built-in ones) are fitted to
the two probes around a load, and the load runs through `memserve/simulator` with these costs. The
means over the requests of real and simulated loads are compared. A load's rate comes from a
simulation too: the one at which the instance in question is busy for that share of the time.

Nothing here is fitted to what a load took. What other processes do to it the kernel measures: how
long each instance, and the orchestrator, waited for a processor while it wanted to run. Simulated
ones are slowed down by the same factor. With `--replay`, the loads that an earlier run measured are
simulated once more.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench._load import Answer, play
from bench._probes import Costs, Meter, Points, Probe, Spent, fit, probe, steps_of, warm_up
from bench._report import Scalar, parser, publish
from bench._serve import get, pin_instances, serving
from memserve import profiles
from memserve.config import Config, SchedulerConfig
from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.profile import ModelShape, Profile
from memserve.simulator import report, setup
from memserve.simulator.simulation import Outcome, Result, Simulation
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import Call, Piece, poisson
from memserve.types import InstanceId

MODE = "1P1D-CC"
SCHEDULER = {"scheduler.split": "always"}
"""Whether the server has a calibrated profile must not decide where its requests run."""
SEARCHES = 8


class Machine(msgspec.Struct, frozen=True):
    """What differs between devices."""

    flags: tuple[str, ...]
    settings: dict[str, str | int | float]
    shape: str
    """Of the model, where no profile says it."""
    device: str
    points: Points
    load: Shape
    requests: int
    """Of each load."""
    max_context: int
    """A session ends before the first call that is longer."""
    bound_by: str
    """The instance whose utilisation counts."""
    utilisations: tuple[float, ...]
    most_rate: float


MACHINES = {
    "cpu": Machine(
        flags=("--device", "cpu"),
        settings={"engine.block_size": 32},
        shape="smollm2-135m",
        device="cpu",
        points=Points(
            prefills=((32, 0), (96, 0), (192, 0), (384, 0), (72, 64), (150, 128), (448, 320)),
            decodes=((1, 64), (2, 256), (4, 128)),
            link="shm",
        ),
        load=Shape(documents=0, system_tokens=64, turns=4, user_tokens=80, reply_tokens=24),
        requests=20,
        max_context=2047,
        bound_by="D0",
        utilisations=(0.35, 0.65),
        most_rate=3.0,
    ),
    "cuda": Machine(
        flags=("--device", "cuda"),
        settings={
            "engine.load_format": "dummy",
            "engine.max_model_len": 16_384,
            "cluster.start_timeout_s": 280,
        },
        shape="llama-3.1-8b",
        device="H200",
        points=Points(
            prefills=(
                *((128, 0), (512, 0), (1024, 0), (2048, 0), (4096, 0)),
                *((528, 512), (2048, 1024), (4096, 3072)),
            ),
            decodes=((1, 512), (4, 1024), (16, 512), (32, 512)),
            link="ipc",
            repeats=3,
        ),
        load=Shape(documents=0, system_tokens=256, turns=4, user_tokens=1500, reply_tokens=64),
        requests=200,
        max_context=16_383,
        bound_by="P0",
        utilisations=(0.2, 0.7),
        most_rate=60.0,
    ),
}


class Load(msgspec.Struct, frozen=True):
    """A load that really ran."""

    utilisation: float
    rate: float
    calls: list[dict[str, Any]]
    outcomes: list[Outcome]
    timelines: list[list[dict[str, Any]]]
    """Of each request that did not fail, as the server tells it."""
    spent: dict[str, Spent]
    """By process."""


class Measured(msgspec.Struct, frozen=True):
    """All that a run found: enough to simulate it again."""

    device: str
    """Of `MACHINES`."""
    base: Profile
    blocks: int
    block_size: int
    pinned: dict[str, int]
    probes: list[Probe]
    """One before each load, and one after the last."""
    loads: list[Load]


def main() -> None:
    """Measure or read, simulate, compare, print, write."""
    args = _arguments()
    machine = MACHINES[args.device]
    base = profiles.load(args.profile) if args.profile else None
    if args.replay:
        run = read(args.replay)
        machine = MACHINES[run.device]
        if base is not None:
            run = msgspec.structs.replace(run, base=base)
    else:
        run = asyncio.run(measure(machine, base or builtin_of(machine, args.model), args))
    costs = [fit(run.base, pair) for pair in zip(run.probes, run.probes[1:], strict=False)]
    results = [simulate(run, *pair) for pair in zip(costs, run.loads, strict=True)]
    rows = [row(*pair) for pair in zip(run.loads, results, strict=True)]
    levels = [level(run.loads, results, each) for each in machine.utilisations]
    raw: dict[str, Any] = {"loads": rows}
    if not args.replay:
        raw |= {"measured": run, "costs": costs, "simulated": [one.outcomes for one in results]}
    publish(
        "simulator_check",
        settings={
            "mode": MODE,
            "machine": msgspec.to_builtins(machine),
            "pinned": run.pinned,
            "replayed": args.replay and args.replay.name,
        },
        metrics={
            f"{found['load']}: {name}": value
            for found in levels
            for name, value in found.items()
            if name != "load"
        },
        raw=msgspec.to_builtins(raw),
        out=args.out,
        rows=[shown(found) for found in rows + levels],
    )


def _arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=sorted(MACHINES), default="cpu")
    arguments.add_argument("--model", help="as `memserve up --model`")
    arguments.add_argument("--profile", type=Path, metavar="FILE", help="of `memserve calibrate`")
    arguments.add_argument("--budget-s", type=float, default=200.0, help="for probes and loads")
    arguments.add_argument("--seed", type=int, default=0, help="of the first load; then rising")
    arguments.add_argument("--replay", type=Path, metavar="FILE", help="a result of this script")
    return arguments.parse_args()


def read(path: Path) -> Measured:
    """What an earlier run measured. Raises: SystemExit."""
    try:
        found = json.loads(path.read_text("utf-8"))["raw"]["measured"]
        return msgspec.convert(found, Measured, str_keys=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--replay {path}: not a result of this script: {error}") from error


def builtin_of(machine: Machine, model: str | None) -> Profile:
    """The profile of the machine's model that needs no calibration."""
    config = Path(model or "") / "config.json"
    shape = setup.MODELS[machine.shape]
    if config.is_file():
        shape = ModelShape.from_config(json.loads(config.read_text("utf-8")), 2)
    return built_in(shape, machine.device, model=machine.shape)


# ── the real runs ─────────────────────────────────────────────────────────────────────────────


async def measure(machine: Machine, base: Profile, args: argparse.Namespace) -> Measured:
    """Start a cluster; probe it and load it in turns until the time is over."""
    flags = ["--mode", MODE, *machine.flags, *(["--model", args.model] if args.model else [])]
    with serving(flags, {**machine.settings, **SCHEDULER}) as url:
        pinned = pin_instances(url) if machine.device == "cpu" else {}
        begun = time.perf_counter()
        instance = get(f"{url}/v1/status")["instances"][0]
        run = Measured(
            device=args.device,
            base=base,
            blocks=instance["stats"]["total_blocks"],
            block_size=int(machine.settings.get("engine.block_size", 16)),
            pinned=pinned,
            probes=[],
            loads=[],
        )
        meter = Meter(url)
        await warm_up(url, 200)
        await probe_once(url, machine, run, meter)
        longest_s = 0.0
        while True:
            lap = time.perf_counter()
            for utilisation in machine.utilisations:
                seed = args.seed + len(run.loads)
                run.loads.append(await one_load(url, machine, run, utilisation, seed, meter))
                await probe_once(url, machine, run, meter)
            longest_s = max(longest_s, time.perf_counter() - lap)
            if time.perf_counter() - begun + longest_s > args.budget_s:
                return run


async def probe_once(url: str, machine: Machine, run: Measured, meter: Meter) -> None:
    """Mutates `run`."""
    run.probes.append(await probe(url, machine.points, meter))


async def one_load(
    url: str, machine: Machine, run: Measured, utilisation: float, seed: int, meter: Meter
) -> Load:
    """Run it, at the rate that the last probe suggests."""
    rate = rate_for(machine, run, utilisation, seed)
    calls = make_load(machine, rate, seed)
    meter.lap()
    answers = await play(url, calls)
    spent = meter.lap()
    return Load(
        utilisation=utilisation,
        rate=rate,
        calls=[stored(call) for call in calls],
        outcomes=[answer.outcome for answer in answers],
        timelines=[_timeline(url, answer) for answer in answers if answer.outcome.error is None],
        spent=spent,
    )


def _timeline(url: str, answer: Answer) -> list[dict[str, Any]]:
    """Without the reasons of the placement."""
    keys = ("name", "at_s", "instance")
    return [{key: step[key] for key in keys} for step in steps_of(url, answer)]


def make_load(machine: Machine, rate: float, seed: int) -> list[Call]:
    """Sessions with texts that no other load has."""
    count = -(-machine.requests // machine.load.turns)
    calls = list(sessions(machine.load, count, seed + 1000))
    calls = setup.fitting(calls, machine.max_context)
    return poisson(calls, rate=rate, requests=machine.requests, think_s=None, seed=seed)


def rate_for(machine: Machine, run: Measured, utilisation: float, seed: int) -> float:
    """Requests a second at which the instance is busy for this share, by simulation."""
    costs = fit(run.base, run.probes[-1:])
    low, high = 0.0, machine.most_rate
    for _ in range(SEARCHES):
        rate = (low + high) / 2
        result = _simulate(run, costs, make_load(machine, rate, seed))
        if result.busy[machine.bound_by] < utilisation:
            low = rate
        else:
            high = rate
    return (low + high) / 2


# ── the simulated ones ────────────────────────────────────────────────────────────────────────


def simulate(run: Measured, costs: Costs, load: Load) -> Result:
    """The same load, on processors that are shared in the same way."""
    return _simulate(run, costs, [_call_of(found) for found in load.calls], load.spent)


def _simulate(
    run: Measured, costs: Costs, calls: Sequence[Call], spent: Mapping[str, Spent] | None = None
) -> Result:
    slowdowns = {InstanceId(name): found.slowdown for name, found in (spent or {}).items()}
    hub_slowdown = slowdowns.get(InstanceId("orchestrator"), 1.0)
    options = setup.Options(
        mode=MODE,
        blocks=run.blocks,
        block_size=run.block_size,
        message_s=costs.message_s * hub_slowdown,
        front_end_s=costs.front_end_s * hub_slowdown,
    )
    model = CostModel(costs.profile)
    config = msgspec.structs.replace(Config(), scheduler=SchedulerConfig(split="always"))
    cluster = setup.cluster(options, config, model, calls)
    cluster = msgspec.structs.replace(cluster, slowdowns=slowdowns)
    return Simulation(cluster, calls, model, time.perf_counter).run()


def stored(call: Call) -> dict[str, Any]:
    """A call as JSON: its pieces by name and length."""
    pieces = [piece for piece in call.prompt if isinstance(piece, Piece)]
    assert len(pieces) == len(call.prompt), "a synthetic load has no literal tokens"
    return {
        "session": call.session,
        "prompt": [[piece.key, piece.length] for piece in pieces],
        "reply": [call.reply.key, call.reply.length],
        "arrival_s": call.arrival_s,
    }


def _call_of(found: dict[str, Any]) -> Call:
    prompt = tuple(Piece(*piece) for piece in found["prompt"])
    return Call(found["session"], prompt, Piece(*found["reply"]), found["arrival_s"])


# ── both ──────────────────────────────────────────────────────────────────────────────────────


def row(load: Load, result: Result) -> dict[str, Scalar]:
    """One load: means, errors, and the seconds for which the engines computed."""
    found: dict[str, Scalar] = {"load": f"{load.utilisation:.0%}", "requests/s": load.rate}
    found |= compare(load.outcomes, result.outcomes)
    for name, share in result.busy.items():
        spent = load.spent[name]
        found[f"{name} ran, s"] = spent.ran_s
        found[f"{name} simulated, s"] = share * result.duration_s / spent.slowdown
        found[f"{name} slowdown"] = spent.slowdown
    found["failed"] = sum(outcome.error is not None for outcome in load.outcomes)
    return found


def level(
    loads: Sequence[Load], results: Sequence[Result], utilisation: float
) -> dict[str, Scalar]:
    """All loads of one utilisation together."""
    pairs = [
        pair for pair in zip(loads, results, strict=True) if pair[0].utilisation == utilisation
    ]
    real = [outcome for load, _ in pairs for outcome in load.outcomes]
    simulated = [outcome for _, result in pairs for outcome in result.outcomes]
    return {"load": f"{utilisation:.0%}, all {len(pairs)}", **compare(real, simulated)}


def compare(real: Sequence[Outcome], simulated: Sequence[Outcome]) -> dict[str, float]:
    """Means of both in ms, and the simulator's error in percent of the real mean."""
    found: dict[str, float] = {}
    for name in ("ttft", "jct", "tpot"):
        is_real = report.spread(getattr(outcome, f"{name}_s") for outcome in real).mean
        is_simulated = report.spread(getattr(outcome, f"{name}_s") for outcome in simulated).mean
        assert is_real is not None and is_simulated is not None
        found[f"{name}, ms"] = 1e3 * is_real
        found[f"simulated {name}, ms"] = 1e3 * is_simulated
        found[f"{name} error, %"] = 100 * (is_simulated / is_real - 1)
    return found


def shown(found: dict[str, Scalar]) -> dict[str, Scalar]:
    """A row of the table: real → simulated, with the error."""
    cells: dict[str, Scalar] = {"load": found["load"], "requests/s": found.get("requests/s")}
    for name in ("ttft", "jct", "tpot"):
        real, simulated = found[f"{name}, ms"], found[f"simulated {name}, ms"]
        cells[f"{name}, ms"] = f"{real:.1f} → {simulated:.1f}, {found[f'{name} error, %']:+.1f}%"
    for name in ("P0", "D0"):
        if f"{name} ran, s" in found:
            real, simulated = found[f"{name} ran, s"], found[f"{name} simulated, s"]
            cells[f"{name}, s"] = f"{real:.1f} → {simulated:.1f} (×{found[f'{name} slowdown']:.2f})"
    cells["failed"] = found.get("failed")
    return cells


if __name__ == "__main__":
    main()

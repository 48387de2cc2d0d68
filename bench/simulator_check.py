"""Whether the simulator says what a real run of the same load takes.

    python -m bench.simulator_check [--device cpu|cuda] [--model MODEL] [--runs 3] [--out FILE]

Starts `memserve up --mode 1P1D-CC`, on CPU with a core of its own for each instance. Single
requests and fixed batches tell the costs of prefills, decode steps and the front end, from the
requests' own timelines, before and after every load; the operators' model of `core/cost_model.py`
is fitted to them. Loads of sessions run for real, and through `memserve/simulator` with these
costs, and the means are compared. Each load has its own arrivals and texts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence

import msgspec

from bench._load import Answer, one, play
from bench._report import parser, publish
from bench._serve import get, pin_instances, serving
from memserve.config import Config
from memserve.core.builtin import built_in
from memserve.core.cost_fit import fit_decodes, fit_prefills
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import DecodeSample, PrefillSample
from memserve.core.profile import Profile
from memserve.simulator import report, setup
from memserve.simulator.simulation import Outcome, Simulation
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import Call, Piece, key_of, poisson

MODE = "1P1D-CC"
MESSAGE_S = 0.2e-3
REPEATS = 3
DECODE_TOKENS = 24


class Machine(msgspec.Struct, frozen=True):
    """What differs between devices."""

    flags: tuple[str, ...]
    settings: dict[str, object]
    shape: str
    name: str
    """Of the device, for the built-in profile that the fit starts from."""
    prefills: tuple[tuple[int, int], ...]
    """Prompt tokens, and how many of them are cached."""
    decodes: tuple[tuple[int, int], ...]
    """Requests in the batch, and tokens of each."""
    load: Shape
    rate: float
    requests: int


MACHINES = {
    "cpu": Machine(
        flags=("--device", "cpu"),
        settings={"engine.block_size": 32},
        shape="smollm2-135m",
        name="cpu",
        prefills=((32, 0), (96, 0), (160, 0), (320, 0), (640, 0), (320, 288), (640, 320)),
        decodes=((1, 64), (1, 512), (2, 256), (4, 128), (6, 256)),
        load=Shape(documents=0, system_tokens=64, turns=4, user_tokens=80, reply_tokens=24),
        rate=0.5,
        requests=60,
    ),
    "cuda": Machine(
        flags=("--device", "cuda"),
        settings={},
        shape="llama-3.1-8b",
        name="H200",
        prefills=((128, 0), (512, 0), (2048, 0), (4096, 0), (2048, 1024), (4096, 3968)),
        decodes=((1, 512), (1, 4096), (4, 1024), (16, 512), (32, 512)),
        load=Shape(documents=0, system_tokens=256, turns=4, user_tokens=800, reply_tokens=200),
        rate=4.0,
        requests=300,
    ),
}


class Probe(msgspec.Struct, frozen=True):
    """What single requests and fixed batches took, at one time."""

    prefills: list[PrefillSample]
    decodes: list[DecodeSample]
    front_end_s: float


def main() -> None:
    """Measure, fit, run, simulate, compare."""
    args, machine = _arguments()
    run = asyncio.run(measure(machine, args.model, args.runs))
    profile = fit(machine, run.probes)
    front_end_s = statistics.median(found.front_end_s for found in run.probes)
    simulated = [
        simulate(machine, profile, calls, run.blocks, front_end_s) for calls, _ in run.loads
    ]
    pairs = [(answers, found) for (_, answers), found in zip(run.loads, simulated, strict=True)]
    rows = [compare(answers, found) for answers, found in pairs]
    means = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    publish(
        "simulator_check",
        settings={
            "mode": MODE,
            "machine": msgspec.to_builtins(machine),
            "blocks": run.blocks,
            "pinned": run.pinned,
            "front_end_s": front_end_s,
            "message_s": MESSAGE_S,
        },
        metrics=means,
        raw={
            "profile": msgspec.to_builtins(profile),
            "probes": msgspec.to_builtins(run.probes),
            "runs": rows,
            "outcomes": [
                {
                    "real": msgspec.to_builtins([answer.outcome for answer in answers]),
                    "simulated": msgspec.to_builtins(found),
                }
                for answers, found in pairs
            ],
        },
        out=args.out,
        rows=[{"run": n, **row} for n, row in enumerate(rows)] + [{"run": "mean", **means}],
    )


def _arguments() -> tuple[argparse.Namespace, Machine]:
    """What was asked for, and the machine with its changes."""
    arguments = parser(__doc__)
    arguments.add_argument("--device", choices=sorted(MACHINES), default="cpu")
    arguments.add_argument("--model", help="as `memserve up --model`; must have the shape's size")
    arguments.add_argument("--shape", help="a known shape or a folder with a config.json")
    arguments.add_argument("--runs", type=int, default=3, help="loads to run and simulate")
    arguments.add_argument("--rate", type=float, help="requests a second")
    arguments.add_argument("--requests", type=int, help="of each load")
    args = arguments.parse_args()
    machine = MACHINES[args.device]
    changes = {"shape": args.shape, "rate": args.rate, "requests": args.requests}
    machine = msgspec.structs.replace(
        machine, **{name: value for name, value in changes.items() if value is not None}
    )
    return args, machine


class Measured(msgspec.Struct, frozen=True):
    """A real cluster's answers."""

    blocks: int
    pinned: dict[str, int]
    probes: list[Probe]
    loads: list[tuple[list[Call], list[Answer]]]


async def measure(machine: Machine, model: str | None, runs: int) -> Measured:
    """Start a cluster, probe it, run the loads, stop it."""
    flags = ["--mode", MODE, *machine.flags, *(["--model", model] if model is not None else [])]
    with serving(flags, machine.settings) as url:
        pinned = pin_instances(url) if machine.name == "cpu" else {}
        await _warm_up(url)
        probes = [await probe(url, machine)]
        blocks = get(f"{url}/v1/status")["instances"][0]["stats"]["total_blocks"]
        loads = []
        for seed in range(runs):
            calls = make_load(machine, seed)
            loads.append((calls, await play(url, calls)))
            probes.append(await probe(url, machine))
    return Measured(blocks, pinned, probes, loads)


# ── what the costs are ────────────────────────────────────────────────────────────────────────


async def probe(url: str, machine: Machine) -> Probe:
    """Measured before and after every load: a machine is not equally fast all the time."""
    prefills, front_end_s = await measure_prefills(url, machine.prefills)
    return Probe(prefills, await measure_decodes(url, machine.decodes), front_end_s)


def _call(name: object, tokens: int, reply: int, head: tuple[Piece, ...] = ()) -> Call:
    own = tokens - sum(piece.length for piece in head)
    prompt = (*head, Piece(key_of(name), own)) if own else head
    return Call(f"{name}", prompt, Piece(key_of(name, "reply"), reply))


async def _warm_up(url: str) -> None:
    for number in range(4):
        await one(url, _call(("warm", number), 200, 8))


async def measure_prefills(
    url: str, points: Iterable[tuple[int, int]]
) -> tuple[list[PrefillSample], float]:
    """Medians, from the request's placement to its first token; and the front end's share."""
    samples: list[PrefillSample] = []
    outside: list[float] = []
    for tokens, cached in points:
        seconds = []
        for repeat in range(REPEATS):
            name = ("prefill", tokens, cached, repeat, time.time_ns())
            head: tuple[Piece, ...] = ()
            if cached:
                head = (Piece(key_of(name, "head"), cached),)
                # one token more than the blocks that are to be found
                await one(url, _call((name, "before"), cached + 1, 1, head))
            answer = await one(url, _call(name, tokens, 1, head))
            steps = _steps(url, answer)
            seconds.append(steps["first token"] - steps["placed"] - 2 * MESSAGE_S)
            outside.append((answer.outcome.ttft_s or 0.0) - steps["first token"])
        samples.append(PrefillSample(tokens, cached, statistics.median(seconds)))
    return samples, statistics.median(outside)


def _steps(url: str, answer: Answer) -> dict[str, float]:
    """Step → when it was first reached, since the request was submitted."""
    if answer.outcome.error is not None:
        raise SystemExit(f"a request failed: {answer.outcome.error}")
    found: dict[str, float] = {}
    for step in get(f"{url}/v1/requests/{answer.id}")["requests"][0]["steps"]:
        found.setdefault(step["name"], step["at_s"])
    return found


async def measure_decodes(url: str, points: Iterable[tuple[int, int]]) -> list[DecodeSample]:
    """Mean gaps between tokens while the whole batch decodes."""
    samples: list[DecodeSample] = []
    for count, tokens in points:
        name = ("decode", count, tokens, time.time_ns())
        # as long as it takes until all are there, and then some
        reply = DECODE_TOKENS + 12 * count
        calls = [
            msgspec.structs.replace(_call((name, n), tokens, reply), arrival_s=0.0)
            for n in range(count)
        ]
        answers = await play(url, calls)
        begin = max(answer.token_times[1] for answer in answers)
        end = min(answer.token_times[-1] for answer in answers)
        gaps = [
            later - earlier
            for answer in answers
            for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
            if earlier >= begin and later <= end
        ]
        if len(gaps) >= count * 4:
            context = count * (tokens + reply // 2)
            samples.append(DecodeSample(count, context, statistics.mean(gaps)))
    return samples


def fit(machine: Machine, probes: Sequence[Probe]) -> Profile:
    """The built-in operators, scaled to what was measured."""
    shape = setup.MODELS.get(machine.shape)
    if shape is None:
        options = setup.Options(model=machine.shape, device=machine.name)
        shape = setup.costs(options).profile.shape
    base = built_in(shape, machine.name, model=machine.shape)
    prefills = [sample for found in probes for sample in found.prefills]
    decodes = [sample for found in probes for sample in found.decodes]
    step = fit_decodes(base, fit_prefills(base, prefills), decodes)
    return msgspec.structs.replace(base, step=step, source="fitted by bench/simulator_check.py")


# ── the load ──────────────────────────────────────────────────────────────────────────────────


def make_load(machine: Machine, seed: int) -> list[Call]:
    """Sessions with texts that no earlier run has used."""
    count = -(-machine.requests // machine.load.turns)
    calls = list(sessions(machine.load, count, seed + 1000))
    return poisson(calls, rate=machine.rate, requests=machine.requests, think_s=None, seed=seed)


def simulate(
    machine: Machine, profile: Profile, calls: Sequence[Call], blocks: int, front_end_s: float
) -> list[Outcome]:
    """The same load with these costs."""
    options = setup.Options(
        mode=MODE,
        blocks=blocks,
        block_size=machine.settings.get("engine.block_size"),  # type: ignore[arg-type]
        message_s=MESSAGE_S,
        front_end_s=front_end_s,
    )
    model = CostModel(profile)
    cluster = setup.cluster(options, Config(), model, calls)
    return Simulation(cluster, calls, model, time.perf_counter).run().outcomes


def compare(real: Sequence[Answer], simulated: Sequence[Outcome]) -> dict[str, float]:
    """Means of both, and the simulator's error relative to the real run."""
    row: dict[str, float] = {}
    for name in ("ttft_s", "tpot_s", "jct_s"):
        is_real = report.spread(getattr(answer.outcome, name) for answer in real).mean
        is_simulated = report.spread(getattr(outcome, name) for outcome in simulated).mean
        assert is_real is not None and is_simulated is not None
        row[f"real_{name}"] = is_real
        row[f"simulated_{name}"] = is_simulated
        row[f"{name[:-2]}_error"] = is_simulated / is_real - 1
    return row


if __name__ == "__main__":
    main()

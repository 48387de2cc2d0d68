"""Whether the simulator says what other benches measured on the machine of a `simulator_check` run.

    python -m bench.simulator_others [--check FILE] [--styles FILE] [--vllm FILE] [--out FILE]

Simulates the loads of `fig12_styles.py` (whole requests; prompts of one length at two rates, in
steps of 512 tokens) and of `gpu_vs_vllm.py` (bursts of like prompts), and compares the means. The
costs are those of all probes of the `simulator_check` run, which was another start of the same
engines: no constant is fitted to what is compared here. Rules are: docs/simulate.md says which. A
burst's real figures are the medians of its rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench import fig12_styles, simulator_check
from bench._probes import Costs, fit
from bench._report import Scalar, parser, publish
from memserve.config import Config, SchedulerConfig
from memserve.core.cost_model import CostModel
from memserve.simulator import report, setup
from memserve.simulator.simulation import Simulation
from memserve.simulator.workload import Call, Piece, key_of

RESULTS = Path(__file__).parent / "results"
FIGURES = ("ttft", "jct", "tpot")


def main() -> None:
    """Read, simulate, compare, print, write."""
    args = _arguments()
    run = simulator_check.read(args.check)
    costs = fit(run.base, run.probes)
    styles, vllm = _load(args.styles), _load(args.vllm)
    rows = [*of_styles(styles, costs, run.block_size), *of_bursts(vllm, costs, run.block_size)]
    publish(
        "simulator_others",
        settings={"costs": args.check.name, "loads": [args.styles.name, args.vllm.name]},
        metrics={
            f"{row['load']}: {name} error, %": row[f"{name} error, %"]
            for row in rows
            for name in FIGURES
        },
        raw=rows,
        out=args.out,
        rows=[_shown(row) for row in rows],
    )


def _arguments() -> argparse.Namespace:
    arguments = parser(__doc__)
    for name, file in (
        ("check", "simulator_check_h200x2"),
        ("styles", "fig12_styles_h200x2"),
        ("vllm", "gpu_vs_vllm_h200x2"),
    ):
        path = RESULTS / f"{file}.json"
        arguments.add_argument(f"--{name}", type=Path, metavar="FILE", default=path)
    return arguments.parse_args()


def _load(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: not a result: {error}") from error
    return found


def of_styles(found: Mapping[str, Any], costs: Costs, block_size: int) -> list[dict[str, Scalar]]:
    """Figure 12's loads: at each rate, those requests at those times."""
    settings = found["settings"]
    chunked = msgspec.structs.replace(costs.profile, chunk_tokens=settings["chunk"])
    costs = msgspec.structs.replace(costs, profile=chunked)
    shape = argparse.Namespace(seed=1, prompt=settings["prompt"], reply=settings["reply"])
    rows = []
    for point in found["raw"]:
        if point["style"] != "request":
            continue
        samples, rate = point["samples"], point["rate"]
        real = {
            "ttft": statistics.mean(one["first_token_s"] for one in samples),
            "tpot": statistics.mean(one["tpot_s"] for one in samples),
        }
        real["jct"] = real["ttft"] + (shape.reply - 1) * real["tpot"]
        calls = fig12_styles.calls(f"rate {rate}", len(samples), rate, shape)
        title = f"{len(samples)} of {shape.prompt} → {shape.reply}, {rate:g}/s"
        rows.append({"load": title, **_compare(real, simulated(calls, costs, block_size))})
    return rows


def of_bursts(found: Mapping[str, Any], costs: Costs, block_size: int) -> list[dict[str, Scalar]]:
    """The bursts that MemServe was asked beside vLLM."""
    prompt, reply = (int(found["settings"][name]) for name in ("prompt", "answer"))
    bursts = [one for one in found["raw"]["bursts"] if one["server"] == "memserve"]
    rows = []
    for count in sorted({one["concurrency"] for one in bursts}):
        own = [one for one in bursts if one["concurrency"] == count]
        real = {
            name: statistics.median(one[f"{name}_s"] for one in own) for name in ("ttft", "tpot")
        }
        real["jct"] = real["ttft"] + (reply - 1) * real["tpot"]
        calls = [
            Call(
                f"{n}",
                (Piece(key_of("burst", n), prompt),),
                Piece(key_of("burst reply", n), reply),
                0.0,
            )
            for n in range(count)
        ]
        title = f"{count} at once of {prompt} → {reply}"
        rows.append({"load": title, **_compare(real, simulated(calls, costs, block_size))})
    return rows


def simulated(calls: Sequence[Call], costs: Costs, block_size: int) -> dict[str, float]:
    """Means in seconds, of a cluster as the benches start it."""
    options = setup.Options(
        mode=simulator_check.MODE,
        block_size=block_size,
        message_s=costs.message_s,
        front_end_s=costs.front_end_s,
    )
    model = CostModel(costs.profile)
    config = msgspec.structs.replace(Config(), scheduler=SchedulerConfig(split="always"))
    cluster = setup.cluster(options, config, model, calls)
    outcomes = Simulation(cluster, calls, model, time.perf_counter).run().outcomes
    means = {
        name: report.spread(getattr(one, f"{name}_s") for one in outcomes).mean for name in FIGURES
    }
    return {name: mean for name, mean in means.items() if mean is not None}


def _compare(real: Mapping[str, float], found: Mapping[str, float]) -> dict[str, Scalar]:
    """In ms, and the error in percent of what was measured."""
    row: dict[str, Scalar] = {}
    for name in FIGURES:
        row[f"{name}, ms"] = 1e3 * real[name]
        row[f"simulated {name}, ms"] = 1e3 * found[name]
        row[f"{name} error, %"] = 100 * (found[name] / real[name] - 1)
    return row


def _shown(row: Mapping[str, Any]) -> dict[str, Scalar]:
    cells: dict[str, Scalar] = {"load": row["load"]}
    for name in FIGURES:
        pair = f"{row[f'{name}, ms']:.1f} → {row[f'simulated {name}, ms']:.1f}"
        cells[f"{name}, ms"] = f"{pair}, {row[f'{name} error, %']:+.1f}%"
    return cells


if __name__ == "__main__":
    main()

"""Fetch or recompute: both measured, and which of them the cost policy would choose.

Two instances, real engines. One of them is made to know the first part of a prompt; then the other
one gets the whole prompt, and has to fetch (`fetch = "always"`), or it gets a prompt of the same
length that nobody knows, and has to compute it. Both are timed by the server, from the placement to
the first token, in one run. The policy is asked with the same cost profile as the server's; the
profile should be calibrated (`memserve calibrate`), or be given by `--profile`.

Right: the faster of the two was chosen. Loss: by how much the chosen one was slower than the
better. Differences within the spread of the measurement are called ties, and are right.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench._report import parser, publish
from bench._serve import released, serving
from memserve import profiles
from memserve.config import Config, engine_settings, load
from memserve.core.cost_model import CostModel
from memserve.core.loads import Loads
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Split
from memserve.models import resolve_model
from memserve.types import InstanceId, Role

LINKS = {"cpu": "shm", "cuda": "ipc"}
MODE = "2PD-CC"
HOLDER, RECEIVER = InstanceId("PD0"), InstanceId("PD1")
REQUEST_TIMEOUT_S = 120.0
FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
"""Prompts are random ids between these: no special tokens, in any vocabulary."""


class Server:
    """The server under test; requests go one after the other."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def prefill(self, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        """(Seconds from the placement to the first token, the timeline's steps by name)."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as response:
            answer = json.load(response)
        steps = released(self._url, answer["id"])
        return steps["first token"]["at_s"] - steps["placed"]["at_s"], steps


class Case(msgspec.Struct):
    """One prompt length and one held share of it."""

    prompt_tokens: int
    held_tokens: int
    fetch_s: list[float] = []
    recompute_s: list[float] = []
    choice: str = ""

    @property
    def seconds(self) -> dict[str, float]:
        return {
            "fetch": statistics.median(self.fetch_s),
            "recompute": statistics.median(self.recompute_s),
        }

    @property
    def faster(self) -> str:
        """One of the two, or `tie`."""
        fetch, recompute = self.seconds["fetch"], self.seconds["recompute"]
        if abs(fetch - recompute) <= (_spread(self.fetch_s) + _spread(self.recompute_s)) / 2:
            return "tie"
        return "fetch" if fetch < recompute else "recompute"

    @property
    def loss(self) -> float:
        return self.seconds[self.choice] / min(self.seconds.values()) - 1

    @property
    def is_right(self) -> bool:
        return self.faster in ("tie", self.choice)


def main() -> None:
    args = _arguments()
    assignments = [f"cluster.device={args.device}", *args.set]
    if args.model:
        assignments.append(f"models.model={args.model}")
    config = load(assignments=[f"cluster.mode={MODE}", *assignments]).config
    block_size = int(engine_settings(config).get("block_size") or args.block_size)
    cost = _cost_model(config, args.profile)
    cases = _cases(args.lengths, args.shares, block_size)
    settings = dict(word.split("=", 1) for word in assignments)
    settings |= {"scheduler.policy": "round_robin", "scheduler.fetch": "always"}
    with serving(["--mode", MODE], settings) as url:
        _measure(Server(url, config.served_name), cases, args.repeats, random.Random(args.seed))
    for case in cases:
        case.choice = _choice(cost, LINKS[config.cluster.device], case, block_size)
    _publish(cases, cost, args)


def _measure(server: Server, cases: list[Case], repeats: int, rng: random.Random) -> None:
    for _ in range(2):  # both instances have run once, and both links
        prompt = _prompt(max(case.prompt_tokens for case in cases), rng)
        for _ in range(2):
            server.prefill(prompt)
    for _ in range(repeats):
        for case in rng.sample(cases, len(cases)):
            prompt = _prompt(case.prompt_tokens, rng)
            # The token after the held ones differs, and so does every later block.
            server.prefill([*prompt[: case.held_tokens], LAST_TOKEN])
            seconds, steps = server.prefill(prompt)
            if "fetched" not in steps or steps["fetched"]["detail"]["tokens"] != case.held_tokens:
                raise SystemExit(f"{case.held_tokens} tokens were not fetched: {steps}")
            case.fetch_s.append(seconds)
            seconds, steps = server.prefill(_prompt(case.prompt_tokens, rng))
            if "fetching" in steps:
                raise SystemExit(f"an unknown prompt was fetched: {steps}")
            case.recompute_s.append(seconds)


def _prompt(length: int, rng: random.Random) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def _cases(lengths: list[int], shares: list[float], block_size: int) -> list[Case]:
    """Held tokens are full blocks, and leave at least one token to compute."""
    found = {
        (length, held)
        for length in lengths
        for share in shares
        if (held := int(min(share * length, length - 1)) // block_size * block_size)
    }
    return [Case(length, held) for length, held in sorted(found)]


def _choice(cost: CostModel, link: str, case: Case, block_size: int) -> str:
    """The policy's, where the holder has no room for more requests."""
    roles = {HOLDER: Role.COLOCATED, RECEIVER: Role.COLOCATED}
    loads = Loads(roles, cost)
    for instance in roles:
        loads.start(instance)
    loads.is_open[loads.slots[HOLDER]] = False
    demand = Demand(
        num_tokens=case.prompt_tokens,
        cached_tokens=np.array([case.held_tokens, 0], np.int32),
        dram_tokens=np.zeros(2, np.int32),
        expected_tokens=1,
        session="",
        now=0.0,
        block_size=block_size,
    )
    placement = make_policy("cost", Split.AUTO, cost, link).place(demand, loads)
    return "recompute" if placement.fetch is None else "fetch"


def _cost_model(config: Config, path: Path | None) -> CostModel:
    if path is not None:
        return CostModel(profiles.load(path))
    model = str(resolve_model(config.models.model))
    return CostModel(profiles.for_config(config, model))


def _spread(samples: list[float]) -> float:
    """Half of what lies between the quartiles; of one sample, 2% of it."""
    if len(samples) < 2:
        return 0.02 * samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2


def _publish(cases: list[Case], cost: CostModel, args: argparse.Namespace) -> None:
    rows = [
        {
            "tokens": case.prompt_tokens,
            "held": case.held_tokens,
            "fetch_ms": round(case.seconds["fetch"] * 1e3, 1),
            "recompute_ms": round(case.seconds["recompute"] * 1e3, 1),
            "faster": case.faster,
            "choice": case.choice,
            "loss": f"{case.loss:.1%}",
        }
        for case in cases
    ]
    publish(
        "fetch_or_recompute",
        settings={
            "mode": MODE,
            "device": args.device,
            "model": args.model or "bundled",
            "profile": cost.source,
            "repeats": args.repeats,
        },
        metrics={
            "cases": len(cases),
            "right_ratio": sum(case.is_right for case in cases) / len(cases),
            "worst_loss_ratio": max(case.loss for case in cases),
            "ties": sum(case.faster == "tie" for case in cases),
            "fetch_is_faster": sum(case.faster == "fetch" for case in cases),
            "greatest_gain_ratio": max(
                case.seconds["recompute"] / case.seconds["fetch"] for case in cases
            ),
        },
        raw=[msgspec.to_builtins(case) for case in cases],
        rows=rows,
        out=args.out,
    )


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=sorted(LINKS), default="cpu")
    made.add_argument("--model", default="", help="a folder or a name; default: the bundled one")
    made.add_argument("--profile", type=Path, help="a calibrated cost profile; default: in force")
    made.add_argument("--lengths", type=int, nargs="+", default=[48, 96, 192, 384, 768, 1536])
    made.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--block-size", type=int, default=16, help="where the device does not fix it")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings")
    args: argparse.Namespace = made.parse_args()
    return args


if __name__ == "__main__":
    main()

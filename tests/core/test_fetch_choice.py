"""Fetch or compute, both ways in the simulator: the policy's choice is the faster one.

The same moment twice: an instance holds the beginning of a prompt, another one gets the prompt and
is told to fetch, or to compute. Sources are idle, in a prompt's step, generating, or all of that;
their engines' steps are simulated, while the policy only estimates what is left of them.
"""

from __future__ import annotations

import random
import time

import msgspec
import pytest

from bench._steered import SteeredPolicy, header
from memserve.config import Config, SchedulerConfig
from memserve.core.builtin import built_in
from memserve.core.cost_model import CostModel
from memserve.core.loads import Loads
from memserve.core.mode import parse_mode
from memserve.core.policies import make_policy
from memserve.core.policy import Demand, Fetching, Placement, Split
from memserve.core.timeline import Detail
from memserve.scheduler_settings import scheduler_settings
from memserve.simulator.engine import EngineLimits
from memserve.simulator.setup import MODELS
from memserve.simulator.simulation import Setup, Simulation
from memserve.simulator.worker import Hardware
from memserve.simulator.workload import Call, Piece, key_of
from memserve.types import Geometry, InstanceId

BLOCK = 16
SOURCE, TARGET = InstanceId("PD0"), InstanceId("PD1")
PROBE_AT_S = 60.0
"""When all that is to be known is known."""


class Kind(msgspec.Struct, frozen=True):
    """Hardware and the sizes that matter on it."""

    model: str
    device: str
    link: str
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    """Lengths of prompts that keep an engine busy."""
    second: float
    """How long a moment is there, relative to the CPU."""


KINDS = {
    "cpu": Kind("smollm2-135m", "cpu", "shm", (64, 160, 400, 800, 1600), (200, 900, 5000), 1.0),
    "gpu": Kind(
        "llama-3.1-8b", "NVIDIA H200", "ipc", (256, 1024, 2048, 8192), (1000, 4000, 20000), 0.1
    ),
}


class Moment(msgspec.Struct, frozen=True):
    """A state of the cluster, and a prompt that comes."""

    length: int
    held: int
    own: int
    prompts: tuple[tuple[InstanceId, int], ...]
    """What begins to be computed just before."""
    num_decoding: int
    """Requests that generate on the source."""
    elapsed_s: float


def moments(kind: Kind, count: int, seed: int) -> list[Moment]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        length = rng.choice(kind.lengths)
        most = (length - 1) // BLOCK
        held = rng.choice((1, max(1, most // 4), max(1, most // 2), most))
        busy = (SOURCE, rng.choice(kind.steps)), (TARGET, kind.steps[0])
        found.append(
            Moment(
                length,
                held * BLOCK,
                rng.choice((0, 0, held // 2)) * BLOCK,
                ((), busy[:1], busy[:1], (), busy[1:])[number % 5],
                rng.randint(1, 6) if number % 5 in (2, 3) else 0,
                rng.uniform(0.0, 0.8) * kind.second,
            )
        )
    return found


class Placing:
    """Places each call where its session says, and the probe the one way or the other."""

    name = "cost"

    def __init__(self, cost: CostModel, link: str, way: Fetching) -> None:
        self._policy = SteeredPolicy(make_policy("cost", Split.AUTO, cost, link), "")
        self.splitting = self._policy.splitting
        self._way = way
        self.reason: Detail = {}
        """Of the probe."""

    def place(self, demand: Demand, loads: Loads) -> Placement:
        name, instance = demand.session.split()
        way = self._way if name == "probe" else Fetching.NEVER
        steered = msgspec.structs.replace(demand, session=header(InstanceId(instance), way))
        placement = self._policy.place(steered, loads)
        if name == "probe":
            self.reason = placement.reason
        return placement

    def placed(self, demand: Demand, placement: Placement) -> None:
        """See `Policy`."""


def measure(kind: Kind, moment: Moment, way: Fetching) -> tuple[float, str]:
    """(Seconds to the first token, what the policy would have done)."""
    cost = CostModel(built_in(MODELS[kind.model], kind.device))
    size = cost.kv_bytes(BLOCK)
    mode = parse_mode("2PD-CC")
    config = Config(scheduler=SchedulerConfig(max_running=1000, max_queued_s=1e6))
    setup = Setup(
        mode=mode,
        scheduler=scheduler_settings(config, mode.default_caching, kind.link),
        hardware=Hardware(
            Geometry("m", "bfloat16", BLOCK, 10_000, 1, size, size, (0,)),
            kind.link,
            EngineLimits(cost.profile.chunk_tokens, 256, 64),
        ),
        message_s=2e-4,
        front_end_s=0.0,
    )
    simulation = Simulation(setup, _calls(kind, moment), cost, time.perf_counter)
    placing = Placing(cost, kind.link, way)
    simulation.scheduler._placer._policy = placing
    result = simulation.run()
    assert simulation.check_idle() == []
    (probe,) = [outcome for outcome in result.outcomes if outcome.session.startswith("probe")]
    assert probe.ttft_s is not None
    return probe.ttft_s, str(placing.reason["own_choice"])


def _calls(kind: Kind, moment: Moment) -> list[Call]:
    calls: list[Call] = []

    def add(name: str, at: InstanceId, pieces: list[tuple[str, int]], reply: int, when: float):  # type: ignore[no-untyped-def]
        prompt = tuple(Piece(key_of(piece), length) for piece, length in pieces)
        calls.append(Call(f"{name} {at}", prompt, Piece(key_of(name, "reply"), reply), when))

    add("known", SOURCE, [("prompt", moment.held), ("another end", 1)], 1, 0.0)
    if moment.own:
        add("own", TARGET, [("prompt", moment.own), ("a third end", 1)], 1, 0.0)
    begin = PROBE_AT_S - moment.elapsed_s
    for number in range(moment.num_decoding):
        add(f"generates{number}", SOURCE, [(f"text {number}", 64)], 400, begin - 0.3 - number / 7)
    for number, (instance, length) in enumerate(moment.prompts):
        add(f"computes{number}", instance, [(f"long {number}", length)], 1, begin)
    add("probe", TARGET, [("prompt", moment.length)], 1, PROBE_AT_S)
    return sorted(calls, key=lambda call: call.arrival_s or 0.0)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_what_the_policy_chooses_is_the_faster_way(name: str) -> None:
    kind, losses, num_faster_fetched = KINDS[name], [], 0
    for moment in moments(kind, 60, seed=5):
        fetch_s, choice = measure(kind, moment, Fetching.ALWAYS)
        compute_s, same_choice = measure(kind, moment, Fetching.NEVER)
        assert choice == same_choice
        chosen_s = fetch_s if choice == "fetch" else compute_s
        losses.append(chosen_s / min(fetch_s, compute_s) - 1)
        num_faster_fetched += fetch_s < compute_s
    assert 10 < num_faster_fetched < 50, "no sweep that one fixed answer would pass"
    assert sum(loss <= 0.02 for loss in losses) >= 0.95 * len(losses), sorted(losses)[-5:]
    assert sum(loss <= 0.1 for loss in losses) >= 0.98 * len(losses), sorted(losses)[-5:]

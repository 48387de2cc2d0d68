"""Fetch or recompute: both measured with real engines, and what the cost policy chose each time.

    python -m bench.fetch_or_recompute [--profile FILE] [--out FILE]
    python -m bench.fetch_or_recompute --device cuda --model FOLDER --lengths 256 1024 4096 …

Two colocated instances. PD0 is made to know the beginning of a prompt, PD1 less of it or nothing;
then PD1 gets the prompt, and is told to fetch what it lacks, or to compute it (`_steered.py`; a new
prompt for each sample). Both are timed by the server, from the placement to the first token. At
every placement the policy says what it would have done on PD1, with the scheduler's own loads, cost
profile and what it has learnt from earlier fetches::

    source idle         PD0 has nothing to do: the fixed costs of a fetch against a few blocks
    source busy         PD0 is computing a long prompt, which began some part of its time ago
    source generating   PD0 runs decode steps for other requests

A way's time in a case is the lower quartile of its samples: what disturbs an engine only adds. A
decision is right if the case's faster way was chosen; ways that differ by less than the mean of
their spreads (half of what lies between the quartiles) are ties, and right. Loss: by how much the
chosen way's time is above that of the better. A case is right, and loses, as most of its decisions.

The profile should be calibrated; `--profile` takes one, else the one in force is used.

`--replay RESULT` measures nothing: of the cases of an earlier run it tells what the policy of today
chooses, by `--profile` and what that run's requests teach, in order (`_fetch_replay.py`). On GPUs
that says little of busy sources in runs before ADR 0033, from which fetches took longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench._fetch_replay import SOURCE, TARGET, Replay
from bench._report import Scalar, parser, publish
from bench._serve import get, pin_instances, released, serving
from bench._steered import PROFILE, REQUEST_TIMEOUT_S, complete
from memserve import profiles
from memserve.core.policy import Fetching
from memserve.types import InstanceId

FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
"""Prompts are random ids between these: no special tokens, in any vocabulary."""
GENERATED_TOKENS = 48
"""Of each request that keeps the source generating: more than a sample takes."""
WAYS = {"fetch": Fetching.ALWAYS, "recompute": Fetching.NEVER}


class Sample(msgspec.Struct):
    """One request, one way."""

    way: str
    seconds: float
    own_choice: str
    """Of the policy, at that moment."""
    predicted_s: float
    """Of the policy, for what it would have chosen."""
    came: bool
    """Whether what was to be fetched came in time; True where nothing was."""
    recompute_s: float | None = None
    """Of the policy, for computing it; None: in results from before this was kept."""


class Case(msgspec.Struct):
    """Lengths in tokens."""

    prompt: int
    held: int
    own: int
    """What the target holds already."""
    busy: int
    """The prompt that the source computes meanwhile; 0: none."""
    elapsed: float
    """Of its time: what has passed when the request comes."""
    generating: int = 0
    """Requests that the source generates for meanwhile."""
    samples: list[Sample] = []

    @property
    def name(self) -> str:
        return f"{self.prompt} tokens, {self.held} held, {self.own} own, source {self.source}"

    @property
    def source(self) -> str:
        """What it does meanwhile."""
        if self.generating:
            return f"generating for {self.generating}"
        return f"busy, {self.elapsed:.0%} done" if self.busy else "idle"

    @property
    def is_complete(self) -> bool:
        """Whether both ways were measured."""
        return all(self.seconds(way) for way in WAYS)

    def seconds(self, way: str) -> list[float]:
        return [sample.seconds for sample in self.samples if sample.way == way]

    @property
    def times(self) -> dict[str, float]:
        """Seconds of each way."""
        return {way: _quartiles(self.seconds(way))[0] for way in WAYS}

    @property
    def faster(self) -> str:
        """One of the two ways, or `tie`."""
        times = self.times
        spread = sum(_spread(self.seconds(way)) for way in WAYS) / 2
        if abs(times["fetch"] - times["recompute"]) <= spread:
            return "tie"
        return min(times, key=times.__getitem__)

    @property
    def choices(self) -> list[str]:
        return [sample.own_choice for sample in self.samples]

    @property
    def usual_choice(self) -> str:
        """Of most of its decisions."""
        return max(sorted(WAYS), key=self.choices.count)

    @property
    def num_right(self) -> int:
        return sum(self.faster in ("tie", choice) for choice in self.choices)

    def loss(self, choice: str) -> float:
        times = self.times
        return times[choice] / min(times.values()) - 1


class Server:
    """The server under test."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._model = get(f"{url}/v1/models")["data"][0]["id"]

    def prefill(
        self,
        prompt: list[int],
        instance: InstanceId,
        fetching: Fetching = Fetching.NEVER,
        max_tokens: int = 1,
    ) -> dict[str, Any]:
        """The steps of the request's timeline by name, once nobody holds anything for it."""
        answer = complete(self._url, prompt, instance, fetching, max_tokens, model=self._model)
        steps: dict[str, Any] = released(self._url, answer["id"])
        return steps


class Bench:
    """Takes samples, one after the other."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self._server = server
        self._rng = rng
        self.profile = "unknown"
        """Where the server's cost profile comes from."""
        self._step_s: dict[int, float] = {}
        """Length → seconds of one prefill of it."""

    def warm_up(self, cases: list[Case]) -> None:
        """Both instances have run all lengths once, and the link."""
        lengths = {case.prompt for case in cases} | {case.busy for case in cases if case.busy}
        for length in sorted(lengths):
            instances = (SOURCE, TARGET, SOURCE, TARGET)
            times = [_ttft_s(self._server.prefill(self._prompt(length), i)) for i in instances]
            self._step_s[length] = min(times)
        for _ in range(3):
            prompt = self._prompt(max(lengths))
            self._server.prefill(prompt[: len(prompt) // 2], SOURCE)
            self._server.prefill(prompt, TARGET, Fetching.ALWAYS)

    def sample(self, case: Case, way: str) -> Sample | None:
        """None if it failed, or did not go the way that was asked for; says so."""
        try:
            return self._sample(case, way)
        except (OSError, SystemExit) as error:  # a request that failed, or was not released
            print(f"{case.name} by {way}: {error}")
            return None

    def _sample(self, case: Case, way: str) -> Sample:
        prompt = self._prompt(case.prompt)
        # The token after the known ones differs, and so does every later block.
        self._server.prefill([*prompt[: case.held], LAST_TOKEN], SOURCE)
        if case.own:
            self._server.prefill([*prompt[: case.own], LAST_TOKEN], TARGET)
        with self._busy(case):
            steps = self._server.prefill(prompt, TARGET, WAYS[way])
        if ("fetching" in steps) != (way == "fetch"):
            raise SystemExit(f"it went the other way: {list(steps)}")
        reason = steps["placed"]["detail"]
        self.profile = reason["profile"]
        return Sample(
            way,
            _ttft_s(steps),
            reason["own_choice"],
            reason["least_s"],
            came=way != "fetch" or "fetched" in steps,
            recompute_s=reason["recompute_s"],
        )

    @contextlib.contextmanager
    def _busy(self, case: Case) -> Iterator[None]:
        """The source has begun another prompt, some part of its time ago, or is generating."""
        loads = [(case.busy, 1)] if case.busy else []
        loads += [(self._shortest, GENERATED_TOKENS)] * case.generating
        others = [threading.Thread(target=self._occupy, args=load) for load in loads]
        for other in others:
            other.start()
        if case.busy:
            time.sleep(case.elapsed * self._step_s[case.busy])
        elif case.generating:
            time.sleep((case.generating + 1) * self._step_s[self._shortest])
        try:
            yield
        finally:
            for other in others:
                other.join(REQUEST_TIMEOUT_S)

    def _occupy(self, num_tokens: int, max_tokens: int) -> None:
        prompt = self._prompt(num_tokens)
        self._server.prefill(prompt, SOURCE, max_tokens=max_tokens)

    @property
    def _shortest(self) -> int:
        """Length that was warmed up."""
        return min(self._step_s)

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


def _ttft_s(steps: dict[str, Any]) -> float:
    seconds: float = steps["first token"]["at_s"] - steps["placed"]["at_s"]
    return seconds


def main() -> None:
    args = _arguments()
    if args.replay:
        _replay(args)
    else:
        _run(args)


def _replay(args: argparse.Namespace) -> None:
    """The choices of today in the cases of an earlier run."""
    if args.profile is None:
        raise SystemExit("--replay needs --profile: of the device that the run was on")
    profile = profiles.load(args.profile)
    earlier = json.loads(args.replay.read_text())
    cases = msgspec.convert(earlier["raw"], list[Case])
    link = "ipc" if earlier["settings"]["device"] == "cuda" else "shm"
    replay = Replay(profile, link, earlier["settings"]["block_size"])
    for number in range(max(len(case.samples) for case in cases)):
        for case in cases:
            if number < len(case.samples):
                sample = case.samples[number]
                sample.own_choice = replay.request(case, sample.way, sample.seconds)
    settings = {**earlier["settings"], "replay": args.replay.name, "measured": earlier["commit"]}
    _publish(cases, settings, args.out)


def _run(args: argparse.Namespace) -> None:
    settings = dict(word.split("=", 1) for word in args.set)
    settings |= {"cluster.device": args.device, "engine.block_size": str(args.block_size)}
    if args.model:
        settings["models.model"] = args.model
    environment = {PROFILE: str(args.profile.resolve())} if args.profile else {}
    cases = _cases(args)
    with serving(
        ["--mode", "2PD-CC"], settings, program="bench._steered", environment=environment
    ) as url:
        begin = time.monotonic()
        if args.pin:
            pin_instances(url)
        bench = Bench(Server(url), random.Random(args.seed))
        bench.warm_up(cases)
        rounds = _measure(bench, cases, args, begin + args.seconds)
    complete = [case for case in cases if case.is_complete]
    if not complete:
        raise SystemExit("no case was measured both ways")
    _publish(
        complete,
        {
            "device": args.device,
            "model": args.model.rstrip("/").rpartition("/")[2] or "bundled",
            "profile": bench.profile,
            "block_size": args.block_size,
            "rounds": rounds,
            "cases_without_samples": len(cases) - len(complete),
            "set": args.set,
        },
        args.out,
    )


def _measure(bench: Bench, cases: list[Case], args: argparse.Namespace, deadline: float) -> int:
    """Rounds over all cases, both ways in turn; how many. Stops early when time is over."""
    rng = random.Random(args.seed)
    for number in range(args.repeats):
        order = [(case, way) for case in cases for way in WAYS]
        for case, way in rng.sample(order, len(order)):
            if number and time.monotonic() > deadline:
                return number
            sample = bench.sample(case, way)
            case.samples += [sample] if sample is not None else []
    return int(args.repeats)


def _cases(args: argparse.Namespace) -> list[Case]:
    """Known tokens are full blocks, and leave at least one token to compute."""
    size = args.block_size
    found = set()
    for length in args.lengths:
        most = (length - 1) // size * size
        helds = {min(blocks * size, most) for blocks in args.blocks}
        helds |= {int(share * most) // size * size for share in args.shares}
        for held in helds - {0}:
            owns = {int(share * held) // size * size for share in args.own_shares}
            found |= {(length, held, own, 0, 0.0, 0) for own in owns if own < held}
            found |= {(length, held, 0, busy, at, 0) for busy in args.busy for at in args.elapsed}
            found |= {(length, held, 0, 0, 0.0, count) for count in args.generating}
    return [Case(*key) for key in sorted(found)]


def _spread(samples: list[float]) -> float:
    """Half of what lies between the quartiles; of one sample, 2% of it."""
    if len(samples) < 2:
        return 0.02 * samples[0]
    low, high = _quartiles(samples)
    return (high - low) / 2


def _quartiles(samples: list[float]) -> tuple[float, float]:
    """The lower and the upper one; of one sample, that."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def _publish(cases: list[Case], settings: dict[str, Any], out: Path | None) -> None:
    rows: list[dict[str, Scalar]] = []
    for case in cases:
        choices = case.choices
        rows.append(
            {
                "tokens": case.prompt,
                "held": case.held,
                "own": case.own,
                "source": case.source,
                "fetch": round(case.times["fetch"] * 1e3, 2),
                "compute": round(case.times["recompute"] * 1e3, 2),
                "faster": case.faster,
                "chosen": f"{choices.count('fetch')}/{len(choices)}",
                "loss": f"{max(map(case.loss, choices)):.1%}",
            }
        )
    print("ms; source: what it did, and how much of its prompt was done; chosen: how often a fetch")
    publish(
        "fetch_or_recompute",
        settings=settings,
        metrics=_metrics(cases),
        raw=[msgspec.to_builtins(case) for case in cases],
        rows=rows,
        out=out,
    )
    for name, value in _metrics(cases).items():
        print(f"{name}: {value:.4g}")


def _metrics(cases: list[Case]) -> dict[str, float]:
    decisions = [(case, choice) for case in cases for choice in case.choices]
    losses = sorted(case.loss(choice) for case, choice in decisions)
    strictly = sum(case.loss(choice) == 0.0 for case, choice in decisions)
    return {
        "cases": len(cases),
        "cases_right_ratio": sum(c.faster in ("tie", c.usual_choice) for c in cases) / len(cases),
        "cases_worst_loss_ratio": max(case.loss(case.usual_choice) for case in cases),
        "decisions": len(decisions),
        "right_ratio": sum(case.num_right for case in cases) / len(decisions),
        "right_without_ties_ratio": strictly / len(decisions),
        "within_10_percent_ratio": sum(loss <= 0.1 for loss in losses) / len(decisions),
        "worst_loss_ratio": losses[-1],
        "cases_tied": sum(case.faster == "tie" for case in cases),
        "cases_faster_fetched": sum(case.faster == "fetch" for case in cases),
        "cases_faster_computed": sum(case.faster == "recompute" for case in cases),
        "always_fetch_worst_loss_ratio": max(case.loss("fetch") for case in cases),
        "never_fetch_worst_loss_ratio": max(case.loss("recompute") for case in cases),
        "given_up": sum(not sample.came for case in cases for sample in case.samples),
    }


def _arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--model", default="", help="a folder or a name; default: the bundled one")
    made.add_argument("--profile", type=Path, help="a calibrated cost profile; default: in force")
    made.add_argument("--replay", type=Path, help="the result of an earlier run")
    made.add_argument("--lengths", type=int, nargs="+", default=[64, 320])
    made.add_argument("--blocks", type=int, nargs="*", default=[1], help="known, by number")
    made.add_argument("--shares", type=float, nargs="*", default=[0.5, 1.0], help="and by share")
    made.add_argument("--own-shares", type=float, nargs="+", default=[0.0, 0.5])
    made.add_argument("--busy", type=int, nargs="*", default=[480], help="prompts of a busy source")
    made.add_argument("--elapsed", type=float, nargs="*", default=[0.25, 0.75], help="of its time")
    made.add_argument("--generating", type=int, nargs="*", default=[2], help="by a busy source")
    made.add_argument("--repeats", type=int, default=3, help="rounds over all cases")
    made.add_argument("--seconds", type=float, default=180.0, help="start no sample after that")
    made.add_argument("--block-size", type=int, default=32)
    made.add_argument("--pin", action="store_true", help="an own core for each instance")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings")
    args: argparse.Namespace = made.parse_args()
    return args


if __name__ == "__main__":
    main()

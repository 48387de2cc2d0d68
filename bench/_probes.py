"""What a running cluster takes for single requests and fixed batches, as its own timelines say.

Collaborator: `simulator_check.py`, which fits the cost model to it. A cluster of mode 1P1D-CC that
has nothing else to do; every prompt is new. What an instance's thread waited for a processor that
others had, as the kernel counts it (`/proc/PID/schedstat`), is taken off.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import psutil

from bench._load import Answer, one, play
from bench._serve import get
from memserve.core.cost_fit import fit_decodes, fit_links, fit_prefills
from memserve.core.cost_samples import DecodeSample, LinkSample, PrefillSample
from memserve.core.profile import Profile
from memserve.simulator.workload import Call, Piece, key_of

DECODE_TOKENS, MORE_FOR_EACH = 16, 8
"""Of a batch's replies: so long that all of them decode together for a while."""


class Probe(msgspec.Struct, frozen=True):
    """What was found at one time."""

    prefills: list[PrefillSample]
    """From being placed to the first token, without the messages: every repeat."""
    decodes: list[DecodeSample]
    links: list[LinkSample]
    messages_s: list[float]
    """From the scheduler to an idle instance and back, halved."""
    front_end_s: list[float]
    """A client's time to the first token, less the scheduler's."""


class Points(msgspec.Struct, frozen=True):
    """What to measure."""

    prefills: tuple[tuple[int, int], ...]
    """Prompt tokens, and how many of them are cached."""
    decodes: tuple[tuple[int, int], ...]
    """Requests in the batch, and tokens of each."""
    link: str
    repeats: int = 2


async def probe(url: str, points: Points, meter: Meter) -> Probe:
    """Measure everything once."""
    links: list[LinkSample] = []
    messages: list[float] = []
    decodes = []
    for count, tokens in points.decodes:
        meter.lap()
        found, message_s = await _decode(url, count, tokens, points.link, links)
        spent = meter.lap()
        messages.append(message_s / spent["orchestrator"].slowdown)
        if found is not None:
            took = found.seconds / spent["D0"].slowdown
            decodes.append(msgspec.structs.replace(found, seconds=took))
    prefills, front_end = await _prefills(url, points, statistics.median(messages), meter)
    return Probe(prefills, decodes, links, messages, front_end)


async def warm_up(url: str, tokens: int) -> None:
    """Let everything run once."""
    for number in range(4):
        await one(url, _call(("warm", number, time.time_ns()), tokens, 8))


def _call(name: object, tokens: int, reply: int, head: tuple[Piece, ...] = ()) -> Call:
    own = tokens - sum(piece.length for piece in head)
    prompt = (*head, Piece(key_of(name), own)) if own else head
    return Call(f"{name}", prompt, Piece(key_of(name, "reply"), reply))


def steps_of(url: str, answer: Answer) -> list[dict[str, object]]:
    """The request's timeline. Raises: SystemExit if it failed."""
    if answer.outcome.error is not None:
        raise SystemExit(f"a request failed: {answer.outcome.error}")
    (timeline,) = get(f"{url}/v1/requests/{answer.id}")["requests"]
    steps: list[dict[str, object]] = timeline["steps"]
    return steps


def _firsts(url: str, answer: Answer) -> dict[str, dict[str, object]]:
    """Step → when it was first reached."""
    found: dict[str, dict[str, object]] = {}
    for step in steps_of(url, answer):
        found.setdefault(str(step["name"]), step)
    return found


def _at(step: dict[str, object]) -> float:
    return float(step["at_s"])  # type: ignore[arg-type]


async def _prefills(
    url: str, points: Points, message_s: float, meter: Meter
) -> tuple[list[PrefillSample], list[float]]:
    samples: list[PrefillSample] = []
    outside: list[float] = []
    for repeat in range(points.repeats):
        for tokens, cached in points.prefills:
            name = ("prefill", tokens, cached, repeat, time.time_ns())
            head: tuple[Piece, ...] = ()
            if cached:
                head = (Piece(key_of(name, "head"), cached),)
                # one token more than the blocks that are to be found
                await one(url, _call((name, "before"), cached + 1, 1, head))
            meter.lap()
            answer = await one(url, _call(name, tokens, 1, head))
            spent = meter.lap()
            steps = _firsts(url, answer)
            took = _at(steps["first token"]) - _at(steps["placed"])
            took -= 2 * message_s + spent["P0"].waited_s
            samples.append(PrefillSample(tokens, cached, took))
            rest_s = (answer.outcome.ttft_s or 0.0) - _at(steps["first token"])
            outside.append(rest_s / spent["orchestrator"].slowdown)
    return samples, outside


async def _decode(
    url: str, count: int, tokens: int, link: str, links: list[LinkSample]
) -> tuple[DecodeSample | None, float]:
    """The mean gap between tokens while the whole batch decodes (None if it never did), and the
    time of a message.

    Mutates `links`: what the first hand-over of the batch shows.
    """
    name = ("decode", count, tokens, time.time_ns())
    reply = DECODE_TOKENS + MORE_FOR_EACH * count
    calls = [
        msgspec.structs.replace(_call((name, n), tokens, reply), arrival_s=0.0)
        for n in range(count)
    ]
    answers = await play(url, calls)
    steps = min((_firsts(url, answer) for answer in answers), key=lambda s: _at(s["allocated"]))
    message_s = (_at(steps["allocated"]) - _at(steps["started"])) / 2
    sent = steps["sent"]["detail"]
    assert isinstance(sent, dict)
    links.append(LinkSample(link, sent["bytes"], sent["seconds"]))
    begin = max(answer.token_times[1] for answer in answers)
    end = min(answer.token_times[-1] for answer in answers)
    gaps = [
        later - earlier
        for answer in answers
        for earlier, later in zip(answer.token_times, answer.token_times[1:], strict=False)
        if earlier >= begin and later <= end
    ]
    if len(gaps) < count * 4:
        return None, message_s
    context = count * (tokens + reply // 2)
    return DecodeSample(count, context, statistics.mean(gaps)), message_s


class Costs(msgspec.Struct, frozen=True):
    """Everything that a simulation of the cluster needs to know of its speed."""

    profile: Profile
    message_s: float
    front_end_s: float


def fit(base: Profile, probes: Sequence[Probe]) -> Costs:
    """The operators of `base`, run as these probes say. Of a point's repeats the median counts."""
    prefills: dict[tuple[int, int], list[float]] = {}
    decodes: dict[tuple[int, int], list[float]] = {}
    for found in probes:
        for x in found.prefills:
            prefills.setdefault((x.num_tokens, x.cached_tokens), []).append(x.seconds)
        for y in found.decodes:
            decodes.setdefault((y.num_requests, y.context_tokens), []).append(y.seconds)
    step = fit_prefills(
        base, [PrefillSample(*at, statistics.median(s)) for at, s in prefills.items()]
    )
    step = fit_decodes(
        base, step, [DecodeSample(*at, statistics.median(s)) for at, s in decodes.items()]
    )
    links = {**base.links, **fit_links(sample for found in probes for sample in found.links)}
    profile = msgspec.structs.replace(
        base, step=step, links=links, source=f"{base.source}; steps fitted to a running cluster"
    )
    return Costs(
        profile, _median(p.messages_s for p in probes), _median(p.front_end_s for p in probes)
    )


def _median(parts: Iterable[list[float]]) -> float:
    return statistics.median(value for part in parts for value in part)


class Spent(msgspec.Struct, frozen=True):
    """Of a process's main thread."""

    ran_s: float
    """On a processor."""
    waited_s: float
    """For one, since others had them all."""

    @property
    def slowdown(self) -> float:
        """By how much it took longer than it would have alone."""
        return 1 + self.waited_s / self.ran_s if self.ran_s else 1.0


class Meter:
    """What a server's processes and this one get of the processors."""

    def __init__(self, url: str) -> None:
        instances = get(f"{url}/v1/status")["instances"]
        self._pids = {str(found["id"]): int(found["pid"]) for found in instances}
        orchestrator = psutil.Process(instances[0]["pid"]).parents()[1]
        self._pids |= {"orchestrator": orchestrator.pid, "client": os.getpid()}
        self._last = self._read()

    def _read(self) -> dict[str, tuple[int, int]]:
        return {name: _schedstat(pid) for name, pid in self._pids.items()}

    def lap(self) -> dict[str, Spent]:
        """Of each since the last call."""
        read, last = self._read(), self._last
        self._last = read
        return {
            name: Spent((ran - last[name][0]) / 1e9, (waited - last[name][1]) / 1e9)
            for name, (ran, waited) in read.items()
        }


def _schedstat(pid: int) -> tuple[int, int]:
    """Nanoseconds on a processor, and waiting for one; zeros where the kernel does not tell."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text("ascii").split()
    except (OSError, ValueError):
        return 0, 0
    return int(ran), int(waited)

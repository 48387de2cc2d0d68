"""What a running cluster takes for single requests and fixed batches, as its own timelines say.

Collaborator: `simulator_check.py`, which fits the cost model to it. A cluster of mode 1P1D-CC that
has nothing else to do; every prompt is new.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence

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
    """From being placed to the first token, without the messages between: every repeat."""
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


async def probe(url: str, points: Points) -> Probe:
    """Measure everything once."""
    links: list[LinkSample] = []
    messages: list[float] = []
    decodes = [await _decode(url, *point, points.link, links, messages) for point in points.decodes]
    prefills, front_end = await _prefills(url, points, statistics.median(messages))
    return Probe(prefills, [one for one in decodes if one is not None], links, messages, front_end)


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
    url: str, points: Points, message_s: float
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
            answer = await one(url, _call(name, tokens, 1, head))
            steps = _firsts(url, answer)
            took = _at(steps["first token"]) - _at(steps["placed"]) - 2 * message_s
            samples.append(PrefillSample(tokens, cached, took))
            outside.append((answer.outcome.ttft_s or 0.0) - _at(steps["first token"]))
    return samples, outside


async def _decode(
    url: str, count: int, tokens: int, link: str, links: list[LinkSample], messages: list[float]
) -> DecodeSample | None:
    """The mean gap between tokens while the whole batch decodes; None if it never did.

    Mutates `links` and `messages`: what the first hand-over of the batch shows.
    """
    name = ("decode", count, tokens, time.time_ns())
    reply = DECODE_TOKENS + MORE_FOR_EACH * count
    calls = [
        msgspec.structs.replace(_call((name, n), tokens, reply), arrival_s=0.0)
        for n in range(count)
    ]
    answers = await play(url, calls)
    steps = min((_firsts(url, answer) for answer in answers), key=lambda s: _at(s["allocated"]))
    messages.append((_at(steps["allocated"]) - _at(steps["started"])) / 2)
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
        return None
    return DecodeSample(count, count * (tokens + reply // 2), statistics.mean(gaps))


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


class Meter:
    """Processor time of a server's processes and this one, and of everybody else."""

    def __init__(self, url: str) -> None:
        workers = {
            str(found["id"]): psutil.Process(found["pid"])
            for found in get(f"{url}/v1/status")["instances"]
        }
        orchestrator = next(iter(workers.values())).parents()[1]
        self._processes = {**workers, "orchestrator": orchestrator, "client": psutil.Process()}
        self._cores = psutil.cpu_count() or 1
        self._begun, self._last = time.perf_counter(), self._read()

    def _read(self) -> dict[str, float]:
        own = {name: sum(p.cpu_times()[:2]) for name, p in self._processes.items()}
        everybody = psutil.cpu_times()
        busy = sum(everybody) - everybody.idle - getattr(everybody, "iowait", 0.0)
        busy -= getattr(everybody, "guest", 0.0) + getattr(everybody, "guest_nice", 0.0)
        return {**own, "others": busy - sum(own.values())}

    def lap(self) -> dict[str, float]:
        """Seconds of each since the last call; `others` as a share of all cores."""
        now, read = time.perf_counter(), self._read()
        spent = {name: read[name] - self._last[name] for name in read}
        spent["others"] /= (now - self._begun) * self._cores
        self._begun, self._last = now, read
        return spent

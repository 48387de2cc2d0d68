r"""A working set of three times the HBM pool: hit ratio, tokens and step times with a DRAM tier.

    python -m bench.working_set [--load chat,agent] [--dataset FILE] [--sessions 20] [--out FILE]
    python -m bench.working_set --device cuda --model FOLDER --dtype bfloat16 --block-size 16 \
        --load-format dummy --eager --sessions 200 --concurrency 16

One instance with a real engine serves the same calls several times, each time in a process of its
own:

    small     an HBM pool of a third of the working set
    tiered    the same, and DRAM for two thirds of it
    cramped   the same, and DRAM for a twelfth of it: what comes in and what is saved fight for it
    whole     an HBM pool of that total size
    uncached  as `whole`, without any caching: what the tokens should be

`--variants tiered,uncached` is the quick check of tokens and audit. `--tp 2` makes an instance of
two ranks (of a model that does not divide among them: with KV heads of zeros added to it).
`--always-swap` reckons with a DRAM that costs nothing, for models so small that computing pays.

The next call comes from any session whose previous one has ended, so a session's KV grows cold
between its turns. `chat`: conversations that share nothing but a short system prompt (ShareGPT's
shape); `agent`: calls of one tool-using agent with a common prompt of few-shot examples (ReAct's
shape). `--dataset` takes a file of conversations instead (see `memserve/simulator/datasets.py`).
A turn of the engine's loop counts as decoding if no request was started in it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench._instance import Hub, serve, shape_of
from bench._report import Scalar, parser, publish, settings_of
from bench.gpu_tp import pad_heads
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
from memserve.simulator.datasets import read
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.workload import Call, Literal, Piece, tokens_of

SHAPES = {
    "chat": Shape(system_tokens=20, turns=4, user_tokens=56, reply_tokens=16),
    "agent": Shape(documents=1, document_tokens=384, turns=4, user_tokens=64, reply_tokens=16),
}
VARIANTS = ("small", "tiered", "cramped", "whole", "uncached")
_DRAM_SHARES = {"tiered": 1.0, "cramped": 1 / 8}
"""Of what the HBM pool lacks."""
_DEADLINE_S = 900.0


class Request(msgspec.Struct):
    """A call, with its tokens: what was generated meanwhile takes the place of earlier replies."""

    session: str
    prompt: list[tuple[int | None, list[int]]]
    """Pieces: the key of those that may be replies, and tokens."""
    reply: int
    """Its key."""
    reply_tokens: int

    @classmethod
    def of(cls, call: Call) -> Request:
        pieces = [(_key_of(piece), tokens_of(piece)) for piece in call.prompt]
        return cls(call.session, pieces, call.reply.key, call.reply.length)


class Job(msgspec.Struct):
    """What a child process is told."""

    model: str
    device: str
    engine: dict[str, Any]
    block_bytes: int
    hbm_blocks: int
    dram_blocks: int
    is_cached: bool
    tp: int
    always_swaps: bool
    concurrency: int
    num_threads: int
    requests: list[Request]


class Answer(msgspec.Struct):
    """What it answers."""

    prompt_tokens: list[int]
    cached_tokens: list[int]
    outputs: list[list[int]]
    decode_turns: list[tuple[float, float, bool]]
    """Seconds, CPU seconds of the thread, and whether blocks were swapped in the turn."""
    swapped_out: int
    swapped_in: int
    problems: list[str]
    seconds: float


# ── the load ──────────────────────────────────────────────────────────────────────────────────


def make_calls(load: str, options: argparse.Namespace) -> list[Call]:
    """Calls in the order in which they are to be sent, none longer than `--max-context`."""
    if options.dataset is not None:
        calls = read(options.dataset)
    else:
        calls = list(sessions(SHAPES[load], options.sessions, options.seed))
    replies = {call.reply.key for call in calls}
    by_session: dict[str, deque[Call]] = {}
    for call in calls:
        cut = msgspec.structs.replace(
            call,
            prompt=tuple(
                _cut(piece, options.max_reply) if _key_of(piece) in replies else piece
                for piece in call.prompt
            ),
            reply=_cut(call.reply, options.max_reply),
        )
        if cut.total_tokens <= options.max_context:
            by_session.setdefault(call.session, deque()).append(cut)
    rng = random.Random(options.seed)
    chosen = rng.sample(sorted(by_session), min(options.sessions, len(by_session)))
    open_sessions = [by_session[name] for name in chosen]
    ordered: list[Call] = []
    while open_sessions:
        session = rng.choice(open_sessions)
        ordered.append(session.popleft())
        if not session:
            open_sessions.remove(session)
    return ordered


def _key_of(piece: Piece | Literal) -> int | None:
    return piece.key if isinstance(piece, Piece) else None


def _cut(piece: Any, max_length: int) -> Piece:
    return Piece(piece.key, min(piece.length, max_length))


def working_set(calls: Sequence[Call], block_size: int) -> int:
    """Different full blocks of all prompts and replies."""
    blocks: set[tuple[int, ...]] = set()
    for call in calls:
        tokens = [t for piece in (*call.prompt, call.reply) for t in tokens_of(piece)]
        for end in range(block_size, len(tokens) + 1, block_size):
            blocks.add((hash(tuple(tokens[:end])), end))
    return len(blocks)


# ── the child: one engine, one load ───────────────────────────────────────────────────────────


class Driver(Hub):
    """Sends the calls, a few at a time, and keeps what comes back."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._queue = deque(enumerate(job.requests))
        self._generated: dict[int, list[int]] = {}
        """Key of a reply → what the engine generated for it."""
        self._running: dict[str, tuple[int, Request]] = {}
        self._outputs: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._has_started = self._has_tokens = False
        self._turn_began = self._cpu_began = 0.0
        self._last_swaps = 0
        self._turns: list[tuple[float, float, bool]] = []
        self._began = time.perf_counter()
        self.audited: Audited | None = None

    def on_event(self, event: AnyEvent) -> None:
        match event:
            case Ready():
                self._began = time.perf_counter()
            case StartFailed() | Rejected():
                raise RuntimeError(event.message)
            case Started():
                self._has_started = True
                self._cached[self._running[event.request_id][0]] = event.cached_tokens
            case Tokens():
                self._has_tokens = True
                for output in event.outputs:
                    index = self._running[output.request_id][0]
                    self._outputs.setdefault(index, []).extend(output.token_ids)
            case Finished():
                index, request = self._running.pop(event.request_id)
                self._generated[request.reply] = self._outputs[index]
                self.forget(event.request_id)
            case Audited():
                self.audited = event
                self.worker.loop.stop()
            case _:
                pass

    def on_turn(self) -> None:
        self._end_turn()
        if time.perf_counter() - self._began > _DEADLINE_S:
            raise TimeoutError(f"the load did not end within {_DEADLINE_S:g} s")
        self._fill()

    def on_turn_begins(self) -> None:
        self._turn_began, self._cpu_began = time.perf_counter(), time.thread_time()
        self._has_started = self._has_tokens = False

    def serve(self) -> None:
        """Run the load in this process."""
        job = self._job
        serve(
            self,
            model=job.model,
            device=job.device,
            engine=job.engine,
            block_bytes=job.block_bytes,
            hbm_blocks=job.hbm_blocks,
            dram_blocks=job.dram_blocks,
            tp=job.tp,
            always_swaps=job.always_swaps,
            num_threads=job.num_threads,
        )

    def answer(self) -> Answer:
        assert self.audited is not None
        indices = range(len(self._job.requests))
        return Answer(
            prompt_tokens=[self._prompts[i] for i in indices],
            cached_tokens=[self._cached[i] for i in indices],
            outputs=[self._outputs[i] for i in indices],
            decode_turns=self._turns,
            swapped_out=self.audited.stats.swapped_out_blocks,
            swapped_in=self.audited.stats.swapped_in_blocks,
            problems=self.audited.problems,
            seconds=time.perf_counter() - self._began,
        )

    # What it does.

    def _end_turn(self) -> None:
        seconds = time.perf_counter() - self._turn_began
        cpu_s = time.thread_time() - self._cpu_began
        stats = self.worker.loop.stats()
        swaps = stats.swapped_out_blocks + stats.swapped_in_blocks
        if self._has_tokens and not self._has_started:
            self._turns.append((seconds, cpu_s, swaps != self._last_swaps))
        self._last_swaps = swaps

    def _fill(self) -> None:
        """Send the next calls whose sessions are free."""
        busy = {request.session for _, request in self._running.values()}
        skipped: list[tuple[int, Request]] = []
        while self._queue and len(self._running) < self._job.concurrency:
            index, request = self._queue.popleft()
            if request.session in busy:
                skipped.append((index, request))
                continue
            busy.add(request.session)
            self._send(index, request)
        self._queue.extendleft(reversed(skipped))
        if not self._queue and not self._running and not self.has_commands and not self.audited:
            self.audit()

    def _send(self, index: int, request: Request) -> None:
        tokens: list[int] = []
        for key, recorded in request.prompt:
            tokens += recorded if key is None else self._generated.get(key, recorded)
        self._prompts[index] = len(tokens)
        name = f"call {index}"
        self._running[name] = (index, request)
        self.start(name, tokens, request.reply_tokens, is_private=not self._job.is_cached)


# ── the parent ────────────────────────────────────────────────────────────────────────────────


def run_child(job: Job, folder: Path) -> Answer:
    """Serve the job in a fresh process."""
    asked, answered = folder / "job.json", folder / "answer.json"
    asked.write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "bench.working_set", "--child", str(asked), str(answered)]
    with (folder / "log").open("wb") as log:
        done = subprocess.run(
            command, stdout=log, stderr=log, timeout=_DEADLINE_S + 300, check=False
        )
    if done.returncode:
        raise SystemExit((folder / "log").read_text(errors="replace")[-4000:])
    return msgspec.json.decode(answered.read_bytes(), type=Answer)


def measure(load: str, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Answer]]:
    """All variants of one load; the sizes, and the answers by variant."""
    calls = make_calls(load, options)
    total = working_set(calls, options.block_size)
    longest = -(-max(call.total_tokens for call in calls) // options.block_size)
    hbm = max(total // 3, longest + 1)
    model = Path(options.model or resolve_model("smollm2-135m-instruct"))
    shape = shape_of(str(model), options.dtype)
    engine: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": longest * options.block_size,
        "block_size": options.block_size,
        "load_format": options.load_format,
    }
    if options.device == "cpu" or options.eager:
        engine["enforce_eager"] = True
    sizes = {"working_set": total, "hbm": hbm, "dram": total - hbm, "longest": longest}
    answers: dict[str, Answer] = {}
    with tempfile.TemporaryDirectory(prefix="memserve-bench-") as folder:
        if shape.num_kv_heads % options.tp:
            source, model = model, Path(folder) / "padded"
            pad_heads(source, model, -(-shape.num_kv_heads // options.tp) * options.tp)
            shape = shape_of(str(model), options.dtype)
        for variant in options.variants:
            answers[variant] = run_child(
                Job(
                    model=str(model),
                    device=options.device,
                    engine=engine,
                    block_bytes=shape.kv_bytes_per_token * options.block_size,
                    hbm_blocks=total if variant in ("whole", "uncached") else hbm,
                    dram_blocks=int((total - hbm) * _DRAM_SHARES.get(variant, 0.0)),
                    is_cached=variant != "uncached",
                    tp=options.tp,
                    always_swaps=options.always_swap,
                    concurrency=options.concurrency,
                    num_threads=options.threads,
                    requests=[Request.of(call) for call in calls],
                ),
                Path(folder),
            )
    return sizes, answers


def summary(answers: dict[str, Answer], *, by_cpu_time: bool) -> dict[str, Scalar]:
    """The figures to quote. `by_cpu_time`: of the steps, since other processes stretch them."""
    hits = {name: hit_ratio(answer) for name, answer in answers.items()}
    expected = answers["uncached"].outputs
    metrics: dict[str, Scalar] = {f"hit ratio, {name}": round(hits[name], 4) for name in hits}
    if "whole" in hits and "tiered" in hits:
        points = 100 * (hits["tiered"] - hits["whole"])
        metrics["hit ratio, tiered less whole, points"] = round(points, 2)
    for name in hits.keys() - {"uncached"}:
        metrics[f"outputs unlike uncached, {name}"] = sum(
            ours != theirs for ours, theirs in zip(answers[name].outputs, expected, strict=True)
        )
    for name in [name for name in ("small", *_DRAM_SHARES) if name in answers]:
        times = turn_times(answers[name], by_cpu_time=by_cpu_time)
        metrics |= {f"{key}, {name}": value for key, value in times.items()}
    for name in [name for name in _DRAM_SHARES if name in answers]:
        metrics[f"blocks swapped out, {name}"] = answers[name].swapped_out
        metrics[f"blocks swapped in, {name}"] = answers[name].swapped_in
    metrics["problems in the audits"] = sum(len(answer.problems) for answer in answers.values())
    for name, answer in answers.items():
        metrics[f"load, {name}, s"] = round(answer.seconds, 2)
    return metrics


def hit_ratio(answer: Answer) -> float:
    """Cached prompt tokens of all prompt tokens."""
    return sum(answer.cached_tokens) / sum(answer.prompt_tokens)


def turn_times(answer: Answer, *, by_cpu_time: bool) -> dict[str, Scalar]:
    """Of turns that decode: those with swapping and those without."""
    turns = [(cpu if by_cpu_time else wall, swaps) for wall, cpu, swaps in answer.decode_turns]
    all_s = [seconds for seconds, _ in turns]
    swapping = [seconds for seconds, swaps in turns if swaps]
    plain = [seconds for seconds, swaps in turns if not swaps]
    median = statistics.median(all_s)
    times: dict[str, Scalar] = {
        "decode step, median, ms": round(median * 1e3, 2),
        "decode step, 99th percentile / median": round(quantile(all_s, 0.99) / median, 2),
        "decode steps": len(all_s),
        "decode steps over twice the median": sum(s > 2 * median for s in plain),
    }
    if swapping:
        times["decode steps with swapping"] = len(swapping)
        times["decode steps with swapping, median / median"] = round(
            statistics.median(swapping) / median, 2
        )
        times["decode steps with swapping, longest / median"] = round(max(swapping) / median, 2)
        times["decode steps with swapping over twice the median"] = sum(
            s > 2 * median for s in swapping
        )
    return times


def quantile(values: Sequence[float], share: float) -> float:
    """The value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--load", default="chat,agent", help="chat, agent or both")
    arguments.add_argument("--dataset", type=Path, help="a file of conversations, for --load")
    arguments.add_argument("--sessions", type=int, default=20)
    arguments.add_argument("--concurrency", type=int, default=3, help="calls at a time")
    arguments.add_argument(
        "--max-context", type=int, default=1024, help="longer calls are left out"
    )
    arguments.add_argument("--max-reply", type=int, default=32, help="longer replies are cut")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments.add_argument("--model", help="a folder; the bundled model by default")
    arguments.add_argument("--load-format", default="auto")
    arguments.add_argument(
        "--eager", action="store_true", help="start sooner: no compilation, no CUDA graphs"
    )
    arguments.add_argument("--dtype", default="float32")
    arguments.add_argument("--block-size", type=int, default=32)
    arguments.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--tp", type=int, default=1, help="ranks of the instance")
    arguments.add_argument("--variants", default=",".join(VARIANTS), help="`uncached` is needed")
    arguments.add_argument("--always-swap", action="store_true")
    arguments.add_argument("--child", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child is not None:
        asked, answered = options.child
        driver = Driver(msgspec.json.decode(asked.read_bytes(), type=Job))
        driver.serve()
        answered.write_bytes(msgspec.json.encode(driver.answer()))
        return
    options.variants = options.variants.split(",")
    if wrong := [variant for variant in options.variants if variant not in VARIANTS]:
        raise SystemExit(f"--variants: {wrong[0]!r}; allowed: {', '.join(VARIANTS)}")
    if "uncached" not in options.variants:
        raise SystemExit("--variants: uncached is what all others are compared with")
    loads = [options.dataset.name] if options.dataset else options.load.split(",")
    if unknown := [load for load in loads if not options.dataset and load not in SHAPES]:
        raise SystemExit(f"--load: {unknown[0]!r}; allowed: {', '.join(SHAPES)}")
    metrics: dict[str, Scalar] = {}
    settings = settings_of(options, "child")
    raw: dict[str, Any] = {}
    for load in loads:
        sizes, answers = measure(load, options)
        settings[f"{load}: blocks"] = sizes
        # On the CPU one thread does everything: its own time leaves other processes out.
        by_cpu_time = options.device == "cpu" and options.threads == options.tp == 1
        figures = summary(answers, by_cpu_time=by_cpu_time)
        settings["steps by CPU time"] = by_cpu_time
        metrics |= {f"{load}: {name}": value for name, value in figures.items()}
        raw[load] = {name: msgspec.to_builtins(answer) for name, answer in answers.items()}
        for answer in raw[load].values():
            del answer["outputs"]
    publish("working_set", settings=settings, metrics=metrics, raw=raw, out=options.out)


if __name__ == "__main__":
    main()

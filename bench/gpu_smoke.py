"""One GPU, end to end: the ipc link between two processes, then `memserve up` in several modes.

    python -m bench.gpu_smoke [--phases link,imports,float32,bfloat16] [--max-seconds 290]

    link       a second process owns GPU memory; blocks are written into it and compared, and it is
               killed in mid-transfer
    imports    which import of the zygote opens the driver, and whether one initialises it
    float32    1PD (nothing cached) makes the reference: sessions of several turns, greedy. Then
               1P1D-CC, both instances on the one GPU, has to give the same tokens, with its cache
               in use, one session after the other and all at once; its prefill instance is killed;
               the pools are audited
    bfloat16   the same pair of modes with FlashAttention; tokens are compared, times shown

Graphs, torch.compile and asynchronous scheduling are on, as vLLM has them, unless `--eager` is
given. A fault prints the logs of all processes, and the exit code is 1. Phases that no longer fit
the time are skipped, and said. `--device cpu` tries this script itself, without the link's phase.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from bench._cluster import ROOT, Cluster, require
from bench._cuda_processes import faults, trace_imports
from bench._gpu_link import check_link
from bench._report import Scalar, parser, publish
from memserve.engine_args import count_gpus

MODEL = "smollm2-135m-instruct"
NEW_TOKENS = 48
NEXT_PROMPT = 90
LATER_SESSION = 37
"""Tokens that each session's first prompt is longer than the one before's."""
TEXTS = ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md")
"""What prompts are cut from: on text a model is seldom undecided between two tokens."""


# ── what is asked ─────────────────────────────────────────────────────────────────────────────


class Size(msgspec.Struct, frozen=True):
    sessions: int = 4
    turns: int = 3
    first_prompt: int = 700
    long_answer: int = 400


SMALL = Size(sessions=2, turns=2, first_prompt=150, long_answer=60)


class Turn(msgspec.Struct):
    prompt: list[int]
    expected: list[int]


def reference(cluster: Cluster, size: Size) -> list[list[Turn]]:
    """Sessions whose turns hold what was answered before."""
    text = cluster.tokenize("\n".join((ROOT / name).read_text("utf-8") for name in TEXTS))
    sessions = []
    for number in range(size.sessions):
        rng = random.Random(number)
        length = size.first_prompt + LATER_SESSION * number
        history = cut(text, length, rng)
        turns = []
        for _ in range(size.turns):
            answer = cluster.complete(history, NEW_TOKENS)
            require(answer.cached_tokens == 0, "the reference found something in a cache")
            turns.append(Turn(history, answer.tokens))
            history = history + answer.tokens + cut(text, NEXT_PROMPT, rng)
        sessions.append(turns)
    return sessions


def cut(text: list[int], length: int, rng: random.Random) -> list[int]:
    """A piece of the text, from anywhere in it."""
    require(len(text) > length, f"the text has {len(text)} tokens only")
    start = rng.randrange(len(text) - length)
    return text[start : start + length]


class Replay(msgspec.Struct):
    equal: int = 0
    total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: list[float] = []
    tpot_ms: list[float] = []
    differences: list[str] = []


def replay(cluster: Cluster, sessions: list[list[Turn]], workers: int) -> Replay:
    """Ask the same; `workers` sessions at a time."""
    result = Replay()
    lock = threading.Lock()

    def run(number: int) -> None:
        for index, turn in enumerate(sessions[number]):
            answer = cluster.complete(turn.prompt, NEW_TOKENS)
            with lock:
                result.total += 1
                result.prompt_tokens += len(turn.prompt)
                result.cached_tokens += answer.cached_tokens
                result.ttft_ms.append(answer.ttft_ms)
                result.tpot_ms.append(answer.tpot_ms)
                if answer.tokens == turn.expected:
                    result.equal += 1
                    continue
                at = next(
                    i
                    for i, (a, b) in enumerate(zip(answer.tokens, turn.expected, strict=True))
                    if a != b
                )
                result.differences.append(f"session {number} turn {index} from token {at}")

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for done in [pool.submit(run, number) for number in range(len(sessions))]:
            done.result()
    return result


# ── phases ────────────────────────────────────────────────────────────────────────────────────


class Run:
    """What is known so far, and the time that is left."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.size = Size() if arguments.device == "cuda" else SMALL
        self.deadline = time.monotonic() + arguments.max_seconds
        self.metrics: dict[str, Scalar] = {}
        self.raw: dict[str, Any] = {}
        self.faults: list[str] = []

    @property
    def left_s(self) -> float:
        left: float = self.deadline - time.monotonic()
        return left

    def settings(self, dtype: str, **more: object) -> dict[str, object]:
        made: dict[str, object] = {
            "engine.dtype": dtype,
            "engine.max_model_len": 4096,
            "server.log_level": "info",
        }
        if self.arguments.device == "cpu":
            return made | {"mempool.hbm_mb": 512}
        if self.arguments.eager:
            made["engine.enforce_eager"] = "true"
        return made | more

    @contextlib.contextmanager
    def clusters(self, *wanted: tuple[str, dict[str, object]]) -> Iterator[list[Cluster]]:
        """Start them at the same time, and wait for all; on a fault show their logs."""
        model, device = self.arguments.model, self.arguments.device
        opened = [
            Cluster(mode, model, device, settings, served_name=MODEL) for mode, settings in wanted
        ]
        try:
            for cluster in opened:
                seconds = cluster.wait(max(20.0, min(200.0, self.left_s)))
                print(f"{cluster.mode} ready after {seconds:.1f} s", flush=True)
                self.raw.setdefault("start_s", []).append([cluster.mode, round(seconds, 1)])
            yield opened
            for cluster in opened:
                cluster.stop()
        except BaseException:
            for cluster in opened:
                cluster.show_logs()
            raise
        finally:
            for cluster in opened:
                cluster.close()

    def note(self, name: str, result: Replay, *, least_equal: float) -> None:
        self.metrics |= {
            f"{name}_equal": f"{result.equal}/{result.total}",
            f"{name}_cached": f"{result.cached_tokens}/{result.prompt_tokens}",
            f"{name}_ttft_ms": statistics.median(result.ttft_ms),
            f"{name}_tpot_ms": statistics.median(result.tpot_ms),
        }
        self.raw[name] = msgspec.to_builtins(result)
        for difference in result.differences:
            print(f"{name}: {difference}", flush=True)
        if result.equal < least_equal * result.total:
            self.faults.append(f"{name}: only {result.equal} of {result.total} turns are equal")

    def float32(self) -> None:
        with self.clusters(("1PD", self.settings("float32"))) as (one,):
            self.check_processes(one)
            sessions = reference(one, self.size)
            self.note("1PD_again", replay(one, sessions, 1), least_equal=1.0)
            one.audit()
        with self.clusters(("1P1D-CC", self.settings("float32"))) as (split,):
            self.check_processes(split)
            result = replay(split, sessions, 1)
            self.note("1P1D-CC", result, least_equal=1.0)
            if not result.cached_tokens:
                self.faults.append("1P1D-CC: nothing was found in a cache")
            self.check_links(split)
            split.audit()
            fresh = [[Turn([7, *t.prompt], t.expected) for t in turns[:1]] for turns in sessions]
            at_once = replay(split, fresh + sessions, 2 * self.size.sessions)
            known = [d for d in at_once.differences if int(d.split()[1]) >= self.size.sessions]
            self.raw["at_once"] = known
            if len(known) > 1:  # a batch of another size may round otherwise once in a while
                self.faults.append(f"1P1D-CC at once: {known}")
            split.audit()
            self.kill_prefill(split, sessions)

    def check_processes(self, cluster: Cluster) -> None:
        """CUDA belongs to workers alone."""
        if self.arguments.device != "cuda":
            return
        workers = [i["pid"] for i in cluster.get("/v1/status")["instances"]]
        found, seen = faults(cluster.process.pid, workers)
        self.raw.setdefault("processes", []).append(seen)
        self.faults += found

    def imports(self) -> None:
        """A zygote whose driver is initialised cannot fork workers."""
        traced = trace_imports()
        self.raw["imports"] = traced
        before: dict[str, Any] = {}
        for step in traced:
            state = {key: value for key, value in step.items() if key != "module"}
            if state != before:
                print(f"import {step['module']}: {state}", flush=True)
            before = state
        self.metrics["driver_initialised_by_imports"] = bool(before.get("initialised"))
        if before.get("initialised"):
            self.faults.append("an import initialises the CUDA driver")

    def check_links(self, cluster: Cluster) -> None:
        for link in cluster.get("/v1/status")["links"]:
            name = f"{link['source']}→{link['target']}"
            print(f"{name}: {link}", flush=True)
            kind = "ipc" if self.arguments.device == "cuda" else "shm"
            if link["kind"] != kind or link["failures"] or not link["size_bytes"]:
                self.faults.append(f"link {name}: {link}")
            elif link["seconds"]:
                self.metrics[f"{name}_GB_per_s"] = link["size_bytes"] / link["seconds"] / 1e9
                self.metrics[f"{name}_ms"] = link["seconds"] / link["transfers"] * 1e3

    def kill_prefill(self, cluster: Cluster, sessions: list[list[Turn]]) -> None:
        """P dies while requests run: all of them are answered, P comes back, pools are clean."""
        before = cluster.instance("P0")
        with concurrent.futures.ThreadPoolExecutor(len(sessions)) as pool:
            running = [
                pool.submit(cluster.complete, turns[1].prompt, self.size.long_answer)
                for turns in sessions
            ]
            time.sleep(0.4)
            os.kill(before["pid"], signal.SIGKILL)
            killed = time.monotonic()
            for one in running:
                one.result()
        cluster.wait_back("P0", before["epoch"], max(30.0, min(90.0, self.left_s)))
        self.metrics["back_after_kill_s"] = time.monotonic() - killed
        self.note("after_kill", replay(cluster, sessions[:2], 1), least_equal=1.0)
        cluster.audit()

    def bfloat16(self) -> None:
        small = {"mempool.hbm_mb": 8192, "engine.gpu_memory_utilization": 0.2}
        wanted = [(mode, self.settings("bfloat16", **small)) for mode in ("1PD", "1P1D-CC")]
        with self.clusters(*wanted) as (one, split):
            sessions = reference(one, self.size)
            self.note("bf16_1PD_again", replay(one, sessions, 1), least_equal=0.9)
            self.note("bf16_1P1D-CC", replay(split, sessions, 1), least_equal=0.5)
            self.check_links(split)
            split.audit()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--phases", default="link,imports,float32,bfloat16")
    options.add_argument("--max-seconds", type=float, default=290.0)
    options.add_argument("--model", default=MODEL)
    options.add_argument("--eager", action="store_true", help="neither compile nor graphs")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = options.parse_args()
    if arguments.device == "cuda" and not count_gpus():
        print("no NVIDIA GPU is visible here: nothing is run")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_smoke was told to end"))
    run = Run(arguments)
    phases: dict[str, Callable[[], None]] = {
        "link": lambda: run.metrics.update(check_link()),
        "imports": run.imports,
        "float32": run.float32,
        "bfloat16": run.bfloat16,
    }
    needed_s = {"link": 15.0, "imports": 20.0, "float32": 60.0, "bfloat16": 60.0}
    for name in arguments.phases.split(","):
        if run.left_s < needed_s[name]:
            print(f"skipped {name}: {run.left_s:.0f} s are left", flush=True)
            run.metrics[f"{name}_phase"] = "skipped"
            continue
        print(f"════ {name}", flush=True)
        started = time.monotonic()
        try:
            phases[name]()
        except Exception as error:  # noqa: BLE001 -- the next phase may tell more
            traceback.print_exc()
            run.faults.append(f"{name}: {type(error).__name__}: {error}")
        run.metrics[f"{name}_phase_s"] = round(time.monotonic() - started, 1)
    run.raw["faults"] = run.faults
    settings = {"model": arguments.model, "phases": arguments.phases, "eager": arguments.eager}
    publish("gpu_smoke", settings=settings, metrics=run.metrics, raw=run.raw, out=arguments.out)
    for fault in run.faults:
        print(f"FAULT {fault}", flush=True)
    return 1 if run.faults else 0


if __name__ == "__main__":
    sys.exit(main())

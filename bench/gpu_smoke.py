"""One GPU, end to end: the ipc link between two processes, then `memserve up` in several modes.

    python -m bench.gpu_smoke [--phases link,float32,bfloat16] [--max-seconds 290] [--out FILE]

    link       a second process owns GPU memory; blocks are written into it and compared, and it is
               killed
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
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from bench._report import Scalar, parser, publish
from memserve.engine_args import count_gpus

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2-135m-instruct"
NEW_TOKENS = 48
NEXT_PROMPT = 90
LATER_SESSION = 37
"""Tokens that each session's first prompt is longer than the one before's."""
TEXTS = ("ARCHITECTURE.md", "README.md", "CONTRIBUTING.md")
"""What prompts are cut from: on text a model is seldom undecided between two tokens."""
REQUEST_TIMEOUT_S = 100.0
TAIL_LINES = 60


class FaultError(Exception):
    """What must not be."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise FaultError(problem)


# ── the link alone ────────────────────────────────────────────────────────────────────────────


def check_link() -> dict[str, Scalar]:
    """Blocks into another process's memory on the same GPU, and what a kill leaves."""
    import torch

    from memserve.ops.blocks import library_for
    from memserve.ops.device_memory import CudaDeviceMemory
    from memserve.types import BlockId, InstanceId, TransferId
    from memserve.workers.gpu_memory import GpuBuffer
    from memserve.workers.links.base import RankPeer
    from memserve.workers.links.ipc import open_ipc

    shape = link_geometry()
    size = shape.num_blocks * shape.block_stride
    device = torch.device("cuda", 0)
    memory = CudaDeviceMemory(device)
    source = GpuBuffer(memory, size)
    source.tensor.view(torch.uint8).random_(0, 256)
    torch.cuda.synchronize()
    command = [sys.executable, "-m", "bench.gpu_smoke", "--peer", str(size)]
    child = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None and child.stdout is not None

    def ask(line: str = "") -> str:
        if line:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        answer = child.stdout.readline().strip()
        require(bool(answer), "the peer process ended; see above")
        return answer

    try:
        peer = RankPeer(InstanceId("D0"), 1, shape, ask())
        started = time.perf_counter()
        link = open_ipc(source, shape, peer, memory, device, library_for(device))
        open_s = time.perf_counter() - started
        rng = random.Random(1)
        times, wrong = [], []
        for number in range(6):
            count = 64
            source_ids = [BlockId(b) for b in rng.sample(range(1, shape.num_blocks), count)]
            target_ids = [BlockId(b) for b in rng.sample(range(1, shape.num_blocks), count)]
            link.send(TransferId(f"t{number}"), source_ids, target_ids)
            done, deadline = [], time.monotonic() + 10
            while not done:
                done = link.poll()
                require(time.monotonic() < deadline, "a transfer does not end")
            (ended,) = done
            require(ended.error is None, f"the transfer failed: {ended.error}")
            require(ended.size_bytes == count * shape.block_bytes, "wrong byte count")
            times.append(ended.seconds)
            own = [checksum(source.tensor, shape.block_stride, b) for b in source_ids]
            there = json.loads(ask(json.dumps([int(b) for b in target_ids])))
            wrong += [b for b, a, c in zip(target_ids, own, there, strict=True) if a != c]
        require(not wrong, f"{len(wrong)} blocks differ at the peer: {wrong[:8]}")
        child.kill()
        child.wait(10)
        link.send(TransferId("late"), [BlockId(1)], [BlockId(2)])
        deadline = time.monotonic() + 10
        while not link.poll():
            require(time.monotonic() < deadline, "a transfer to a dead peer does not end")
        link.close()
        require(bool((source.tensor[:1024] == source.tensor[:1024]).all()), "CUDA is broken")
        source.close()
        free_bytes = torch.cuda.mem_get_info(device)[0]
    finally:
        child.kill()
        child.wait(10)
    best = min(times)
    return {
        "link_open_s": open_s,
        "link_GB_per_s": count * shape.block_bytes / best / 1e9,
        "link_ms": best * 1e3,
        "free_GiB_after": free_bytes / 2**30,
    }


def link_geometry() -> Any:
    """256 blocks of 2 MiB."""
    from memserve.types import Geometry

    page = 64 << 10
    return Geometry(
        model="smoke",
        dtype="bfloat16",
        block_size=16,
        num_blocks=256,
        num_kv_heads=8,
        page_bytes=page,
        block_stride=32 * page,
        layer_offsets=tuple(layer * page for layer in range(32)),
    )


def checksum(memory: Any, stride: int, block: int) -> list[int]:
    """Of one block: two sums that change with any byte and with its place."""
    import torch

    words = memory[block * stride : (block + 1) * stride].view(torch.int32).to(torch.int64)
    places = torch.arange(1, words.numel() + 1, device=words.device)
    return [int(words.sum()), int((words * places).sum())]


def be_peer(size: int) -> None:
    """The other process: own memory, say where, answer with checksums of the blocks asked for."""
    import torch

    from memserve.ops.device_memory import CudaDeviceMemory
    from memserve.workers.gpu_memory import GpuBuffer

    device = torch.device("cuda", 0)
    torch.cuda.init()
    buffer = GpuBuffer(CudaDeviceMemory(device), size)
    torch.cuda.synchronize()
    print(buffer.address, flush=True)
    stride = link_geometry().block_stride
    for line in sys.stdin:
        print(
            json.dumps([checksum(buffer.tensor, stride, b) for b in json.loads(line)]), flush=True
        )


# ── a cluster ─────────────────────────────────────────────────────────────────────────────────


class Cluster:
    """One `memserve up`. All its logs can be shown, also after it has removed them."""

    def __init__(self, mode: str, model: str, device: str, settings: Mapping[str, object]) -> None:
        self.mode = mode
        self._folder = Path(tempfile.mkdtemp(prefix="memserve-smoke-"))
        self._logs: dict[str, IO[str]] = {}
        self._is_closing = threading.Event()
        command = [sys.executable, "-m", "memserve", "up", "--no-tui", "--port", "0"]
        command += ["--mode", mode, "--model", model, "--device", device]
        command += ["--gpus", "1"] if device == "cuda" else []
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        print(f"$ memserve {' '.join(command[3:])}", flush=True)
        self._up_log = (self._folder / "up.log").open("w")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=self._up_log,
            stderr=self._up_log,
            env={
                **os.environ,
                "TMPDIR": str(self._folder),
                "MEMSERVE_CONFIG": self._no_settings(),
                # Triton rounds float32 to 19 bits before it multiplies, unless it is told not to.
                "TRITON_F32_DEFAULT": "ieee",
            },
        )
        self._watcher = threading.Thread(target=self._follow_logs, daemon=True)
        self._watcher.start()

    def _no_settings(self) -> str:
        path = self._folder / "empty.toml"
        path.touch()
        return str(path)

    def wait(self, timeout_s: float) -> float:
        """Until it is ready; how many seconds that took."""
        deadline = time.monotonic() + timeout_s
        while True:
            require(self.process.poll() is None, f"{self.mode} ended while starting")
            require(
                time.monotonic() < deadline, f"{self.mode} is not ready after {timeout_s:.0f} s"
            )
            found = re.search(r"(http://127\.0\.0\.1:\d+)\D", self.output())
            if found:
                self.url = found.group(1)
                return time.monotonic() - self.started
            time.sleep(0.2)

    def output(self) -> str:
        return (self._folder / "up.log").read_text(errors="replace")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)

    def complete(self, prompt: list[int], max_tokens: int = NEW_TOKENS) -> Answer:
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(
            self.url + "/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        answer = Answer()
        begun = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as stream:
                for line in stream:
                    answer.take(line.decode().strip(), time.perf_counter() - begun)
        except urllib.error.HTTPError as error:
            raise FaultError(f"HTTP {error.code}: {error.read().decode()[:500]}") from error
        require(len(answer.tokens) == max_tokens, f"{len(answer.tokens)} tokens of {max_tokens}")
        return answer

    def tokenize(self, text: str) -> list[int]:
        body = {"model": MODEL, "prompt": text, "add_special_tokens": False}
        request = urllib.request.Request(
            self.url + "/tokenize",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def audit(self) -> None:
        """Wait until all pools are quiet, then every block must have exactly one owner."""
        deadline = time.monotonic() + 15
        while True:
            reports = self.get("/v1/status?audit=true")["audit"]
            problems = [f"{r['instance']}: {p}" for r in reports for p in r["problems"]]
            holders = [f"{r['instance']}: {h}" for r in reports for h in r["holders"]]
            if not problems and not holders:
                return
            require(time.monotonic() < deadline, f"audit: {problems}, held by {holders}")
            time.sleep(0.2)

    def instance(self, name: str) -> dict[str, Any]:
        found = [i for i in self.get("/v1/status")["instances"] if i["id"] == name]
        require(len(found) == 1, f"no instance {name}")
        return found[0]

    def cuda_outside_workers(self) -> list[str]:
        """Faults: whoever has opened the driver's memory manager has initialised CUDA."""
        workers = {i["pid"] for i in self.get("/v1/status")["instances"]}
        others = {self.process.pid, *children(self.process.pid)} - workers
        seen = [pid for pid in workers if uses_cuda(pid)]
        if len(seen) != len(workers):  # the driver shows itself elsewhere here
            print("note: could not see which processes use CUDA", flush=True)
        return [
            f"process {p} is no worker and has initialised CUDA" for p in others if uses_cuda(p)
        ]

    def stop(self, timeout_s: float = 25.0) -> None:
        """SIGTERM; it must end by itself, with exit code 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise FaultError(f"{self.mode} does not stop") from None
        require(code == 0, f"{self.mode} ended with exit code {code}")

    def show_logs(self) -> None:
        self._read_new_logs()
        print(f"──── {self.mode}: what it printed", flush=True)
        print(tail(self.output()), flush=True)
        for name, file in sorted(self._logs.items()):
            file.seek(0)
            print(f"──── {self.mode}: {name}", flush=True)
            print(tail(file.read()), flush=True)

    def close(self) -> None:
        self._is_closing.set()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._watcher.join(5)
        for file in self._logs.values():
            file.close()
        self._up_log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _follow_logs(self) -> None:
        while not self._is_closing.wait(0.3):
            self._read_new_logs()

    def _read_new_logs(self) -> None:
        """Open what is new: an open file can be read after its name is gone."""
        for path in self._folder.glob("memserve-*/*.log"):
            if path.name not in self._logs:
                with contextlib.suppress(OSError):
                    self._logs[path.name] = path.open(errors="replace")


class Answer:
    """The tokens of one stream, and when they came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.arrivals: list[float] = []
        self.cached_tokens = 0

    def take(self, line: str, seconds: float) -> None:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        require("error" not in event, f"the stream ended in {event.get('error')}")
        for choice in event.get("choices", []):
            if choice.get("token_ids"):
                self.tokens += choice["token_ids"]
                self.arrivals.append(seconds)
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0

    @property
    def ttft_ms(self) -> float:
        return self.arrivals[0] * 1e3

    @property
    def tpot_ms(self) -> float:
        return (self.arrivals[-1] - self.arrivals[1]) / (len(self.arrivals) - 2) * 1e3


def tail(text: str) -> str:
    lines = [line[:400] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:])


def children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def uses_cuda(pid: int) -> bool:
    try:
        names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    return any("nvidia-uvm" in name for name in names)


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
            answer = cluster.complete(history)
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
            answer = cluster.complete(turn.prompt)
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
        return self.deadline - time.monotonic()

    def settings(self, dtype: str, **more: object) -> dict[str, object]:
        made: dict[str, object] = {
            "engine.dtype": dtype,
            "engine.max_model_len": 4096,
            "models.served_name": MODEL,
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
        opened = [Cluster(mode, model, device, settings) for mode, settings in wanted]
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
            self.faults += one.cuda_outside_workers()
            sessions = reference(one, self.size)
            self.note("1PD_again", replay(one, sessions, 1), least_equal=1.0)
            one.audit()
        with self.clusters(("1P1D-CC", self.settings("float32"))) as (split,):
            self.faults += split.cuda_outside_workers()
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
        deadline = time.monotonic() + max(30.0, min(90.0, self.left_s))
        while True:
            now = cluster.instance("P0")
            if now["state"] == "ready" and now["epoch"] > before["epoch"]:
                break
            require(now["state"] != "failed", f"P0 does not come back: {now['error']}")
            require(time.monotonic() < deadline, f"P0 is still {now['state']}: {now['error']}")
            time.sleep(0.3)
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
    options.add_argument("--phases", default="link,float32,bfloat16")
    options.add_argument("--max-seconds", type=float, default=290.0)
    options.add_argument("--model", default=MODEL)
    options.add_argument("--eager", action="store_true", help="neither compile nor graphs")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.peer is not None:
        be_peer(arguments.peer)
        return 0
    if arguments.device == "cuda" and not count_gpus():
        print("no NVIDIA GPU is visible here: nothing is run")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_smoke was told to end"))
    run = Run(arguments)
    phases: dict[str, Callable[[], None]] = {
        "link": lambda: run.metrics.update(check_link()),
        "float32": run.float32,
        "bfloat16": run.bfloat16,
    }
    needed_s = {"link": 10.0, "float32": 60.0, "bfloat16": 60.0}
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

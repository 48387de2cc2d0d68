"""TPOT of 1P1D-CC beside plain vLLM of the same version, on the same GPU, in one run.

    python -m bench.gpu_vs_vllm --model FOLDER --load-format dummy [--gpus 2] [--out FILE]
    python -m bench.gpu_vs_vllm --device cpu --concurrency 1 2 --rounds 1

Both servers are up from the beginning to the end: MemServe with P on the first GPU and D on the
last, `vllm serve` on the last. They never work at the same time, and an idle engine computes
nothing, so each has D's GPU for itself while it is measured; engine arguments, memory for KV,
client and prompts are the same. Each round asks both for the same burst of random prompts, in turns
of who comes first, so that a drift of the machine shows in the spread of the ratios::

    ttft       from sending a request to its first token, mean of the burst
    tpot       from a request's first to its last token, by their number, mean of the burst
    steady     time for a token of each while all requests of the burst decode: no prefill, no
               transfer, nothing but steps

For MemServe the status tells where a steady step goes: inside vLLM's step, in the rest of D's turn
(commands, transfers, events), and what is left until the client has its tokens. The CPU time of the
serving process and its like in vLLM is shown for a step of the burst.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil

from bench._cluster import Cluster, require, tail
from bench._report import Scalar, parser, publish, settings_of
from bench._serve import turn
from memserve.engine_args import count_gpus, visible_gpus
from memserve.models import resolve_model

MODEL = "bench"
FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
REQUEST_TIMEOUT_S = 120.0
START_TIMEOUT_S = 280.0
SERVERS = ("memserve", "vllm")
RATIOS = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "steady": "steady_s",
    "throughput": "tokens_per_s",
}
"""What is compared → the field of `Burst`."""


class Burst(msgspec.Struct):
    """What one server did for one burst."""

    server: str
    concurrency: int
    round: int
    ttft_s: float
    tpot_s: float
    steady_s: float
    tokens_per_s: float
    front_cpu_s: float
    """CPU time of the process that serves HTTP, for each token of a request."""
    step_s: float | None = None
    turn_s: float | None = None
    steps: int = 0


class PlainVllm:
    """`vllm serve`, on one GPU."""

    def __init__(self, options: argparse.Namespace, model: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `close`)
        # What `vllm serve` runs, by a name that the packages for CPUs have as well.
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
        command += ["--model", model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL]
        command += ["--kv-cache-memory-bytes", str(options.hbm_mb << 20)]
        command += ["--enable-prefix-caching", "--disable-log-stats"]
        command += ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
        for key, value in engine_arguments(options).items():
            flag = f"--{key.replace('_', '-')}"
            command += [flag] if value is True else [flag, str(value)]
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1"}
        if options.device == "cuda":
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            environment["CUDA_VISIBLE_DEVICES"] = visible_gpus()[options.gpus - 1]
        print(f"$ vllm {' '.join(command[3:])}", flush=True)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )

    def wait(self, deadline: float) -> None:
        """Until it is ready. Raises: FaultError."""
        while True:
            require(self.process.poll() is None, "vllm serve ended while starting")
            require(time.monotonic() < deadline, "vllm serve is not ready in time")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.3)

    def show_log(self) -> None:
        self._log.seek(0)
        print(f"──── vllm serve\n{tail(self._log.read())}", flush=True)

    def close(self) -> None:
        """It and the processes that it started, which are in its session."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self._log.close()


def engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """For both. What vLLM chooses by its kind of use otherwise is named."""
    made: dict[str, Any] = {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "dtype": "bfloat16" if options.device == "cuda" else "float32",
        "max_model_len": 2 * (options.prompt + options.answer),
        "load_format": options.load_format,
        "gpu_memory_utilization": 0.05,  # asked for at the start; the size of the KV decides
    }
    if options.device == "cpu":
        made["block_size"] = 32
    if options.eager or options.device == "cpu":
        made["enforce_eager"] = True
    return made


# ── the client ────────────────────────────────────────────────────────────────────────────────


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: list[int], max_tokens: int
) -> tuple[float, list[float]]:
    """When the request was sent, and when each of its tokens came."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    times: list[float] = []
    sent = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        text = "" if response.status == 200 else await response.text()
        require(response.status == 200, f"HTTP {response.status}: {text[:300]}")
        async for line in response.content:
            now = time.perf_counter()
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            require("error" not in event, f"the stream ended in {event.get('error')}")
            for choice in event["choices"]:
                times += [now] * len(choice.get("token_ids") or [])
    require(len(times) == max_tokens, f"{len(times)} tokens of {max_tokens} came")
    return sent, times


async def ask_all(
    url: str, prompts: Sequence[list[int]], max_tokens: int
) -> list[tuple[float, list[float]]]:
    """All at once."""
    timeout = aiohttp.ClientTimeout(REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        return await asyncio.gather(*(ask(session, url, p, max_tokens) for p in prompts))


def steady_period(all_times: Sequence[list[float]]) -> float:
    """Seconds for a token of each request, while all of them have some before and after.

    NaN if that never was: the first request had ended before the last one began.
    """
    begin = max(times[0] for times in all_times)
    end = min(times[-1] for times in all_times)
    counts = [sum(begin < at <= end for at in times) for times in all_times]
    return (end - begin) / statistics.mean(counts) if min(counts) > 1 else float("nan")


class Meter:
    """Asks one server, and looks at its processes meanwhile."""

    def __init__(self, name: str, url: str, process: psutil.Process, cluster: Cluster | None):
        self.name = name
        self._url = url
        self._process = process
        self._cluster = cluster

    def burst(self, number: int, prompts: Sequence[list[int]], max_tokens: int) -> Burst:
        before, cpu_before = self._engine(), self._cpu_s()
        answers = asyncio.run(ask_all(self._url, prompts, max_tokens))
        cpu_s, after = self._cpu_s() - cpu_before, self._engine()
        tpot_s = [(times[-1] - times[0]) / (len(times) - 1) for _, times in answers]
        duration_s = max(t[-1] for _, t in answers) - min(sent for sent, _ in answers)
        result = Burst(
            server=self.name,
            concurrency=len(prompts),
            round=number,
            ttft_s=statistics.mean(times[0] - sent for sent, times in answers),
            tpot_s=statistics.mean(tpot_s),
            steady_s=steady_period([times for _, times in answers]),
            tokens_per_s=len(prompts) * max_tokens / duration_s,
            front_cpu_s=cpu_s / max_tokens,
        )
        if before is not None and after is not None and after["steps"] > before["steps"]:
            result.steps = after["steps"] - before["steps"]
            result.step_s = (after["step_s"] - before["step_s"]) / result.steps
            result.turn_s = (after["turn_s"] - before["turn_s"]) / result.steps
        return result

    def _engine(self) -> dict[str, Any] | None:
        """D's counters, once it has said that it is idle."""
        if self._cluster is None:
            return None
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            stats: dict[str, Any] | None = self._cluster.instance("D0")["stats"]
            if stats is not None and not stats["running_requests"] + stats["pinned_requests"]:
                return stats
            time.sleep(0.05)
        return None

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


# ── the run ───────────────────────────────────────────────────────────────────────────────────


def measure(
    meters: Sequence[Meter], options: argparse.Namespace, deadline: float, bursts: list[Burst]
) -> None:
    """Fill in the bursts, as many rounds as there is time for."""
    rng = random.Random(options.seed)

    def prompts(count: int) -> list[list[int]]:
        return [
            [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(options.prompt)]
            for _ in range(count)
        ]

    for count in sorted(options.concurrency):
        warm_up = prompts(count)
        for meter in meters:
            meter.burst(0, warm_up, min(options.answer, 32))
    for number in range(options.rounds):
        for count in options.concurrency:
            if time.monotonic() > deadline:
                print(f"stopped before round {number + 1}, {count} at once: no time", flush=True)
                return
            asked = prompts(count)
            order = meters if number % 2 else list(reversed(meters))
            bursts.extend(meter.burst(number, asked, options.answer) for meter in order)


def summary(bursts: Sequence[Burst]) -> tuple[dict[str, Scalar], list[dict[str, Scalar]]]:
    """Figures to quote: medians over the rounds; ratios within each round, MemServe by vLLM."""
    metrics: dict[str, Scalar] = {}
    rows: list[dict[str, Scalar]] = []
    for count in sorted({burst.concurrency for burst in bursts}):
        line = [burst for burst in bursts if burst.concurrency == count]
        pairs = _pairs(line)
        for server in SERVERS:
            own = [burst for burst in line if burst.server == server]
            if own:
                rows.append(_row(server, count, own))
        for name, field in RATIOS.items():
            ratios = [getattr(ours, field) / getattr(theirs, field) for ours, theirs in pairs]
            ratios = [ratio for ratio in ratios if ratio == ratio]  # without NaN
            if ratios:
                key = f"{name}_ratio_at_{count}"
                metrics[key] = round(statistics.median(ratios), 4)
                metrics[f"{key}_least"] = round(min(ratios), 4)
                metrics[f"{key}_most"] = round(max(ratios), 4)
    return metrics, rows


def _pairs(line: Sequence[Burst]) -> list[tuple[Burst, Burst]]:
    by_round: dict[int, dict[str, Burst]] = {}
    for burst in line:
        by_round.setdefault(burst.round, {})[burst.server] = burst
    both = [found for found in by_round.values() if len(found) == len(SERVERS)]
    return [(found["memserve"], found["vllm"]) for found in both]


def _row(server: str, count: int, own: Sequence[Burst]) -> dict[str, Scalar]:
    def ms(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None and value == value]
        return round(statistics.median(known) * 1e3, 3) if known else None

    steady, turn = ms([b.steady_s for b in own]), ms([b.turn_s for b in own])
    step = ms([b.step_s for b in own])
    return {
        "server": server,
        "at once": count,
        "ttft ms": ms([b.ttft_s for b in own]),
        "tpot ms": ms([b.tpot_s for b in own]),
        "steady ms": steady,
        "step ms": step,
        "rest of turn ms": None if step is None or turn is None else round(turn - step, 3),
        "outside ms": None if steady is None or turn is None else round(steady - turn, 3),
        "front CPU ms": ms([b.front_cpu_s for b in own]),
        "tokens/s": round(statistics.median(b.tokens_per_s for b in own)),
    }


def main() -> int:
    options = _options()
    if options.device == "cuda" and count_gpus() < options.gpus:
        print(f"{count_gpus()} GPUs are visible here, {options.gpus} are needed: nothing is run")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_vs_vllm was told to end"))
    model = options.model or str(resolve_model("smollm2-135m-instruct"))
    settings: dict[str, object] = {"mempool.hbm_mb": options.hbm_mb}
    settings |= {f"engine.{k}": _toml(v) for k, v in engine_arguments(options).items()}
    bursts: list[Burst] = []
    plain = PlainVllm(options, model)
    cluster = Cluster(
        "1P1D-CC", model, options.device, settings, gpus=options.gpus, served_name=MODEL
    )
    fault: str | None = None
    try:
        print(f"memserve is ready after {cluster.wait(START_TIMEOUT_S):.1f} s", flush=True)
        plain.wait(cluster.started + START_TIMEOUT_S)
        print(f"both are after {time.monotonic() - cluster.started:.1f} s", flush=True)
        meters = [
            Meter("memserve", cluster.url, psutil.Process(cluster.process.pid), cluster),
            Meter("vllm", plain.url, psutil.Process(plain.process.pid), None),
        ]
        with turn():
            measure(meters, options, time.monotonic() + options.max_seconds, bursts)
        cluster.audit()
        cluster.stop()
    except Exception as error:  # noqa: BLE001 -- what was measured before is shown in any case
        fault = f"{type(error).__name__}: {error}"
        cluster.show_logs()
        plain.show_log()
    finally:
        cluster.close()
        plain.close()
    _publish(options, model, bursts, fault)
    return 1 if fault else 0


def _publish(
    options: argparse.Namespace, model: str, bursts: list[Burst], fault: str | None
) -> None:
    metrics, rows = summary(bursts)
    publish(
        "gpu_vs_vllm",
        settings=settings_of(options)
        | {"model": Path(model).name, "engine": engine_arguments(options)},
        metrics=metrics,
        raw={"bursts": [_finite(msgspec.to_builtins(b)) for b in bursts], "fault": fault},
        rows=rows,
        out=options.out,
    )
    for name, value in metrics.items():
        print(f"{name}: {value}")
    if fault:
        print(f"FAULT {fault}", flush=True)


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in fields.items()}


def _toml(value: object) -> object:
    return "true" if value is True else value


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--gpus", type=int, default=2, help="2: P has a GPU of its own")
    made.add_argument("--model", default="", help="a folder; default: the bundled model")
    made.add_argument("--load-format", default="auto")
    made.add_argument("--eager", action="store_true", help="neither compile nor graphs")
    made.add_argument("--hbm-mb", type=int, default=16384, help="for KV, of each engine")
    made.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--prompt", type=int, default=512)
    made.add_argument("--answer", type=int, default=256)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--max-seconds", type=float, default=150.0, help="of measuring: then no more")
    options: argparse.Namespace = made.parse_args()
    return options


if __name__ == "__main__":
    sys.exit(main())

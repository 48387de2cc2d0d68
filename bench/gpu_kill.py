"""An instance is killed while KV is on its way to it: who lives serves on, and nothing is lost.

    python -m bench.gpu_kill --model FOLDER [--mode 1P2D-CC --gpus 2 --eager] [--out FILE]
    python -m bench.gpu_kill --device cpu --mode 1P2D-CC

    link       (GPUs) one process writes into another's HBM on the last GPU, which is killed in
               mid-transfer; then it has another life
    D          under load, kill -9 of one decode instance
    P          the same of the prefill instance

The load: a few clients ask for long prompts and short answers, so that transfers never cease, and a
few for long answers, so that decoding never does. What must be: every client gets an answer or an
error of one line; tokens go on flowing to somebody within 2 s (where another instance can decode);
the instance comes back, and KV is transferred to or from its new life; when all is quiet, the
audits of all pools are clean.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
from typing import Any

from bench._cluster import Answer, Cluster, FaultError, require
from bench._cuda_processes import faults as cuda_faults
from bench._report import Scalar, parser, publish, settings_of
from memserve.engine_args import count_gpus

MODEL = "bench"
SERVES_ON_S = 2.0
FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
TRANSFERS_BEFORE_KILL = 4


class Load:
    """Clients in threads, until told to end; when tokens came, and what failed."""

    def __init__(self, cluster: Cluster, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._options = options
        self._is_ending = threading.Event()
        self.arrivals: list[float] = []
        """Of events with tokens, at any client, by the monotonic clock."""
        self.num_done = 0
        self.failures: list[str] = []
        shapes = [(options.long_prompt, options.short_answer)] * options.prefill_clients
        shapes += [(options.short_prompt, options.long_answer)] * options.decode_clients
        self._threads = [
            threading.Thread(target=self._ask, args=(number, *shape), daemon=True)
            for number, shape in enumerate(shapes)
        ]
        for thread in self._threads:
            thread.start()

    def end(self, timeout_s: float) -> int:
        """No new requests; returns how many clients have not had their answer in time."""
        self._is_ending.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def longest_silence(self, since: float, until: float) -> float:
        """The longest time without a token at any client."""
        inside = [at for at in self.arrivals if since <= at <= until]
        points = [since, *inside, until]
        return max(b - a for a, b in itertools.pairwise(points))

    def _ask(self, number: int, prompt_tokens: int, max_tokens: int) -> None:
        rng = random.Random(number)
        while not self._is_ending.is_set():
            prompt = [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(prompt_tokens)]
            try:
                self._cluster.complete(prompt, max_tokens, _Noted(self.arrivals))
                self.num_done += 1
            except (FaultError, OSError) as error:
                self.failures.append(f"client {number}: {error}"[:300])
                time.sleep(0.2)  # the server may ask for patience


class _Noted(Answer):
    def __init__(self, arrivals: list[float]) -> None:
        super().__init__()
        self._seen_by_all = arrivals

    def take(self, line: str, seconds: float) -> None:
        before = len(self.tokens)
        super().take(line, seconds)
        if len(self.tokens) > before:
            self._seen_by_all.append(time.monotonic())


class Run:
    def __init__(self, cluster: Cluster, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._options = options
        self.metrics: dict[str, Scalar] = {}
        self.raw: dict[str, Any] = {}
        self.faults: list[str] = []

    def kill(self, victim: str) -> None:
        """Kill it under load, and look at everybody."""
        load = Load(self._cluster, self._options)
        try:
            self._kill_under(load, victim)
        finally:
            hung = load.end(self._options.answer_s)
        if hung:
            self.faults.append(f"{victim} killed: {hung} clients hang")
        self.metrics[f"{victim}_requests_done"] = load.num_done
        self.metrics[f"{victim}_requests_failed"] = len(load.failures)
        self.raw[f"{victim}_failures"] = load.failures[:20]
        for failure in load.failures[:3]:
            print(f"{victim} killed, {failure}", flush=True)
        self._cluster.audit()

    def _kill_under(self, load: Load, victim: str) -> None:
        partner, before = self._partner(victim), self._cluster.instance(victim)
        self._await_transfers(partner, TRANSFERS_BEFORE_KILL)
        reserved = self._catch_transfer(victim)
        os.kill(before["pid"], signal.SIGKILL)
        killed = time.monotonic()
        back_s = self._cluster.wait_back(victim, before["epoch"], self._options.back_s)
        back = time.monotonic()
        silence_s = load.longest_silence(killed, min(back, killed + 10.0))
        self.metrics |= {
            f"{victim}_reserved_blocks_last_heard": reserved,
            f"{victim}_longest_silence_s": round(silence_s, 3),
            f"{victim}_back_after_s": round(back_s, 1),
        }
        if self._others_decode(victim) and silence_s > SERVES_ON_S:
            self.faults.append(f"{victim} killed: no token for {silence_s:.1f} s")
        self._await_transfers(partner, 1)
        self.metrics[f"{victim}_transfers_again_after_s"] = round(time.monotonic() - back, 2)

    def _partner(self, victim: str) -> tuple[str, str]:
        """The link that must work again."""
        return ("P0", victim) if victim.startswith("D") else (victim, "D0")

    def _others_decode(self, victim: str) -> bool:
        states = self._cluster.get("/v1/status")["instances"]
        return any(i["id"] != victim and i["id"].startswith("D") for i in states)

    def _await_transfers(self, pair: tuple[str, str], count: int) -> None:
        """Until so many more transfers have been made over the link."""
        first, deadline = self._transfers(pair), time.monotonic() + 30.0
        while self._transfers(pair) < first + count:
            require(time.monotonic() < deadline, f"nothing is sent from {pair[0]} to {pair[1]}")
            time.sleep(0.05)

    def _transfers(self, pair: tuple[str, str]) -> int:
        link = self._cluster.link(*pair)
        return 0 if link is None else int(link["transfers"])

    def _catch_transfer(self, victim: str) -> int:
        """Wait for a moment in which blocks are reserved for one; returns how many."""
        receivers = [victim] if victim.startswith("D") else ["D0"]
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            stats = [self._cluster.instance(name)["stats"] for name in receivers]
            found: int = sum(s["reserved_blocks"] for s in stats if s is not None)
            if found:
                return found
            time.sleep(0.01)
        return 0


def main() -> int:
    options = _options()
    if options.device == "cuda" and count_gpus() < options.gpus:
        print(f"{count_gpus()} GPUs are visible here, {options.gpus} are needed: nothing is run")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_kill was told to end"))
    metrics: dict[str, Scalar] = {}
    raw: dict[str, Any] = {}
    faults: list[str] = []
    phases = options.phases.split(",")
    if options.device == "cuda" and "link" in phases:
        _attempt("link", faults, lambda: metrics.update(_link(options.gpus - 1)))
    if victims := [phase for phase in phases if phase != "link"]:
        _attempt("cluster", faults, lambda: _clusters(options, victims, metrics, raw, faults))
    raw["faults"] = faults
    settings = settings_of(options)
    publish("gpu_kill", settings=settings, metrics=metrics, raw=raw, out=options.out)
    for fault in faults:
        print(f"FAULT {fault}", flush=True)
    return 1 if faults else 0


def _attempt(name: str, faults: list[str], phase: Any) -> None:
    print(f"════ {name}", flush=True)
    try:
        phase()
    except Exception as error:  # noqa: BLE001 -- the next phase may tell more
        traceback.print_exc()
        faults.append(f"{name}: {type(error).__name__}: {error}")


def _link(peer_gpu: int) -> dict[str, Scalar]:
    from bench._gpu_link import check_link

    return check_link(peer_gpu)


def _clusters(
    options: argparse.Namespace,
    victims: list[str],
    metrics: dict[str, Scalar],
    raw: dict[str, Any],
    faults: list[str],
) -> None:
    settings: dict[str, object] = {
        "engine.max_model_len": options.long_prompt + options.short_prompt + options.long_answer,
        "server.log_level": "info",
        "mempool.hbm_mb": options.hbm_mb,
    }
    if options.device == "cuda":
        settings |= {"engine.load_format": options.load_format, "engine.dtype": "bfloat16"}
        settings |= {"engine.gpu_memory_utilization": 0.4}
        settings |= {"engine.enforce_eager": "true"} if options.eager else {}
    cluster = Cluster(
        options.mode, options.model, options.device, settings, gpus=options.gpus, served_name=MODEL
    )
    run = Run(cluster, options)
    try:
        metrics["start_s"] = round(cluster.wait(options.start_s), 1)
        if options.device == "cuda":
            workers = [i["pid"] for i in cluster.get("/v1/status")["instances"]]
            found, raw["processes"] = cuda_faults(cluster.process.pid, workers)
            faults += found
        for victim in victims:
            run.kill({"D": "D0", "P": "P0"}[victim])
        cluster.stop()
    except BaseException:
        cluster.show_logs()
        raise
    finally:
        cluster.close()
        metrics.update(run.metrics)
        raw.update(run.raw)
        faults += run.faults


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--phases", default="link,D,P")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--mode", default="1P2D-CC")
    made.add_argument("--gpus", type=int, default=2)
    made.add_argument("--model", default="smollm2-135m-instruct")
    made.add_argument("--load-format", default="dummy", help="auto: the model's real weights")
    made.add_argument("--eager", action="store_true", help="neither compile nor graphs")
    made.add_argument("--hbm-mb", type=int, default=16384)
    made.add_argument("--long-prompt", type=int, default=4096)
    made.add_argument("--short-answer", type=int, default=16)
    made.add_argument("--short-prompt", type=int, default=128)
    made.add_argument("--long-answer", type=int, default=1024)
    made.add_argument("--prefill-clients", type=int, default=6)
    made.add_argument("--decode-clients", type=int, default=4)
    made.add_argument("--start-s", type=float, default=200.0, help="until it must be ready")
    made.add_argument("--back-s", type=float, default=120.0, help="until the killed one must be")
    made.add_argument("--answer-s", type=float, default=60.0, help="until all clients have theirs")
    options: argparse.Namespace = made.parse_args()
    if unknown := [p for p in options.phases.split(",") if p not in ("link", "D", "P")]:
        raise SystemExit(f"--phases: {unknown[0]!r}; allowed: link, D, P")
    return options


if __name__ == "__main__":
    sys.exit(main())

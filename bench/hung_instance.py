"""An instance hangs (SIGSTOP) while requests arrive: how long do they wait, and who was sent there?

    python -m bench.hung_instance [--mode 2P1D-CC --stop P0] [--requests 30] [--out FILE]

Requests arrive one after the other, every second one with a prefix that the instance holds which
will be stopped. It stays stopped until some seconds after the last request was sent, and then goes
on; the cluster manager does not end it meanwhile. Shown of each request: the time to the first and
to the last token, where it was placed, in order, and what became of it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from bench._report import parser, publish, settings_of
from bench._serve import get, serving

MODEL = "bench"
FIRST_TOKEN, LAST_TOKEN = 1000, 10_000
PREFIX_TOKENS, SUFFIX_TOKENS = 128, 16
NUM_TOKENS = 8
LONG_S = 5.0
DEADLINE_S = 90.0


class Call(threading.Thread):
    """One request, streamed."""

    def __init__(self, url: str, name: str, prompt: list[int]) -> None:
        super().__init__(daemon=True)
        self.name = name
        self._url = url
        self._body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.ttft_s: float | None = None
        self.jct_s: float | None = None
        self.error = ""

    def run(self) -> None:
        began = time.monotonic()
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            json.dumps(self._body).encode(),
            {"Content-Type": "application/json", "X-Request-Id": self.name},
        )
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
                for line in response:
                    if b'"error"' in line:
                        self.error = line.decode()[:200]
                    elif line.startswith(b"data: {") and self.ttft_s is None:
                        self.ttft_s = time.monotonic() - began
        except (OSError, urllib.error.URLError) as error:
            self.error = f"{error}"[:200]
        self.jct_s = time.monotonic() - began


def prompt_of(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(num_tokens)]


def places(url: str, name: str) -> list[str]:
    """Where the request's prompt was to be computed, in order, and whom it left."""
    try:
        found = get(f"{url}/v1/requests/{name}")
    except urllib.error.HTTPError:
        return ["unknown"]
    (timeline,) = found.get("requests", [found])
    wanted = ("placed", "lost", "silent")
    return [f"{s['name']} {s['instance']}" for s in timeline["steps"] if s["name"] in wanted]


def pid_of(url: str, instance: str) -> int:
    rows = get(f"{url}/v1/status")["instances"]
    return int(next(row["pid"] for row in rows if row["id"] == instance))


def measure(url: str, victim: str, num_requests: int, every_s: float, after_s: float) -> list[Call]:
    """Stop it, send, and let it go on; all calls, ended."""
    rng = random.Random(7)
    prefix = prompt_of(rng, PREFIX_TOKENS)
    for number in range(4):  # whoever is idle computes one: so all have begun, and hold the prefix
        warm = Call(url, f"warm-{number}", prefix + prompt_of(rng, SUFFIX_TOKENS))
        warm.start()
        warm.join()
    pid = pid_of(url, victim)
    calls = []
    os.kill(pid, signal.SIGSTOP)
    try:
        for number in range(num_requests):
            head = prefix if number % 2 else prompt_of(rng, PREFIX_TOKENS)
            call = Call(url, f"call-{number}", head + prompt_of(rng, SUFFIX_TOKENS))
            call.start()
            calls.append(call)
            time.sleep(every_s)
        deadline = time.monotonic() + after_s
        for call in calls:
            call.join(max(0.0, deadline - time.monotonic()))
    finally:
        os.kill(pid, signal.SIGCONT)
    for call in calls:
        call.join(DEADLINE_S)
    return calls


def audit_problems(url: str) -> list[str]:
    """What the instances' books have wrong, once nobody runs."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        status = get(f"{url}/v1/status?audit=true")
        problems = [p for report in status["audit"] for p in report["problems"]]
        holders = [h for report in status["audit"] for h in report["holders"]]
        if problems or not holders:
            return problems
        time.sleep(0.2)
    return [f"still held: {holders}"]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--mode", default="2P1D-CC")
    made.add_argument("--stop", default="P0", help="the instance that hangs")
    made.add_argument("--requests", type=int, default=30)
    made.add_argument("--every-s", type=float, default=0.7)
    made.add_argument(
        "--after-s", type=float, default=10.0, help="how long it hangs after the last"
    )
    made.add_argument("--model", default="smollm2-135m-instruct")
    made.add_argument("--device", default="cpu")
    args = made.parse_args()
    flags = ["--mode", args.mode, "--device", args.device, "--model", args.model]
    settings = {
        "cluster.heartbeat_timeout_s": 300,
        "engine.block_size": 32,
        "models.served_name": MODEL,
    }
    with serving(flags, settings) as url:
        calls = measure(url, args.stop, args.requests, args.every_s, args.after_s)
        rows: list[dict[str, Any]] = [
            {
                "request": call.name,
                "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 2),
                "jct_s": None if call.jct_s is None else round(call.jct_s, 2),
                "places": ", ".join(places(url, call.name)),
                "error": call.error,
            }
            for call in calls
        ]
        problems = audit_problems(url)
    ttfts = sorted(call.ttft_s for call in calls if call.ttft_s is not None)
    jcts = sorted(call.jct_s for call in calls if call.jct_s is not None)
    publish(
        "hung_instance",
        settings=settings_of(args),
        metrics={
            "ttft_p50_s": round(ttfts[len(ttfts) // 2], 3),
            "ttft_max_s": round(ttfts[-1], 3),
            "jct_max_s": round(jcts[-1], 3),
            "num_long": sum(jct > LONG_S for jct in jcts),
            "num_sent_there": sum(f"placed {args.stop}" in row["places"] for row in rows),
            "num_errors": sum(bool(row["error"]) for row in rows),
            "audit": "; ".join(problems) or "clean",
        },
        raw=rows,
        rows=rows,
        out=args.out,
    )


if __name__ == "__main__":
    main()

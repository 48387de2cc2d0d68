"""A `memserve up` that a script watches closely: its logs, its processes, its pools, its answers.

Unlike `_serve.py`, which is for figures, this is for checks: a fault shows all logs, kills are part
of the plan, and every answer's tokens and their times are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
REQUEST_TIMEOUT_S = 100.0
TAIL_LINES = 60


class FaultError(Exception):
    """What must not be."""


def require(condition: bool, problem: str) -> None:
    if not condition:
        raise FaultError(problem)


class Answer:
    """The tokens of one stream, and when they came."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.arrivals: list[float] = []
        """Seconds since the request was sent, one for each event with tokens."""
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


class Cluster:
    """One `memserve up`. All its logs can be shown, also after it has removed them."""

    def __init__(
        self,
        mode: str,
        model: str,
        device: str,
        settings: Mapping[str, object],
        *,
        gpus: int = 1,
        served_name: str,
    ) -> None:
        self.mode = mode
        self.url = ""
        self._served_name = served_name
        self._folder = Path(tempfile.mkdtemp(prefix="memserve-check-"))
        self._logs: dict[str, IO[str]] = {}
        self._is_closing = threading.Event()
        command = [sys.executable, "-m", "memserve", "up", "--no-tui", "--port", "0"]
        command += ["--mode", mode, "--model", model, "--device", device]
        command += ["--gpus", str(gpus)] if device == "cuda" else []
        for key, value in {**settings, "models.served_name": served_name}.items():
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

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=REQUEST_TIMEOUT_S) as answer:
            return json.load(answer)

    def complete(
        self, prompt: Sequence[int], max_tokens: int, answer: Answer | None = None
    ) -> Answer:
        """Greedy, and exactly so long. `answer` fills while it comes, for who cannot wait.

        Raises: FaultError; OSError if the connection breaks.
        """
        body = {
            "model": self._served_name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = answer or Answer()
        begun = time.perf_counter()
        try:
            with self._post("/v1/completions", body) as stream:
                for line in stream:
                    answer.take(line.decode().strip(), time.perf_counter() - begun)
        except urllib.error.HTTPError as error:
            raise FaultError(f"HTTP {error.code}: {error.read().decode()[:500]}") from error
        require(len(answer.tokens) == max_tokens, f"{len(answer.tokens)} tokens of {max_tokens}")
        return answer

    def tokenize(self, text: str) -> list[int]:
        body = {"model": self._served_name, "prompt": text, "add_special_tokens": False}
        with self._post("/tokenize", body) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens

    def _post(self, path: str, body: object) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)

    # ── state ─────────────────────────────────────────────────────────────────────────────────

    def instance(self, name: str) -> dict[str, Any]:
        instances: list[dict[str, Any]] = self.get("/v1/status")["instances"]
        found = [i for i in instances if i["id"] == name]
        require(len(found) == 1, f"no instance {name}")
        return found[0]

    def link(self, source: str, target: str) -> dict[str, Any] | None:
        """What the status says of it; None if there is none now."""
        for link in self.get("/v1/status")["links"]:
            if (link["source"], link["target"]) == (source, target):
                found: dict[str, Any] = link
                return found
        return None

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

    def wait_back(self, name: str, epoch: int, timeout_s: float) -> float:
        """Until the instance has had another life and is ready; seconds from now."""
        begun = time.monotonic()
        while True:
            now = self.instance(name)
            if now["state"] == "ready" and now["epoch"] > epoch:
                return time.monotonic() - begun
            require(now["state"] != "failed", f"{name} does not come back: {now['error']}")
            is_late = time.monotonic() > begun + timeout_s
            require(not is_late, f"{name} is still {now['state']}: {now['error']}")
            time.sleep(0.1)

    # ── the end ───────────────────────────────────────────────────────────────────────────────

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


def tail(text: str) -> str:
    """The last lines, cut to a width that can be read."""
    lines = [line[:400] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-TAIL_LINES:])

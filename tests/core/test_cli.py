"""The command line: exit codes, one-line errors, what is imported, what `status` prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from memserve import cli
from memserve.config import Config
from memserve.errors import StartError
from memserve.messages import PoolStats
from memserve.status import AuditReport, Costs, Counters, InstanceStatus, Snapshot
from memserve.types import InstanceId, InstanceState, Role

ROOT = Path(__file__).resolve().parents[2]
STATS = PoolStats(
    total_blocks=100,
    free_blocks=60,
    historical_blocks=30,
    active_blocks=10,
    reserved_blocks=0,
    quarantined_blocks=0,
    pinned_requests=0,
    running_requests=1,
    waiting_requests=0,
    prefix_hit_tokens=50,
    prefix_query_tokens=100,
)
SNAPSHOT = Snapshot(
    model="some-model",
    mode="1PD",
    caching="none",
    device="cpu",
    is_ready=True,
    uptime_s=5.0,
    instances=[
        InstanceStatus(
            id=InstanceId("PD0"),
            role=Role.COLOCATED,
            state=InstanceState.READY,
            epoch=1,
            pid=1,
            restarts=0,
            stats=STATS,
            stats_age_s=0.2,
            queued_tokens=0,
            running_requests=1,
        )
    ],
    links=[],
    counters=Counters(1, 1, 0, 0, 0, 0, 0, 10, 5, 3),
    costs=Costs("built in", False, "built in", None, 1.0, 1.0),
)


class FakeServer(ThreadingHTTPServer):
    """Answers `/v1/status` with `answer`; remembers the paths and keys it was asked with."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.answer = msgspec.json.encode(SNAPSHOT)
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, FakeServer)
        server.asked.append((self.path, self.headers.get("Authorization")))
        self.send_response(server.status)
        self.end_headers()
        self.wfile.write(server.answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            fake.shutdown()
            thread.join(timeout=10)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No `memserve.toml`, no variables."""
    monkeypatch.chdir(tmp_path)
    for name in ("MEMSERVE_CONFIG", "MEMSERVE_URL", "MEMSERVE_SERVER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "100")


Captured = pytest.CaptureFixture[str]


# ── mistakes ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("up --mode 1p1d", "cluster.mode: '1p1d' is not a mode, did you mean '1P1D'?"),
        ("up --port 99999", "server.port: 99999 (--port) is not allowed"),
        ("up --device tpu", "cluster.device: 'tpu' (--device)"),
        ("up --config absent.toml", "--config: no file 'absent.toml'"),
        ("config --set server.prt=1", "did you mean 'server.port'"),
        ("config --prot 1", "No such option"),
        ("config extra", "unexpected extra argument"),
        ("confgi", "No such command 'confgi'"),
        ("status --url ftp://x", "--url: 'ftp://x' is not an address"),
        ("status --url http://x:port", "is not an address"),
        ("top", "top needs a terminal"),
    ],
)
def test_a_mistake_is_one_line(line: str, words: str, capsys: Captured) -> None:
    assert cli.invoke(line.split()) == cli.EXIT_MISTAKE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("memserve: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_no_command_prints_help(capsys: Captured) -> None:
    assert cli.invoke([]) == cli.EXIT_MISTAKE
    assert "Usage: memserve" in capsys.readouterr().err


def test_version(capsys: Captured) -> None:
    assert cli.invoke(["--version"]) == 0
    assert capsys.readouterr().out.startswith("memserve ")


# ── config ────────────────────────────────────────────────────────────────────────────────────


def test_every_flag_reaches_its_key(capsys: Captured) -> None:
    line = (
        "config --mode 2PD --caching prefill --device cpu --tp 1 --model m --served-name n"
        " --host 0.0.0.0 --port 9000 --log-level debug --set engine.seed=7"
    )
    assert cli.invoke(line.split()) == 0
    text = capsys.readouterr().out
    expected = {
        "mode": ('"2PD"', "--mode"),
        "caching": ('"prefill"', "--caching"),
        "device": ('"cpu"', "--device"),
        "tp": ("1", "--tp"),
        "model": ('"m"', "--model"),
        "served_name": ('"n"', "--served-name"),
        "host": ('"0.0.0.0"', "--host"),
        "port": ("9000", "--port"),
        "log_level": ('"debug"', "--log-level"),
        "seed": ("7", "--set"),
    }
    lines = {line.partition(" = ")[0]: line.partition(" = ")[2] for line in text.splitlines()}
    for key, (value, origin) in expected.items():
        assert [part.strip() for part in lines[key].split("  # ")] == [value, origin]


def test_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "memserve.toml").write_text("[server]\nport = 1234\n")
    monkeypatch.setenv("MEMSERVE_CLUSTER_MODE", "3PD")
    assert cli.invoke(["config"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^port = 1234 +# memserve.toml$", text, re.MULTILINE)
    assert re.search(r'^mode = "3PD" +# MEMSERVE_CLUSTER_MODE$', text, re.MULTILINE)


def test_config_imports_nothing_heavy() -> None:
    code = (
        "import sys; from memserve import cli; code = cli.invoke(['config', '--set',"
        " 'engine.seed=1']); heavy = {'torch', 'vllm', 'aiohttp', 'rich', 'asyncio'};"
        " found = heavy & set(sys.modules); print(found, file=sys.stderr); sys.exit(bool(found))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "seed = 1" in done.stdout


# ── up ────────────────────────────────────────────────────────────────────────────────────────


class FakeOrchestrator(ModuleType):
    """Stands where `memserve.orchestrator` is imported from."""

    def __init__(self, outcome: int | BaseException) -> None:
        super().__init__("memserve.orchestrator")
        self.outcome = outcome
        self.seen: list[tuple[Config, bool]] = []

    def run(self, config: Config, progress: Any, *, show_live_view: bool) -> int:
        self.seen.append((config, show_live_view))
        progress.note("starting")
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.mark.parametrize(
    ("outcome", "code", "error"),
    [
        (0, 0, ""),
        (3, 3, ""),
        (StartError("port 8000 is in use"), 1, "memserve: error: port 8000 is in use\n"),
        (KeyboardInterrupt(), 130, "\n"),  # ends the line with the ^C
    ],
)
def test_up(
    outcome: int | BaseException,
    code: int,
    error: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    fake = FakeOrchestrator(outcome)
    monkeypatch.setitem(sys.modules, "memserve.orchestrator", fake)
    assert cli.invoke(["up", "--mode", "2PD-CC", "--port", "0"]) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("starting\n", error)
    [(config, shows_live_view)] = fake.seen
    assert config.cluster.mode == "2PD-CC"
    assert config.server.port == 0
    assert not shows_live_view  # stdout is no terminal


# ── status ────────────────────────────────────────────────────────────────────────────────────


def test_status(server: FakeServer, capsys: Captured) -> None:
    assert cli.invoke(["status", "--url", server.url + "/"]) == 0
    text = capsys.readouterr().out
    for words in ("some-model", "1PD", "● ready", "PD0", "100", "50%"):
        assert words in text
    assert server.asked == [("/v1/status", None)]


def test_status_as_json(server: FakeServer, capsys: Captured) -> None:
    assert cli.invoke(["status", "--json", "--url", server.url, "--api-key", "k"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(server.answer)
    assert server.asked == [("/v1/status", "Bearer k")]


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["block 7 has two owners"], 1)])
def test_status_with_audit(
    problems: list[str], code: int, server: FakeServer, capsys: Captured
) -> None:
    report = AuditReport(InstanceId("PD0"), STATS, problems, ["request r1"])
    body = msgspec.to_builtins(SNAPSHOT) | {"audit": msgspec.to_builtins([report])}
    server.answer = msgspec.json.encode(body)
    assert cli.invoke(["status", "--audit", "--url", server.url]) == code
    assert (problems or ["held by request r1"])[0] in capsys.readouterr().out
    assert server.asked == [("/v1/status?audit=true", None)]


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (401, b"", "answers HTTP 401 Unauthorized; give its key by --api-key"),
        (503, b"", "answers HTTP 503"),
        (200, b"<html>", "does not speak MemServe's status"),
        (200, b"{}", "does not speak MemServe's status"),
    ],
)
def test_status_of_something_else(
    status: int, answer: bytes, words: str, server: FakeServer, capsys: Captured
) -> None:
    server.status, server.answer = status, answer
    assert cli.invoke(["status", "--url", server.url]) == cli.EXIT_FAILED
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_status_without_a_server(capsys: Captured) -> None:
    with FakeServer() as closed:
        url = closed.url
    assert cli.invoke(["status", "--url", url]) == cli.EXIT_FAILED
    err = capsys.readouterr().err
    assert err == f"memserve: error: no server answers at {url}: Connection refused\n"

"""The bench convention: what is printed, what is written, and what is refused."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from bench import _report
from bench._report import commit, hardware, parser, publish, settings_of


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=120, color_system=None)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_file_has_the_agreed_keys(tmp_path: Path, console: Console) -> None:
    args = parser("A figure.\n\nMore of it.").parse_args(["--out", str(tmp_path / "a" / "b.json")])
    returned = publish(
        "transfer",
        settings={"tokens": [16, 2048], "dtype": "bfloat16"},
        metrics={"push_s": 0.0012, "size_bytes": 1_474_560, "link": "shm"},
        raw=[[0.0011, 0.0013]],
        out=args.out,
        console=console,
    )
    written = json.loads((tmp_path / "a" / "b.json").read_text())
    assert written == returned
    assert list(written) == ["name", "commit", "hardware", "settings", "metrics", "raw"]
    assert written["metrics"] == {"push_s": 0.0012, "size_bytes": 1474560, "link": "shm"}
    assert written["settings"]["tokens"] == [16, 2048]
    assert written["raw"] == [[0.0011, 0.0013]]


def test_metrics_are_the_table_unless_rows_are_given(console: Console) -> None:
    publish("a", settings={}, metrics={"push_s": 0.00123456, "size_bytes": 1474560}, raw=None,
            out=None, console=console)  # fmt: skip
    lines = printed(console)
    assert "push_s" in lines
    assert "0.001235" in lines
    assert "1,474,560" in lines


def test_rows_are_the_table(console: Console) -> None:
    rows: list[dict[str, _report.Scalar]] = [
        {"tokens": 16, "push": "0.2 ms"},
        {"tokens": 2048, "push": "3.1 ms", "note": "aggregated"},
    ]
    publish("a", settings={}, metrics={"hidden_s": 1.0}, raw=None, out=None, rows=rows,
            console=console)  # fmt: skip
    lines = printed(console)
    assert "2,048" in lines
    assert "aggregated" in lines
    assert "–" in lines
    assert "hidden_s" not in lines


def test_figure_that_is_no_number_is_refused_before_it_is_printed(
    tmp_path: Path, console: Console
) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        publish("a", settings={}, metrics={"push_s": float("nan")}, raw=None,
                out=tmp_path / "a.json", console=console)  # fmt: skip
    assert printed(console) == ""
    assert not (tmp_path / "a.json").exists()


def test_unusable_output_path_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for bad, why in ((tmp_path, "is a folder"), (tmp_path / "file" / "x.json", "cannot write")):
        with pytest.raises(SystemExit) as ended:
            parser("A figure.").parse_args(["--out", str(bad)])
        assert ended.value.code == 2
        assert why in capsys.readouterr().err


def test_hardware_names_the_machine() -> None:
    machine = hardware()
    assert list(machine) == ["cpu", "cores", "memory_bytes", "gpus"]
    assert machine["cpu"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_bytes"] > 2**28


def test_gpus_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA GB10, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert hardware()["gpus"] == [
        {"name": "NVIDIA H200", "memory_bytes": 143771 * 2**20},
        {"name": "NVIDIA GB10", "memory_bytes": None},
    ]


def test_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware()["gpus"] == []


def test_commit_says_whether_files_differ(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            check=True, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.stdout.strip()

    assert commit(tmp_path) == "unknown"
    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "--no-verify", "-m", "one")
    head = git("rev-parse", "HEAD")
    assert commit(tmp_path) == head
    (tmp_path / "untracked").touch()
    assert commit(tmp_path) == head
    (tmp_path / "a").write_text("2")
    assert commit(tmp_path) == f"{head}-dirty"


def test_settings_name_no_path() -> None:
    options = argparse.Namespace(
        out=Path("/results/a.json"),
        child=None,
        model="/models/llama/",
        dataset=Path("/data/chats.jsonl"),
        tp=2,
        variants=["tiered"],
    )
    found = {"model": "llama", "dataset": "chats.jsonl", "tp": 2, "variants": ["tiered"]}
    assert settings_of(options, "child") == found
    assert settings_of(argparse.Namespace(out=None, model=None)) == {"model": "bundled"}

"""What every benchmark script does with its results: a table for people, a file for machines.

A script parses its arguments with `parser`, measures, and calls `publish` once::

    args = parser(__doc__).parse_args()
    ...
    publish("startup", settings={...}, metrics={"ready_s": 3.4}, raw=samples, out=args.out)

The file holds `{"name", "commit", "hardware", "settings", "metrics", "raw"}`: `metrics` are the
figures to quote, with their unit at the end of the name (`ready_s`, `size_bytes`); `raw` is what
they were computed from. Standard library, psutil and rich only, so that any script can afford it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import psutil
from rich.console import Console
from rich.table import Table

Scalar: TypeAlias = str | int | float | bool | None

_ROOT = Path(__file__).resolve().parent.parent
_COMMAND_TIMEOUT_S = 10.0


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser that has `--out FILE`; the script adds its own options.

    From now on the script ends by SIGTERM as by Ctrl-C: it stops what it has started.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    made = argparse.ArgumentParser(
        description=(description or "").strip().partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("--out", type=_output_file, metavar="FILE", help="write the results here")
    return made


def settings_of(options: argparse.Namespace, *but: str) -> dict[str, Any]:
    """What a run was asked for, but not `out` and those named.

    Files and the model go by their last name: a path says nothing on another machine.
    """
    named = {k: v for k, v in vars(options).items() if k not in ("out", *but)}
    found = {k: v.name if isinstance(v, Path) else v for k, v in named.items()}
    if "model" in found:
        found["model"] = Path(found["model"] or "").name or "bundled"
    return found


def publish(
    name: str,
    *,
    settings: Mapping[str, Any],
    metrics: Mapping[str, Scalar],
    raw: Any,
    out: Path | None,
    rows: Sequence[Mapping[str, Scalar]] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Print the results and, with `out`, write them. Returns: what was (or would be) written.

    `rows` is what the table shows, a mapping per line with the columns' names as keys; without it
    the table lists `metrics`. Raises: ValueError if a figure is not a finite number.
    """
    result = {
        "name": name,
        "commit": commit(),
        "hardware": hardware(),
        "settings": dict(settings),
        "metrics": dict(metrics),
        "raw": raw,
    }
    text = json.dumps(result, indent=2, allow_nan=False)
    shown = rows if rows is not None else _as_rows(metrics)
    console = console or Console()
    console.print(_title(result), highlight=False)
    console.print(_table(shown))
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    return result


def commit(root: Path = _ROOT) -> str:
    """The commit that is measured, with `-dirty` if files differ from it; `unknown` without git."""
    head = _output_of("git", "-C", str(root), "rev-parse", "HEAD")
    if head is None:
        return "unknown"
    changes = _output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return head if changes == "" else f"{head}-dirty"


def hardware() -> dict[str, Any]:
    """The machine: processor, cores this process may use, memory, GPUs."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
    }


def _output_file(text: str) -> Path:
    """Checked before anything is measured: a long run must not end in a path that is wrong."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from error
    return path


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    fields = (line.partition(":") for line in lines)
    return next(
        (value.strip() for key, _, value in fields if key.strip() == "model name"), "unknown"
    )


def _gpus() -> list[dict[str, str | int | None]]:
    listed = _output_of(
        "nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"
    )
    gpus: list[dict[str, str | int | None]] = []
    for line in (listed or "").splitlines():
        model, _, memory_mib = (part.strip() for part in line.rpartition(","))
        size = int(memory_mib) * 2**20 if memory_mib.isdigit() else None  # some do not tell
        gpus.append({"name": model, "memory_bytes": size})
    return gpus


def _as_rows(metrics: Mapping[str, Scalar]) -> list[dict[str, Scalar]]:
    return [{"metric": key, "value": value} for key, value in metrics.items()]


def _title(result: Mapping[str, Any]) -> str:
    machine = result["hardware"]
    gpus = f", {len(machine['gpus'])} × {machine['gpus'][0]['name']}" if machine["gpus"] else ""
    short, _, is_dirty = result["commit"].partition("-")
    return (
        f"{result['name']} · {short[:10]}{'-dirty' if is_dirty else ''} · "
        f"{machine['cores']} cores {machine['cpu']}{gpus}"
    )


def _table(rows: Sequence[Mapping[str, Scalar]]) -> Table:
    table = Table()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        is_number = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(column, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _cell(value: Scalar) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)

"""`memserve simulate`: options, and what is printed. Everything heavy is imported when it runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memserve.errors import ConfigError

if TYPE_CHECKING:
    from memserve.core.cost_model import CostModel
    from memserve.simulator.setup import Options
    from memserve.simulator.simulation import Setup
    from memserve.simulator.synthetic import Shape

_PATH = click.Path(path_type=Path)
_OTHER_KEYS = ("transfer.reservation_s", "transfer.room_wait_s")
"""Of the configuration, besides [scheduler]: those that change a simulation."""


@click.command()
@click.option("--mode", default="1P1D-CC", show_default=True, help="Instances, as in `up`.")
@click.option("--caching", help="none, prefill, decode or full; else by the mode.")
@click.option("--dataset", type=_PATH, metavar="FILE", help="A trace or conversations, maybe .gz.")
@click.option(
    "--synthetic",
    "shape",
    multiple=True,
    metavar="KEY=VALUE",
    help="Without a data set: documents, document_tokens, hot, system_tokens, turns, user_tokens,"
    " reply_tokens.",
)
@click.option("--requests", type=int, metavar="N", help="At most so many.")
@click.option("--rate", type=float, metavar="R", help="Requests a second.")
@click.option("--copies", type=int, default=1, metavar="N", help="The trace so often at once.")
@click.option("--think-s", type=float, metavar="S", help="Mean time between a session's calls.")
@click.option("--max-context", type=int, default=131_072, show_default=True, metavar="TOKENS")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--model", default="llama-3.1-8b", show_default=True, help="A known shape, or a folder."
)
@click.option("--device", default="H200", show_default=True, help="What the model runs on.")
@click.option("--tp", metavar="N|P=N,D=M", help="GPUs of one instance; 1, or the profile's.")
@click.option("--policy", help="cost, prefix, session, least_loaded or round_robin.")
@click.option("--split", help="auto, always or never.")
@click.option("--profile", type=_PATH, metavar="FILE", help="What `calibrate` measured.")
@click.option("--link", help="ipc, nccl, tcp or shm.")
@click.option("--blocks", type=int, metavar="N", help="KV blocks of an instance.")
@click.option("--block-size", type=int, metavar="TOKENS")
@click.option("--max-num-seqs", type=int, default=256, show_default=True)
@click.option("--slo-ttft-s", type=float, metavar="S", help="Objective that goodput counts.")
@click.option("--slo-tpot-s", type=float, metavar="S", help="Objective that goodput counts.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help=f"Keys of [scheduler], {', '.join(_OTHER_KEYS)}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--csv", "csv_file", type=_PATH, metavar="FILE", help="Write a line per request.")
@click.option("--svg", "svg_file", type=_PATH, metavar="FILE", help="Write what is printed.")
def simulate(
    assignments: tuple[str, ...],
    as_json: bool,
    csv_file: Path | None,
    svg_file: Path | None,
    policy: str | None,
    split: str | None,
    **values: Any,
) -> None:
    """Run a load on simulated instances, with the real scheduler, and show what it would get."""
    import msgspec
    from rich.console import Console

    from memserve import config
    from memserve.simulator import report, setup
    from memserve.simulator.simulation import Simulation

    flags = {"scheduler.policy": ("--policy", policy), "scheduler.split": ("--split", split)}
    given = {key: (flag, text) for key, (flag, text) in flags.items() if text is not None}
    settings = config.load(flags=given, assignments=assignments, environ=os.environ)
    _check_used(assignments, values)
    options = _options(values)
    costs = setup.costs(options)
    calls = setup.load(options)
    cluster = setup.cluster(options, settings.config, costs, calls)
    _check_files(csv_file, svg_file, as_json)
    result = Simulation(cluster, calls, costs, time.perf_counter).run()
    summary = report.summarize(result, options.objectives)
    if csv_file is not None:
        with _written("--csv", csv_file):
            report.write_csv(result.outcomes, csv_file)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary)).decode())
        return
    console = Console(record=svg_file is not None)
    console.print(_title(cluster, costs), soft_wrap=True)
    report.show(summary, result, options.objectives, console)
    if svg_file is not None:
        with _written("--svg", svg_file):
            console.save_svg(str(svg_file), title="memserve simulate")


def _check_used(assignments: tuple[str, ...], values: dict[str, Any]) -> None:
    """Whether all that was typed has a meaning together. Raises: ConfigError."""
    for text in assignments:
        key = text.partition("=")[0].strip()
        if not key.startswith("scheduler.") and key not in _OTHER_KEYS:
            allowed = f"keys of [scheduler], {', '.join(_OTHER_KEYS)}"
            raise ConfigError("--set", f"{key} changes nothing here", allowed)
    if values["dataset"] is not None and values["shape"]:
        raise ConfigError("--synthetic", "there is a --dataset", "one of them")
    context = click.get_current_context()
    for name in ("model", "device"):
        is_typed = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if values["profile"] is not None and is_typed:
            raise ConfigError(f"--{name}", "the --profile says it", "one of them")


def _options(values: dict[str, Any]) -> Options:
    from memserve.simulator.objectives import Objectives
    from memserve.simulator.setup import Options
    from memserve.types import Caching

    caching, tp = values.pop("caching"), values.pop("tp")
    if caching is not None and caching not in {member.value for member in Caching}:
        allowed = ", ".join(member.value for member in Caching)
        raise ConfigError("--caching", f"{caching!r} is no level", allowed)
    return Options(
        caching=None if caching is None else Caching(caching),
        tp=int(tp) if tp is not None and re.fullmatch(r"[+-]?\d{1,9}", tp) else tp,
        synthetic=_shape(values.pop("shape")),
        objectives=Objectives(values.pop("slo_ttft_s"), values.pop("slo_tpot_s")),
        **values,
    )


def _shape(assignments: tuple[str, ...]) -> Shape:
    import msgspec

    from memserve.simulator.synthetic import Shape

    given: dict[str, str] = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or key not in Shape.__struct_fields__:
            raise ConfigError("--synthetic", f"{text!r}", ", ".join(Shape.__struct_fields__))
        given[key] = value
    try:
        return msgspec.convert(given, Shape, strict=False)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$.")
        raise ConfigError(f"--synthetic {where.rstrip('`')}", what) from error


def _title(cluster: Setup, costs: CostModel) -> str:
    sizes = " or ".join(f"{size:,}" for size in sorted({*cluster.blocks_of.values()}))
    what = f"{cluster.mode} · {costs.profile.model} on {costs.profile.device} ({costs.source})"
    return f"{what} · {sizes} blocks of {cluster.hardware.geometry.block_size}"


def _check_files(csv_file: Path | None, svg_file: Path | None, as_json: bool) -> None:
    """Before the run: empties the files. Raises: ConfigError."""
    if svg_file is not None and (as_json or svg_file == csv_file):
        why = "the CSV file too" if svg_file == csv_file else "--json prints no picture"
        raise ConfigError("--svg", f"cannot write {svg_file}: {why}")
    for flag, file in (("--csv", csv_file), ("--svg", svg_file)):
        if file is not None:
            with _written(flag, file):
                file.open("w").close()


@contextmanager
def _written(flag: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(flag, f"cannot write {path}: {error.strerror}") from error

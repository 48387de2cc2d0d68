"""The command line: `memserve up`, `status`, `top`, `config`, `calibrate`, `simulate`.

A user's mistake is one line on stderr and exit code 2; a cluster that cannot be started or reached
is one line and exit code 1. Everything heavy is imported inside the command that needs it, so that
help, mistakes and `memserve config` answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from memserve import __version__
from memserve.errors import ConfigError, MemServeError
from memserve.simulator.command import simulate

if TYPE_CHECKING:
    from memserve.config import Settings

_Command = TypeVar("_Command", bound=Callable[..., Any])

EXIT_FAILED = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130

_FLAGS: tuple[tuple[str, str, str, str], ...] = (
    ("--mode", "cluster.mode", "MODE", "Instances: 1P1D, 2PD, 1P2D+1PD; -CC: context caching."),
    ("--caching", "cluster.caching", "LEVEL", "none, prefill, decode or full; else by the mode."),
    ("--device", "cluster.device", "DEVICE", "auto, cpu or cuda."),
    ("--gpus", "cluster.gpus", "N", "GPUs to use."),
    ("--tp", "cluster.tp", "N", "Ranks (GPUs) of one instance, or of each role: P=2,D=1."),
    ("--model", "models.model", "MODEL", "A bundled name, a Hugging Face id or a folder."),
    ("--served-name", "models.served_name", "NAME", "The model's name in the API."),
    ("--host", "server.host", "HOST", "Address to listen on."),
    ("--port", "server.port", "PORT", "Port to listen on; 0: any free one."),
    ("--log-level", "server.log_level", "LEVEL", "debug, info, warning or error."),
)
"""Flag, key, placeholder, help. Values are checked where all configuration is: `config.py`."""


def main() -> None:
    """The entry point. Ends the process with the command's exit code."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        result = cli.main(list(arguments), prog_name="memserve", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_MISTAKE
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_MISTAKE)
    except ConfigError as error:
        return _fail(str(error), EXIT_MISTAKE)
    except MemServeError as error:
        return _fail(str(error), EXIT_FAILED)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="memserve %(version)s")
def cli() -> None:
    """Serve a language model from instances that share their KV cache."""


def _configuration(command: _Command) -> _Command:
    """The flags that make up a configuration."""
    assign = click.option(
        "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any key, as in the file."
    )
    file = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Instead of $MEMSERVE_CONFIG or ./memserve.toml.",
    )
    command = file(assign(command))
    for flag, key, placeholder, text in reversed(_FLAGS):
        command = click.option(flag, key.replace(".", "_"), metavar=placeholder, help=text)(command)
    return command


def _server(command: _Command) -> _Command:
    """The options that name a running server."""
    url = click.option(
        "--url",
        envvar="MEMSERVE_URL",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="Address of the server; also $MEMSERVE_URL.",
    )
    key = click.option(
        "--api-key",
        envvar="MEMSERVE_SERVER_API_KEY",
        default="",
        help="The server's key; also $MEMSERVE_SERVER_API_KEY.",
    )
    return url(key(command))


def _load(
    config_file: Path | None, assignments: tuple[str, ...], values: dict[str, Any]
) -> Settings:
    from memserve import config

    flags: dict[str, tuple[str, str]] = {}
    for flag, key, _, _ in _FLAGS:
        value = values[key.replace(".", "_")]
        if value is not None:
            flags[key] = (flag, value)
    return config.load(
        config_file=config_file,
        flags=flags,
        assignments=assignments,
        environ=os.environ,
        folder=Path.cwd(),
    )


@cli.command()
@_configuration
@click.option("--no-tui", is_flag=True, help="Plain lines instead of the live view.")
def up(
    config_file: Path | None, assignments: tuple[str, ...], no_tui: bool, **values: str | None
) -> int:
    """Start the instances and serve the OpenAI API."""
    settings = _load(config_file, assignments, values)

    from rich.console import Console

    from memserve.orchestrator import run
    from memserve.progress import Progress

    output = Console()
    progress = Progress(output, Console(stderr=True))
    try:
        return run(settings.config, progress, show_live_view=output.is_terminal and not no_tui)
    finally:
        progress.close()


@cli.command()
@_configuration
def config(config_file: Path | None, assignments: tuple[str, ...], **values: str | None) -> None:
    """Print the configuration in force, and where each value comes from."""
    settings = _load(config_file, assignments, values)

    from memserve.config_text import to_toml

    click.echo(to_toml(settings), nl=False)


@cli.command()
@_configuration
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the profile here, not into the cache folder.",
)
@click.option(
    "--samples",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep the measurements in this file.",
)
def calibrate(
    config_file: Path | None,
    assignments: tuple[str, ...],
    out: Path | None,
    samples: Path | None,
    **values: str | None,
) -> None:
    """Measure the model on this machine, for placing requests. Takes minutes."""
    settings = _load(config_file, assignments, values)

    from memserve import calibration

    profile, path = calibration.calibrate(settings.config, click.echo, out, samples)
    for line in calibration.summary(profile):
        click.echo(line)
    click.echo(f"profile: {path}")


@cli.command()
@_server
@click.option("--json", "as_json", is_flag=True, help="Print the server's JSON as it is.")
@click.option("--audit", is_flag=True, help="Check every instance's pool; exit code 1 if wrong.")
def status(url: str, api_key: str, as_json: bool, audit: bool) -> int:
    """Print what the cluster looks like now."""
    from memserve.status_client import Audited, StatusClient

    client = StatusClient(url, api_key=api_key, timeout_s=30.0 if audit else 5.0)
    body = client.fetch(audit=audit)
    reports = client.decode(body, Audited).audit if audit else []
    if as_json:
        click.echo(body)
    else:
        from rich.console import Console

        from memserve import tui, tui_text
        from memserve.status import Snapshot

        console = Console()
        snapshot = client.decode(body, Snapshot)
        console.print(tui.render(snapshot, None, 0.0, console.width))
        for line in tui_text.audit_lines(reports):
            console.print(line)
    return EXIT_FAILED if any(report.problems for report in reports) else 0


@cli.command()
@_server
def top(url: str, api_key: str) -> None:
    """Watch the cluster: instances, links, rates. `q` ends it."""
    import signal
    from types import FrameType

    from rich.console import Console

    from memserve import tui
    from memserve.status_client import StatusClient

    console = Console()
    if not console.is_terminal:
        raise click.UsageError("top needs a terminal; `memserve status` prints one look")

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # unwinds, so that the terminal is given back

    signal.signal(signal.SIGTERM, end)
    try:
        tui.top(StatusClient(url, api_key=api_key, timeout_s=2.0), console)
    except KeyboardInterrupt:
        return


cli.add_command(simulate)


def _fail(message: str, code: int) -> int:
    one_line = " ".join(message.split())
    click.echo(f"memserve: error: {one_line}", err=True)
    return code

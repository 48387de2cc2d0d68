"""The live view of a cluster in the terminal: `memserve top`, and `memserve up` once it serves.

`render` is pure: snapshots in, a rich renderable out. `View` keeps what it needs between two
frames. `top` polls a server over HTTP, `live_view` runs inside the orchestrator's event loop.
Collaborators: `status.Snapshot`, `status_client.py`, `tui_text.py` (bars, rows).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.table import Table
from rich.text import Text

from memserve import tui_text
from memserve.errors import ProtocolError, UnavailableError
from memserve.status import Snapshot
from memserve.status_client import StatusClient
from memserve.units import format_time

INTERVAL_S = 1.0
_MAX_EVENTS = 200
_QUIT_KEYS = frozenset({"q", "Q"})


def render(
    snapshot: Snapshot,
    previous: Snapshot | None,
    interval_s: float,
    width: int,
    *,
    height: int | None = None,
    events: Sequence[str] = (),
    notice: str | None = None,
    address: str = "",
    hint: str = "",
) -> RenderableType:
    """One frame. Rates are those between `previous` and `snapshot`, `interval_s` apart.

    `notice` replaces the cluster's readiness: what is shown is old. With `height`, the tables and
    the events are cut to fit, and say how much they leave out.
    """
    before = previous if interval_s > 0 else None
    problems = tui_text.problem_lines(snapshot)
    traffic = tui_text.traffic_tables(snapshot, before, interval_s)
    rows = [len(snapshot.instances), len(snapshot.links), len(events)]
    fixed = 8 + 2 * len(traffic) + len(problems) + (2 if rows[1] else 0) + (2 if rows[2] else 0)
    if height is not None:
        rows = tui_text.share_rows(rows, height - fixed - 2)
    parts: list[RenderableType] = [
        tui_text.header(snapshot, notice, address),
        Text(),
        *traffic,
        Text(),
    ]
    parts += [tui_text.instance_table(snapshot, width, rows[0]), *problems]
    if snapshot.links and rows[1]:
        parts += [Text(), tui_text.link_table(snapshot, before, interval_s, width, rows[1])]
    if events and rows[2]:
        parts += [Text(), Text("EVENTS", tui_text.HEAD)]
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in events[-rows[2] :]]
    parts += [Text(), _footer(hint)]
    if notice is not None:  # what is shown is old
        parts[2:-1] = [Styled(part, tui_text.DIM) for part in parts[2:-1]]
    return Group(*parts)


def changes(previous: Snapshot | None, current: Snapshot) -> list[str]:
    """What has changed in the membership, in words."""
    if previous is None:
        return []
    if current.uptime_s < previous.uptime_s:
        return ["the server was started again"]
    lines: list[str] = []
    known = {instance.id: instance for instance in previous.instances}
    for instance in current.instances:
        old = known.pop(instance.id, None)
        if old is None:
            lines.append(f"{instance.id} joined: {instance.word}")
        elif (old.word, old.epoch) != (instance.word, instance.epoch):
            life = f", life {instance.epoch}" if old.epoch != instance.epoch else ""
            why = f": {instance.error}" if instance.error else ""
            lines.append(f"{instance.id} {old.word} → {instance.word}{life}{why}")
    lines += [f"{name} left" for name in known]
    failures = {(link.source, link.target): link.failures for link in previous.links}
    for link in current.links:
        new = link.failures - failures.get((link.source, link.target), 0)
        if new > 0:
            plural = "s" if new > 1 else ""
            lines.append(f"{link.source} → {link.target}: {new} transfer{plural} failed")
    if previous.is_ready != current.is_ready:
        lines.append("the cluster is ready" if current.is_ready else "the cluster is not ready")
    return lines


class View:
    """What one live view remembers: the last two snapshots, events, since when it sees nothing."""

    def __init__(
        self,
        hint: str,
        *,
        address: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_time: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        self._hint = hint
        self._address = address
        self._clock = clock
        self._wall_time = wall_time
        self._current: Snapshot | None = None
        self._previous: Snapshot | None = None
        self._events: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._missing_since: tuple[str, float] | None = None
        self._missing_reason = ""

    def saw(self, snapshot: Snapshot) -> None:
        """A new snapshot."""
        if self._missing_since is not None:
            self.add_event("reachable again")
            self._missing_since = None
        for line in changes(self._current, snapshot):
            self.add_event(line)
        self._previous, self._current = self._current, snapshot

    def missed(self, reason: str) -> None:
        """The server did not answer."""
        self._missing_reason = reason
        if self._missing_since is None:
            self._missing_since = (self._wall_time(), self._clock())
            self.add_event(reason)

    def add_event(self, line: str) -> None:
        self._events.append(f"{self._wall_time()}  {line}")

    def render(self, width: int, height: int | None = None) -> RenderableType:
        """The frame of this moment."""
        notice = None
        if self._missing_since is not None:
            since, at_s = self._missing_since
            notice = f"unreachable since {since} ({format_time(self._clock() - at_s)})"
        if self._current is None:
            return self._render_nothing(notice)
        interval_s = 0.0
        if self._previous is not None and notice is None:
            interval_s = self._current.uptime_s - self._previous.uptime_s
        return render(
            self._current,
            self._previous,
            interval_s,
            width,
            height=height,
            events=tuple(self._events),
            notice=notice,
            address=self._address,
            hint=self._hint,
        )

    def _render_nothing(self, notice: str | None) -> RenderableType:
        lines = [Text.assemble(("MemServe", "bold"), "  ", (notice or "waiting", "bold red"))]
        if notice:
            lines += [Text(), Text(self._missing_reason)]
        return Group(*lines, Text(), Text(self._hint, tui_text.DIM))


def top(client: StatusClient, console: Console) -> None:
    """Poll and draw until `q` or an interrupt; the terminal is given back in any case."""
    view = View("q quit", address=client.url)
    with _Keys() as keys, _screen(console) as live:
        while True:
            try:
                view.saw(client.snapshot())
            except (UnavailableError, ProtocolError) as error:
                view.missed(str(error))
            live.update(view.render(*console.size), refresh=True)
            if keys.wait(INTERVAL_S) in _QUIT_KEYS:
                return


async def live_view(
    get_snapshot: Callable[[], Snapshot],
    stop: asyncio.Event,
    *,
    address: str = "",
    console: Console | None = None,
    interval_s: float = INTERVAL_S,
) -> None:
    """Draw until `stop` is set, from inside the event loop; log lines become events meanwhile.

    Frames are written by a thread: a terminal that is halted (Ctrl-S) must not halt the server.
    """
    console = console or Console()
    view = View("Ctrl-C stops the server", address=address)
    with _logs_as_events(view), _screen(console) as live:
        while not stop.is_set():
            view.saw(get_snapshot())
            frame = view.render(*console.size)
            await asyncio.to_thread(live.update, frame, refresh=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), interval_s)


def _screen(console: Console) -> Live:
    return Live(
        Text(),
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _footer(hint: str) -> Table:
    table = Table.grid(expand=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(no_wrap=True, justify="right")
    table.add_row(tui_text.legend(), Text(hint, tui_text.DIM))
    return table


class _Keys:
    """Single keys from the terminal, without Enter. Does nothing where stdin is no terminal."""

    def __enter__(self) -> _Keys:
        self._fd = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        if self._fd is not None:
            self._saved = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, self._saved)

    def wait(self, timeout_s: float) -> str:
        """The key that was pressed within this time, or an empty text."""
        watched = [] if self._fd is None else [self._fd]
        readable, _, _ = select.select(watched, [], [], timeout_s)
        if not readable or self._fd is None:
            return ""
        data = os.read(self._fd, 1)
        if not data:  # the terminal is gone: select would return at once for ever
            raise KeyboardInterrupt
        return data.decode("ascii", "replace")


class _EventHandler(logging.Handler):
    """Log records become events; the last ones are kept for when the terminal is given back."""

    def __init__(self, view: View) -> None:
        super().__init__()
        self._view = view
        self.kept: deque[logging.LogRecord] = deque(maxlen=_MAX_EVENTS)

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {record.exc_info[1]}"
        first_line = text.partition("\n")[0]
        is_warning = record.levelno >= logging.WARNING
        name = f"{record.levelname.lower()}: " if is_warning else ""
        self._view.add_event(name + first_line)


@contextlib.contextmanager
def _logs_as_events(view: View) -> Iterator[None]:
    """While the view has the screen, nothing else may write on it."""
    root = logging.getLogger()
    on_screen = [
        handler
        for handler in root.handlers
        if type(handler) is logging.StreamHandler and handler.stream in (sys.stderr, sys.stdout)
    ]
    events = _EventHandler(view)
    for handler in on_screen:
        root.removeHandler(handler)
    root.addHandler(events)
    try:
        yield
    finally:
        root.removeHandler(events)
        for handler in on_screen:
            root.addHandler(handler)
            for record in events.kept:
                handler.handle(record)

"""What `memserve up` shows while it starts: a line per instance, then the address and a curl line.

On a terminal the lines are updated in place; elsewhere every change is a line of its own. No
thread redraws them, so that a process that forks stays single-threaded. Collaborators: `cli.py`
makes it, `orchestrator.py` feeds it.
"""

from __future__ import annotations

import json
import shlex

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from memserve.types import InstanceId, InstanceState

MARKS: dict[InstanceState, tuple[str, str]] = {
    InstanceState.STARTING: ("○", "yellow"),
    InstanceState.READY: ("●", "green"),
    InstanceState.LOST: ("✕", "red"),
    InstanceState.FAILED: ("✕", "bold red"),
}
"""A sign and a style for each state; the signs differ without colour where it matters."""


class Progress:
    """Lines of the start-up. Ends with `ready` or `failed`; after that, calls print plain lines."""

    def __init__(self, output: Console, errors: Console) -> None:
        """`output` and `errors`: consoles over stdout and stderr."""
        self._output = output
        self._errors = errors
        self._lines: dict[InstanceId, tuple[str, InstanceState]] = {}
        self._live: Live | None = None

    def instance(self, instance: InstanceId, text: str, state: InstanceState) -> None:
        """What the instance does now; the same line again changes nothing."""
        if self._lines.get(instance) == (text, state):
            return
        self._lines[instance] = (text, state)
        if not self._output.is_terminal:
            self._print(f"{instance}  {text}")
            return
        if self._live is None:
            self._live = Live(console=self._output, auto_refresh=False)
            self._live.start()
        self._live.update(self._table(), refresh=True)

    def note(self, text: str) -> None:
        """A line above those of the instances."""
        self._print(text)

    def ready(self, url: str, model: str, *, has_api_key: bool = False) -> None:
        """The address and one curl line to copy."""
        self.close()
        self._print("")
        self._print(f"MemServe serves {model} at {url}")
        self._print("")
        self._print(curl_line(url, model, has_api_key=has_api_key))
        self._print("")

    def failed(self, text: str) -> None:
        """Why it did not start: one line on stderr."""
        self.close()
        self._errors.print(
            f"memserve: error: {text}", markup=False, highlight=False, soft_wrap=True
        )

    def close(self) -> None:
        """Leave the lines as they are and give the terminal back; idempotent."""
        live, self._live = self._live, None
        self._lines.clear()
        if live is not None:
            live.stop()

    def _print(self, text: str) -> None:
        self._output.print(text, markup=False, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for instance, (text, state) in self._lines.items():
            mark, style = MARKS[state]
            table.add_row(Text(mark, style), Text(instance, "bold"), Text(text))
        return table


def curl_line(url: str, model: str, *, has_api_key: bool = False) -> str:
    """A chat request that a shell takes as it is."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    words = ["curl", "-s", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    line = shlex.join([*words, "-d", json.dumps(body, ensure_ascii=False)])
    return f'{line} -H "Authorization: Bearer $MEMSERVE_SERVER_API_KEY"' if has_api_key else line

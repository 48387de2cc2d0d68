"""A `memserve` whose workers serve between the engine's steps alone, as they did before ADR 0028.

    python -m bench._between_steps up …           as `python -m memserve up …`

What it starts as its zygote is this module again, with the arguments of `memserve.workers.zygote`:
there it takes the wait inside a step away from the workers, which are forked afterwards.

Only for benchmarks: so that both ways are measured in one run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from memserve import cli, zygote_process
from memserve.workers.step_outputs import StepOutputs

_ZYGOTE = "memserve.workers.zygote"


class _Subprocess:
    """The module, for `zygote_process.py`: starts this module in the zygote's place."""

    @staticmethod
    def Popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        own = [__spec__.name if word == _ZYGOTE else word for word in command]
        return subprocess.Popen(own, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def _never(outputs: StepOutputs, serve: Callable[[], None]) -> int:
    """In place of `serve_while_waiting`: nothing ever wakes the loop up."""
    return os.eventfd(0, os.EFD_CLOEXEC)


def main() -> None:
    """Be the orchestrator, or its zygote."""
    if "--fd" in sys.argv:
        StepOutputs.serve_while_waiting = _never  # type: ignore[method-assign, assignment]
        from memserve.workers import zygote

        zygote.main()
        return
    vars(zygote_process)["subprocess"] = _Subprocess()
    cli.main()


if __name__ == "__main__":
    main()

"""Run directories: what one `memserve up` leaves on disk lies in one, which ends with it.

The orchestrator makes it and removes it. The zygote removes it if the orchestrator was killed
(`workers/zygote.py`). If both were, it stays, until somebody starts again: `own` removes those
whose processes are all dead. That is told by a lock, which each process of a run shares, and which
the kernel frees with the last of them, in whatever way it dies.

The lock is in the directory, and taken a moment after it was made. Whoever removes it meanwhile
holds the lock alone while he does; so its maker, when he has the lock, sees that it is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "memserve-"
_LOCK = "lock"


@contextlib.contextmanager
def own() -> Iterator[Path]:
    """A new run directory, only for this user; removed at the end. Removes dead ones before."""
    remove_dead(Path(tempfile.gettempdir()))
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def hold(folder: Path) -> int:
    """Keep a run directory alive; the descriptor that does, also in forks of this process.

    Raises: FileNotFoundError if it is gone.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def remove_dead(parent: Path) -> None:
    """Remove the run directories in it of which no process is left."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not one, not ours, or in use
            _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> None:
    """Raises: OSError if it is not to be removed."""
    if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        logger.debug("removed %s: its processes are dead", folder)
    finally:
        os.close(lock)


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = hold(folder)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another start took it for dead, before it was locked

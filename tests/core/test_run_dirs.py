"""Run directories: a dead one goes at the next start, a living one never."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from memserve import run_dirs

_OWNER = """
import os, sys
from pathlib import Path
from memserve import run_dirs
with run_dirs.own() as folder:
    other = os.fork()
    if other == 0:  # the zygote, which holds it by itself
        run_dirs.hold(folder)
        sys.stdin.read()
    print(other, folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_is_private_and_ends_with_its_owner(temporary: Path) -> None:
    with run_dirs.own() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "P0.log").write_text("said")
    assert not list(temporary.iterdir())


def test_it_is_dead_when_the_last_of_its_processes_is(temporary: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert owner.stdin is not None and owner.stdout is not None
    try:
        pid, path = owner.stdout.readline().split()
        other, folder = int(pid), Path(path)
        (folder / "P0.log").write_text("said")
        run_dirs.remove_dead(temporary)
        assert folder.exists()
        owner.kill()
        owner.wait()
        run_dirs.remove_dead(temporary)
        assert folder.exists(), "the other one lives"
        os.kill(other, 9)
        assert owner.stdout.read() == ""  # both ends are closed: it is gone
        with run_dirs.own() as mine:
            assert not folder.exists() and mine.exists()
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


def test_two_that_run_leave_each_other_alone() -> None:
    with run_dirs.own() as one, run_dirs.own() as two, run_dirs.own() as three:
        assert len({one, two, three}) == 3
        assert one.exists() and two.exists() and three.exists()


def test_one_that_is_taken_for_dead_before_it_is_locked(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start looks at the worst moment; this one makes another directory."""
    flock, seen = fcntl.flock, []

    def after_a_look(lock: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and not seen:
            seen.extend(temporary.iterdir())
            run_dirs.remove_dead(temporary)
        flock(lock, kind)

    monkeypatch.setattr(fcntl, "flock", after_a_look)
    with run_dirs.own() as folder:
        assert len(seen) == 1 and not seen[0].exists()
        assert folder != seen[0] and folder.exists()
        run_dirs.remove_dead(temporary)
        assert folder.exists()


def test_what_is_no_run_directory_stays(temporary: Path) -> None:
    (temporary / "memserve-without-a-lock").mkdir()
    (temporary / "other").mkdir()
    (temporary / "other" / "lock").touch()
    (temporary / "memserve-link").symlink_to(temporary / "other")
    (temporary / "memserve-file").touch()
    before = sorted(temporary.rglob("*"))
    run_dirs.remove_dead(temporary)
    assert sorted(temporary.rglob("*")) == before


def test_what_is_gone_cannot_be_held(temporary: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run_dirs.hold(temporary / "memserve-gone")

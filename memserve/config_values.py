"""Values of configuration keys: into the type of their key, or one error that says what is allowed.

Collaborators: `config.py` has the keys and their types, `config_layers.py` the values.
"""

from __future__ import annotations

import enum
import typing
from types import NoneType, UnionType
from typing import Annotated, Any, Literal

import msgspec

from memserve.config_layers import Layered
from memserve.errors import ConfigError


def convert(key: str, layered: Layered, kind: Any) -> Any:
    """The value in the type of its key, if it can be one. Raises: ConfigError."""
    for value in (layered.value, layered.raw):
        if value is None:
            continue
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            continue
    raise ConfigError(
        key, f"{layered.value!r} ({layered.origin}) is not allowed", allowed_values(kind)
    )


def allowed_values(kind: Any) -> str:
    """What a key of this type may be, in words."""
    if typing.get_origin(kind) is Annotated:
        return str(next(meta.description for meta in kind.__metadata__ if meta.description))
    if typing.get_origin(kind) in (typing.Union, UnionType):
        return " or ".join(
            allowed_values(option) for option in typing.get_args(kind) if option is not NoneType
        )
    if typing.get_origin(kind) is list:
        return f"a list: each {allowed_values(*typing.get_args(kind))}"
    if typing.get_origin(kind) is Literal:
        return ", ".join(typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ", ".join(str(member.value) for member in kind)
    if typing.get_origin(kind) is dict:
        return 'a table of names and folders: { name = "folder" }'
    return {str: "a string"}.get(kind, str(kind))

"""A configuration as TOML text with the origin of every value: `memserve config`."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

import msgspec

from memserve.config import SECTIONS, Settings

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SECRETS = frozenset({"server.api_key", "server.api_keys"})


def to_toml(settings: Settings) -> str:
    """One line per key, `key = value  # origin`; reading it back gives the same configuration.

    What is not set, and what is secret, is a comment.
    """
    lines: list[tuple[str, str]] = []
    for section in settings.config.__struct_fields__:
        values = getattr(settings.config, section)
        if section in SECTIONS:
            values = msgspec.structs.asdict(values)
        lines += [("", "")] if lines else []
        lines.append((f"[{section}]", ""))
        for name, value in values.items():
            key = f"{section}.{name}"
            lines.append((_line(key, name, value), settings.origins[key]))
    column = max(len(text) for text, _ in lines if len(text) <= 48)
    return "".join(
        (f"{text:<{column}}  # {origin}" if origin else text) + "\n" for text, origin in lines
    )


def toml_value(value: object) -> str:
    """A TOML value on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case enum.Enum():
            return toml_value(value.value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case Mapping():
            items = (f"{_toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            return "{" + ", ".join(items) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(toml_value, value)) + "]"
        case _:  # the dates and times of TOML
            return str(value)


def _line(key: str, name: str, value: object) -> str:
    if value is None:
        return f"# {name} is not set"
    if key in _SECRETS and value:
        return f"# {name} is set, and not shown"
    return f"{_toml_key(name)} = {toml_value(value)}"


def _toml_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)

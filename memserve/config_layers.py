"""Where configuration comes from: a TOML file, environment variables, flags, `--set`.

Each reader returns `section.key` → `Layered`; `config.py` merges them and checks the values.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memserve.errors import ConfigError

FILE_NAME = "memserve.toml"
FILE_VARIABLE = "MEMSERVE_CONFIG"
_PREFIX = "MEMSERVE_"


class Layered(msgspec.Struct, frozen=True):
    """A value before its type is known."""

    value: Any
    origin: str
    raw: str | None = None
    """As it was typed, for keys that take a string: `--set models.served_name=7`."""


def find_file(named: Path | None, environ: Mapping[str, str], folder: Path | None) -> Path | None:
    """The file to read, if any. One that was named must exist. Raises: ConfigError."""
    by_variable = environ.get(FILE_VARIABLE)
    if named is None and by_variable:
        named = Path(by_variable)
    if named is not None:
        if not named.is_file():
            key = "--config" if str(named) != by_variable else FILE_VARIABLE
            raise ConfigError(key, f"no file {str(named)!r}")
        return named
    path = folder / FILE_NAME if folder is not None else None
    return path if path is not None and path.is_file() else None


def from_file(path: Path, sections: Iterable[str]) -> dict[str, Layered]:
    """Raises: ConfigError: unreadable, not TOML, an unknown section."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"not valid TOML: {error}") from error
    values: dict[str, Layered] = {}
    for section, table in tables.items():
        if section not in sections:
            raise unknown_section(section, sections)
        if not isinstance(table, dict):
            raise ConfigError(section, f"{table!r} is not a section", f"[{section}] and its keys")
        for name, value in table.items():
            values[f"{section}.{name}"] = Layered(value, _shown(path))
    return values


def from_environ(environ: Mapping[str, str], sections: Iterable[str]) -> dict[str, Layered]:
    """`MEMSERVE_SERVER_PORT=9000` is `server.port`."""
    values: dict[str, Layered] = {}
    for variable, text in environ.items():
        for section in sections:
            prefix = f"{_PREFIX}{section.upper()}_"
            if variable.startswith(prefix):
                name = variable.removeprefix(prefix).lower()
                values[f"{section}.{name}"] = Layered(parse_value(text), variable, text)
    return values


def from_flags(flags: Mapping[str, tuple[str, str]]) -> dict[str, Layered]:
    """`section.key` → (flag, its text)."""
    return {key: Layered(parse_value(text), flag, text) for key, (flag, text) in flags.items()}


def from_assignments(assignments: Sequence[str]) -> dict[str, Layered]:
    """Raises: ConfigError: not `section.key=value`."""
    values: dict[str, Layered] = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError("--set", f"{text!r} is not an assignment", "section.key=value")
        raw = value.strip()
        values[key] = Layered(parse_value(raw), "--set", raw)
    return values


def parse_value(text: str) -> Any:
    """A TOML value; a bare word is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text


def unknown_section(section: str, sections: Iterable[str]) -> ConfigError:
    near = difflib.get_close_matches(section, sections, n=1)
    if near:
        return ConfigError(section, f"unknown section, did you mean [{near[0]}]?")
    return ConfigError(section, "unknown section", ", ".join(sections))


def unknown_key(key: str, known: Iterable[str]) -> ConfigError:
    """With the nearest known key, or else the keys of its section."""
    keys = [other.split(".", 1) for other in known]
    section, _, name = key.rpartition(".")
    in_section = [name for other, name in keys if other == section]
    near = [".".join(other) for other in keys if other[1] == name]
    if in_section:
        similar = difflib.get_close_matches(name, in_section, n=1)
        near += [f"{section}.{other}" for other in similar]
    else:
        near += difflib.get_close_matches(key, map(".".join, keys), n=1)
    if near:
        return ConfigError(key, f"unknown key, did you mean {near[0]!r}?")
    if in_section:
        return ConfigError(
            key, "unknown key", ", ".join(f"{section}.{name}" for name in in_section)
        )
    sections = sorted({other for other, _ in keys} | {"engine"})
    return ConfigError(key, "unknown key", f"section.key, in the sections {', '.join(sections)}")


def _shown(path: Path) -> str:
    """Short where it can be: relative to the working folder."""
    text = os.path.relpath(path)
    return str(path) if text.startswith("..") else text

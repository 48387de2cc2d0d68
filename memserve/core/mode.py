"""Modes: how many instances of each kind, and whether context caching is on.

    mode   = groups [ "-CC" ]
    groups = group { "+" group }
    group  = n "P" m "D"     n prefill and m decode instances
           | n "PD"          n colocated instances

`2PD`, `1P1D`, `1P2D-CC`, `1P2D+1PD-CC`. The suffix `-CC` turns all of context caching on (the
paper's PD-Caching-3); without it nothing is kept between requests.
"""

from __future__ import annotations

import re

import msgspec

from memserve.errors import ConfigError
from memserve.types import Caching, InstanceId, Role

GRAMMAR = "groups <n>P<m>D or <n>PD joined by '+', then '-CC' for context caching"
MAX_INSTANCES = 64
"""Over the whole mode: more would be a typing error rather than a machine."""

_COUNT = "[1-9][0-9]{0,3}"
_GROUP = re.compile(rf"(?P<prefill>{_COUNT})P(?P<decode>{_COUNT})D|(?P<colocated>{_COUNT})PD")
_PIECE = re.compile(r"([0-9]{0,4})(PD|P|D)")
_SUFFIX = "-CC"


class Group(msgspec.Struct, frozen=True):
    """Either prefill and decode instances, at least one of each, or colocated ones."""

    prefill: int = 0
    decode: int = 0
    colocated: int = 0

    def __str__(self) -> str:
        return f"{self.colocated}PD" if self.colocated else f"{self.prefill}P{self.decode}D"


class Mode(msgspec.Struct, frozen=True):
    """A parsed mode; `str(mode)` is its canonical text."""

    groups: tuple[Group, ...]
    has_caching: bool

    def __str__(self) -> str:
        return "+".join(map(str, self.groups)) + (_SUFFIX if self.has_caching else "")

    @property
    def default_caching(self) -> Caching:
        return Caching.FULL if self.has_caching else Caching.NONE

    @property
    def num_instances(self) -> int:
        return sum(group.prefill + group.decode + group.colocated for group in self.groups)

    def count(self, role: Role) -> int:
        """Instances of this kind, over all groups."""
        match role:
            case Role.PREFILL:
                return sum(group.prefill for group in self.groups)
            case Role.DECODE:
                return sum(group.decode for group in self.groups)
            case Role.COLOCATED:
                return sum(group.colocated for group in self.groups)

    def instances(self) -> list[tuple[InstanceId, Role]]:
        """Every instance, group by group; each kind is numbered over the whole mode."""
        made = dict.fromkeys(Role, 0)
        instances: list[tuple[InstanceId, Role]] = []
        for group in self.groups:
            for role, count in (
                (Role.PREFILL, group.prefill),
                (Role.DECODE, group.decode),
                (Role.COLOCATED, group.colocated),
            ):
                for _ in range(count):
                    instances.append((InstanceId(f"{role.value}{made[role]}"), role))
                    made[role] += 1
        return instances


def parse_mode(text: str, max_instances: int = MAX_INSTANCES) -> Mode:
    """Raises: ConfigError, with the grammar and the nearest valid mode."""
    has_caching = text.endswith(_SUFFIX)
    matches = [_GROUP.fullmatch(part) for part in text.removesuffix(_SUFFIX).split("+")]
    groups = tuple(
        Group(**{kind: int(count) for kind, count in match.groupdict().items() if count})
        for match in matches
        if match is not None
    )
    if len(groups) != len(matches):
        raise ConfigError(
            "cluster.mode",
            f"{text!r} is not a mode, did you mean {nearest_mode(text)!r}?",
            GRAMMAR,
        )
    mode = Mode(groups, has_caching)
    if mode.num_instances > max_instances:
        raise ConfigError(
            "cluster.mode",
            f"{text!r} asks for {mode.num_instances} instances",
            f"at most {max_instances}",
        )
    return mode


def nearest_mode(text: str) -> str:
    """A valid mode that is close to what was typed: right letters, counts and order."""
    upper = text.upper()
    wanted = {"P": 0, "D": 0, "PD": 0}
    for count, kind in _PIECE.findall(upper):
        wanted[kind] += max(int(count or 1), 1)
    if wanted["P"] or wanted["D"]:
        wanted["P"], wanted["D"] = max(wanted["P"], 1), max(wanted["D"], 1)
    if not 1 <= sum(wanted.values()) <= MAX_INSTANCES:
        return "1P1D-CC"
    groups: list[Group] = []
    if wanted["P"]:
        groups.append(Group(prefill=wanted["P"], decode=wanted["D"]))
    if wanted["PD"]:
        groups.append(Group(colocated=wanted["PD"]))
    return str(Mode(tuple(groups), "CC" in upper))

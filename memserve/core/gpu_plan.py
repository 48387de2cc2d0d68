"""How many ranks an instance has, and on which GPUs they compute; pure.

GPUs are numbers from 0, as the process sees them. Each rank of an instance has one, neighbours in
that order. Where there are fewer GPUs than ranks, instances share them, dealt out so that no GPU
has more than it must, and that a GPU gets instances of different kinds (`1P1D` on one GPU, `2P2D`
on two; P on GPUs 0 and 1 and D on GPU 0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations

import msgspec

from memserve.errors import ConfigError
from memserve.types import InstanceId, Role

MAX_DEFAULT_TP = 8
"""A machine's GPUs with links between them. More ranks have to be asked for."""
BY_ROLE = r"^(P|D|PD)=[1-9][0-9]*(,(P|D|PD)=[1-9][0-9]*)*$"
"""Tensor parallelism of each role, as text: `P=2,D=1`; roles that it does not name have 1."""

_KEY = "cluster.tp"
_LINKS = {"cpu": ("shm",), "cuda": ("ipc", "nccl")}
"""Device → the kinds of links that reach its memory."""


class GpuPlan(msgspec.Struct, frozen=True):
    """The outcome of `plan_gpus`."""

    gpus_of: dict[InstanceId, tuple[int, ...]]
    """The instance's own GPUs, in the order of its ranks."""
    num_gpus: int
    """How many there are to use."""

    def num_sharing(self, instance: InstanceId) -> int:
        """How many instances its GPUs have to hold, itself included."""
        own = set(self.gpus_of[instance])
        return max(sum(gpu in gpus for gpus in self.gpus_of.values()) for gpu in own)

    @property
    def unused(self) -> tuple[int, ...]:
        """GPUs that no instance has."""
        used = {gpu for gpus in self.gpus_of.values() for gpu in gpus}
        return tuple(gpu for gpu in range(self.num_gpus) if gpu not in used)

    def visible_order(self, instance: InstanceId) -> tuple[int, ...]:
        """All GPUs that some instance has, the instance's own ones first.

        Memory of another process can be mapped only where its GPU is visible, and an engine takes
        the first ones that it sees.
        """
        own = self.gpus_of[instance]
        others = {gpu for gpus in self.gpus_of.values() for gpu in gpus} - set(own)
        return (*own, *sorted(others))


def check_link(kind: str, device: str, plan: GpuPlan | None) -> None:
    """Whether links of this kind, or `auto`, can join the instances. Raises: ConfigError."""
    usable = _LINKS[device]
    if kind not in ("auto", *usable):
        raise ConfigError(
            "transfer.link",
            f"{kind!r} does not reach the memory of device {device}",
            ", ".join(("auto", *usable)),
        )
    if kind == "nccl" and plan is not None:
        for one, other in combinations(plan.gpus_of, 2):
            shared = set(plan.gpus_of[one]) & set(plan.gpus_of[other])
            if shared:
                raise ConfigError(
                    "transfer.link",
                    f"NCCL cannot join {one} and {other}, which share GPU {min(shared)}",
                    "auto, ipc",
                )


def parse_tp(value: int | str, roles: Sequence[Role]) -> dict[Role, int]:
    """Ranks of an instance of each of the mode's roles. Raises: ConfigError."""
    if isinstance(value, int):
        return dict.fromkeys(roles, value)
    known = {role.value: role for role in roles}
    tp_of = dict.fromkeys(roles, 1)
    if re.match(BY_ROLE, value) is None:
        raise ConfigError(_KEY, f"{value!r} is not allowed", "a number, or one a role: P=2,D=1")
    parts = [part.partition("=") for part in value.split(",")]
    if len({name for name, _, _ in parts}) < len(parts):
        raise ConfigError(_KEY, f"{value!r} names a role twice", "once each: P=2,D=1")
    for name, _, number in parts:
        if name not in known:
            raise ConfigError(_KEY, f"{value!r}, but the mode has no {name}", ", ".join(known))
        tp_of[known[name]] = int(number)
    return tp_of


def describe_tp(tp_of: Mapping[Role, int]) -> int | str:
    """What `parse_tp` reads, in its shortest form."""
    degrees = set(tp_of.values())
    if len(degrees) == 1:
        return degrees.pop()
    return ",".join(f"{role.value}={tp}" for role, tp in tp_of.items())


def plan_gpus(
    instances: Sequence[tuple[InstanceId, Role]],
    num_gpus: int,
    tp_of: Mapping[Role, int] | None = None,
) -> GpuPlan:
    """Divide `num_gpus` (at least one) among the instances.

    `tp_of`: GPUs of an instance of each role; None: the same number for all, the largest power of
    two with which nobody shares. Raises: ConfigError for one that has more than there are.
    """
    if tp_of is None:
        tp_of = dict.fromkeys(Role, _largest_fitting(len(instances), num_gpus))
    most = max(tp_of[role] for _, role in instances)
    if most > num_gpus:
        there = "1 GPU is" if num_gpus == 1 else f"{num_gpus} GPUs are"
        allowed = "1" if num_gpus == 1 else f"1 to {num_gpus}"
        raise ConfigError(_KEY, f"{most} asked for, but {there} to be used", allowed)
    load = [0] * num_gpus
    gpus_of: dict[InstanceId, tuple[int, ...]] = {}
    for instance, role in instances:
        gpus = _least_loaded(load, tp_of[role])
        for gpu in gpus:
            load[gpu] += 1
        gpus_of[instance] = tuple(gpus)
    return GpuPlan(gpus_of, num_gpus)


def _least_loaded(load: Sequence[int], count: int) -> range:
    """So many neighbours, with the fewest instances on any of them, then on all of them."""
    places = [range(first, first + count) for first in range(len(load) - count + 1)]
    return min(places, key=lambda place: (max(load[g] for g in place), sum(load[g] for g in place)))


def _largest_fitting(num_instances: int, num_gpus: int) -> int:
    tp = 1
    while 2 * tp * num_instances <= num_gpus and 2 * tp <= MAX_DEFAULT_TP:
        tp *= 2
    return tp


def describe_plan(plan: GpuPlan) -> str:
    """One line for people: who is where, and what stays unused."""
    on: dict[tuple[int, ...], list[str]] = {}
    for instance, gpus in plan.gpus_of.items():
        on.setdefault(gpus, []).append(instance)
    parts = [f"GPU {'+'.join(map(str, gpus))}: {', '.join(who)}" for gpus, who in on.items()]
    if plan.unused:
        parts.append(f"{len(plan.unused)} of {plan.num_gpus} GPUs unused")
    return "; ".join(parts)

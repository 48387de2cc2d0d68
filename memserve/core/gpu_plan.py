"""Which instance computes on which GPUs; pure.

GPUs are numbers from 0, as the process sees them. An instance has `tp` of them to itself,
neighbours in that order. Where there are fewer GPUs than instances, instances of one GPU each share
them, dealt out in turn, so that a GPU gets instances of different kinds (`1P1D` on one GPU, `2P2D`
on two).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memserve.errors import ConfigError
from memserve.types import InstanceId

MAX_TP = 1
"""Tensor parallelism that KV transfers can handle: ranks cannot exchange their parts yet."""


class GpuPlan(msgspec.Struct, frozen=True):
    """The outcome of `plan_gpus`."""

    tp: int
    """GPUs of each instance."""
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


def plan_gpus(
    instances: Sequence[InstanceId],
    num_gpus: int,
    tp: int | None = None,
    *,
    max_tp: int = MAX_TP,
) -> GpuPlan:
    """Divide `num_gpus` (at least one) among the instances.

    `tp`: GPUs of one instance; None: the largest power of two that fits, at most `max_tp`.
    Raises: ConfigError for a `tp` that does not fit, or that is above `max_tp`.
    """
    if tp is None:
        tp = _largest_fitting(len(instances), num_gpus, max_tp)
    if tp > max_tp:
        raise ConfigError(
            "cluster.tp",
            f"{tp} asked for, but instances with tensor parallelism cannot exchange KV yet",
            str(max_tp) if max_tp == 1 else f"1 to {max_tp}",
        )
    if tp > 1 and tp * len(instances) > num_gpus:
        fitting = _largest_fitting(len(instances), num_gpus, max_tp)
        raise ConfigError(
            "cluster.tp",
            f"{len(instances)} instances of {tp} GPUs each do not fit {num_gpus}",
            f"at most {fitting}",
        )
    gpus_of = {
        instance: tuple((index * tp + rank) % num_gpus for rank in range(tp))
        for index, instance in enumerate(instances)
    }
    return GpuPlan(tp, gpus_of, num_gpus)


def _largest_fitting(num_instances: int, num_gpus: int, max_tp: int) -> int:
    tp = 1
    while 2 * tp * num_instances <= num_gpus and 2 * tp <= max_tp:
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

"""What calibration measures: one struct per kind of measurement, serialisable as JSON.

`workers/calibrate.py` makes them, `cost_fit.py` turns them into a profile.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memserve.core.profile import Gemm, ModelShape

UNDISTURBED = 0.25
"""Of the prefills at a point, the one at this share of them counts: a disturbed one only takes
longer."""


class GemmSample(msgspec.Struct, frozen=True):
    """One product."""

    gemm: Gemm
    tokens: int
    seconds: float


class AttentionSample(msgspec.Struct, frozen=True):
    """One layer's attention: `new_tokens` queries after `cached_tokens`, per request.

    One new token each is a decode step, everything else a prefill.
    """

    num_heads: int
    num_kv_heads: int
    new_tokens: int
    cached_tokens: int
    seconds: float
    num_requests: int = 1


class LinearSample(msgspec.Struct, frozen=True):
    """One element-wise operator (`ModelShape.elementwise`)."""

    name: str
    elements: int
    seconds: float


class LinkSample(msgspec.Struct, frozen=True):
    """Moving `size_bytes` over a kind of link."""

    link: str
    size_bytes: int
    seconds: float


class ReduceSample(msgspec.Struct, frozen=True):
    """One all-reduce of a message over some ranks."""

    ranks: int
    size_bytes: int
    seconds: float
    launch_s: float
    """What the host of the slowest rank took to launch it."""


class PrefillSample(msgspec.Struct, frozen=True):
    """One whole prefill in a real engine that did nothing else."""

    num_tokens: int
    cached_tokens: int
    seconds: float
    host_s: float | None = None
    """What a fixed piece of work took the host right before: tells a slow moment of it."""


class DecodeSample(msgspec.Struct, frozen=True):
    """One decode step in a real engine."""

    num_requests: int
    context_tokens: int
    seconds: float


class Samples(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a calibration measured, and on what."""

    model: str
    device: str
    dtype: str
    engine: str
    created: str = ""
    tp: int
    shape: ModelShape
    num_sms: int
    chunk_tokens: int
    graph_sizes: tuple[int, ...] = ()
    gemms: list[GemmSample]
    attention: list[AttentionSample]
    elementwise: list[LinearSample]
    links: list[LinkSample]
    reduces: list[ReduceSample] = []
    """None where there is one device only."""
    prefills: list[PrefillSample]
    """All, several at each point: the host's speed varies (`undisturbed`)."""
    decodes: list[DecodeSample]


def undisturbed(
    prefills: Iterable[PrefillSample], share: float = UNDISTURBED
) -> list[PrefillSample]:
    """Of those at each point the one that `share` of them are quicker than."""
    points: dict[tuple[int, int], list[PrefillSample]] = {}
    for sample in prefills:
        points.setdefault((sample.num_tokens, sample.cached_tokens), []).append(sample)
    return [
        sorted(found, key=lambda sample: sample.seconds)[
            min(int(len(found) * share), len(found) - 1)
        ]
        for found in points.values()
    ]

"""What calibration measures: one struct per kind of measurement, serialisable as JSON.

`workers/calibrate.py` makes them, `cost_fit.py` turns them into a profile.
"""

from __future__ import annotations

import msgspec

from memserve.core.profile import Gemm, ModelShape

REDUCE = "reduce"
"""The name of an all-reduce among the link samples."""


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
    """`link`: a kind of link, or `REDUCE`; `size_bytes`: what is sent by one rank."""

    link: str
    size_bytes: int
    seconds: float


class PrefillSample(msgspec.Struct, frozen=True):
    """One whole prefill in a real engine that did nothing else."""

    num_tokens: int
    cached_tokens: int
    seconds: float


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
    prefills: list[PrefillSample]
    decodes: list[DecodeSample]

"""From measurements to a `Profile`: operators first, then how the engine runs them.

`workers/calibrate.py` measures the samples; nothing here measures. Beside the operators' model
stands `WholeModelFit`, which looks at whole prefills only: for comparison (the paper: figure 14).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memserve.core.profile import Gemm, LinkFit, ModelShape, Profile


class GemmSample(msgspec.Struct, frozen=True):
    gemm: Gemm
    tokens: int
    seconds: float


class AttentionSample(msgspec.Struct, frozen=True):
    """One layer: `new_tokens` queries after `cached_tokens`, per request."""

    num_heads: int
    num_kv_heads: int
    new_tokens: int
    cached_tokens: int
    seconds: float
    num_requests: int = 1


class LinearSample(msgspec.Struct, frozen=True):
    name: str
    elements: int
    seconds: float


class LinkSample(msgspec.Struct, frozen=True):
    """`link`: a kind of link, or `reduce` for an all-reduce."""

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


class WholeModelFit(msgspec.Struct, frozen=True):
    """Seconds of a prefill as one polynomial, with nothing known of what is inside it."""

    tp: int
    coefficients: tuple[float, ...]

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        raise NotImplementedError

    def with_tp(self, tp: int) -> WholeModelFit:
        """All it can do: divide by the number of ranks."""
        raise NotImplementedError


def fit_operators(samples: Samples, links: dict[str, LinkFit] | None = None) -> Profile:
    """The profile that these measurements give. `links`: for kinds that were not measured."""
    raise NotImplementedError


def fit_whole_model(prefills: Sequence[PrefillSample], tp: int = 1) -> WholeModelFit:
    raise NotImplementedError

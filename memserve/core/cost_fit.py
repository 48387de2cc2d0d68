"""From measurements to a `Profile`: operators first, then how the engine runs them.

`workers/calibrate.py` measures the samples (`cost_samples.py`); nothing here measures.

All fits are least squares of relative errors (`least_squares.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import (
    UNDISTURBED,
    AttentionSample,
    DecodeSample,
    GemmSample,
    LinearSample,
    LinkSample,
    PrefillSample,
    ReduceSample,
    Samples,
    undisturbed,
)
from memserve.core.least_squares import columns, mean_error, nonnegative, relative
from memserve.core.profile import (
    CALIBRATED,
    AttentionFit,
    Floats,
    Gemm,
    GemmFit,
    LinearFit,
    LinkFit,
    Profile,
    ReduceFit,
    StepFit,
    step_parts,
)

_GPU_TILES = ((64, 128), (128, 128), (128, 256), (256, 128), (192, 128), (256, 256))
_CPU_TILES = tuple((rows, 64) for rows in (1, 4, 8, 16, 32, 64, 128))
_SCALE_PRIOR = 0.03
"""How firmly the engine's scales are held near 1: as a relative error of this part of a prefill."""
_DECODE_SCALE_PRIOR = 0.1
"""The same for decode steps, whose host time and operators are harder to tell apart."""
_DEGREES = (1, 2, 4, 8)
"""Of tensor parallelism, that hosts are predicted for."""
_UNBOUNDED = 1e15
"""Bytes per second where the size made no difference: JSON knows no infinity."""
_ROUNDS = 20
"""After which a fit that swings between two sets of bound samples is taken as it is."""
_MOST_GUESSES = 5
"""Of a floor, to begin with: each costs a fit."""
_COLUMNS = (
    "request_s",
    "prompt_token_s",
    "host_s",
    "gemm_scale",
    "attention_scale",
    "linear_scale",
    "floor_s",
    "graph_floor_s",
)
"""What a prefill's time is linear in, once it is known which of its steps a floor bounds."""


# ── a profile ─────────────────────────────────────────────────────────────────────────────────


def fit_operators(samples: Samples, fallback: Profile) -> Profile:
    """The profile that these measurements give.

    `fallback`: what to take for links and all-reduce where nothing was measured. Raises: ValueError
    if an operator of the model has no samples.
    """
    profile = Profile(
        source=CALIBRATED,
        model=samples.model,
        device=samples.device,
        dtype=samples.dtype,
        engine=samples.engine,
        created=samples.created,
        tp=samples.tp,
        shape=samples.shape,
        num_sms=samples.num_sms,
        chunk_tokens=samples.chunk_tokens,
        graph_sizes=samples.graph_sizes,
        gemms=_fit_gemms(samples),
        attention=_fit_attentions(samples.attention),
        elementwise=_fit_elementwise(samples.elementwise),
        reduce=fit_reduce(samples.reduces) or fallback.reduce,
        links={**fallback.links, **fit_links(samples.links)},
    )
    _check_complete(profile)
    prefills = undisturbed(samples.prefills)
    step = fit_decodes(profile, fit_prefills(profile, prefills), samples.decodes)
    profile = msgspec.structs.replace(profile, step=step)
    if len(prefills) < len(samples.prefills):
        profile = msgspec.structs.replace(profile, steps=_fit_slowest(profile, samples))
    return msgspec.structs.replace(profile, error=_prefill_error(profile, prefills))


def _fit_slowest(profile: Profile, samples: Samples) -> dict[int, StepFit]:
    """By the number of ranks, the engine's steps where the slowest of so many hosts counts.

    Every rank launches its own kernels, and at each all-reduce the others wait for it. If one host
    needs less than t in a share p of all cases, then the slowest of n does in p^n of them. So what
    is undisturbed of n ranks is of one rank not the lower quartile, but the 0.25^(1/n) quantile.
    """
    found = {}
    for ranks in _DEGREES:
        share = UNDISTURBED ** (samples.tp / ranks)
        step = fit_prefills(profile, undisturbed(samples.prefills, share))
        found[ranks] = fit_decodes(profile, step, samples.decodes)
    return found


def _check_complete(profile: Profile) -> None:
    shape = profile.shape
    wanted = {gemm.name for gemm in (*shape.layer_gemms(1), shape.head_gemm(1))}
    wanted |= {"attention", *shape.elementwise(1)}
    found = {fit.gemm.name for fit in profile.gemms} | set(profile.elementwise)
    found |= {"attention"} if profile.attention else set()
    if missing := wanted - found:
        raise ValueError(f"nothing was measured of the operators {', '.join(sorted(missing))}")


def _fit_gemms(samples: Samples) -> tuple[GemmFit, ...]:
    by_gemm: dict[Gemm, list[GemmSample]] = {}
    for sample in samples.gemms:
        by_gemm.setdefault(sample.gemm, []).append(sample)
    return tuple(fit_gemm(gemm, found, samples.num_sms) for gemm, found in by_gemm.items())


def fit_gemm(gemm: Gemm, samples: Sequence[GemmSample], num_sms: int) -> GemmFit:
    """The tile size under which waves explain the samples best, then a correction for the rest."""
    tokens = np.array([sample.tokens for sample in samples], dtype=np.int64)
    seconds = np.array([sample.seconds for sample in samples])
    tiles = _GPU_TILES if num_sms > 1 else _CPU_TILES
    fits = [_fit_waves(gemm, tile, tokens, seconds, num_sms) for tile in tiles]
    best = min(fits, key=lambda fit: mean_error(fit.seconds(tokens, num_sms), seconds))
    ratios = seconds / best.seconds(tokens, num_sms)
    by_tokens: dict[int, list[float]] = {}
    for count, ratio in zip(tokens.tolist(), ratios.tolist(), strict=True):
        by_tokens.setdefault(count, []).append(ratio)
    correction = tuple((count, float(np.mean(found))) for count, found in sorted(by_tokens.items()))
    return msgspec.structs.replace(best, correction=correction)


def _fit_waves(
    gemm: Gemm, tile: tuple[int, int], tokens: np.ndarray, seconds: Floats, num_sms: int
) -> GemmFit:
    """With this tile. Which samples are bound by reading comes out of the fit, in turns."""
    waves = -(-(-(-tokens // tile[0]) * -(-gemm.n // tile[1])) // num_sms)
    ones = np.ones(len(tokens))
    wave_terms = np.stack([waves - 1, ones], axis=1).astype(np.float64)
    read_terms = np.stack([ones, tokens], axis=1).astype(np.float64)
    is_read = waves == 1
    wave_s, read_s = np.zeros(2), np.zeros(2)
    for _ in range(_ROUNDS):
        if not is_read.all():
            wave_s = relative(wave_terms[~is_read], seconds[~is_read])
        if is_read.any():
            read_s = relative(read_terms[is_read], seconds[is_read])
        changed = read_terms @ read_s > wave_terms @ wave_s
        if (changed == is_read).all():
            break
        is_read = changed
    return GemmFit(
        gemm=gemm,
        tile_m=tile[0],
        tile_n=tile[1],
        full_wave_s=float(wave_s[0]),
        last_wave_s=float(wave_s[1]),
        read_s=float(read_s[0]),
        read_token_s=float(read_s[1]),
    )


def _fit_attentions(samples: Iterable[AttentionSample]) -> tuple[AttentionFit, ...]:
    by_heads: dict[tuple[int, int], list[AttentionSample]] = {}
    for sample in samples:
        by_heads.setdefault((sample.num_heads, sample.num_kv_heads), []).append(sample)
    return tuple(_fit_attention(*heads, found) for heads, found in by_heads.items())


def _fit_attention(
    num_heads: int, num_kv_heads: int, samples: Sequence[AttentionSample]
) -> AttentionFit:
    prefills = [sample for sample in samples if sample.new_tokens > 1]
    decodes = [sample for sample in samples if sample.new_tokens == 1]
    if not prefills or not decodes:
        raise ValueError(f"attention with {num_heads} heads: prefill and decode samples are needed")
    new, cached, seconds = columns((s.new_tokens, s.cached_tokens, s.seconds) for s in prefills)
    terms = np.stack([new * cached, new * new, new, cached, np.ones(len(new))], axis=1)
    prefill = relative(terms, seconds, least=0.02)
    requests, context, seconds = columns(
        (s.num_requests, s.num_requests * (s.cached_tokens + 1), s.seconds) for s in decodes
    )
    decode = relative(np.stack([np.ones(len(requests)), requests, context], axis=1), seconds)
    return AttentionFit(num_heads, num_kv_heads, *prefill.tolist(), *decode.tolist())


def _fit_elementwise(samples: Iterable[LinearSample]) -> dict[str, LinearFit]:
    by_name: dict[str, list[LinearSample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    fits = {}
    for name, found in by_name.items():
        elements, seconds = columns((sample.elements, sample.seconds) for sample in found)
        terms = np.stack([np.ones(len(elements)), elements], axis=1)
        fits[name] = LinearFit(*relative(terms, seconds).tolist())
    return fits


def fit_links(samples: Iterable[LinkSample]) -> dict[str, LinkFit]:
    """Kind of link → fixed part and bandwidth. A kind needs two sizes."""
    by_link: dict[str, list[LinkSample]] = {}
    for sample in samples:
        by_link.setdefault(sample.link, []).append(sample)
    fits = {}
    for link, found in by_link.items():
        sizes, seconds = columns((sample.size_bytes, sample.seconds) for sample in found)
        fixed_s, byte_s = relative(np.stack([np.ones(len(sizes)), sizes], axis=1), seconds).tolist()
        if byte_s > 0:
            fits[link] = LinkFit(fixed_s, 1 / byte_s)
    return fits


def fit_reduce(samples: Sequence[ReduceSample]) -> ReduceFit | None:
    """Of the samples with the fewest ranks. None without two sizes."""
    ranks = min((sample.ranks for sample in samples), default=0)
    found = sorted((s for s in samples if s.ranks == ranks), key=lambda one: one.size_bytes)
    if len({sample.size_bytes for sample in found}) < 2:
        return None
    sizes, seconds, launches = columns((s.size_bytes, s.seconds, s.launch_s) for s in found)
    sent = 2 * (ranks - 1) / ranks * sizes
    fixed_s, byte_s = relative(np.stack([np.ones(len(sent)), sent], axis=1), seconds).tolist()
    fit = ReduceFit(
        source=f"measured over {ranks} ranks",
        fixed_s=fixed_s,
        bytes_per_s=1 / byte_s if byte_s > 0 else _UNBOUNDED,
        launch_s=float(launches.min()),
    )
    ratios = seconds / fit.seconds(ranks, sizes)
    correction = zip(sizes.astype(int).tolist(), ratios.tolist(), strict=True)
    return msgspec.structs.replace(fit, correction=tuple(correction))


# ── steps of the engine ───────────────────────────────────────────────────────────────────────


class _Chunk(msgspec.Struct, frozen=True):
    """One step of a measured prefill: its operators' seconds, and which floor it has.

    A CPU launches with the threads that compute, so that the host's time adds to the operators' and
    there is no floor. Before a GPU the launches run beside the operators, a few layers ahead: the
    longer of the two counts.
    """

    gemms_s: float
    linear_s: float
    attention_s: float
    reduce_s: float
    has_graph: bool
    is_on_cpu: bool


def fit_prefills(profile: Profile, samples: Sequence[PrefillSample]) -> StepFit:
    """How the engine turns the profile's operators into prefills.

    Linear once it is known which steps the launches bound; that is guessed, fitted and corrected in
    turns. Without samples the operators are taken as they are.
    """
    if not samples:
        return profile.step
    chunks = [list(_chunks(profile, sample)) for sample in samples]
    seconds = np.array([sample.seconds for sample in samples])
    starts = itertools.product(
        *(_floors(seconds, chunks, has_graph) for has_graph in (False, True))
    )
    fits = [
        _settle(samples, chunks, StepFit(floor_s=floor_s, graph_floor_s=graph_floor_s))
        for floor_s, graph_floor_s in starts
    ]
    return min(fits, key=lambda step: mean_error(_predict(step, samples, chunks), seconds))


def _floors(seconds: Floats, chunks: Sequence[Sequence[_Chunk]], has_graph: bool) -> list[float]:
    """Guesses: none, and what the quickest prefills of that kind took. On a CPU only none."""
    kind = [
        total
        for total, steps in zip(seconds.tolist(), chunks, strict=True)
        if len(steps) == 1 and steps[0].has_graph == has_graph and not steps[0].is_on_cpu
    ]
    return [0.0, *sorted(kind)[:_MOST_GUESSES]]


def _settle(
    samples: Sequence[PrefillSample], chunks: Sequence[Sequence[_Chunk]], step: StepFit
) -> StepFit:
    """From a first guess: which steps are bound, the best fit to that, and again."""
    is_bound: list[list[bool]] = []
    for _ in range(_ROUNDS):
        changed = [_bounds(step, steps) for steps in chunks]
        if changed == is_bound:
            break
        is_bound = changed
        step = _fit_bound(samples, chunks, is_bound)
    return step


def _predict(
    step: StepFit, samples: Sequence[PrefillSample], chunks: Sequence[Sequence[_Chunk]]
) -> Floats:
    """Seconds of the samples' prefills."""
    return np.array(
        [
            step.request_s + sample.num_tokens * step.prompt_token_s + _steps_s(step, steps)
            for sample, steps in zip(samples, chunks, strict=True)
        ]
    )


def _chunks(profile: Profile, sample: PrefillSample) -> Iterator[_Chunk]:
    attention = profile.attention_fit(*profile.shape.heads(profile.tp))
    before = min(sample.cached_tokens, sample.num_tokens - 1)
    while before < sample.num_tokens:
        tokens = min(profile.chunk_tokens, sample.num_tokens - before)
        parts = step_parts(profile, profile.tp, np.array([tokens]))
        yield _Chunk(
            gemms_s=float(parts.gemms_s[0]),
            linear_s=float(parts.linear_s[0]),
            attention_s=profile.shape.num_layers * attention.prefill_s(tokens, before),
            reduce_s=float(parts.reduce_s[0]),
            has_graph=bool(profile.graph_sizes) and tokens <= profile.graph_sizes[-1],
            is_on_cpu=profile.num_sms == 1,
        )
        before += tokens


def _bounds(step: StepFit, chunks: Sequence[_Chunk]) -> list[bool]:
    """Which steps count by their floor, as `CostModel.exec_s` has it."""
    floors_s = sum(_floor_s(step, chunk) for chunk in chunks)
    if _full_s(step, chunks) + _work_s(step, chunks[-1]) < floors_s:
        return [True] * len(chunks)
    return [*(_work_s(step, chunk) < _floor_s(step, chunk) for chunk in chunks[:-1]), False]


def _steps_s(step: StepFit, chunks: Sequence[_Chunk]) -> float:
    floors_s = sum(_floor_s(step, chunk) for chunk in chunks)
    return max(_full_s(step, chunks) + _work_s(step, chunks[-1]), floors_s)


def _full_s(step: StepFit, chunks: Sequence[_Chunk]) -> float:
    """Of all but the last one."""
    return sum(max(_work_s(step, chunk), _floor_s(step, chunk)) for chunk in chunks[:-1])


def _work_s(step: StepFit, chunk: _Chunk) -> float:
    work_s = step.host_s + step.gemm_scale * chunk.gemms_s + step.linear_scale * chunk.linear_s
    return work_s + step.attention_scale * chunk.attention_s + chunk.reduce_s


def _floor_s(step: StepFit, chunk: _Chunk) -> float:
    return step.graph_floor_s if chunk.has_graph else step.floor_s


def _fit_bound(
    samples: Sequence[PrefillSample],
    chunks: Sequence[Sequence[_Chunk]],
    is_bound: Sequence[Sequence[bool]],
) -> StepFit:
    """The fit when it is known which steps are bound by their floor."""
    rows = [_terms(*one) for one in zip(samples, chunks, is_bound, strict=True)]
    reduces_s = np.array(
        [
            sum(chunk.reduce_s for chunk, bound in zip(steps, bounds, strict=True) if not bound)
            for steps, bounds in zip(chunks, is_bound, strict=True)
        ]
    )
    seconds = np.array([sample.seconds for sample in samples])
    is_scale = [name.endswith("_scale") for name in _COLUMNS]
    prior = np.eye(len(_COLUMNS))[is_scale] * _SCALE_PRIOR * len(samples) ** 0.5
    terms = np.vstack([np.array(rows) / seconds[:, None], prior])
    target = np.concatenate([1 - reduces_s / seconds, prior.sum(axis=1)])
    found = nonnegative(terms, target)
    return StepFit(**dict(zip(_COLUMNS, found.tolist(), strict=True)))


def _terms(sample: PrefillSample, steps: Sequence[_Chunk], is_bound: Sequence[bool]) -> list[float]:
    """What each of `_COLUMNS` counts for in this prefill."""
    row = dict.fromkeys(_COLUMNS, 0.0)
    row["request_s"], row["prompt_token_s"] = 1.0, sample.num_tokens
    for chunk, bound in zip(steps, is_bound, strict=True):
        if bound:
            row["graph_floor_s" if chunk.has_graph else "floor_s"] += 1.0
        else:
            row["host_s"] += chunk.is_on_cpu
            row["gemm_scale"] += chunk.gemms_s
            row["attention_scale"] += chunk.attention_s
            row["linear_scale"] += chunk.linear_s
    return list(row.values())


def fit_decodes(profile: Profile, step: StepFit, samples: Sequence[DecodeSample]) -> StepFit:
    """`step`, with what decode steps cost besides their operators."""
    if not samples:
        return step
    attention = profile.attention_fit(*profile.shape.heads(profile.tp))
    rows = np.array([sample.num_requests for sample in samples], dtype=np.int64)
    context = np.array([sample.context_tokens for sample in samples], dtype=np.float64)
    seconds = np.array([sample.seconds for sample in samples])
    parts = step_parts(profile, profile.tp, rows, rows)
    attention_s = attention.decode_fixed_s + rows * attention.decode_request_s
    attention_s = attention_s + context * attention.decode_context_s
    work = parts.gemms_s + parts.linear_s + profile.shape.num_layers * attention_s
    terms = np.stack([np.ones(len(rows)), rows, work], axis=1) / seconds[:, None]
    prior = np.array([[0.0, 0.0, _DECODE_SCALE_PRIOR * len(samples) ** 0.5]])
    target = np.concatenate([np.ones(len(rows)), prior.sum(axis=1)])
    host_s, request_s, scale = nonnegative(np.vstack([terms, prior]), target).tolist()
    return msgspec.structs.replace(
        step, decode_host_s=host_s, decode_request_s=request_s, decode_scale=scale
    )


def _prefill_error(profile: Profile, samples: Sequence[PrefillSample]) -> float | None:
    if not samples:
        return None
    model = CostModel(profile)
    predicted = np.array([model.exec_s(s.num_tokens, s.cached_tokens) for s in samples])
    return mean_error(predicted, np.array([sample.seconds for sample in samples]))

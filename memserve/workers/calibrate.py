"""`python -m memserve.workers.calibrate JOB.json SAMPLES.json`: measure a model on this device.

Started by `memserve/calibration.py`, since the orchestrator imports neither torch nor vllm. First
every operator alone (`operators.py`), at the shapes of one rank for several degrees of tensor
parallelism: all of them fit on one device. Then whole prefills and decode steps in a real engine
(`probe.py`). The samples go into a file; `core/cost_fit.py` makes a profile of them. Progress is
told on stdout, a line each; errors end in a last line on stderr, and status 1.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memserve.core.cost_samples import (
    AttentionSample,
    DecodeSample,
    GemmSample,
    LinearSample,
    LinkSample,
    PrefillSample,
    ReduceSample,
    Samples,
)
from memserve.core.profile import Gemm, ModelShape
from memserve.errors import MemServeError, StartError
from memserve.workers.all_reduce import measure_reduces
from memserve.workers.cores import fastest_cores
from memserve.workers.environment import set_engine_environment
from memserve.workers.spec import CalibrationJob

if TYPE_CHECKING:
    from memserve.workers.operators import Operators
    from memserve.workers.probe import EngineProbe

Report = Callable[[str], None]

DEGREES = (1, 2, 4, 8)
"""Of tensor parallelism: whose shards are measured, where the heads can be divided so."""
_GEMM_TOKENS = (1, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792)
_GEMM_LARGE = (2048, 2560, 3072, 4096, 6144, 8192, 12288, 16384)
_HEAD_ROWS = (1, 4, 16, 64, 256)
_LINEAR_TOKENS = (1, 128, 512, 2048, 8192)
_ATTENTION_NEW = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_ATTENTION_CACHED = (0, 512, 1536, 4096, 8192, 14336)
_DECODES = ((1, 64), (1, 1024), (1, 4096), (4, 512), (8, 256), (16, 384), (32, 512), (64, 512))
_PREFILLS = (24, 96, 200, 320, 448, 620, 800, 1100, 1700, 2600, 4600, 7000, 11000, 15000)
"""Several so short that the launches bound them, in and out of the sizes of CUDA graphs."""
_CACHED_SHARES = (0.0, 0.4, 0.8)
_NEARLY_ALL = 20
"""Tokens left to compute where nearly the whole prompt is cached."""
_COPY_BYTES = (1 << 16, 1 << 20, 1 << 23, 1 << 26)
_DECODE_STEPS = 24
ROUNDS = 8
"""Of prefills: all points in turn, so that a slow minute of the host falls on no point alone."""
_ROUNDS_ON_CPU = 4
"""There one takes ten seconds and more."""
_SHORT_TOKENS = 2048
"""Longer computations are bound by the device, which is steadier: every third round will do."""
_FIRST_LONG, _EVERY_LONG = 1, 3


def calibrate(job: CalibrationJob, report: Report) -> Samples:
    """Measure everything. Imports and initialises the device. Raises: MemServeError."""
    from memserve.workers.probe import EngineProbe

    probe = EngineProbe(job.model, job.engine, job.kv_bytes, job.layout)
    try:
        return measure(probe, job, report)
    finally:
        probe.close()


def measure(probe: EngineProbe, job: CalibrationJob, report: Report) -> Samples:
    """The same with a probe, which is started after the operators unless it was before; leaves it
    running."""
    samples = measure_operators(probe, job, report)
    if job.reduce_ranks:
        reduces = measured_reduces(job.reduce_ranks, report)
        samples = msgspec.structs.replace(samples, reduces=reduces)
    report("starting the engine")
    probe.start()
    if probe.is_on_gpu:  # on a CPU all cores compute
        probe.pin(fastest_cores(1))
    report("warming up")
    probe.warm_up()
    points = prefill_points(probe.longest)
    rounds = []
    count = ROUNDS if probe.is_on_gpu else _ROUNDS_ON_CPU
    for index in range(count):
        report(f"{len(points)} prefills, round {index + 1} of {count}")
        rounds.append(prefill_round(probe, points, index))
    return with_steps(samples, probe, measured(rounds), report)


def with_steps(
    samples: Samples, probe: EngineProbe, prefills: list[PrefillSample], report: Report
) -> Samples:
    """The operators' samples, with what was and now is measured in the started engine."""
    return msgspec.structs.replace(
        samples,
        chunk_tokens=probe.limits.chunk_tokens,
        graph_sizes=probe.limits.graph_sizes,
        prefills=prefills,
        decodes=measure_decodes(probe, report),
    )


# ── operators ─────────────────────────────────────────────────────────────────────────────────


def measure_operators(probe: EngineProbe, job: CalibrationJob, report: Report) -> Samples:
    """Every operator of the probe's model, alone. The engine need not have been started."""
    import torch

    with torch.inference_mode():
        samples = _measure_operators(probe, job, report)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return samples


def _measure_operators(probe: EngineProbe, job: CalibrationJob, report: Report) -> Samples:
    import torch
    import vllm

    from memserve.workers.operators import Operators

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    operators = Operators(device, probe.dtype, probe.shape.head_dim, probe.clock)
    shape, chunk_tokens = probe.shape, probe.limits.chunk_tokens
    degrees = [tp for tp in DEGREES if shape.num_heads % tp == 0 and shape.num_kv_heads % tp == 0]
    return Samples(
        model=job.name,
        device=job.device,
        dtype=job.dtype,
        engine=f"vllm {vllm.__version__}",
        created=job.created,
        tp=1,
        shape=shape,
        num_sms=properties.multi_processor_count if properties else 1,
        chunk_tokens=chunk_tokens,
        gemms=_measure_gemms(operators, shape, degrees, chunk_tokens, report),
        attention=_measure_attention(
            operators, shape, degrees, chunk_tokens, probe.max_model_len, report
        ),
        elementwise=_measure_elementwise(operators, shape, chunk_tokens, report),
        links=[LinkSample("dram", size, operators.copy(size)) for size in _COPY_BYTES],
        prefills=[],
        decodes=[],
    )


def _measure_gemms(
    operators: Operators,
    shape: ModelShape,
    degrees: Iterable[int],
    chunk_tokens: int,
    report: Report,
) -> list[GemmSample]:
    samples = []
    sizes = [tokens for tokens in (*_GEMM_TOKENS, *_GEMM_LARGE) if tokens < chunk_tokens]
    gemms: dict[Gemm, list[int]] = {}
    for tp in degrees:
        gemms |= {gemm: [*sizes, chunk_tokens] for gemm in shape.layer_gemms(tp)}
        gemms[shape.head_gemm(tp)] = list(_HEAD_ROWS)
    for gemm, counts in gemms.items():
        report(f"product {gemm.name} [{gemm.k} × {gemm.n}]")
        weights = operators.make_weights(gemm)
        samples += [
            GemmSample(gemm, tokens, operators.gemm(gemm, tokens, weights)) for tokens in counts
        ]
    return samples


def _measure_attention(
    operators: Operators,
    shape: ModelShape,
    degrees: Iterable[int],
    chunk_tokens: int,
    longest: int,
    report: Report,
) -> list[AttentionSample]:
    news = [tokens for tokens in _ATTENTION_NEW if tokens < chunk_tokens]
    if chunk_tokens <= longest:
        news.append(chunk_tokens)
    prefills = [
        (new, cached, 1) for new in news for cached in _ATTENTION_CACHED if new + cached <= longest
    ]
    decodes = [(1, context, count) for count, context in _DECODES if context <= longest]
    samples = []
    for heads in dict.fromkeys(shape.heads(tp) for tp in degrees):
        report(f"attention with {heads[0]} heads, {heads[1]} of them KV heads")
        for new, cached, count in (*prefills, *decodes):
            seconds = operators.attention(heads, new, cached, count)
            samples.append(AttentionSample(*heads, new, cached, seconds, count))
    return samples


def _measure_elementwise(
    operators: Operators, shape: ModelShape, chunk_tokens: int, report: Report
) -> list[LinearSample]:
    report("element-wise operators")
    samples = []
    widths = shape.elementwise(1)
    for tokens in [count for count in _LINEAR_TOKENS if count <= chunk_tokens]:
        seconds = {
            "norm": 2 * operators.norm(tokens, shape.hidden),  # a layer has two
            "rope": operators.rope(tokens, shape.heads(1)),
            "activation": operators.activation(tokens, widths["activation"]),
        }
        samples += [
            LinearSample(name, tokens * widths[name], found) for name, found in seconds.items()
        ]
    return samples


def measured_reduces(ranks: int, report: Report) -> list[ReduceSample]:
    """All-reduces over that many GPUs; none where they fail: the model is good without them."""
    report(f"all-reduces over {ranks} GPUs")
    try:
        return measure_reduces("cuda", ranks)
    except StartError as error:
        report(f"not measured, what is built in stays: {error}")
        return []


# ── the engine ────────────────────────────────────────────────────────────────────────────────


def prefill_points(longest: int) -> list[tuple[int, int]]:
    """Prompt lengths and how much of each is cached."""
    lengths = [count for count in _PREFILLS if count < longest]
    points = [(count, int(count * share)) for count in lengths for share in _CACHED_SHARES]
    return points + [(count, count - _NEARLY_ALL) for count in lengths if count > 1000]


def prefill_round(
    probe: EngineProbe, points: Sequence[tuple[int, int]], index: int
) -> list[PrefillSample | None]:
    """One prefill at each point that is due, in an order of the round's own: the short ones always,
    the others in some rounds. Where it was not due it is None."""
    is_long_due = index % _EVERY_LONG == _FIRST_LONG
    found: list[PrefillSample | None] = [None] * len(points)
    order = list(range(len(points)))
    random.Random(index).shuffle(order)
    for place in order:
        num_tokens, cached_tokens = points[place]
        if is_long_due or num_tokens - cached_tokens <= _SHORT_TOKENS:
            found[place] = probe.prefill(num_tokens, cached_tokens)
    return found


def measured(rounds: Iterable[Iterable[PrefillSample | None]]) -> list[PrefillSample]:
    """All that the rounds found."""
    return [sample for found in rounds for sample in found if sample is not None]


def measure_decodes(probe: EngineProbe, report: Report) -> list[DecodeSample]:
    """Decode steps at several batches and contexts, as far as they fit."""
    samples = []
    for count, context in _DECODES:
        needed = context + probe.decode_tokens(count, context, _DECODE_STEPS)
        fits = needed <= probe.longest and count * needed <= probe.capacity_tokens
        if fits and count <= probe.limits.max_requests:
            report(f"decode steps of {count} requests with {context} tokens")
            samples.append(probe.decode(count, context, _DECODE_STEPS))
    return samples


# ── the process ───────────────────────────────────────────────────────────────────────────────


def main(arguments: list[str]) -> int:
    """The command line. Returns: the exit status."""
    if len(arguments) != 2:
        print("usage: calibrate JOB.json SAMPLES.json", file=sys.stderr)  # noqa: T201
        return 2
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=CalibrationJob)
    set_engine_environment(os.environ, num_threads=job.num_threads, log_level=job.log_level)
    import torch

    from memserve.workers.main import describe

    torch.set_num_threads(job.num_threads)
    try:
        samples = calibrate(job, lambda text: print(text, flush=True))  # noqa: T201
    except Exception as error:  # noqa: BLE001 - the process's boundary
        if not isinstance(error, MemServeError):
            traceback.print_exc()
        print(describe(error, job.kv_bytes), file=sys.stderr)  # noqa: T201
        return 1
    Path(arguments[1]).write_bytes(msgspec.json.encode(samples))
    return 0


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)  # what libraries say as they are torn down would hide the last line

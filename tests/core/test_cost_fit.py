"""Fitting: from samples of a device whose truth is known back to its costs, at other points too."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench._whole_model import fit_whole_model
from memserve.core.cost_fit import (
    fit_gemm,
    fit_links,
    fit_operators,
    fit_prefills,
    fit_reduce,
)
from memserve.core.cost_model import CostModel
from memserve.core.cost_samples import (
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
from memserve.core.least_squares import nonnegative
from memserve.core.profile import (
    AttentionFit,
    GemmFit,
    LinearFit,
    LinkFit,
    ModelShape,
    Profile,
    ReduceFit,
    StepFit,
)

SHAPE = ModelShape(
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=32000,
)
FLOPS, BYTES = 600e12, 3.5e12
CHUNK = 2048
TOKENS = (1, 16, 64, 128, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
CALIBRATED = (24, 96, 320, 620, 1100, 1700, 2600, 4600, 7000, 11000, 15000)
TESTED = (200, 400, 512, 900, 2048, 3000, 4096, 8192, 12288, 16000)
SHARES = (0.0, 0.4, 0.8, 0.97)

Noise = Callable[[], float]


def true_gemm(gemm: object, **changes: float) -> GemmFit:
    wave_s = 2 * 128 * 256 * gemm.k * 132 / FLOPS  # type: ignore[attr-defined]
    size = 2 * gemm.n * gemm.k  # type: ignore[attr-defined]
    return GemmFit(gemm, 128, 256, wave_s, 0.9 * wave_s, size / BYTES, 2e-9)  # type: ignore[arg-type]


def truth(step: StepFit) -> Profile:
    """A GPU."""
    return Profile(
        source="truth",
        model="m",
        device="GPU",
        dtype="bfloat16",
        engine="e",
        tp=1,
        shape=SHAPE,
        num_sms=132,
        chunk_tokens=CHUNK,
        graph_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
        gemms=tuple(true_gemm(gemm) for gemm in (*SHAPE.layer_gemms(1), SHAPE.head_gemm(1))),
        attention=(AttentionFit(32, 8, 4e-11, 2.1e-11, 5e-10, 1.2e-9, 4e-6, 5e-6, 1e-7, 1.2e-9),),
        elementwise={name: LinearFit(3e-6, 1.5e-12) for name in SHAPE.elementwise(1)},
        reduce=ReduceFit(1e-5, 1.5e11, 3e-5),
        step=step,
        links={"ipc": LinkFit(1e-3, 2e11)},
    )


STEP = StepFit(
    request_s=1.5e-3,
    floor_s=35e-3,
    graph_floor_s=17e-3,
    gemm_scale=1.08,
    attention_scale=0.95,
    linear_scale=0.7,
    prompt_token_s=1.5e-6,
    decode_host_s=8e-4,
    decode_request_s=1e-5,
    decode_scale=1.05,
)


def points(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(length, int(length * share)) for length in lengths for share in SHARES]


def measure(profile: Profile, noise: Noise, degrees: tuple[int, ...] = (1,)) -> Samples:
    """What a calibration of this device would find."""
    gemms, attention = [], []
    for tp in degrees:
        for gemm in SHAPE.layer_gemms(tp):
            found = profile.gemm_fit(gemm).seconds(np.array(TOKENS), 132)
            gemms += [
                GemmSample(gemm, tokens, float(seconds) * noise())
                for tokens, seconds in zip(TOKENS, found, strict=True)
            ]
        head = SHAPE.head_gemm(tp)
        found = profile.gemm_fit(head).seconds(np.array((1, 16, 64)), 132)
        gemms += [
            GemmSample(head, rows, float(seconds) * noise())
            for rows, seconds in zip((1, 16, 64), found, strict=True)
        ]
        heads = SHAPE.heads(tp)
        fit = profile.attention_fit(*heads)
        attention += [
            AttentionSample(*heads, new, cached, fit.prefill_s(new, cached) * noise())
            for new, cached in itertools.product((16, 128, 512, 2048), (0, 1024, 8192, 14000))
        ]
        for count, cached in ((1, 63), (1, 4095), (16, 511), (64, 511)):
            seconds = fit.decode_fixed_s + count * fit.decode_request_s
            seconds += count * (cached + 1) * fit.decode_context_s
            attention.append(AttentionSample(*heads, 1, cached, seconds * noise(), count))
    model = CostModel(profile)
    return Samples(
        model="m",
        device="GPU",
        dtype="bfloat16",
        engine="e",
        tp=1,
        shape=SHAPE,
        num_sms=132,
        chunk_tokens=CHUNK,
        graph_sizes=profile.graph_sizes,
        gemms=gemms,
        attention=attention,
        elementwise=[
            LinearSample(name, width * tokens, (3e-6 + 1.5e-12 * width * tokens) * noise())
            for name, width in SHAPE.elementwise(1).items()
            for tokens in (1, 512, 2048)
        ],
        links=[LinkSample("dram", size, 2e-5 + size / 5e10) for size in (1 << 16, 1 << 26)],
        prefills=[
            PrefillSample(x, cached, model.exec_s(x, cached) * noise())
            for x, cached in points(CALIBRATED)
        ],
        decodes=[
            DecodeSample(count, context, model.decode_step_s(count, context) * noise())
            for count, context in ((1, 64), (1, 4096), (4, 2048), (16, 6000), (64, 30000))
        ],
    )


def noise_of(spread: float) -> Noise:
    rng = random.Random(7)
    return lambda: 1 + rng.uniform(-spread, spread)


def mean_error(found: object, true: CostModel) -> float:
    cost = found.exec_s  # type: ignore[attr-defined]
    return float(np.mean([abs(cost(*at) / true.exec_s(*at) - 1) for at in points(TESTED)]))


# ── the whole way ─────────────────────────────────────────────────────────────────────────────


def test_a_known_device_is_found_again() -> None:
    true = CostModel(truth(STEP))
    profile = fit_operators(measure(true.profile, noise_of(0)), true.profile)
    found = CostModel(profile)
    assert mean_error(found, true) < 0.01
    for count, context in ((2, 1000), (32, 20000), (64, 4000)):
        assert found.decode_step_s(count, context) == pytest.approx(
            true.decode_step_s(count, context), rel=0.02
        )
    assert profile.error is not None
    assert profile.error < 0.01
    assert profile.source == "calibrated"


def test_noise_is_averaged_out() -> None:
    true = CostModel(truth(STEP))
    found = CostModel(fit_operators(measure(true.profile, noise_of(0.04)), true.profile))
    assert mean_error(found, true) < 0.03


def test_the_floors_of_launching_are_found() -> None:
    profile = fit_operators(measure(truth(STEP), noise_of(0)), truth(STEP))
    assert profile.step.floor_s == pytest.approx(35e-3, rel=0.05)
    assert profile.step.graph_floor_s == pytest.approx(17e-3, rel=0.05)


def test_where_nothing_bounds_the_steps_no_floor_is_made_up() -> None:
    true = truth(msgspec.structs.replace(STEP, floor_s=0.0, graph_floor_s=0.0))
    profile = fit_operators(measure(true, noise_of(0.03)), true)
    assert profile.step.floor_s == profile.step.graph_floor_s == 0
    assert mean_error(CostModel(profile, 2), CostModel(true, 2)) < 0.05


def test_a_floor_does_not_shrink_with_more_ranks() -> None:
    true = CostModel(truth(STEP))
    found = CostModel(fit_operators(measure(true.profile, noise_of(0.02)), true.profile))
    launches_s = 2 * SHAPE.num_layers * true.profile.reduce.launch_s
    for new, more_s in ((40, 0.0), (700, launches_s)):  # replayed as a graph, and launched
        expected = found.exec_s(new) + more_s
        assert found.with_tp(8).exec_s(new) == pytest.approx(expected, rel=0.01)
        assert found.with_tp(8).exec_s(new) == pytest.approx(true.exec_s(new) + more_s, rel=0.04)


def test_on_a_cpu_launching_adds_to_computing() -> None:
    step = msgspec.structs.replace(STEP, host_s=8e-3, floor_s=0.0, graph_floor_s=0.0)
    true = msgspec.structs.replace(truth(step), num_sms=1, graph_sizes=())
    waves = [
        msgspec.structs.replace(fit, full_wave_s=fit.full_wave_s / 132, last_wave_s=0.0)
        for fit in true.gemms
    ]
    true = msgspec.structs.replace(true, gemms=tuple(waves))
    model = CostModel(true)
    prefills = [PrefillSample(*at, model.exec_s(*at)) for at in points(CALIBRATED)]
    found = fit_prefills(true, prefills)
    assert found.floor_s == found.graph_floor_s == 0
    assert found.host_s == pytest.approx(8e-3, rel=0.1)


@pytest.mark.parametrize("degrees", [(1,), (1, 2)])
def test_another_degree_is_predicted_and_the_whole_model_fit_cannot(
    degrees: tuple[int, ...],
) -> None:
    true = CostModel(truth(STEP))
    samples = measure(true.profile, noise_of(0.02), degrees)
    found = CostModel(fit_operators(samples, true.profile))
    whole = fit_whole_model(samples.prefills)
    two = true.with_tp(2)
    assert mean_error(found.with_tp(2), two) < 0.05
    assert mean_error(whole.with_tp(2), two) > 2 * mean_error(found.with_tp(2), two)
    assert mean_error(whole, true) < 0.25


def test_of_the_prefills_at_a_point_an_undisturbed_one_counts() -> None:
    times = {(9, 0): [9.0, 3, 1, 2, 8, 7, 5, 4], (9, 4): [2.0, 1.0, 3.0], (5, 0): [5.0]}
    prefills = [PrefillSample(*at, seconds) for at, found in times.items() for seconds in found]
    assert [one.seconds for one in undisturbed(prefills)] == [3, 1, 5]
    assert [one.seconds for one in undisturbed(prefills, 0.5)] == [5, 2, 5]
    assert [one.seconds for one in undisturbed(prefills, 1.0)] == [9, 3, 5]


def slowed(step: StepFit, host: float) -> StepFit:
    """With a host that takes so many times as long."""
    return msgspec.structs.replace(
        step,
        request_s=host * step.request_s,
        floor_s=host * step.floor_s,
        graph_floor_s=host * step.graph_floor_s,
    )


def test_a_step_of_two_ranks_is_launched_by_the_slower_host() -> None:
    rng = random.Random(3)
    true = truth(STEP)
    speeds = [1.0 + 0.8 * rng.random() for _ in range(64)]
    of_one = [CostModel(msgspec.structs.replace(true, step=slowed(STEP, one))) for one in speeds]
    prefills = [
        PrefillSample(*at, rng.choice(of_one).exec_s(*at))
        for at in points(CALIBRATED)
        for _ in range(24)
    ]
    samples = msgspec.structs.replace(measure(true, noise_of(0)), prefills=prefills)
    profile = fit_operators(samples, true)
    hosts = [slowed(STEP, max(rng.choices(speeds, k=2))) for _ in range(64)]
    of_two = [CostModel(msgspec.structs.replace(true, step=step), 2) for step in hosts]
    short = [(count, cached) for count, cached in points(TESTED) if count - cached <= 512]
    measured = undisturbed(
        PrefillSample(*at, model.exec_s(*at)) for at in short for model in of_two
    )

    def missed(profile: Profile) -> float:
        model = CostModel(profile, 2)
        found = [model.exec_s(one.num_tokens, one.cached_tokens) / one.seconds for one in measured]
        return float(np.abs(np.array(found) - 1).mean())

    assert missed(profile) < 0.06
    assert missed(msgspec.structs.replace(profile, steps={})) > 0.1, "one host for both"


def test_as_many_ranks_as_were_measured_need_no_guess() -> None:
    step, two = StepFit(floor_s=1.0), StepFit(floor_s=2.0)
    profile = msgspec.structs.replace(truth(step), steps={1: step, 2: two, 4: step}, tp=2)
    assert profile.step_fit(2) is profile.step
    profile = msgspec.structs.replace(profile, tp=1)
    assert [profile.step_fit(ranks).floor_s for ranks in (1, 2, 3, 4, 8)] == [1, 2, 2, 1, 1]
    assert truth(step).step_fit(8) == step


def test_without_prefills_the_operators_are_taken_as_they_are() -> None:
    samples = measure(truth(StepFit()), noise_of(0))
    samples = msgspec.structs.replace(samples, prefills=[], decodes=[])
    profile = fit_operators(samples, truth(STEP))
    assert profile.step == StepFit()
    assert profile.error is None
    assert mean_error(CostModel(profile), CostModel(truth(StepFit()))) < 0.01


def test_links_that_were_not_measured_come_from_the_fallback() -> None:
    samples = measure(truth(STEP), noise_of(0))
    profile = fit_operators(samples, truth(STEP))
    assert profile.links["ipc"] == LinkFit(1e-3, 2e11)
    assert profile.links["dram"].bytes_per_s == pytest.approx(5e10)
    assert profile.reduce == truth(STEP).reduce


def test_all_reduces_are_those_that_were_measured() -> None:
    """A way for small messages, and another one for large ones."""
    times = {1 << 13: 8e-6, 1 << 17: 9e-6, 1 << 20: 12e-6, 1 << 24: 150e-6, 1 << 26: 590e-6}
    reduces = [ReduceSample(2, size, found, 3e-5) for size, found in times.items()]
    reduces += [ReduceSample(4, size, 9.0, 9.0) for size in times]
    samples = msgspec.structs.replace(measure(truth(STEP), noise_of(0)), reduces=reduces)
    fit = fit_operators(samples, truth(STEP)).reduce
    assert fit.source == "measured over 2 ranks"
    assert fit.launch_s == 3e-5
    sizes = np.array(list(times), dtype=float)
    np.testing.assert_allclose(fit.seconds(2, sizes), list(times.values()))
    between = fit.seconds(2, np.array([1 << 22], dtype=float))[0]
    assert 12e-6 < between < 150e-6


def test_one_size_says_nothing_of_all_reduces() -> None:
    assert fit_reduce([]) is None
    assert fit_reduce([ReduceSample(2, 1 << 20, 1e-5, 0.0)] * 3) is None


def test_an_operator_without_samples_is_named() -> None:
    samples = measure(truth(STEP), noise_of(0))
    gemms = [sample for sample in samples.gemms if sample.gemm.name != "down"]
    with pytest.raises(ValueError, match="operators down"):
        fit_operators(msgspec.structs.replace(samples, gemms=gemms), truth(STEP))


def test_samples_survive_json() -> None:
    samples = measure(truth(STEP), noise_of(0))
    assert msgspec.json.decode(msgspec.json.encode(samples), type=Samples) == samples


# ── single fits ───────────────────────────────────────────────────────────────────────────────


def test_waves_are_recognised_between_the_measured_sizes() -> None:
    gemm = SHAPE.layer_gemms(1)[1]
    true = true_gemm(gemm)
    samples = [GemmSample(gemm, n, float(true.seconds(np.array(n), 132))) for n in TOKENS]
    fit = fit_gemm(gemm, samples, 132)
    between = np.array([700, 1000, 1100, 1400, 1900])
    assert fit.seconds(between, 132) == pytest.approx(true.seconds(between, 132), rel=0.02)
    assert len(set(true.seconds(between, 132))) > 1, "they must need different numbers of waves"


def test_on_a_cpu_half_the_columns_take_half_the_time() -> None:
    whole, half = (SHAPE.layer_gemms(tp)[2] for tp in (1, 2))
    samples = [GemmSample(whole, n, 1e-9 * whole.n * -(-n // 16)) for n in TOKENS]
    fit = fit_gemm(whole, samples, 1)
    tokens = np.array([500, 1000, 2048])
    ratio = fit.resized(half).seconds(tokens, 1) / fit.seconds(tokens, 1)
    assert ratio == pytest.approx([0.5] * 3, rel=0.02)


def test_a_kernel_that_waves_do_not_explain_is_corrected_where_it_was_measured() -> None:
    gemm = SHAPE.layer_gemms(1)[0]
    odd = {n: 1e-6 * (100 + n * (1.3 if n > 500 else 0.4)) for n in TOKENS}
    fit = fit_gemm(gemm, [GemmSample(gemm, n, seconds) for n, seconds in odd.items()], 132)
    assert fit.seconds(np.array(TOKENS), 132) == pytest.approx(list(odd.values()), rel=1e-6)


def test_a_link_of_one_size_is_not_fitted_to_nothing() -> None:
    assert fit_links([]) == {}
    fits = fit_links([LinkSample("shm", 10, 1.0), LinkSample("shm", 10_000_010, 2.0)])
    assert fits["shm"].seconds(5_000_010) == pytest.approx(1.5)


def test_a_whole_model_fit_needs_prefills() -> None:
    with pytest.raises(ValueError, match="needs prefills"):
        fit_whole_model([])


numbers = st.floats(-10, 10, allow_nan=False, width=32)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_coefficients_are_the_best_that_are_not_negative(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(3, 8)), data.draw(st.integers(1, 4))
    terms = np.array(data.draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns)))
    terms = terms.reshape(rows, columns)
    target = np.array(data.draw(st.lists(numbers, min_size=rows, max_size=rows)))
    found = nonnegative(terms, target)
    assert (found >= 0).all()
    best = float(((terms @ found - target) ** 2).sum())
    rng = np.random.default_rng(0)
    for scale in (1e-3, 0.1, 1.0):  # no neighbour is better
        for _ in range(20):
            other = np.maximum(found + scale * rng.normal(size=columns), 0)
            assert float(((terms @ other - target) ** 2).sum()) >= best - 1e-6 * (1 + best)

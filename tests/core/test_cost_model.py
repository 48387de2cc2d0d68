"""The cost model: shapes, operators, prefills in chunks, steps, moves, other degrees."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memserve.core.builtin import BUILT_IN, UNKNOWN_GPU, built_in, spec_for
from memserve.core.cost_model import CostModel
from memserve.core.profile import (
    AttentionFit,
    Gemm,
    GemmFit,
    LinearFit,
    LinkFit,
    ModelShape,
    Profile,
    ReduceFit,
    StepFit,
    step_parts,
)

LLAMA_13B: dict[str, Any] = {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}
LLAMA_8B: dict[str, Any] = LLAMA_13B | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = ModelShape(
    num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, intermediate=512, vocab=1000
)


FREE_REDUCE = ReduceFit(0.0, 1e15)


def make_profile(**changes: Any) -> Profile:
    """A device of round numbers, whose operators all cost something."""
    heads, kv_heads = SMALL.heads(1)
    values: dict[str, Any] = {
        "source": "test",
        "model": "small",
        "device": "none",
        "dtype": "bfloat16",
        "engine": "none",
        "tp": 1,
        "shape": SMALL,
        "num_sms": 4,
        "chunk_tokens": 64,
        "gemms": tuple(
            GemmFit(gemm, 16, 64, gemm.k * 4e-9, gemm.k * 3e-9, gemm.n * gemm.k * 1e-12, 1e-9)
            for gemm in (*SMALL.layer_gemms(1), SMALL.head_gemm(1))
        ),
        "attention": (
            AttentionFit(heads, kv_heads, 2e-9, 1e-9, 1e-8, 5e-9, 1e-6, 1e-6, 1e-7, 1e-9),
        ),
        "elementwise": {name: LinearFit(1e-6, 1e-12) for name in SMALL.elementwise(1)},
        "reduce": ReduceFit(5e-6, 1e10, 1e-6),
        "step": StepFit(request_s=1e-4, host_s=2e-5, prompt_token_s=1e-8, decode_host_s=3e-5),
        "links": {"ipc": LinkFit(1e-3, 2e11), "dram": LinkFit(1e-5, 5e10)},
    }
    return Profile(**(values | changes))


PROFILES = {
    "plain": make_profile(),
    "floor": make_profile(step=StepFit(host_s=1e-5, floor_s=3e-4)),
    "graphs": make_profile(
        graph_sizes=(1, 8, 32), step=StepFit(floor_s=4e-4, graph_floor_s=5e-5, attention_scale=2)
    ),
}
profiles = st.sampled_from(sorted(PROFILES))


# ── shapes ────────────────────────────────────────────────────────────────────────────────────


def test_a_shape_from_a_configuration() -> None:
    shape = ModelShape.from_config(LLAMA_8B)
    assert shape == ModelShape(32, 4096, 32, 8, 128, 14336, 128256, 2)
    assert shape.kv_bytes_per_token == 131072
    assert ModelShape.from_config(LLAMA_13B).kv_bytes_per_token == 819200


def test_a_head_size_of_its_own_and_a_text_part() -> None:
    config = {"text_config": LLAMA_8B | {"head_dim": 64}, "vision_config": {}}
    assert ModelShape.from_config(config).head_dim == 64


def test_without_kv_heads_there_are_as_many_as_heads() -> None:
    config = {key: value for key, value in LLAMA_13B.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(config).num_kv_heads == 40


def test_the_data_type_is_the_configuration_s_unless_it_is_given() -> None:
    assert ModelShape.from_config(LLAMA_13B | {"torch_dtype": "float32"}).dtype_bytes == 4
    assert ModelShape.from_config(LLAMA_13B | {"torch_dtype": "float32"}, 2).dtype_bytes == 2


def test_of_experts_count_those_that_a_token_visits() -> None:
    config = LLAMA_13B | {"num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert ModelShape.from_config(config).intermediate == 8 * 768


def test_what_a_configuration_lacks_is_named() -> None:
    config = {key: LLAMA_13B[key] for key in ("hidden_size", "num_hidden_layers")}
    with pytest.raises(ValueError, match="num_attention_heads, vocab_size, intermediate_size"):
        ModelShape.from_config(config)


def test_a_rank_s_shard() -> None:
    shape = ModelShape.from_config(LLAMA_8B)
    assert shape.layer_gemms(2) == (
        Gemm("qkv", (16 + 2 * 4) * 128, 4096),
        Gemm("o", 4096, 16 * 128),
        Gemm("gate_up", 14336, 4096),
        Gemm("down", 4096, 7168),
    )
    assert shape.head_gemm(2) == Gemm("lm_head", 64128, 4096)
    assert shape.heads(16) == (2, 1)  # KV heads are repeated


# ── operators ─────────────────────────────────────────────────────────────────────────────────


def test_a_product_costs_full_waves_and_a_last_one() -> None:
    fit = GemmFit(Gemm("o", 256, 64), 128, 128, 3.0, 2.0, 0.0, 0.0)
    tokens = np.array([0, 1, 256, 257, 512, 513])
    # 2 tiles per 128 tokens on 4 multiprocessors: a wave takes 256 tokens.
    assert fit.seconds(tokens, 4).tolist() == [0.0, 2.0, 2.0, 5.0, 5.0, 8.0]


def test_few_tokens_cost_what_reading_the_weights_costs() -> None:
    fit = GemmFit(Gemm("o", 256, 64), 128, 128, 3.0, 2.0, 4.0, 0.5)
    assert fit.seconds(np.array([1, 2, 600]), 4).tolist() == [4.5, 5.0, 304.0]


def test_a_correction_is_interpolated_and_holds_beyond_its_ends() -> None:
    fit = GemmFit(Gemm("o", 128, 64), 1024, 128, 1.0, 1.0, 0.0, 0.0, ((16, 1.0), (64, 3.0)))
    assert fit.seconds(np.array([4, 16, 32, 64, 256]), 1).tolist() == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_another_shard_of_a_product() -> None:
    profile = make_profile()
    whole, half = SMALL.layer_gemms(1)[3], SMALL.layer_gemms(2)[3]
    assert (half.n, half.k) == (whole.n, whole.k // 2)
    one, two = profile.gemm_fit(whole), profile.gemm_fit(half)
    assert two.full_wave_s == one.full_wave_s / 2
    assert two.read_s == one.read_s / 2
    columns, half_columns = (profile.gemm_fit(SMALL.layer_gemms(tp)[2]) for tp in (1, 2))
    tokens = np.array([64])
    # Half the columns: half the tiles, each as dear as before.
    assert half_columns.full_wave_s == columns.full_wave_s
    assert half_columns.seconds(tokens, 1)[0] == pytest.approx(
        columns.seconds(tokens, 1)[0] / 2, 0.1
    )


def test_the_fit_of_the_very_shard_is_preferred() -> None:
    half = SMALL.layer_gemms(2)[3]
    measured = GemmFit(half, 32, 32, 1.0, 1.0, 0.0, 0.0)
    profile = make_profile()
    profile = msgspec.structs.replace(profile, gemms=(*profile.gemms, measured))
    assert profile.gemm_fit(half) is measured


def test_a_step_is_padded_to_the_next_graph() -> None:
    parts = step_parts(PROFILES["graphs"], 1, np.array([2, 8, 9, 32, 33]))
    assert parts.gemms_s[0] == parts.gemms_s[1] < parts.gemms_s[3]
    assert parts.linear_s[0] == parts.linear_s[1] < parts.linear_s[2] == parts.linear_s[3]
    assert parts.linear_s[3] < parts.linear_s[4] < 1.2 * parts.linear_s[3]


# ── prefill ───────────────────────────────────────────────────────────────────────────────────


def naive_exec_s(profile: Profile, num_tokens: int, cached_tokens: int) -> float:
    """Chunk by chunk, straight from the definition: step k+1 is launched while k is computed."""
    step, layers = profile.step, profile.shape.num_layers
    attention = profile.attention[0]
    before = min(cached_tokens, num_tokens - 1)
    computed = launched = 0.0
    while before < num_tokens:
        new = min(profile.chunk_tokens, num_tokens - before)
        parts = step_parts(profile, 1, np.array([new]))
        work = step.host_s + step.gemm_scale * parts.gemms_s[0]
        work += step.linear_scale * parts.linear_s[0]
        work += step.attention_scale * layers * attention.prefill_s(new, before)
        has_graph = bool(profile.graph_sizes) and new <= profile.graph_sizes[-1]
        floor = step.graph_floor_s if has_graph else step.floor_s
        before += new
        launched += floor
        computed += max(work, floor) if before < num_tokens else work
    return max(computed, launched) + step.request_s + num_tokens * step.prompt_token_s


@given(profiles, st.integers(1, 1000), st.integers(0, 1000))
@settings(max_examples=200, deadline=None)
def test_a_prefill_is_the_sum_of_its_chunks(name: str, num_tokens: int, cached: int) -> None:
    profile = PROFILES[name]
    expected = naive_exec_s(profile, num_tokens, min(cached, num_tokens))
    assert CostModel(profile).exec_s(num_tokens, cached) == pytest.approx(expected, rel=1e-9)


def test_of_a_cached_prompt_the_last_token_is_computed() -> None:
    model = CostModel(make_profile())
    assert model.exec_s(100, 100) == model.exec_s(100, 99) == model.exec_s(100, 500) > 0
    assert model.exec_s(100, -5) == model.exec_s(100)


def test_an_empty_prompt_costs_nothing() -> None:
    assert CostModel(make_profile()).exec_s(0) == 0


@given(profiles, st.integers(2, 900), st.integers(0, 800))
@settings(max_examples=100, deadline=None)
def test_more_to_compute_never_costs_less(name: str, num_tokens: int, cached: int) -> None:
    model = CostModel(PROFILES[name])
    cost = model.exec_s(num_tokens, cached)
    assert model.exec_s(num_tokens + 1, cached) >= cost * (1 - 1e-9)


def test_what_is_cached_is_saved() -> None:
    model = CostModel(make_profile())
    costs = [model.exec_s(640, cached) for cached in range(0, 640, 64)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < costs[0] / 3


@given(profiles, st.integers(0, 700), st.lists(st.integers(-5, 800), max_size=8))
@settings(max_examples=100, deadline=None)
def test_one_prompt_on_many_instances(name: str, num_tokens: int, cached: list[int]) -> None:
    model = CostModel(PROFILES[name])
    model.observe(300, 0, 1.0)
    expected = [model.exec_s(num_tokens, tokens) for tokens in cached]
    assert model.exec_many(num_tokens, cached).tolist() == pytest.approx(expected, rel=1e-9)


def test_many_instances_keep_their_shape() -> None:
    model = CostModel(make_profile())
    assert model.exec_many(500, np.array([[0, 64, 0], [500, 499, 64]])).shape == (2, 3)
    assert model.exec_many(500, []).shape == (0,)


# ── steps ─────────────────────────────────────────────────────────────────────────────────────


def test_a_step_with_one_chunk_is_that_prefill_s_step() -> None:
    for profile in PROFILES.values():
        model = CostModel(profile)
        assert model.step_s([(50, 200)], begun_tokens=250) == pytest.approx(model.exec_s(250, 200))


def test_a_mixed_step_costs_more_than_either_part_and_less_than_both() -> None:
    model = CostModel(make_profile())
    chunk, decodes = model.step_s([(40, 100)]), model.decode_step_s(8, 900)
    mixed = model.step_s([(40, 100)], 8, 900)
    assert max(chunk, decodes) < mixed < chunk + decodes


def test_a_step_without_chunks_is_a_decode_step() -> None:
    model = CostModel(make_profile())
    assert model.step_s([], 5, 700) == model.decode_step_s(5, 700)


def test_what_surrounds_a_prefill_is_paid_once_for_all_that_begin_together() -> None:
    model = CostModel(make_profile())
    chunks = [(20, 100), (30, 200)]
    more_s = model.step_s(chunks, begun_tokens=350) - model.step_s(chunks)
    assert more_s == pytest.approx(1e-4 + 350 * 1e-8)


def test_a_chunk_of_one_token_is_computed_as_a_decode() -> None:
    """The engine replays the same graph: a hit that leaves one token costs no prefill."""
    model = CostModel(PROFILES["graphs"])
    assert model.step_s([(1, 99)], 3, 500) == pytest.approx(model.decode_step_s(4, 600))
    begun_s = CostModel(make_profile()).step_s([(1, 99)], begun_tokens=100)
    assert begun_s == pytest.approx(CostModel(make_profile()).decode_step_s(1, 100) + 100 * 1e-8)
    beside = model.step_s([(40, 100), (1, 99)], 3, 500)
    assert beside == pytest.approx(model.step_s([(40, 100)], 4, 600))


def test_launching_keeps_a_gpu_s_host_for_a_part_of_a_long_step() -> None:
    graphs = CostModel(PROFILES["graphs"])
    assert (graphs.launch_s(32), graphs.launch_s(33)) == (5e-5, 4e-4)
    unknown = make_profile(step=StepFit(graph_floor_s=5e-5), graph_sizes=(1, 8, 32))
    assert CostModel(unknown).launch_s(33) == 5e-5  # at least what a graph takes
    floor = PROFILES["floor"]
    on_cpu = msgspec.structs.replace(floor, device="cpu-1")
    assert (CostModel(floor).launch_s(8), CostModel(on_cpu).launch_s(8)) == (3e-4, math.inf)


def test_decode_steps_grow_with_requests_and_context() -> None:
    model = CostModel(make_profile())
    assert model.decode_step_s(0, 0) == 0
    assert model.decode_step_s(1, 100) < model.decode_step_s(1, 5000)
    assert model.decode_step_s(8, 5000) < model.decode_step_s(64, 5000)
    assert model.decode_step_s(2048, 0) == pytest.approx(2 * model.decode_step_s(1024, 0))


def test_a_decode_step_reads_the_context_once_per_layer() -> None:
    model = CostModel(make_profile())
    growth = model.decode_step_s(4, 2000) - model.decode_step_s(4, 1000)
    assert growth == pytest.approx(1000 * 1e-9 * SMALL.num_layers)


# ── moves ─────────────────────────────────────────────────────────────────────────────────────


def test_moving_kv() -> None:
    model = CostModel(make_profile())
    assert model.transfer_s(200_000_000, "ipc") == pytest.approx(1e-3 + 1e-3)
    assert model.swap_in_s(50_000_000) == pytest.approx(1e-5 + 1e-3)
    assert model.with_tp(2).swap_in_s(100_000_000) == model.swap_in_s(50_000_000)
    assert model.transfer_s(0, "ipc") == 0
    assert model.kv_bytes(10) == 10 * 2 * 4 * 4 * 32 * 2


def test_an_unknown_link_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'pigeon'; known: dram, ipc"):
        CostModel(make_profile()).transfer_s(1, "pigeon")


# ── other degrees ─────────────────────────────────────────────────────────────────────────────


def test_more_ranks_compute_less_each() -> None:
    model = CostModel(make_profile(step=StepFit(), reduce=FREE_REDUCE))
    ratio = model.with_tp(2).exec_s(640) / model.exec_s(640)
    assert 0.5 <= ratio < 0.75
    assert model.with_tp(2).with_tp(1).exec_s(640) == model.exec_s(640)


def test_ranks_pay_for_their_all_reduces() -> None:
    free = CostModel(make_profile(step=StepFit(), reduce=FREE_REDUCE), 2)
    paid = CostModel(make_profile(step=StepFit(), reduce=ReduceFit(1e-3, 1e9)), 2)
    sent = 64 * SMALL.hidden * 2  # 2·(tp−1)/tp of the activations
    expected = 2 * SMALL.num_layers * (1e-3 + sent / 1e9)
    assert paid.exec_s(64) - free.exec_s(64) == pytest.approx(expected)


def test_a_floor_has_the_launches_of_all_reduces_in_it() -> None:
    step = StepFit(floor_s=1.0, graph_floor_s=0.5)
    reduce = ReduceFit(1e-6, 1e12, launch_s=0.01)
    model = CostModel(make_profile(step=step, reduce=reduce, graph_sizes=(8,)))
    assert model.exec_s(20) == 1.0
    assert model.with_tp(2).exec_s(20) == pytest.approx(1.0 + 2 * SMALL.num_layers * 0.01)
    assert model.with_tp(4).exec_s(20) == model.with_tp(2).exec_s(20)
    assert model.with_tp(2).exec_s(8) == 0.5, "a graph is launched as one"
    on_cpu = make_profile(step=StepFit(host_s=1e-3), reduce=reduce)
    assert on_cpu.floor_s(2) == 0.0


def test_an_all_reduce_is_what_was_measured_at_its_size() -> None:
    fit = ReduceFit(1e-5, 1e11, correction=((1 << 10, 1.0), (1 << 20, 2.0)))
    small, mid, large = fit.seconds(2, np.array([1 << 10, 1 << 15, 1 << 22], dtype=float)).tolist()
    assert small == pytest.approx(1e-5 + (1 << 10) / 1e11)
    assert mid == pytest.approx(1.5 * (1e-5 + (1 << 15) / 1e11))
    assert large == pytest.approx(2 * (1e-5 + (1 << 22) / 1e11))
    assert fit.seconds(4, np.array([1.0 * (1 << 10)]))[0] == pytest.approx(1e-5 + 1536 / 1e11)


def test_a_profile_says_where_it_comes_from() -> None:
    assert built_in(SMALL, "NVIDIA H200").describe().startswith("built in, from the data sheet")
    profile = make_profile(source="calibrated", created="2026-11-30T12:00", device="H200")
    assert profile.is_calibrated
    assert profile.describe().startswith("calibrated at 2026-11-30T12:00 for ")
    assert "H200" in profile.describe()


def test_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed: 1 or more"):
        CostModel(make_profile()).with_tp(0)


# ── observations ──────────────────────────────────────────────────────────────────────────────


def test_observations_correct_slowly() -> None:
    model = CostModel(make_profile())
    before = model.exec_s(300)
    decode, step = model.decode_step_s(4, 500), model.step_s([(10, 10)])
    model.observe(300, 0, 1.5 * before)
    assert before < model.exec_s(300) < 1.05 * before
    assert step < model.step_s([(10, 10)]) < 1.05 * step
    assert model.decode_step_s(4, 500) == decode


def test_observations_converge_on_what_is_true() -> None:
    model = CostModel(make_profile())
    truth = 1.4 * model.exec_s(300, 100)
    for _ in range(200):
        model.observe(300, 100, truth)
    assert model.exec_s(300, 100) == pytest.approx(truth, rel=0.01)


def test_a_slower_host_is_told_from_a_slower_device() -> None:
    """Another day's host takes longer for launches, and the device computes as before."""
    host_bound, device_bound = 8, 2000
    truth = CostModel(PROFILES["floor"])
    truth._host_factor = 1.5
    model = CostModel(PROFILES["floor"])
    assert truth.exec_s(host_bound) > 1.4 * model.exec_s(host_bound)
    for _ in range(200):
        for tokens in (host_bound, device_bound):
            model.observe(tokens, 0, truth.exec_s(tokens))
    assert model.host_factor == pytest.approx(1.5, rel=0.02)
    assert model.device_factor == pytest.approx(1.0, rel=0.02)
    for tokens in (host_bound, 300, device_bound):
        assert model.exec_s(tokens) == pytest.approx(truth.exec_s(tokens), rel=0.02)


@pytest.mark.parametrize("name", PROFILES)
def test_many_cost_the_same_with_corrections(name: str) -> None:
    model = CostModel(PROFILES[name])
    model._host_factor, model._device_factor = 1.3, 0.8
    cached = np.array([0, 1, 100, 299, 300, 800])
    expected = [model.exec_s(1000, tokens) for tokens in cached.tolist()]
    np.testing.assert_allclose(model.exec_many(1000, cached), expected, rtol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 500), st.floats(0, 1e6)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_no_observation_leads_beyond_the_bounds(observed: list[tuple[int, float]]) -> None:
    model = CostModel(PROFILES["plain"])
    for num_tokens, seconds in observed:
        before = model.device_factor, model.host_factor
        model.observe(num_tokens, 0, seconds)
        for factor, old in zip((model.device_factor, model.host_factor), before, strict=True):
            assert 0.5 <= factor <= 2
            assert abs(np.log(factor / old)) <= 0.1 * np.log(4) + 1e-9


# ── built-in profiles ─────────────────────────────────────────────────────────────────────────


def test_a_built_in_profile_says_so() -> None:
    assert CostModel(BUILT_IN).source.startswith("built in")
    assert "H200" in built_in(SMALL, "NVIDIA H200").source
    assert spec_for("NVIDIA GeForce 9") is UNKNOWN_GPU


@pytest.mark.parametrize(("num_tokens", "measured_s"), [(2048, 0.054), (8192, 0.228)])
def test_an_h200_s_built_in_profile_is_right_within_a_factor_of_two(
    num_tokens: int, measured_s: float
) -> None:
    model = CostModel(built_in(ModelShape.from_config(LLAMA_8B), "NVIDIA H200"))
    assert 0.5 < model.exec_s(num_tokens) / measured_s < 2


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
def test_two_ranks_compute_long_prompts_in_about_half_the_time(device: str) -> None:
    profile = built_in(ModelShape.from_config(LLAMA_13B), device)
    model = CostModel(msgspec.structs.replace(profile, reduce=FREE_REDUCE))
    assert model.with_tp(2).exec_s(8192) / model.exec_s(8192) == pytest.approx(0.5, abs=0.05)


def test_an_unknown_gpu_is_taken_for_a_slow_one() -> None:
    shape = ModelShape.from_config(LLAMA_8B)
    costs = [CostModel(built_in(shape, name)).exec_s(4096) for name in ("H200", "A100", "?")]
    assert costs == sorted(costs)


def test_a_larger_model_costs_more() -> None:
    small, large = (
        CostModel(built_in(ModelShape.from_config(config), "H200"))
        for config in (LLAMA_8B, LLAMA_13B)
    )
    assert large.exec_s(4096) > 1.3 * small.exec_s(4096)
    assert large.decode_step_s(8, 9000) > small.decode_step_s(8, 9000)


def test_a_profile_survives_json() -> None:
    for profile in (BUILT_IN, *PROFILES.values()):
        assert msgspec.json.decode(msgspec.json.encode(profile), type=Profile) == profile

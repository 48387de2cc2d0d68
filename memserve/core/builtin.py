"""Profiles for devices that were not calibrated, from what their data sheets say.

A built-in profile orders placements sensibly (a longer prompt costs more, a cached one less, a
larger model more) and is right within a factor of about two; its `source` says that it is one.
`memserve calibrate` replaces it by measurements. Collaborator: `profile.py`.
"""

from __future__ import annotations

import msgspec

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
)


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a kind of device can do, as engines get it out of it."""

    name: str
    num_sms: int
    flops_per_s: float
    """Of bf16 products, in large ones."""
    bytes_per_s: float
    """Of its memory, in long reads."""
    chunk_tokens: int
    host_s: float
    """Of a step: scheduling, sampling, output."""
    launch_s: float
    """Of a layer's kernels, without a graph."""
    links: dict[str, LinkFit]


_DRAM = LinkFit(30e-6, 20e9)
_GPU_LINKS = {
    "ipc": LinkFit(0.5e-3, 200e9),
    "nccl": LinkFit(1e-3, 150e9),
    "tcp": LinkFit(1e-3, 1e9),
    "shm": LinkFit(1e-3, 5e9),
    "dram": _DRAM,
}
_CPU_LINKS = {
    "shm": LinkFit(0.5e-3, 10e9),
    "tcp": LinkFit(1e-3, 1e9),
    "dram": LinkFit(0.2e-3, 10e9),
}

_REDUCE = ReduceFit(10e-6, 250e9, launch_s=25e-6, source="built in, of GPUs joined by NVLink")
_REDUCE_ON_CPU = ReduceFit(100e-6, 5e9, source="built in, of processes on one host")

CPU = DeviceSpec(
    name="cpu",
    num_sms=1,
    flops_per_s=150e9,
    bytes_per_s=12e9,
    chunk_tokens=2048,
    host_s=8e-3,
    launch_s=1e-3,
    links=_CPU_LINKS,
)
"""One core of a server with bf16 instructions."""


def _gpu(name: str, num_sms: int, peak_flops: float, peak_bytes: float) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        num_sms=num_sms,
        flops_per_s=0.6 * peak_flops,
        bytes_per_s=0.7 * peak_bytes,
        chunk_tokens=8192,
        host_s=2e-3,
        launch_s=0.5e-3,
        links=_GPU_LINKS,
    )


DEVICES: dict[str, DeviceSpec] = {
    "H200": _gpu("H200", 132, 989e12, 4.8e12),
    "H100": _gpu("H100", 132, 989e12, 3.35e12),
    "H800": _gpu("H800", 132, 989e12, 3.35e12),
    "A100": _gpu("A100", 108, 312e12, 2.0e12),
}
"""Part of the device's name → what it can do."""

UNKNOWN_GPU = _gpu("unknown GPU", 80, 120e12, 0.8e12)
"""Conservative: about a data-centre GPU of two generations ago."""


def spec_for(device: str) -> DeviceSpec:
    """By the device's name as its driver tells it, or `cpu`."""
    if device.lower().startswith("cpu"):
        return CPU
    return next((spec for name, spec in DEVICES.items() if name in device), UNKNOWN_GPU)


def built_in(
    shape: ModelShape, device: str, *, model: str = "", dtype: str = "bfloat16"
) -> Profile:
    """A profile for a model that nobody calibrated on this device."""
    spec = spec_for(device)
    heads, kv_heads = shape.heads(1)
    pair_s = 4 * heads * shape.head_dim / (0.5 * spec.flops_per_s)
    kv_read_s = 2 * kv_heads * shape.head_dim * shape.dtype_bytes / spec.bytes_per_s
    element = LinearFit(0.0, 2 * shape.dtype_bytes / spec.bytes_per_s)
    return Profile(
        source=f"built in, from the data sheet of: {spec.name}",
        model=model,
        device=device,
        dtype=dtype,
        engine="any",
        tp=1,
        shape=shape,
        num_sms=spec.num_sms,
        chunk_tokens=spec.chunk_tokens,
        gemms=tuple(
            _gemm_fit(gemm, spec, shape) for gemm in (*shape.layer_gemms(1), shape.head_gemm(1))
        ),
        attention=(
            AttentionFit(
                num_heads=heads,
                num_kv_heads=kv_heads,
                cached_pair_s=pair_s,
                new_pair_s=pair_s / 2,
                token_s=0.0,
                read_s=kv_read_s,
                fixed_s=0.0,
                decode_fixed_s=0.0,
                decode_request_s=0.0,
                decode_context_s=kv_read_s,
            ),
        ),
        elementwise=dict.fromkeys(shape.elementwise(1), element),
        reduce=_REDUCE_ON_CPU if spec is CPU else _REDUCE,
        step=StepFit(
            host_s=spec.host_s,
            floor_s=spec.host_s + spec.launch_s * shape.num_layers,
            decode_host_s=spec.host_s,
        ),
        links=spec.links,
    )


def _gemm_fit(gemm: Gemm, spec: DeviceSpec, shape: ModelShape) -> GemmFit:
    tile_m, tile_n = (128, 128) if spec.num_sms > 1 else (32, 64)
    wave_s = 2 * tile_m * tile_n * gemm.k * spec.num_sms / spec.flops_per_s
    return GemmFit(
        gemm=gemm,
        tile_m=tile_m,
        tile_n=tile_n,
        full_wave_s=wave_s,
        last_wave_s=wave_s,
        read_s=gemm.n * gemm.k * shape.dtype_bytes / spec.bytes_per_s,
        read_token_s=(gemm.n + gemm.k) * shape.dtype_bytes / spec.bytes_per_s,
    )


BUILT_IN = built_in(
    ModelShape(
        num_layers=30,
        hidden=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocab=49152,
    ),
    "cpu",
    model="smollm2-135m-instruct",
)
"""The bundled model on a CPU."""

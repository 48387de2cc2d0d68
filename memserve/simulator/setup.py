"""From what was typed to what is run: the load, the cluster, the costs. Every mistake is named.

Collaborators: `command.py` and the benches fill in `Options`; `simulation.py` runs the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from memserve import profiles
from memserve.config import LINK_OF, Config
from memserve.core.builtin import CPU, DEVICES, built_in
from memserve.core.cost_model import CostModel
from memserve.core.gpu_plan import parse_tp
from memserve.core.mode import parse_mode
from memserve.core.profile import ModelShape, Profile
from memserve.errors import ConfigError
from memserve.scheduler_settings import scheduler_settings
from memserve.simulator import datasets
from memserve.simulator.engine import EngineLimits
from memserve.simulator.objectives import Objectives
from memserve.simulator.simulation import Setup
from memserve.simulator.synthetic import Shape, sessions
from memserve.simulator.worker import Hardware
from memserve.simulator.workload import Call, poisson, replay
from memserve.types import Caching, Geometry, InstanceId, Role

MAX_INSTANCES = 9999

MODELS: dict[str, ModelShape] = {
    "llama-2-13b": ModelShape(40, 5120, 40, 40, 128, 13824, 32000),
    "llama-3.1-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49152),
}
"""Shapes that need no file."""

_MEMORY_BYTES = {"H200": 141e9, "H100": 80e9, "H800": 80e9, "A100": 80e9}
_OTHER_GPU_BYTES = 24e9
_CPU_KV_BYTES = 128 << 20
_USED_SHARE = 0.9
_ACTIVATIONS_BYTES = 4e9
"""What an engine needs besides weights and KV, roughly."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What can be chosen; the names are the flags' names."""

    mode: str = "1P1D-CC"
    caching: Caching | None = None
    dataset: Path | None = None
    synthetic: Shape = Shape()
    requests: int | None = None
    rate: float | None = None
    copies: int = 1
    think_s: float | None = None
    max_context: int = 131_072
    seed: int = 0
    model: str = "llama-3.1-8b"
    device: str = "H200"
    tp: int | str | None = None
    """GPUs of an instance, also by role: `P=2,D=1`; None: as the profile was calibrated."""
    profile: Path | None = None
    link: str | None = None
    blocks: int | None = None
    block_size: int | None = None
    max_num_seqs: int = 256
    message_s: float = 0.2e-3
    front_end_s: float = 2e-3
    objectives: Objectives = Objectives()


_DEFAULT_REQUESTS = 1000
_DEFAULT_RATE = 2.0
_MOST_CALLS = 2_000_000
"""Each takes about half a kilobyte of this machine's memory, and a millisecond."""
_DAY_S = 86_400
_LONGEST_S = 366 * _DAY_S
_MOST_BLOCKS = 10_000_000
"""Of one instance; each takes some of this machine's memory."""
_MOST_BLOCKS_IN_ALL = 200_000_000
_BLOCK_BYTES = 60
"""Of this machine's memory, for a block that nothing was put into yet."""


# ── the load ──────────────────────────────────────────────────────────────────────────────────


def load(options: Options) -> list[Call]:
    """The calls with their arrivals, sorted. Raises: ConfigError."""
    _check_numbers(options)
    if options.dataset is None:
        options.synthetic.check()
        count = options.requests or _DEFAULT_REQUESTS
        num_sessions = -(-count // options.synthetic.turns)
        calls = list(sessions(options.synthetic, num_sessions, options.seed))
    else:
        calls = datasets.read(options.dataset)
    calls = fitting(calls, options.max_context)
    if calls and calls[0].arrival_s is not None:
        if options.requests is not None:  # of all copies together
            calls = calls[: -(-options.requests // options.copies)]
        if len(calls) * options.copies > _MOST_CALLS:
            what = f"{options.copies:,} times {len(calls):,} calls are too many"
            raise ConfigError("--copies", what, f"up to {_MOST_CALLS // len(calls):,}")
        calls = replay(calls, options.rate, options.copies, options.seed)[: options.requests]
    elif options.copies != 1:
        raise ConfigError("--copies", "needs a data set that says when calls arrive", "1")
    else:
        calls = poisson(
            calls,
            rate=options.rate or _DEFAULT_RATE,
            requests=options.requests or min(len(calls), _DEFAULT_REQUESTS),
            think_s=options.think_s,
            seed=options.seed,
        )
    _check_length(calls)
    return calls


def _check_numbers(options: Options) -> None:
    names = ("requests", "rate", "copies", "think_s", "max_context", "blocks", "block_size")
    values = {name: getattr(options, name) for name in (*names, "max_num_seqs")}
    values |= {"tp": options.tp} if isinstance(options.tp, int) else {}
    values |= {"slo_ttft_s": options.objectives.ttft_s, "slo_tpot_s": options.objectives.tpot_s}
    for name, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(
                f"--{name.replace('_', '-')}", f"{value} is not allowed", "a number above 0"
            )
    if options.requests is not None and options.requests > _MOST_CALLS:
        what = f"{options.requests:,} are too many"
        raise ConfigError("--requests", what, f"up to {_MOST_CALLS:,}")
    if options.blocks is not None and options.blocks > _MOST_BLOCKS:
        raise ConfigError("--blocks", f"{options.blocks:,} are too many", f"up to {_MOST_BLOCKS:,}")


def _check_length(calls: Sequence[Call]) -> None:
    """Idle time is simulated too, second by second."""
    last_s = calls[-1].arrival_s or 0.0
    if not last_s <= _LONGEST_S:  # also if it is no number
        raise ConfigError(
            "--rate",
            f"the last call would arrive after {last_s / _DAY_S:.3g} days",
            f"loads of up to {_LONGEST_S / _DAY_S:.0f} days",
        )


def fitting(calls: Sequence[Call], max_context: int) -> list[Call]:
    """Those within the context; a session ends before its first call that is not.

    Raises: ConfigError if none is.
    """
    ended: set[str] = set()
    kept: list[Call] = []
    for call in calls:
        if call.total_tokens > max_context:
            ended.add(call.session)
        elif call.session not in ended:
            kept.append(call)
    if not kept:
        raise ConfigError("--max-context", f"no call fits into {max_context} tokens")
    return kept


# ── the costs ─────────────────────────────────────────────────────────────────────────────────


def costs(options: Options) -> CostModel:
    """From the profile that was named, else the built-in one. Raises: ConfigError."""
    _check_numbers(options)
    if options.profile is None:
        profile = built_in(_shape(options.model), _device(options.device), model=options.model)
    else:
        profile = profiles.load(options.profile)
    tp_of = _degrees(options, profile)
    for tp in {*tp_of.values()}:
        profiles.check_degree("--tp", tp, profile.shape)
    roles = parse_mode(options.mode, MAX_INSTANCES).instances()
    return CostModel(profile, next(tp_of[i] for i, role in roles if role is not Role.DECODE))


def _degrees(options: Options, profile: Profile) -> dict[InstanceId, int]:
    """The GPUs of each instance. Raises: ConfigError."""
    instances = parse_mode(options.mode, MAX_INSTANCES).instances()
    by_role = parse_tp(options.tp or profile.tp, list(dict.fromkeys(r for _, r in instances)))
    return {instance: by_role[role] for instance, role in instances}


def _device(text: str) -> str:
    """The known device that is named, or whose name is a part of it."""
    known = (*DEVICES, CPU.name)
    found = next((name for name in known if name.lower() in text.lower()), None)
    if found is None:
        what = f"nothing is known of {text!r}"
        raise ConfigError("--device", what, f"{', '.join(known)}, or a --profile of it")
    return found


def _shape(model: str) -> ModelShape:
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("not a JSON object")
        return ModelShape.from_config(found)
    except (OSError, ValueError, TypeError) as error:
        known = f"{', '.join(MODELS)}, or a folder with a config.json"
        what = error.strerror if isinstance(error, OSError) else error
        raise ConfigError("--model", f"{model!r}: {what}", known) from error


# ── the cluster ───────────────────────────────────────────────────────────────────────────────


def cluster(options: Options, config: Config, model: CostModel, calls: Iterable[Call]) -> Setup:
    """The instances that are to serve these calls. Raises: ConfigError."""
    mode = parse_mode(options.mode, MAX_INSTANCES)
    profile = model.profile
    link = _link(options, profile)
    block_size = options.block_size or (32 if profile.is_on_cpu else 16)
    block_bytes = model.kv_bytes(block_size)
    tp_of = _degrees(options, profile)
    room = {tp: int(_kv_bytes(profile, tp) // block_bytes) for tp in sorted({*tp_of.values()})}
    blocks_of = {instance: options.blocks or room[tp] for instance, tp in tp_of.items()}
    least = min(blocks_of.values())
    largest = max((call.total_tokens for call in calls), default=0)
    if (least - 1) * block_size < largest:
        raise ConfigError(
            "--blocks",
            f"{least} blocks of {block_size} tokens are too few for a call of {largest} tokens",
            f"from {-(-largest // block_size) + 1}, or a smaller --max-context",
        )
    _check_memory(len(blocks_of), sum(blocks_of.values()))
    scheduler = scheduler_settings(config, options.caching or mode.default_caching, link)
    return Setup(
        mode=mode,
        scheduler=msgspec.structs.replace(scheduler, tp_of=tp_of),
        hardware=Hardware(
            _geometry(profile, block_size, block_bytes, least),
            link,
            EngineLimits(profile.chunk_tokens, options.max_num_seqs),
        ),
        message_s=options.message_s,
        front_end_s=options.front_end_s,
        blocks_of=blocks_of,
    )


def _link(options: Options, profile: Profile) -> str:
    link = options.link or LINK_OF["cpu" if profile.is_on_cpu else "cuda"]
    known = [kind for kind in profile.links if kind != "dram"]
    if link not in known:
        raise ConfigError("--link", f"the profile knows no {link!r}", ", ".join(known))
    return link


def _geometry(profile: Profile, block_size: int, block_bytes: int, blocks: int) -> Geometry:
    shape = profile.shape
    page_bytes = block_bytes // shape.num_layers
    return Geometry(
        model=profile.model,
        dtype=profile.dtype,
        block_size=block_size,
        num_blocks=blocks,
        num_kv_heads=shape.num_kv_heads,
        page_bytes=page_bytes,
        block_stride=block_bytes,
        layer_offsets=tuple(layer * page_bytes for layer in range(shape.num_layers)),
    )


def _check_memory(instances: int, blocks: int) -> None:
    """`blocks`: of all together."""
    if blocks > _MOST_BLOCKS_IN_ALL:
        size_gb = blocks * _BLOCK_BYTES / 1e9
        raise ConfigError(
            "--blocks",
            f"{blocks:,} blocks of {instances:,} instances take {size_gb:.0f} GB of this machine",
            f"up to {_MOST_BLOCKS_IN_ALL // instances:,} for each",
        )


def _kv_bytes(profile: Profile, tp: int) -> float:
    """What is left for KV of the memory of an instance of `tp` GPUs."""
    shape = profile.shape
    if profile.is_on_cpu:
        return _CPU_KV_BYTES
    known = next((size for name, size in _MEMORY_BYTES.items() if name in profile.device), None)
    total = _USED_SHARE * (known or _OTHER_GPU_BYTES) * tp
    matrices = sum(gemm.n * gemm.k for gemm in shape.layer_gemms(1)) * shape.num_layers
    weights = (matrices + 2 * shape.vocab * shape.hidden) * shape.dtype_bytes
    left = total - weights - _ACTIVATIONS_BYTES
    if left <= 0:
        raise ConfigError(
            "--tp",
            f"{profile.model or 'the model'} needs {weights / 1e9:.0f} GB for its weights, "
            f"{tp} × {profile.device} have {total / 1e9:.0f}",
            "more, or another --model or --device",
        )
    return left

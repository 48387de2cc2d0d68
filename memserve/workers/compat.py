"""Everything that touches an internal of vLLM which may move between its versions.

Collaborators: `main.py` builds the engine here; `engine_loop.py` steps it through `Engine`;
`connector.py` is built by vLLM itself, and finds its host in the configuration made here.

The engine is an unmodified vLLM wheel. What this module reaches into: the constructor and `step_fn`
of `EngineCore`, the calls that schedule and launch a step (`step_outputs.py`), the scheduler's
queues, and the list of KV layouts that the CPU backend admits to.
Inside the block pool: `engine_pool.py`; the one call that allocates the KV cache: `kv_layout.py`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import vllm
from torch.distributed import distributed_c10d
from vllm.config import CUDAGraphMode, KVTransferConfig, VllmConfig
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout, is_full_attention_spec
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from memserve.errors import ConfigError, RequestError, StartError
from memserve.types import BlockId, Lora, Namespace, TransferStyle
from memserve.workers.engine_pool import resume_hashing
from memserve.workers.environment import without_multicast
from memserve.workers.step_outputs import StepOutputs

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash

    from memserve.workers.connector import ConnectorHost

SUPPORTED_VLLM = "0.32"
"""Minor version; every patch release of it is accepted."""

HOST_KEY = "memserve_host"
LAYOUT_KEY = "memserve_layout"
STYLE_KEY = "memserve_style"

_BLOCK_FIRST = KVCacheLayout.BLHNC
_LAYER_FIRST = KVCacheLayout.LBHNC
_OWNED_ARGUMENTS = {
    "model": "models.model",
    "kv_transfer_config": "transfer",
    "kv_cache_memory_bytes": "mempool.hbm_mb",
    "enable_prefix_caching": "cluster.caching",
}
"""Engine arguments that MemServe sets itself, and the key to use instead."""


# ── building the engine ───────────────────────────────────────────────────────────────────────


def check_version(version: str = vllm.__version__) -> None:
    """Raises: StartError if this vLLM is not a supported one."""
    if ".".join(version.split(".")[:2]) != SUPPORTED_VLLM:
        raise StartError(f"vLLM {version} is installed; supported: {SUPPORTED_VLLM}.*")


def make_config(
    model: str,
    engine: Mapping[str, Any],
    *,
    engine_id: str,
    kv_bytes: int | None,
    layout: str,
    host: ConnectorHost,
    style: TransferStyle,
    tp: int,
) -> VllmConfig:
    """The engine's configuration.

    `engine`: further fields of `EngineArgs`. `layout`: auto, block_first or layer_first. `host`
    travels in the connector's own section of the configuration, which vLLM hands to the connector
    as it is: so the connector finds its worker without a module-level registry. With `tp` above 1
    vLLM forks that many ranks, each with a copy of all this.

    `kv_bytes`: of each rank.
    Raises: ConfigError, StartError; what vLLM's own checks raise.
    """
    check_version()
    _check_arguments(engine)
    engine = without_multicast(engine, tp)
    if current_platform.is_cpu() and layout != "layer_first":
        _allow_block_first_on_cpu()
    wanted = _LAYER_FIRST if layout == "layer_first" else _BLOCK_FIRST
    arguments = EngineArgs(
        model=model,
        kv_transfer_config=_connector(engine_id, host, wanted, style),
        kv_cache_memory_bytes=kv_bytes,
        enable_prefix_caching=True,
        tensor_parallel_size=tp,
        distributed_executor_backend="mp" if tp > 1 else None,
        **engine,
    )
    # Without a context vLLM takes its smallest limits instead of those of `vllm serve`.
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if tp > 1:  # the CPU platform has asked for spawning: slow, and without the host
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        if current_platform.is_cpu() and len(os.sched_getaffinity(0)) < 2 * tp:
            _let_ranks_sleep()
    return config


def _connector(
    engine_id: str, host: ConnectorHost, layout: KVCacheLayout, style: TransferStyle
) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MemServeConnector",
        kv_connector_module_path="memserve.workers.connector",
        kv_role="kv_both",
        engine_id=engine_id,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={HOST_KEY: host, LAYOUT_KEY: layout.name, STYLE_KEY: style},
    )


@dataclasses.dataclass(frozen=True)
class StepLimits:
    """How the engine cuts its work into steps."""

    chunk_tokens: int
    """The most tokens of prompts in one step."""
    max_requests: int
    graph_sizes: tuple[int, ...]
    """Token counts, rising, that steps with prompts are padded to and replayed at as graphs."""


def step_limits(config: VllmConfig) -> StepLimits:
    """Of an engine that was built with `config`: building settles them."""
    scheduler, compilation = config.scheduler_config, config.compilation_config
    mode: CUDAGraphMode | None = compilation.cudagraph_mode
    has_graphs = mode is not None and mode.mixed_mode() != CUDAGraphMode.NONE
    sizes = (compilation.cudagraph_capture_sizes or []) if has_graphs else []
    return StepLimits(
        chunk_tokens=scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens,
        max_requests=scheduler.max_num_seqs,
        graph_sizes=tuple(sorted(sizes)),
    )


def _check_arguments(engine: Mapping[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    for name in engine:
        if name not in known:
            raise ConfigError.unknown_key(f"engine.{name}", (f"engine.{k}" for k in known))
        if name in _OWNED_ARGUMENTS:
            raise ConfigError(f"engine.{name}", f"is set by {_OWNED_ARGUMENTS[name]}")


def _allow_block_first_on_cpu() -> None:
    """Let the CPU backend take the block-first layout.

    It declares the layer-first one alone, but its kernels address blocks by strides and read and
    write the block-first one as well; the layout's integration test compares tokens.
    """
    layouts = (_LAYER_FIRST, _BLOCK_FIRST)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


def _let_ranks_sleep() -> None:
    """Have ranks on the CPU add up their results by torch's own means.

    vLLM's spin on shared memory, which takes a core for each: with fewer, every sum waits for
    the others' time slices.
    """
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def check_kv_groups(config: KVCacheConfig) -> None:
    """Raises: StartError unless the model has one kind of KV, kept for the whole prompt."""
    groups = config.kv_cache_groups
    if len(groups) != 1:
        raise StartError(
            f"the model has {len(groups)} KV cache groups (layers whose KV is kept in different"
            " ways); supported: models with one"
        )
    if not is_full_attention_spec(groups[0].kv_cache_spec):
        name = type(groups[0].kv_cache_spec).__name__
        raise StartError(f"the model's KV cache is a {name}; supported: full attention")


@contextmanager
def _one_gloo_device() -> Iterator[None]:
    """Let all of torch's process groups that are made inside it share one device.

    vLLM makes a dozen groups of one member each, and each device's thread wakes up a hundred times
    a second: more than everything else that an idle worker does. The device is made with the first
    group, in the process that needs it: its thread would not survive the forking of ranks.
    """
    original = distributed_c10d.ProcessGroupGloo
    devices: list[Any] = []

    class SharedDevice(original):  # type: ignore[valid-type,misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            if not devices:
                devices.append(original.create_default_device())
            options = original._Options()
            options._devices = devices
            options._threads = 1
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = SharedDevice
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original


# ── the engine ────────────────────────────────────────────────────────────────────────────────


class Engine:
    """vLLM's `EngineCore`, as far as the engine loop needs it. Not thread-safe, as it is itself."""

    def __init__(self, config: VllmConfig, loras: Sequence[Lora] = ()) -> None:
        """Load the model and its adapters, and build the KV cache.

        Raises: StartError; what vLLM raises.
        """
        with _one_gloo_device():
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._scheduler: Any = self._core.scheduler
        self._outputs = StepOutputs(self._core.model_executor, self._scheduler)
        self._loras = {lora.name: self._load(lora) for lora in loras}

    def _load(self, lora: Lora) -> LoRARequest:
        request = LoRARequest(lora.name, lora.number, lora.path)
        try:
            self._core.add_lora(request)
        except Exception as error:  # whatever is wrong with it, it would break a step later
            reason = " ".join(str(error).split())
            raise StartError(f"models.loras.{lora.name}: {reason}") from error
        return request

    # Properties of the model and the pool.

    @property
    def block_pool(self) -> BlockPool:
        pool: BlockPool = self._scheduler.kv_cache_manager.block_pool
        return pool

    @property
    def steps(self) -> StepOutputs:
        """Which step is being scheduled, and which have ended."""
        return self._outputs

    @property
    def block_size(self) -> int:
        size: int = self._core.vllm_config.cache_config.block_size
        return size

    @property
    def max_model_len(self) -> int:
        length: int = self._core.vllm_config.model_config.max_model_len
        return length

    def hash_request(
        self,
        token_ids: Sequence[int],
        namespace: Namespace,
        known_hashes: Sequence[BlockHash] = (),
    ) -> Request:
        """A request that is never scheduled: vLLM computes the block hashes of the tokens.

        `known_hashes`: of the first blocks, from before; the others are chained to them.
        """
        name = namespace.lora_name
        request = EngineCoreRequest(
            request_id="hash",
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None if name is None else self._loras[name],
            cache_salt=namespace.cache_salt,
            data_parallel_rank=None,
        )
        hasher = resume_hashing(self._core.request_block_hasher, known_hashes)
        return Request.from_engine_core_request(request, hasher)

    # Requests.

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a request. Raises: what vLLM's checks raise."""
        self._core.add_request(*self._core.preprocess_add_request(request))

    def abort(self, request_id: str) -> None:
        """End a request; the connector's hook runs. Unknown ids are ignored."""
        self._core.abort_requests([request_id])

    def step(self) -> tuple[EngineCoreOutputs | None, bool]:
        """One step: the outputs (of the one client that there is), and whether the model ran."""
        outputs, has_run = self._core.step_fn()
        self._core.post_step(has_run)
        return (outputs or {}).get(0), has_run

    def serve_while_waiting(self, serve: Callable[[], None]) -> int:
        """Have `serve` called, again and again, while `step` waits for what the device computes.

        The scheduler has launched all that it could by then, and has not seen the output of the
        oldest step. Meanwhile requests may be added, but none may be aborted. Returns a file
        descriptor that becomes readable when the wait is over.
        """
        return self._outputs.serve_while_waiting(serve)

    # Load.

    @property
    def is_busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._core.batch_queue) or self._scheduler.has_requests()

    @property
    def num_running(self) -> int:
        num_running: int = self._scheduler.get_request_counts()[0]
        return num_running

    @property
    def num_waiting(self) -> int:
        num_waiting: int = self._scheduler.get_request_counts()[1]
        return num_waiting

    @property
    def is_starved(self) -> bool:
        """Whether requests wait for nothing but blocks (not, say, for a grammar)."""
        in_flight = self._core.batch_queue or ()  # with nothing to compute, empty steps are
        if self._scheduler.running or any(s.total_num_scheduled_tokens for _, s, _ in in_flight):
            return False
        ready = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return any(request.status in ready for request in self._scheduler.waiting)

    def fence(self) -> Callable[[], bool]:
        """Whether every step that is in flight at this moment has ended.

        With asynchronous scheduling the pool indexes a block when its step is scheduled; its KV is
        there once that step has ended.
        """
        return self._outputs.fence()

    def running_blocks(self, request_id: str) -> tuple[list[BlockId], int]:
        """A running request's block table, and how many tokens' KV it holds as soon as the steps
        in flight have ended (see `fence`). Nothing for a request that waits or is unknown."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.status != RequestStatus.RUNNING:
            return [], 0
        table = self._scheduler.kv_cache_manager.get_block_ids(request_id)[0]
        return [BlockId(block_id) for block_id in table], request.num_computed_tokens

    def held_blocks(self) -> dict[str, list[int]]:
        """Who holds which blocks in the engine itself, once per reference."""
        manager = self._scheduler.kv_cache_manager
        held = {
            request_id: [block for block in manager.get_block_ids(request_id)[0] if block != 0]
            for request_id in self._scheduler.requests
        }
        for fence, blocks in self._scheduler.deferred_frees:
            held.setdefault(f"step {fence}", []).extend(block.block_id for block in blocks)
        return {holder: blocks for holder, blocks in held.items() if blocks}

    def shutdown(self) -> None:
        """Stop the executor's processes and the scheduler's helpers, as this process ends.

        Not the core's own `shutdown`, which takes a second to collect garbage for a process that
        goes on.
        """
        self._core.model_executor.shutdown()
        self._core.scheduler.shutdown()
        self._outputs.close()


def complete_tokens(request: Request) -> int:
    """How many of a finished request's tokens have their KV written.

    The last token's KV never counts: nothing was computed from it. Steps in flight (asynchronous
    scheduling) are counted by vLLM beforehand, and are taken off.
    """
    written = request.num_computed_tokens - request.num_in_flight_tokens
    complete: int = max(0, min(written, request.num_tokens - 1))
    return complete


# ── what travels ──────────────────────────────────────────────────────────────────────────────


class EngineCodec:
    """vLLM's own msgpack codec, one buffer per message (tensors inline)."""

    def __init__(self) -> None:
        self._decoder = MsgpackDecoder(EngineCoreRequest)
        self._encoder = MsgpackEncoder(size_threshold=sys.maxsize)

    def decode_request(self, data: bytes) -> EngineCoreRequest:
        """Raises: RequestError."""
        try:
            request: EngineCoreRequest = self._decoder.decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            raise RequestError(
                f"not an EngineCoreRequest of vLLM {vllm.__version__}: {error}"
            ) from error
        return request

    def encode_outputs(self, outputs: EngineCoreOutputs) -> bytes:
        """One step's outputs."""
        return bytes(self._encoder.encode(outputs)[0])

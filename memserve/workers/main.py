"""A worker's process, from the fork to its end.

Collaborators: `zygote.py` forks it with a `WorkerSpec`; `compat.py` builds the engine; everything
else runs in `engine_loop.py`. This is the only place that knows how a worker's parts fit together.

Exit codes: 0 told to stop, 1 a fault in the running engine, 2 the engine could not be built.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pydantic
import torch
from vllm.platforms import current_platform

from memserve.core.cost_model import CostModel
from memserve.errors import MemServeError, StartError
from memserve.messages import PROTOCOL_VERSION, Ready, StartFailed
from memserve.types import Geometry
from memserve.workers.compat import Engine, make_config
from memserve.workers.engine_loop import EngineLoop
from memserve.workers.engine_pool import EnginePool
from memserve.workers.environment import GRAMMAR_STACK_BYTES, set_engine_environment
from memserve.workers.hosts import Home, KvHost, OwnKvHost, RankedKvHost, make_host
from memserve.workers.index_reports import IndexReports
from memserve.workers.links.choice import LinkChoice
from memserve.workers.mempool import MemPool
from memserve.workers.port import Port
from memserve.workers.sleeps import sleep_exactly
from memserve.workers.spec import WorkerSpec
from memserve.workers.swap_queue import NoSwaps, Swaps
from memserve.workers.swap_setup import make_swaps
from memserve.workers.transfer import Transfers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE_CHARS = 500
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_worker(spec: WorkerSpec, parent_pid: int) -> NoReturn:
    """Be this worker; the process ends here. `parent_pid`: it must not outlive that process.

    Standard output and error are the worker's log already.
    """
    status = 1
    try:
        _die_with(parent_pid)
        _set_up_process(spec)
        status = _serve(spec)
    except Exception:  # the process's boundary
        logger.exception("%s epoch %d: the engine is broken", spec.instance, spec.epoch)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Nothing of the zygote, whose copy this process is, may run on the way out.
        os._exit(status)


def _serve(spec: WorkerSpec) -> int:
    """Build the engine and serve until told to stop; returns the exit code."""
    try:
        port = Port(spec.hub_address, spec.instance, spec.epoch)
    except StartError as error:  # nobody can be told
        logger.error("%s: %s", spec.instance, error)
        return 2
    try:
        worker = Worker(spec, port)
    except Exception as error:  # whatever it is, the user has to see it
        if not isinstance(error, MemServeError):
            logger.exception("%s: the engine could not be built", spec.instance)
        message = describe(error, spec.kv_bytes)
        logger.error("%s: %s", spec.instance, message)
        port.send(StartFailed(instance=spec.instance, epoch=spec.epoch, message=message))
        port.close()
        return 2
    signal.signal(signal.SIGTERM, lambda *_: worker.loop.ask_to_stop())
    worker.run()
    return 0


class Worker:
    """The parts of one instance, built in order and closed in the opposite one."""

    def __init__(self, spec: WorkerSpec, port: Port) -> None:
        """Load the model. Raises: ConfigError, StartError; what vLLM raises."""
        _require_device(spec.device)
        self._port = port
        home = Home(spec.instance, spec.epoch, Path(spec.run_dir))
        self._host = host = make_host(spec.model, spec.device, home, spec.tp, spec.style)
        started_at = time.monotonic()
        config = _configure(spec, host)
        configured_at = time.monotonic()
        with _turn_on_gpus(spec.gpu_locks):
            turned_at = time.monotonic()
            self._engine = _build_engine(config, spec, host)
        built_at = time.monotonic()
        geometry = host.settle()
        if spec.layout == "block_first" and not geometry.is_aggregated:
            raise StartError("mempool.layout: the attention backend cannot do block_first")
        mempool = MemPool(
            EnginePool(self._engine.block_pool, self._engine.hash_request, self._engine.steps),
            self._engine.block_size,
            reserve_blocks=spec.reserve_blocks,
            records_changes=True,
        )
        reports = IndexReports(mempool, spec.instance, spec.epoch, port.send)
        self._transfers = Transfers(
            mempool,
            geometry,
            LinkChoice(geometry, host.addresses, host.open_lanes, spec.link),
            spec.instance,
            spec.epoch,
            reports.send,
            spec.style,
        )
        self._swaps = self._make_swaps(spec, geometry, mempool)
        self.loop = EngineLoop(
            spec.instance,
            spec.epoch,
            self._engine,
            mempool,
            self._transfers,
            self._swaps,
            reports,
            port,
            spec.heartbeat_interval_s,
            time.monotonic,
        )
        host.loop = self.loop
        startup_s = {
            "config": configured_at - started_at,
            **({"turn": turned_at - configured_at} if spec.gpu_locks else {}),
            "model": host.asked_for_memory_at - turned_at,
            "kv cache": built_at - host.asked_for_memory_at,
        }
        port.send(self._ready(spec, geometry, startup_s))

    def run(self) -> None:
        """Serve until told to stop, then give everything back."""
        self.loop.run()
        self._transfers.close()
        self._swaps.close()
        self._host.stop()
        self._engine.shutdown()
        self._host.close()
        self._port.close()

    def _ready(self, spec: WorkerSpec, geometry: Geometry, startup_s: dict[str, float]) -> Ready:
        return Ready(
            instance=spec.instance,
            epoch=spec.epoch,
            protocol=PROTOCOL_VERSION,
            geometry=geometry,
            addresses=self._host.addresses,
            max_model_len=self._engine.max_model_len,
            stats=self.loop.stats(),
            startup_s=startup_s,
        )

    def _make_swaps(self, spec: WorkerSpec, geometry: Geometry, mempool: MemPool) -> Swaps:
        if not spec.dram_bytes:
            return NoSwaps()
        return make_swaps(
            mempool,
            geometry,
            self._host.open_dram(spec.dram_bytes),
            is_on_gpu=spec.device == "cuda",
            max_model_len=self._engine.max_model_len,
            costs=CostModel(spec.profile, geometry.tp_size),
            clock=time.monotonic,
        )


def _configure(spec: WorkerSpec, host: OwnKvHost | RankedKvHost) -> VllmConfig:
    """Raises: ConfigError, StartError; what vLLM raises."""
    config = make_config(
        spec.model,
        spec.engine,
        engine_id=f"{spec.instance}/{spec.epoch}",
        kv_bytes=None if spec.kv_bytes is None else spec.kv_bytes // spec.tp,
        layout=spec.layout,
        host=host,
        style=spec.style,
        tp=spec.tp,
    )
    if isinstance(host, RankedKvHost):
        host.total_kv_heads = config.model_config.get_total_num_kv_heads()
        _tie_forks_to_their_parents()
    return config


def _build_engine(config: VllmConfig, spec: WorkerSpec, host: KvHost) -> Engine:
    """Raises: what vLLM raises; StartError with a rank's own words, if it could say them."""
    try:
        return Engine(config, spec.loras)
    except Exception as error:
        if (reason := host.failure) is not None:
            raise StartError(reason) from error
        raise


def describe(error: Exception, kv_bytes: int | None) -> str:
    """One line for a user, of whatever stopped the start."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, pydantic.ValidationError) and (first := error.errors()[0])["loc"]:
        text = f"engine.{first['loc'][0]}: {first['input']!r}: {first['msg']}"
    elif kv_bytes is not None and isinstance(error, ValueError) and "cache" in text:
        # vLLM's advice names arguments that have no effect when the size is given.
        size_mb = kv_bytes >> 20
        text = f"mempool.hbm_mb: {size_mb} MiB do not hold one request of full length: {text}"
    if len(text) > _MAX_MESSAGE_CHARS:
        text = text[: _MAX_MESSAGE_CHARS - 1] + "…"
    return text


# ── the process ───────────────────────────────────────────────────────────────────────────────


def _die_with(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, also in the middle of a step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the request to the kernel
        os._exit(1)


def _tie_forks_to_their_parents() -> None:
    """From now on the kernel kills what is forked here, the ranks, when its parent dies."""
    parent = [os.getpid()]

    def note_parent() -> None:
        parent[0] = os.getpid()

    os.register_at_fork(before=note_parent, after_in_child=lambda: _die_with(parent[0]))


def _set_up_process(spec: WorkerSpec) -> None:
    sleep_exactly()
    for number in (signal.SIGINT, signal.SIGTERM):  # the orchestrator ends its workers, in order
        signal.signal(number, signal.SIG_IGN)
    set_engine_environment(os.environ, num_threads=spec.num_threads, log_level=spec.log_level)
    if spec.visible_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(spec.visible_gpus)
    os.environ["TMPDIR"] = tempfile.tempdir = spec.run_dir
    torch.set_num_threads(spec.num_threads)
    threading.stack_size(GRAMMAR_STACK_BYTES)
    level = spec.log_level.upper()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=_LOG_FORMAT, force=True)
    logging.getLogger("memserve").setLevel(level)
    logging.getLogger("vllm").setLevel(level)


def _require_device(device: str) -> None:
    """Raises: StartError if vLLM would run elsewhere, or CUDA cannot be used in a fork."""
    found = "cpu" if current_platform.is_cpu() else current_platform.device_type
    if found != device:
        raise StartError(f"cluster.device is {device}, but the installed vLLM finds {found!r}")
    if device == "cuda" and torch.cuda._is_in_bad_fork():
        raise StartError("an import has initialised CUDA in the zygote: no worker can use it now")


@contextmanager
def _turn_on_gpus(paths: Sequence[str]) -> Iterator[None]:
    """Keep others out that would build an engine on one of the same GPUs; none: nobody shares them.

    `paths`: a lock for each, in an order that is the same for all who want several.

    vLLM sizes its KV cache by what is free on the whole GPU before and after a trial run: another
    engine must not grow or shrink meanwhile. Waits for as long as the cluster manager lets it: that
    one ends workers which are not ready in time. The kernel lets go of the lock of a process that
    dies.
    """
    with ExitStack() as locks:
        for path in paths:
            lock = locks.enter_context(open(path, "ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Not only closed: ranks that were forked meanwhile hold the same file open.
            locks.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        yield

"""What vLLM's connector finds in the engine's configuration: who owns the KV cache's memory.

`OwnKvHost`: the engine computes in this process, which has the only rank. `RankedKvHost`: vLLM
forks the ranks from this process, the driver. They inherit the configuration, and with it the host:
the scheduler's half of the connector calls the driver's object, and the worker's half of each rank
calls its copy there, which makes the rank's buffer and starts its agent.

    driver: RankedKvHost ──pipe── rank 0: RankedKvHost, KvMemory, RankDram, RankAgent (thread)
              RankGroup  ──pipe── rank 1: …

Collaborators: `connector.py` calls the hooks, `main.py` builds the rest of the instance on a host.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec
import torch
from vllm.distributed import get_tensor_model_parallel_rank

from memserve.errors import StartError
from memserve.types import Geometry, InstanceId, TransferStyle
from memserve.workers.copies import BlockCopies, Copies
from memserve.workers.hostmemory import HostMemory
from memserve.workers.kv_layout import geometry_of, place_kv_cache
from memserve.workers.kv_memory import KvMemory, Openers, kv_memory
from memserve.workers.links.base import Link, Rank
from memserve.workers.links.choice import open_here
from memserve.workers.links.heads import Route
from memserve.workers.rank_agent import RankAgent
from memserve.workers.rank_copies import RankedCopies
from memserve.workers.rank_dram import RankDram
from memserve.workers.rank_group import RankGroup, RankWatch
from memserve.workers.rank_messages import Failed, Joined, StepOrders, put

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from memserve.workers.engine_loop import EngineLoop

logger = logging.getLogger(__name__)


class Home(msgspec.Struct, frozen=True):
    """Who this instance is for its peers, and the folder for its sockets."""

    instance: InstanceId
    epoch: int
    folder: Path

    def rank(self, number: int) -> Rank:
        return Rank(self.instance, self.epoch, number)


class KvHost(Protocol):
    """A `connector.ConnectorHost`, and what its instance's other parts need of the KV cache."""

    loop: EngineLoop | None
    asked_for_memory_at: float
    """When vLLM came to allocate the KV cache, by the monotonic clock."""

    def settle(self) -> Geometry:
        """The engine is built: how each rank's KV lies (rank 0 speaks). Raises: StartError."""
        ...

    @property
    def failure(self) -> str | None:
        """What is known of a start that has failed, beyond what the engine says."""
        ...

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """As in `Ready`; also the kinds of links that this instance can open."""
        ...

    def open_lanes(self, kind: str, routes: Sequence[Route]) -> list[Link]:
        """See `links/choice.py`."""
        ...

    def open_dram(self, size_bytes: int) -> Copies:
        """Host memory beside the KV cache, of all ranks together. Once, settled.

        Raises: StartError.
        """
        ...

    def stop(self) -> None:
        """The engine is about to end."""
        ...

    def close(self) -> None:
        """Give everything back, after the engine and all links have ended."""
        ...


class _LoopHost:
    """The scheduler's half: it exists before the engine does, and passes its hooks to the loop."""

    def __init__(self, model: str, style: TransferStyle) -> None:
        self._model = model
        self._style = style
        self._layers: dict[str, int] = {}
        self.loop: EngineLoop | None = None
        self.asked_for_memory_at = time.monotonic()

    def on_scheduled(self, request_id: str, cached_tokens: int) -> None:
        if self.loop is not None:
            self.loop.on_scheduled(request_id, cached_tokens)

    def on_step(self, num_scheduled: Mapping[str, int]) -> StepOrders | None:
        if self.loop is not None:
            self.loop.on_step(num_scheduled)
        return None

    def on_step_begins(self, orders: StepOrders) -> None:
        pass

    def on_step_ended(self, orders: StepOrders) -> None:
        pass

    def on_layer(self, layer_name: str) -> None:
        if self.loop is not None and layer_name in self._layers:
            self.loop.on_layer(self._layers[layer_name])

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        if self.loop is not None:
            self.loop.on_finished(request, block_ids)


class OwnKvHost(_LoopHost):
    """An instance of one rank."""

    def __init__(self, model: str, device: str, home: Home, style: TransferStyle) -> None:
        super().__init__(model, style)
        self._memory = kv_memory(device, home.rank(0), home.folder)
        self._geometry: Geometry | None = None
        self._openers: Openers = {}

    def kv_cache_memory(self) -> AbstractContextManager[None] | None:
        self.asked_for_memory_at = time.monotonic()
        return place_kv_cache(self._memory.make)

    def on_kv_caches(self, kv_caches: dict[str, torch.Tensor], block_size: int) -> None:
        self._geometry = geometry_of(self._model, block_size, kv_caches)
        self._layers = {name: layer for layer, name in enumerate(kv_caches)}
        _require_own_memory(self._memory, kv_caches)
        self._openers = self._memory.openers(self._geometry, self._style)

    def settle(self) -> Geometry:
        if self._geometry is None:
            raise StartError(f"{self._model} has no KV cache")
        return self._geometry

    @property
    def failure(self) -> str | None:
        return None

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        return {kind: (address,) for kind, address in self._memory.addresses.items()}

    @property
    def tensor(self) -> torch.Tensor | None:
        """The buffer."""
        return self._memory.tensor

    def open_lanes(self, kind: str, routes: Sequence[Route]) -> list[Link]:
        return open_here(self._openers[kind], routes)

    def open_dram(self, size_bytes: int) -> Copies:
        geometry, hbm = self.settle(), self._memory.tensor
        assert hbm is not None
        memory = HostMemory(size_bytes, pin=hbm.is_cuda)
        return BlockCopies(geometry, hbm, memory, self._memory.ops(), time.monotonic)

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self._memory.close()


class RankedKvHost(_LoopHost):
    """An instance of several ranks; see the module for who has which copy of it."""

    def __init__(
        self,
        model: str,
        device: str,
        home: Home,
        tp: int,
        style: TransferStyle,
    ) -> None:
        super().__init__(model, style)
        self._home = home
        self._device = device
        self._tp = tp
        self.total_kv_heads: int | None = None
        """Of the whole model. To be set before the ranks are forked."""
        pairs = [Pipe() for _ in range(tp)]
        self._driver_ends = [driver for driver, _ in pairs]
        self._rank_ends = [rank for _, rank in pairs]
        self._group = RankGroup(self._driver_ends)
        self._joined: list[Joined] = []
        self._watch: RankWatch | None = None
        self._memory: KvMemory | None = None
        self._dram: RankDram | None = None
        self._copies: RankedCopies | None = None

    def __reduce__(self) -> NoReturn:
        raise StartError(
            "ranks have to be forked, but vLLM starts them anew: something has initialised the"
            " device in the driver's process"
        )

    # ── in the rank's process ─────────────────────────────────────────────────────────────────

    def kv_cache_memory(self) -> AbstractContextManager[None] | None:
        self.asked_for_memory_at = time.monotonic()
        rank = self._home.rank(get_tensor_model_parallel_rank())
        self._memory = kv_memory(self._device, rank, self._home.folder)
        return place_kv_cache(self._make)

    def _make(self, size_bytes: int) -> torch.Tensor:
        assert self._memory is not None
        try:
            return self._memory.make(size_bytes)
        except StartError as error:
            put(self._rank_ends[get_tensor_model_parallel_rank()], Failed(str(error)))
            raise

    def on_kv_caches(self, kv_caches: dict[str, torch.Tensor], block_size: int) -> None:
        rank, memory = get_tensor_model_parallel_rank(), self._memory
        connection = self._rank_ends[rank]
        for end in (*self._driver_ends, *self._rank_ends):
            if end is not connection:  # of others: whoever holds one hides its owner's death
                end.close()
        try:
            geometry = msgspec.structs.replace(
                geometry_of(self._model, block_size, kv_caches),
                tp_rank=rank,
                tp_size=self._tp,
                total_kv_heads=self.total_kv_heads,
            )
            if memory is None:
                raise StartError("vLLM has not asked for the KV cache's memory")
            _require_own_memory(memory, kv_caches)
        except StartError as error:
            put(connection, Failed(str(error)))
            raise
        # vLLM's handler would end this rank; its driver does that, in order.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _unlink_shared_memory()
        assert memory.tensor is not None
        self._dram = RankDram(geometry, memory.tensor, memory.ops)
        agent = RankAgent(connection, memory.openers(geometry, self._style), self._dram)
        joined = Joined(os.getpid(), geometry, memory.addresses, self.asked_for_memory_at)
        put(connection, joined)
        threading.Thread(
            target=self._serve, args=(agent, memory, rank), name="rank agent", daemon=True
        ).start()

    def on_step_begins(self, orders: StepOrders) -> None:
        assert self._dram is not None
        self._dram.before_step(orders)

    def on_step_ended(self, orders: StepOrders) -> None:
        assert self._dram is not None
        self._dram.after_step(orders)

    def _serve(self, agent: RankAgent, memory: KvMemory, rank: int) -> None:
        try:
            if self._device == "cuda":
                torch.cuda.set_device(rank)  # of this thread, before any link
            agent.serve()
            memory.close()
        except Exception:  # the thread's boundary: without its agent the rank is of no use
            logger.exception("rank %d cannot move KV any more", rank)
            sys.stderr.flush()
            os._exit(1)

    # ── in the driver's process ───────────────────────────────────────────────────────────────

    def settle(self) -> Geometry:
        self._joined = self._group.join()
        for end in self._rank_ends:
            end.close()
        self._watch = RankWatch([joined.pid for joined in self._joined], _end_with_rank)
        self.asked_for_memory_at = min(joined.asked_for_memory_at for joined in self._joined)
        first = self._joined[0].geometry
        for joined in self._joined[1:]:
            require_alike(first, joined.geometry)
        return first

    @property
    def failure(self) -> str | None:
        return self._group.failure

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        return common_addresses([joined.addresses for joined in self._joined])

    def open_lanes(self, kind: str, routes: Sequence[Route]) -> list[Link]:
        return self._group.open(kind, routes)

    def open_dram(self, size_bytes: int) -> Copies:
        self._copies = RankedCopies(self._group, self._joined[0].geometry, size_bytes)
        return self._copies

    def on_step(self, num_scheduled: Mapping[str, int]) -> StepOrders | None:
        super().on_step(num_scheduled)
        return None if self._copies is None else self._copies.step()

    def stop(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def close(self) -> None:
        self._group.close()


def make_host(
    model: str,
    device: str,
    home: Home,
    tp: int,
    style: TransferStyle,
) -> OwnKvHost | RankedKvHost:
    """For an instance of `tp` ranks."""
    if tp == 1:
        return OwnKvHost(model, device, home, style)
    return RankedKvHost(model, device, home, tp, style)


def require_alike(first: Geometry, other: Geometry) -> None:
    """Whether one rank's block ids and pages mean the same on another. Raises: StartError."""
    differing = [
        name
        for name in first.__struct_fields__
        if name != "tp_rank" and getattr(first, name) != getattr(other, name)
    ]
    if differing:
        raise StartError(
            f"the KV of rank {other.tp_rank} lies unlike that of rank 0: {', '.join(differing)}"
        )


def common_addresses(ranks: Sequence[Mapping[str, str]]) -> dict[str, tuple[str, ...]]:
    """Kind of link → each rank's address, of the kinds that all ranks have, in the first's order.

    `ranks`: each rank's addresses by kind. A rank may lack one that others have (NCCL).
    """
    shared = [kind for kind in ranks[0] if all(kind in addresses for addresses in ranks)]
    return {kind: tuple(addresses[kind] for addresses in ranks) for kind in shared}


def _require_own_memory(memory: KvMemory, kv_caches: dict[str, torch.Tensor]) -> None:
    storage = next(iter(kv_caches.values())).untyped_storage()
    if memory.tensor is None or storage.data_ptr() != memory.tensor.data_ptr():
        raise StartError("vLLM did not take the KV cache's memory from the shared buffer")


def _unlink_shared_memory() -> None:
    """Take away the names of the memory through which vLLM's ranks on a CPU add up their results.

    All ranks have mapped it by the time at which the KV cache is made. vLLM removes the names when
    it ends in order; a rank that is killed would leave them behind.
    """
    if (name := os.environ.get("VLLM_DIST_IDENT")) is not None:
        for path in Path("/dev/shm").glob(f"{name}-*"):
            path.unlink(missing_ok=True)


def _end_with_rank(rank: int) -> None:
    """Called in the watch's thread: the engine's own may wait for that rank forever."""
    logger.error("rank %d has died: this instance ends", rank)
    sys.stderr.flush()
    os._exit(1)

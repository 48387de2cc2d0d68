"""Where vLLM calls us: the hooks of its KV connector interface.

Collaborators: vLLM builds one connector for the scheduler and one for each rank of the model, in
this process or in the rank's own; all find their host (`hosts.py`), or that process's copy of it,
in the configuration that `compat.py` made.
Nothing is loaded here: KV that arrives is inserted into the block pool, where the request finds it
as an ordinary prefix hit. So most hooks have nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from memserve.types import TransferStyle
from memserve.workers.compat import HOST_KEY, LAYOUT_KEY, STYLE_KEY, check_kv_groups

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from memserve.workers.rank_messages import StepOrders


class ConnectorHost(Protocol):
    """Whoever has to know what the engine does. All calls come from the thread that computes."""

    def kv_cache_memory(self) -> AbstractContextManager[None] | None:
        """Around the allocation of the KV cache; None leaves it to vLLM."""
        ...

    def on_kv_caches(self, kv_caches: dict[str, torch.Tensor], block_size: int) -> None:
        """The KV cache exists. Per layer `[num_blocks, num_heads, block_size, content]`."""
        ...

    def on_scheduled(self, request_id: str, cached_tokens: int) -> None:
        """The request was scheduled for the first time; its step has not run yet."""
        ...

    def on_step(self, num_scheduled: Mapping[str, int]) -> StepOrders | None:
        """The step that runs next computes so many tokens of each request.

        Returns what it has to bring to the ranks, if they are other processes.
        """
        ...

    def on_step_begins(self, orders: StepOrders) -> None:
        """On a rank: nothing of the step has written to the KV cache yet."""
        ...

    def on_step_ended(self, orders: StepOrders) -> None:
        """On a rank: the step has computed all its KV (on a GPU: queued it)."""
        ...

    def on_layer(self, layer_name: str) -> None:
        """The step has computed this layer (on a GPU: queued it). Told in the style `layer`."""
        ...

    def on_finished(self, request: Request, block_ids: list[int]) -> None:
        """The request has ended, or was aborted; right after this its blocks are freed."""
        ...


class StepMetadata(KVConnectorMetadata):
    """What vLLM carries from the scheduler's half to the worker's, with each step."""

    def __init__(self, orders: StepOrders | None) -> None:
        self.orders = orders


class MemServeConnector(KVConnectorBase_V1, SupportsHMA):
    """Passes the scheduler's and the worker's hooks on to the host."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises: StartError if the model's KV cache is not of a supported kind."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_kv_groups(kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._host: ConnectorHost = settings[HOST_KEY]
        self._tells_layers = settings[STYLE_KEY] is TransferStyle.LAYER

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a request that was preempted may end, since `on_finished` sees its blocks then."""
        return False

    # ── the worker's half ─────────────────────────────────────────────────────────────────────

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        layout: str = settings[LAYOUT_KEY]
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A graph of the whole model would not call `save_kv_layer`."""
        return extra_config[STYLE_KEY] is TransferStyle.LAYER

    def get_mem_pool_context(self) -> AbstractContextManager[None] | None:
        return self._host.kv_cache_memory()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._host.on_kv_caches(kv_caches, self._vllm_config.cache_config.block_size)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._tells_layers:
            self._host.on_layer(layer_name)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called before the step overwrites blocks that were evicted for it."""
        if (orders := _orders(kv_connector_metadata)) is not None:
            self._host.on_step_begins(orders)

    def wait_for_save(self) -> None:
        if (orders := _orders(self._connector_metadata)) is not None:
            self._host.on_step_ended(orders)

    # ── the scheduler's half ──────────────────────────────────────────────────────────────────

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        for new in scheduler_output.scheduled_new_reqs:
            self._host.on_scheduled(new.req_id, new.num_computed_tokens)
        return StepMetadata(self._host.on_step(scheduler_output.num_scheduled_tokens))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._host.on_finished(request, block_ids[0])
        return False, None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))


def _orders(metadata: KVConnectorMetadata | None) -> StepOrders | None:
    return metadata.orders if isinstance(metadata, StepMetadata) else None

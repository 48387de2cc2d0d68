"""Builds an instance's DRAM tier and what swaps with it.

Collaborators: `main.py` calls it for a worker that has a tier; `dram.py`, `swapping.py` and
`swap_queue.py` are the parts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from memserve.core.swap import SwapCosts, SwapDecision, limits_for
from memserve.ops.blocks import block_ops
from memserve.types import Geometry
from memserve.workers.dram import DramTier
from memserve.workers.hostmemory import HostMemory
from memserve.workers.mempool import MemPool
from memserve.workers.swap_queue import SwapQueue
from memserve.workers.swapping import Swapper

_BATCH_BYTES = 16 << 20
"""Backed up by one copy: what one poll copies on the CPU, 0.3 ms of a GPU's host link."""


def make_swaps(
    mempool: MemPool,
    geometry: Geometry,
    hbm: torch.Tensor,
    *,
    dram_bytes: int,
    max_model_len: int,
    costs: SwapCosts,
    clock: Callable[[], float],
) -> SwapQueue:
    """For the KV cache that lies in `hbm` (the whole buffer). Raises: StartError."""
    tier = DramTier(
        geometry,
        hbm,
        HostMemory(dram_bytes, pin=hbm.is_cuda),
        block_ops(hbm.device),
        clock,
    )
    limits = limits_for(mempool.num_blocks, -(-max_model_len // geometry.block_size))
    batch_blocks = max(1, _BATCH_BYTES // geometry.block_bytes)
    swapper = Swapper(mempool, tier, limits, clock, batch_blocks=batch_blocks)
    decision = SwapDecision(costs, geometry.block_size, geometry.block_bytes * geometry.tp_size)
    return SwapQueue(mempool, swapper, decision, limits, clock)

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

_HOST_BATCH_BYTES = 16 << 20
"""Backed up in a step: as much as one poll copies."""
_CUDA_BATCH_BYTES = 64 << 20
"""At a step of 5 ms this is 12 GB/s, more than prefills can fill HBM with."""


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
    batch_bytes = _CUDA_BATCH_BYTES if hbm.is_cuda else _HOST_BATCH_BYTES
    batch_blocks = max(1, batch_bytes // geometry.block_bytes)
    swapper = Swapper(mempool, tier, limits, clock, batch_blocks=batch_blocks)
    decision = SwapDecision(costs, geometry.block_size, geometry.block_bytes * geometry.tp_size)
    return SwapQueue(mempool, swapper, decision, limits, clock)

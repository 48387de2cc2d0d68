"""Builds an instance's DRAM tier and what swaps with it.

Collaborators: `main.py` calls it for a worker that has a tier, with the copies of its host
(`hosts.py`); `dram.py`, `swapping.py` and `swap_queue.py` are the parts.
"""

from __future__ import annotations

from collections.abc import Callable

from memserve.core.swap import SwapCosts, SwapDecision, limits_for
from memserve.types import Geometry
from memserve.workers.copies import Copies
from memserve.workers.dram import DramTier
from memserve.workers.mempool import MemPool
from memserve.workers.swap_queue import SwapQueue
from memserve.workers.swapping import Swapper

_HOST_BATCH_BYTES = 16 << 20
"""Backed up in a step by each rank: as much as one poll copies."""
_CUDA_BATCH_BYTES = 64 << 20
"""At a step of 5 ms this is 12 GB/s, more than prefills can fill HBM with."""


def make_swaps(
    mempool: MemPool,
    geometry: Geometry,
    copies: Copies,
    *,
    is_on_gpu: bool,
    max_model_len: int,
    costs: SwapCosts,
    clock: Callable[[], float],
) -> SwapQueue:
    """Takes over the copies. `geometry`: of any rank."""
    tier = DramTier(copies)
    limits = limits_for(mempool.num_blocks, -(-max_model_len // geometry.block_size))
    batch_bytes = _CUDA_BATCH_BYTES if is_on_gpu else _HOST_BATCH_BYTES
    batch_blocks = max(1, batch_bytes // geometry.block_bytes)
    swapper = Swapper(mempool, tier, limits, clock, batch_blocks=batch_blocks)
    decision = SwapDecision(costs, geometry.block_size, geometry.block_bytes * geometry.tp_size)
    return SwapQueue(mempool, swapper, decision, limits, clock)

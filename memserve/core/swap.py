"""Whether KV in DRAM is worth bringing back, and how much history is kept there.

Pure arithmetic. `workers/swapping.py` asks before it swaps a prompt's blocks in; `cost_model.py`
answers what the two ways cost. The paper: section 4.1, swap_in and swap_out.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class SwapCosts(Protocol):
    """`CostModel`, as far as it is needed here."""

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds for a prefill of `num_tokens`, of which `cached_tokens` are in HBM."""
        ...

    def swap_in_s(self, size_bytes: int) -> float:
        """Seconds from DRAM to HBM."""
        ...


class SwapDecision:
    """Swap in or compute again. Does not mutate."""

    def __init__(self, costs: SwapCosts, block_size: int, block_bytes: int) -> None:
        """`block_bytes`: of one block of `block_size` tokens, on all ranks."""
        self._costs = costs
        self._block_size = block_size
        self._block_bytes = block_bytes

    def pays(self, num_tokens: int, cached_tokens: int, dram_blocks: int) -> bool:
        """Whether a prompt is ready sooner with `dram_blocks` swapped in.

        `cached_tokens`: the prefix that HBM holds in any case, which these blocks continue.
        """
        known_tokens = cached_tokens + dram_blocks * self._block_size
        saved_s = self._costs.exec_s(num_tokens, cached_tokens) - self._costs.exec_s(
            num_tokens, known_tokens
        )
        return saved_s > self._costs.swap_in_s(dram_blocks * self._block_bytes)


class SwapLimits(msgspec.Struct, frozen=True):
    """How far swapping goes."""

    margin_blocks: int
    """So many HBM blocks can be taken without losing anything: they are free, or history that is
    in DRAM too."""
    pinned_blocks: int
    """Swapped in, or being swapped in, for requests that the engine has not scheduled yet."""
    deadline_s: float = 5.0
    """A request that waited so long is computed without what is still in DRAM."""
    ttl_s: float = 3600.0
    """What nobody asked for in this time leaves DRAM."""


def limits_for(num_blocks: int, longest_blocks: int) -> SwapLimits:
    """For an HBM pool of `num_blocks`, and requests that have up to `longest_blocks`.

    The engine takes blocks in bursts as long as a request, faster than they can be copied: what the
    next burst takes must be in DRAM before. The margin costs capacity, since it is kept twice.
    """
    burst = min(longest_blocks, num_blocks // 2)
    return SwapLimits(
        margin_blocks=max(burst, num_blocks // 8, 1), pinned_blocks=max(num_blocks // 2, 1)
    )

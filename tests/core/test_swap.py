"""When swapping in pays, and how far swapping goes."""

from __future__ import annotations

import pytest

from memserve.core.swap import SwapDecision, limits_for


class Costs:
    """A millisecond a token that is computed; as much for a kilobyte from DRAM."""

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        return 1e-3 * (num_tokens - cached_tokens)

    def swap_in_s(self, size_bytes: int) -> float:
        return 1e-6 * size_bytes


@pytest.mark.parametrize(
    ("block_bytes", "cached_tokens", "pays"),
    [(15_900, 0, True), (16_100, 0, False), (15_900, 32, True), (1 << 20, 0, False)],
)
def test_swapping_in_pays_when_it_is_faster_than_computing(
    block_bytes: int, cached_tokens: int, pays: bool
) -> None:
    decision = SwapDecision(Costs(), 16, block_bytes)
    assert decision.pays(1000, cached_tokens, 10) is pays


@pytest.mark.parametrize(
    ("num_blocks", "longest", "margin"),
    [(100, 20, 20), (100, 5, 12), (100, 80, 50), (30_000, 512, 3750), (1, 1, 1), (2, 64, 1)],
)
def test_the_margin_covers_a_burst_and_leaves_half_the_pool(
    num_blocks: int, longest: int, margin: int
) -> None:
    limits = limits_for(num_blocks, longest)
    assert limits.margin_blocks == margin
    assert 1 <= limits.pinned_blocks <= max(1, num_blocks // 2)

"""What a request has to keep to count as good: the service-level objectives of a run."""

from __future__ import annotations

import msgspec

from memserve.simulator.simulation import Outcome


class Objectives(msgspec.Struct, frozen=True):
    """None: anything will do."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    @property
    def are_any(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None

    def are_met(self, outcome: Outcome) -> bool:
        """Of a request that failed: no. TPOT counts where there are two tokens."""
        ttft_s, tpot_s = outcome.ttft_s, outcome.tpot_s
        if outcome.ended_at is None or ttft_s is None:
            return False
        is_soon = self.ttft_s is None or ttft_s <= self.ttft_s
        return is_soon and (self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s)

    def __str__(self) -> str:
        parts = [("TTFT", self.ttft_s), ("TPOT", self.tpot_s)]
        return ", ".join(f"{name} ≤ {value:g} s" for name, value in parts if value is not None)

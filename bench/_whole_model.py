"""A cost model that looks at whole prefills only, to compare with (the paper: figure 14).

`memserve/core/cost_fit.py` fits what MemServe uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from memserve.core.cost_samples import PrefillSample
from memserve.core.least_squares import columns, relative
from memserve.core.profile import Floats


class WholeModelFit(msgspec.Struct, frozen=True):
    """Seconds of a prefill as one polynomial, with nothing known of what is inside it.

    `a·n·c + b·n² + c·n + d·c + e` with n tokens computed after c cached ones.
    """

    tp: int
    coefficients: tuple[float, ...]

    def exec_s(self, num_tokens: int, cached_tokens: int = 0) -> float:
        """As `CostModel.exec_s`."""
        terms = _whole_terms(np.array([num_tokens]), np.array([cached_tokens]))
        return float((terms @ np.array(self.coefficients))[0])

    def with_tp(self, tp: int) -> WholeModelFit:
        """All it can do: divide by the number of ranks."""
        ratio = self.tp / tp
        return WholeModelFit(tp, tuple(ratio * number for number in self.coefficients))


def fit_whole_model(prefills: Sequence[PrefillSample], tp: int = 1) -> WholeModelFit:
    """The best polynomial. Raises: ValueError without samples."""
    if not prefills:
        raise ValueError("a whole-model fit needs prefills")
    total, cached, seconds = columns(
        (sample.num_tokens, sample.cached_tokens, sample.seconds) for sample in prefills
    )
    return WholeModelFit(tp, tuple(relative(_whole_terms(total, cached), seconds).tolist()))


def _whole_terms(total: np.ndarray, cached: np.ndarray) -> Floats:
    before = np.minimum(cached, total - 1).astype(np.float64)
    new = total - before
    return np.stack([new * before, new * new, new, before, np.ones(len(new))], axis=1)

"""Least squares with coefficients that cannot be negative, for `cost_fit.py`.

A cost that falls with more work would mislead wherever nothing was measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from memserve.core.profile import Floats

_RIDGE = 1e-12
"""Keeps sets of dependent terms solvable."""
_TOLERANCE = 1e-9


def nonnegative(terms: Floats, target: Floats) -> Floats:
    """The coefficients ≥ 0 with the least squares of `terms @ coefficients − target`.

    Tries sets of coefficients that are not 0, the largest first, until one is the best: exact, and
    quick for the eight that the largest fit has. Shapes: terms `[samples, coefficients]`, target
    `[samples]`.
    """
    num = terms.shape[1]
    norms = np.sqrt((terms * terms).sum(axis=0))
    scaled = terms / np.where(norms > 0, norms, 1.0)
    gram, moments = scaled.T @ scaled, scaled.T @ target
    tolerance = _TOLERANCE * (1 + float(np.abs(moments).max(initial=0.0)))
    used = np.flatnonzero(norms).tolist()
    for size in range(len(used), 0, -1):
        for chosen in itertools.combinations(used, size):
            places = list(chosen)
            part = gram[np.ix_(places, places)] + _RIDGE * np.eye(size)
            found = np.linalg.solve(part, moments[places])
            if (found < 0).any():
                continue
            slopes = moments - gram[:, places] @ found
            slopes[places] = 0.0
            if (slopes <= tolerance).all():  # no coefficient that is 0 would help if it grew
                best = np.zeros(num)
                best[places] = found / norms[places]
                return best
    return np.zeros(num)


def relative(terms: Floats, seconds: Floats, least: float = 0.0) -> Floats:
    """`nonnegative` of relative errors. `least`: samples shorter than this part of the longest one
    count no more than that."""
    weights = 1 / np.maximum(seconds, least * seconds.max())
    return nonnegative(terms * weights[:, None], seconds * weights)


def mean_error(predicted: Floats, measured: Floats) -> float:
    """The mean absolute relative error."""
    return float(np.mean(np.abs(predicted / measured - 1)))


def columns(rows: Iterable[Sequence[float]]) -> Floats:
    """The rows, turned into arrays by column."""
    return np.array(list(rows), dtype=np.float64).T

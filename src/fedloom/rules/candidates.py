# SPDX-License-Identifier: Apache-2.0
"""One factorisation, a solution for each filter, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.rules.solving import BelowFloorWarning, Factorisation, FastWeights
from fedloom.rules.statistics import Gram


def candidates(gram: Gram, alphas: Sequence[float | None], ridge: float = 0.0) -> list[FastWeights]:
    """Solve for every alpha; one that float64 sums cannot hold says so as ``floored``."""
    factorised = Factorisation.of(gram)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowFloorWarning)
        return [factorised.solve(alpha=alpha, ridge=ridge) for alpha in alphas]


def candidates_of_rows(
    keys: NDArray[Any], values: NDArray[Any], alphas: Sequence[float | None], ridge: float = 0.0
) -> list[NDArray[np.float64]]:
    """Solve for every alpha from rows ``[n, d]`` and ``[n, p]``, n below d: weights ``[d, p]``.

    ``K K' = U diag(s^2) U'`` is n x n, and ``W = K' U diag(1 / (s^2 + ridge)) U' V``: the weights
    of ``candidates`` for a factorisation of n^3 in place of d^3 (see ``solving.solve_dual``).
    """
    k, v = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    eigen, vectors = np.linalg.eigh(k @ k.T)
    sigma, basis = np.sqrt(np.clip(eigen[::-1], 0.0, None)), vectors[:, ::-1]
    factorised = Factorisation(sigma, basis, basis.T @ v, float(np.vdot(v, v)), len(k))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowFloorWarning)
        return [k.T @ factorised.solve(alpha=alpha, ridge=ridge).weights for alpha in alphas]


def best(scored: Sequence[tuple[float, float]]) -> int:
    """Return the place of the most right answers, then the lowest cross-entropy, then the first.

    >>> best([(7, 1.0), (9, 2.0), (9, 1.5), (9, 1.5)])
    2
    """
    order = [(-correct, ce, place) for place, (correct, ce) in enumerate(scored)]
    return min(order)[2]

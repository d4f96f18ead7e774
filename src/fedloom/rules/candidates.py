# SPDX-License-Identifier: Apache-2.0
"""One factorisation, a solution for each filter, and the choice among them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fedloom.rules.solving import BelowFloorWarning, Factorisation, FastWeights
from fedloom.rules.statistics import Gram


def candidates(gram: Gram, alphas: Sequence[float | None], ridge: float = 0.0) -> list[FastWeights]:
    """Solve for every alpha; one that float64 sums cannot hold says so as ``floored``."""
    factorised = Factorisation.of(gram)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BelowFloorWarning)
        return [factorised.solve(alpha=alpha, ridge=ridge) for alpha in alphas]


def best(scored: Sequence[tuple[float, float]]) -> int:
    """Return the place of the most right answers, then the lowest cross-entropy, then the first.

    >>> best([(7, 1.0), (9, 2.0), (9, 1.5), (9, 1.5)])
    2
    """
    order = [(-correct, ce, place) for place, (correct, ce) in enumerate(scored)]
    return min(order)[2]

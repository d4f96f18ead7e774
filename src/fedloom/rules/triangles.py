# SPDX-License-Identifier: Apache-2.0
"""``Triangle``: the same problem kept as a QR factor, so that no condition number is squared.

A triangle has the size of a Gram and merges like one, but by a factorisation and not by a sum: it
cannot be masked, noised or subtracted, and it hides nothing that the Gram shows (it is the Gram's
Cholesky factor).  It is the oracle of the tests, and a mode for servers that clients trust.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.rules.factors import triangle
from fedloom.rules.solving import FastWeights

_ROWS = 8192


@dataclass(frozen=True, eq=False)
class Triangle:
    """The factor ``R`` of a QR decomposition of ``[K V]`` (tall-skinny QR: Demmel et al., 2012).

    >>> keys, values = np.eye(3), np.ones((3, 1))
    >>> halves = Triangle.of(keys[:1], values[:1]) + Triangle.of(keys[1:], values[1:])
    >>> bool(np.allclose(halves.solve(alpha=1.0).weights, 1.0))
    True
    """

    factor: NDArray[np.float64]
    """``[at most d + p, d + p]``, upper triangular."""
    keys: int
    """Width of the keys, d."""
    count: float

    @classmethod
    def of(cls, keys: NDArray[Any], values: NDArray[Any]) -> Triangle:
        """Factorise rows of ``keys`` ``[n, d]`` and ``values`` ``[n, p]``, a block at a time."""
        factor = np.zeros((0, keys.shape[1] + values.shape[1]))
        for start in range(0, len(keys), _ROWS):
            rows = slice(start, start + _ROWS)
            block = np.concatenate([factor, _joined(keys[rows], values[rows])])
            factor = triangle(block)
        return cls(factor, int(keys.shape[1]), len(keys))

    def __add__(self, other: Triangle) -> Triangle:
        factor = triangle(np.concatenate([self.factor, other.factor]))
        return Triangle(factor, self.keys, self.count + other.count)

    def solve(self, *, alpha: float, rank: int | None = None) -> FastWeights:
        """Return the fast weights; see ``fedloom.rules.solving`` for the filter.

        Raises
        ------
        ValueError
            If no row went in.
        """
        if not self.count > 0:
            raise ValueError("a triangle of no rows: expected at least one")
        of_keys, of_values = self.factor[:, : self.keys], self.factor[:, self.keys :]
        u, sigma, rt = np.linalg.svd(of_keys, full_matrices=False)
        tolerance = self.count**-alpha
        kept = sigma > tolerance * sigma[0]
        if rank is not None:
            kept[rank:] = False
        size = int(kept.sum())
        projected = u[:, :size].T @ of_values
        squares = float(np.vdot(of_values, of_values))
        return FastWeights(
            rt[:size].T @ (projected / sigma[:size, None]),
            size,
            tolerance,
            float(np.vdot(projected, projected)) / squares if squares else math.nan,
            float(sigma[0] / sigma[size - 1]) if size else math.nan,
        )


def _joined(keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float64]:
    return np.concatenate([keys, values], axis=1, dtype=np.float64)

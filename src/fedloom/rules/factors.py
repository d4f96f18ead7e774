# SPDX-License-Identifier: Apache-2.0
"""Matrices of low rank, kept as two thin factors and never multiplied out.

Norms and singular values come from two thin QR decompositions and a square core: for factors of
width n that is ``O((out + in) n^2)`` work and no array beyond ``max(out, in) x n``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True, eq=False)
class Factors:
    """The ``out x in`` matrix ``b @ a``, which nobody needs to form.

    >>> Factors(np.array([[3.0], [0.0]]), np.array([[0.0, 2.0, 0.0]])).norm()
    6.0
    """

    b: NDArray[Any]
    """``[out, width]``"""
    a: NDArray[Any]
    """``[width, in]``"""

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the product."""
        return self.b.shape[0], self.a.shape[1]

    @property
    def width(self) -> int:
        """Columns of ``b``: no less than the rank."""
        return int(self.a.shape[0])

    @classmethod
    def joined(cls, parts: Sequence[Factors]) -> Factors:
        """Stack side by side: the product is the sum of the parts' products, in float64."""
        b = np.concatenate([part.b for part in parts], axis=1, dtype=np.float64)
        return cls(b, np.concatenate([part.a for part in parts], axis=0, dtype=np.float64))

    def times(self, number: float) -> Factors:
        """Multiply by a number, in float64 and on ``a`` alone."""
        return Factors(self.b, np.asarray(self.a, np.float64) * number)

    def minus(self, other: Factors) -> Factors:
        """Return the difference; its width is the sum of both."""
        return self.joined([self, other.times(-1.0)])

    def astype(self, dtype: DTypeLike) -> Factors:
        """Round both factors."""
        return Factors(self.b.astype(dtype), self.a.astype(dtype))

    def norm(self) -> float:
        """Frobenius norm. No Gram matrix, which would square the condition number."""
        return float(np.linalg.norm(triangle(self.b) @ triangle(self.a.T).T))

    def folded(self) -> Factors:
        """Return factors of the same product that are no wider than its shorter side.

        The standard basis is as orthonormal as any: beyond that width the product itself, beside
        an identity, is the smaller of the two forms.
        """
        if self.width <= min(self.shape):
            return self
        out, inner = self.shape
        whole = np.asarray(self.b, np.float64) @ np.asarray(self.a, np.float64)
        return Factors(np.eye(out), whole) if out <= inner else Factors(whole, np.eye(inner))

    def spectrum(self) -> Spectrum:
        """Return the thin singular value decomposition of the product."""
        q_b, r_b = np.linalg.qr(np.asarray(self.b, np.float64))
        q_a, r_a = np.linalg.qr(np.asarray(self.a, np.float64).T)
        u, values, vt = np.linalg.svd(r_b @ r_a.T, full_matrices=False)
        # What rounding leaves of a zero must not grow: a factor takes its square root. Columns that
        # cancel leave more than the product's own size tells, so their norms set the floor.
        norms = np.linalg.norm(r_b, axis=0) @ np.linalg.norm(r_a, axis=0)
        values[values <= norms * np.finfo(np.float64).eps] = 0.0
        left, right = q_b @ u, vt @ q_a.T
        largest = np.abs(left).argmax(axis=0)
        sign = np.where(np.take_along_axis(left, largest[None], axis=0)[0] < 0, -1.0, 1.0)
        return Spectrum(left * sign, values, right * sign[:, None])


def triangle(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Return the factor R of a QR decomposition, in float64."""
    return np.asarray(np.linalg.qr(np.asarray(matrix, np.float64), mode="r"))


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A thin singular value decomposition in one gauge.

    The largest entry of each left vector is positive, so equal input gives equal bits. Where
    singular values coincide, or two entries tie to the last bit, another BLAS may turn the vectors;
    only products are free of the gauge, and only products should be compared across machines.
    """

    left: NDArray[np.float64]
    """``[out, n]``, orthonormal columns."""
    values: NDArray[np.float64]
    """``[n]``, falling; what is zero but for rounding is zero."""
    right: NDArray[np.float64]
    """``[n, in]``, orthonormal rows."""

    @property
    def rank(self) -> int:
        """Number of singular values that are not zero."""
        return int(np.count_nonzero(self.values))

    def tail(self, rank: int) -> float:
        """Frobenius norm of what no matrix of rank ``rank`` can hold (Eckart and Young)."""
        return float(np.linalg.norm(self.values[rank:]))

    def pair(self, rank: int, scale: float, row_norm: float = 0.0) -> Factors:
        """Return the best factors of rank ``rank``: ``scale * b @ a`` is the truncated matrix.

        Both sides take the square root of the singular values, or ``a`` has rows of norm
        ``row_norm`` and ``b`` takes the rest. Directions beyond the matrix's own rank are zero on
        both sides.
        """
        used = min(rank, self.rank)
        values = self.values[:used] / scale
        rows = np.full(used, row_norm) if row_norm else np.sqrt(values)
        b, a = np.zeros((len(self.left), rank)), np.zeros((rank, self.right.shape[1]))
        b[:, :used] = self.left[:, :used] * (values / rows)
        a[:used] = rows[:, None] * self.right[:used]
        return Factors(b, a)

    def distance(self, pair: Factors) -> float:
        """Frobenius norm of this matrix minus ``pair.b @ pair.a``, at the cost of a thin product.

        Each factor is split along and across the singular vectors; the four blocks that follow are
        orthogonal, so their norms add in squares and nothing cancels.
        """
        b, a = np.asarray(pair.b, np.float64), np.asarray(pair.a, np.float64)
        along_b, along_a = self.left.T @ b, a @ self.right.T
        across_b, across_a = b - self.left @ along_b, a - along_a @ self.right
        inside = float(np.linalg.norm(np.diag(self.values) - along_b @ along_a))
        outside = ((along_b, across_a), (across_b, along_a), (across_b, across_a))
        return math.hypot(inside, *(Factors(*block).norm() for block in outside))

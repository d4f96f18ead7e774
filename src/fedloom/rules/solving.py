# SPDX-License-Identifier: Apache-2.0
"""Fast weights ``W = K^+ V`` from sums: one factorisation, then any filter and any ridge.

The filter is FAAST's (arXiv 2605.04651 and its released code): singular values of ``K`` at or below
``sigma_max * N ** -alpha`` are dropped, with N the number of rows of all clients together.  It is a
hard cut, relative, on singular values and not on their squares.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.rules.statistics import Gram


class BelowFloorWarning(UserWarning):
    """A tolerance lies below what the sums can hold; the floor was used in its place."""


@dataclass(frozen=True, eq=False)
class FastWeights:
    """A solution, and what is to be known about it."""

    weights: NDArray[np.float64]
    """``[d, p]``: a query ``q`` reads ``q @ weights``."""
    rank: int
    """Directions of the keys that were kept."""
    tolerance: float
    """Kept are singular values above so large a share of the largest."""
    explained: float
    """``1 - ||K W - V||^2 / ||V||^2`` over the summed rows; NaN if ``||V||`` is unknown."""
    condition: float
    """Largest over smallest kept singular value."""
    floored: bool = False
    """Whether the tolerance that was asked for is below what the sums can hold."""


def floor(keys: int) -> float:
    """Return the smallest relative tolerance on singular values that float64 sums can hold.

    Rounding leaves errors of ``eps`` times the largest eigenvalue in every other one, and an
    eigenvalue is a singular value squared: ``sqrt(d eps)``, 4.8e-7 for d = 1024.
    """
    return math.sqrt(keys * float(np.finfo(np.float64).eps))


def tolerance(
    count: float, keys: int, alpha: float | None, *, ridge: float = 0.0, shrunk: float = 1.0
) -> tuple[float, bool]:
    """Return the relative tolerance on singular values, and whether it was raised to the floor.

    Parameters
    ----------
    shrunk : float
        The largest trace before rows were taken out, over the largest eigenvalue now: what was
        rounding beside the one passes for directions beside the other.

    Warns
    -----
    BelowFloorWarning
        If it was raised.
    """
    lowest = 0.0 if ridge else floor(keys) * math.sqrt(max(shrunk, 1.0))
    asked = 0.0 if alpha is None else count**-alpha
    floored = alpha is not None and asked < lowest
    if floored:
        warnings.warn(
            f"a tolerance of N^-alpha = {asked:.2g} is below {lowest:.2g}, the smallest that"
            f" float64 sums of {keys} keys can hold: that one is used; take a"
            " smaller alpha, or triangles in place of sums",
            BelowFloorWarning,
            stacklevel=3,
        )
    return max(asked, lowest), floored


@dataclass(frozen=True, eq=False)
class Factorisation:
    """Eigenvalues and eigenvectors of one Gram; every solution from it costs a product."""

    sigma: NDArray[np.float64]
    """Singular values of ``K``, largest first: ``[d]``."""
    basis: NDArray[np.float64]
    """Right singular vectors as columns: ``[d, d]``."""
    projected: NDArray[np.float64]
    """``basis' K'V``: ``[d, p]``."""
    squares: float
    count: float
    before: float = 0.0
    """As in the Gram: the largest trace from which rows were taken out."""

    @classmethod
    def of(cls, gram: Gram) -> Factorisation:
        """Factorise; costs about ``9 d^3`` operations.

        Raises
        ------
        ValueError
            If no row was summed: there is nothing to solve.
        """
        if not gram.count > 0:
            raise ValueError(f"a Gram of {gram.count} rows: expected at least one")
        values, vectors = np.linalg.eigh(gram.dense())
        sigma = np.sqrt(np.clip(values[::-1], 0.0, None))  # rounding makes zeros negative
        basis = np.ascontiguousarray(vectors[:, ::-1])
        projected = basis.T @ gram.cross
        return cls(sigma, basis, projected, gram.squares, gram.count, gram.before)

    def solve(
        self, *, alpha: float | None = 1.0, ridge: float = 0.0, rank: int | None = None
    ) -> FastWeights:
        """Return the fast weights for one filter.

        Parameters
        ----------
        alpha : float or None
            Keep singular values above ``N ** -alpha`` of the largest; larger keeps more. None keeps
            all that the sums can hold.
        ridge : float
            Solve ``(K'K + ridge I) W = K'V`` in the kept directions.
        rank : int, optional
            Keep at most so many directions, the largest.

        Warns
        -----
        BelowFloorWarning
            If the tolerance is below ``floor``, which is then used.
        """
        if ridge < 0 or (alpha is not None and alpha < 0) or (rank is not None and rank < 1):
            raise ValueError(
                f"alpha {alpha}, ridge {ridge}, rank {rank}: expected none below 0 and a rank of 1"
            )
        largest = float(self.sigma[0]) ** 2
        cut, floored = tolerance(
            self.count,
            len(self.sigma),
            alpha,
            ridge=ridge,
            shrunk=self.before / largest if largest else 1.0,
        )
        return self._filtered(cut, ridge, rank, floored)

    def _filtered(
        self, tolerance: float, ridge: float, rank: int | None, floored: bool
    ) -> FastWeights:
        kept = self.sigma > tolerance * self.sigma[0]
        if rank is not None:
            kept[rank:] = False
        size = int(kept.sum())  # sigma falls: the kept come first
        s, projected = self.sigma[:size], self.projected[:size]
        inverse = 1.0 / (s**2 + ridge)
        weights = self.basis[:, :size] @ (inverse[:, None] * projected)
        # ||V||^2 - ||KW - V||^2 = 2 tr W'K'V - tr W'K'KW, both in the kept directions.
        gained = float(((2.0 * inverse - inverse**2 * s**2) @ (projected**2)).sum())
        return FastWeights(
            weights,
            size,
            tolerance,
            gained / self.squares if self.squares > 0 else math.nan,
            float(s[0] / s[-1]) if size else math.nan,
            floored,
        )

    def sweep(
        self, alphas: Sequence[float] = (), ridges: Sequence[float] = ()
    ) -> Iterator[FastWeights]:
        """Yield a solution for each alpha, then for each ridge without a filter."""
        for alpha in alphas:
            yield self.solve(alpha=alpha)
        for ridge in ridges:
            yield self.solve(alpha=None, ridge=ridge)


def solve(
    gram: Gram, *, alpha: float | None = 1.0, ridge: float = 0.0, rank: int | None = None
) -> FastWeights:
    """Solve once; see ``Factorisation`` for several filters at the price of one.

    >>> keys = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> found = solve(Gram.of(keys, keys @ [[1.0], [5.0]]), alpha=1.0)
    >>> found.rank, found.weights.ravel().round(9).tolist()
    (2, [1.0, 5.0])
    """
    return Factorisation.of(gram).solve(alpha=alpha, ridge=ridge, rank=rank)


def solve_dual(
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    alpha: float | None = 1.0,
    count: float | None = None,
) -> FastWeights:
    """Solve from the rows themselves by an eigendecomposition of ``K K'`` (n x n).

    For a few rows (n <= d), where it is cheaper than the sums: ``W = K' (K K')^+ V``.

    Parameters
    ----------
    count : float, optional
        N of the filter, where these rows are not all; their number if left out.
    """
    k, v = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    if not len(k):
        raise ValueError("no row: expected at least one")
    eigen, vectors = np.linalg.eigh(k @ k.T)
    factorised = Factorisation(
        sigma=np.sqrt(np.clip(eigen[::-1], 0.0, None)),
        basis=vectors[:, ::-1],
        projected=vectors[:, ::-1].T @ v,
        squares=float(np.vdot(v, v)),
        count=len(k) if count is None else count,
    )
    dual = factorised.solve(alpha=alpha)
    explained = float((factorised.projected[: dual.rank] ** 2).sum())
    return FastWeights(
        k.T @ dual.weights,
        dual.rank,
        dual.tolerance,
        explained / factorised.squares if factorised.squares else math.nan,
        dual.condition,
        dual.floored,
    )


def naive_solve(
    keys: NDArray[Any], values: NDArray[Any], *, alpha: float, count: float | None = None
) -> NDArray[np.float64]:
    """Return ``R diag(1 / s) U' V`` over the kept singular values: the definition, row by row."""
    k, v = np.asarray(keys, np.float64), np.asarray(values, np.float64)
    u, s, rt = np.linalg.svd(k, full_matrices=False)
    tolerance = s[0] * (len(k) if count is None else count) ** -alpha
    weights = np.zeros((k.shape[1], v.shape[1]))
    for j, size in enumerate(s):
        if size > tolerance:
            weights += np.outer(rt[j], u[:, j] @ v) / size
    return weights

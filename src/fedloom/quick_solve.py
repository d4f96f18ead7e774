# SPDX-License-Identifier: Apache-2.0
"""The classifier's sums and solves without the work that nobody reads.

``fedloom.rules.solving`` factorises ``K'K = R diag(s^2) R'``, and is the oracle of what is here.
Half of that goes into ``K'K = Q T Q'`` with T tridiagonal (Golub and Van Loan, 8.3), and a single
solution needs no more: a ridge a factor of Cholesky, a filter the eigenvectors of T on the shorter
side of its cut.  For many solutions all of T's eigenvectors are made, and Q turns back solutions
instead of them.  All of it is exact algebra, and has the rounding of an eigendecomposition.
"""

# Shapes: d width of the keys, C classes, J solutions.

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import blas, eigh_tridiagonal, lapack

from fedloom.rules.solving import Factorisation, tolerance
from fedloom.rules.statistics import Gram

Matrix = NDArray[np.float64]
Rows = NDArray[np.intp]

_BLOCK = 2048  # rows cast up and multiplied at a time
_FEW = 8  # one eigenvector in so many is quicker by itself; more are made all at once
_SMALL = 32  # below, calls cost more than numbers


def blocks(rows: Rows, size: int = _BLOCK) -> Iterator[Rows]:
    """Yield so many rows at a time."""
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


@dataclass(frozen=True, eq=False)
class Sums:
    """What a ``Gram`` of one-hot values holds, neither mirrored nor packed."""

    square: Matrix
    """Lower triangle of ``K'K`` ``[d, d]``, in Fortran's order; zeros above."""
    cross: Matrix
    """``K'Y``: ``[d, C]``."""
    count: int
    before: float = 0.0
    """As in the ``Gram``: the largest trace from which rows were taken out."""

    @classmethod
    def of(cls, keys: NDArray[np.floating], labels: Rows, classes: int, rows: Rows) -> Sums:
        """Sum over some rows of ``keys`` ``[n, d]`` with classes by index ``[n]``.

        Raises
        ------
        ValueError
            If a sum is not finite.
        """
        width = keys.shape[1]
        square, cross = np.zeros((width, width), order="F"), np.zeros((width, classes), order="F")
        for some in blocks(rows[np.argsort(labels[rows], kind="stable")]):
            block = np.asarray(keys[some], np.float64)
            square = blas.dsyrk(1.0, block.T, beta=1.0, c=square, lower=1, overwrite_c=1)
            starts = np.flatnonzero(np.diff(labels[some], prepend=-1))  # rows go by class
            for first, end in pairwise((*starts, len(some))):
                cross[:, labels[some[first]]] += block[first:end].sum(axis=0)
        if not (np.isfinite(square.diagonal()).all() and np.isfinite(cross).all()):
            raise ValueError("keys hold numbers whose squares are not finite in float64")
        return cls(square, cross, len(rows))

    @functools.cached_property
    def trace(self) -> float:
        """Sum of all squared entries of ``K``."""
        return float(self.square.trace())

    def times(self, weights: Matrix) -> Matrix:
        """Return ``K'K W``."""
        made: Matrix = blas.dsymm(1.0, self.square, weights, lower=1)
        return made

    def gram(self) -> Gram:
        """Return what can be added to other sums, sent and kept."""
        packed = self.square.T[np.triu_indices(len(self.square))]
        return Gram(packed, self.cross, float(self.count), self.count, self.before)

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.square + other.square,
            self.cross + other.cross,
            self.count + other.count,
            max(self.before, other.before),
        )

    def __sub__(self, other: Sums) -> Sums:
        return Sums(
            self.square - other.square,
            self.cross - other.cross,
            self.count - other.count,
            max(self.before, other.before, self.trace),
        )


@dataclass(frozen=True, eq=False)
class Tridiagonal:
    """``K'K = Q T Q'``: Q as reflectors that are never multiplied out."""

    diagonal: Matrix
    beside: Matrix
    reflectors: Matrix
    scales: Matrix
    inner: Matrix
    """``Q' K'Y``: ``[d, C]``."""

    @classmethod
    def of(cls, sums: Sums) -> Tridiagonal:
        """Reduce; costs about ``4/3 d^3`` operations."""
        work = int(lapack.dsytrd_lwork(len(sums.square), lower=1)[0])
        made, diagonal, beside, scales, _ = lapack.dsytrd(sums.square, lower=1, lwork=work)
        reflectors = np.asfortranarray(made[1:, :-1])
        inner = _turned(reflectors, scales, sums.cross, "T")
        return cls(diagonal, beside, reflectors, scales, inner)

    @functools.cached_property
    def eigenvalues(self) -> Matrix:
        """Those of T and so of ``K'K``, smallest first, without the vectors."""
        found: Matrix = eigh_tridiagonal(
            self.diagonal,
            self.beside,
            eigvals_only=True,
            check_finite=False,
            lapack_driver="sterf",
        )
        return found

    @functools.cached_property
    def eigen(self) -> tuple[Matrix, Matrix]:
        """Eigenvalues of T, smallest first, and all its eigenvectors."""
        found: tuple[Matrix, Matrix] = eigh_tridiagonal(
            self.diagonal, self.beside, check_finite=False
        )
        return found

    @property
    def sigma(self) -> Matrix:
        """Singular values of ``K``, largest first."""
        return np.sqrt(np.clip(self.eigen[0][::-1], 0.0, None))

    def filtered(self, cut: float, ridge: float) -> tuple[Matrix, int] | None:
        """Solve for one relative tolerance on singular values.

        Returns
        -------
        Weights ``[d, C]`` and the number of directions kept; None where rounding decides on which
        side of the cut an eigenvalue is.
        """
        values, width = self.eigenvalues, len(self.eigenvalues)
        least = cut**2 * values[-1]
        rounding = 4.0 * np.sqrt(width) * np.finfo(np.float64).eps * values[-1]
        if np.abs(values - least).min() <= rounding:
            return None
        dropped = int((values <= least).sum())
        inner = self._without(dropped, ridge) if _FEW * dropped <= width else None
        if inner is None:
            inner = self._within(dropped, width, ridge)
        return _turned(self.reflectors, self.scales, inner, "N"), width - dropped

    def solutions(self, ridges: Sequence[float], sizes: Sequence[int], ridge: float) -> Matrix:
        """Solve with each ridge, then (with ``ridge``) in each number of largest directions.

        Parameters
        ----------
        sizes : sequence of int
            Each larger than the one before.

        Returns
        -------
        array of shape (J, C, d)
        """
        width = len(self.diagonal)
        found: list[Matrix] = []
        for each in ridges:
            shifted = self._shifted(self.inner, each)
            if shifted is None:  # below the rounding of the sums: what is positive is kept
                shifted = self._within(int((self.eigen[0] <= 0).sum()), width, each)
            found.append(shifted)
        total = np.zeros_like(self.inner)
        for first, last in pairwise((0, *sizes)):
            total = total + self._within(width - last, width - first, ridge)
            found.append(total)
        side_by_side: Matrix = np.concatenate(found, axis=1)
        weights = _turned(self.reflectors, self.scales, side_by_side, "N")
        return weights.T.reshape(len(found), -1, width)

    def _within(self, first: int, end: int, ridge: float) -> Matrix:
        """Solve in some eigenvectors of T."""
        values, vectors = self._vectors(first, end)
        return vectors @ ((vectors.T @ self.inner) / (values + ridge)[:, None])

    def _without(self, dropped: int, ridge: float) -> Matrix | None:
        """Solve with T itself and take the few small directions out; None if T is singular.

        They are out of the right side too: what the solve then blows up is rounding alone, and that
        lies in the directions that go out last.
        """
        if not dropped:
            return self._shifted(self.inner, ridge)
        small = self._vectors(0, dropped)[1]
        solved = self._shifted(self.inner - small @ (small.T @ self.inner), ridge)
        return None if solved is None else solved - small @ (small.T @ solved)

    def _shifted(self, right: Matrix, ridge: float) -> Matrix | None:
        """Return ``(T + ridge I)^-1 right``; None where that is not positive definite."""
        *_, solved, failed = lapack.dptsv(self.diagonal + ridge, self.beside, right)
        return None if failed else solved

    def _vectors(self, first: int, end: int) -> tuple[Matrix, Matrix]:
        """Return some eigenvalues and eigenvectors: by bisection and inverse iteration if few."""
        if "eigen" in self.__dict__ or _FEW * (end - first) > len(self.diagonal):
            return self.eigen[0][first:end], self.eigen[1][:, first:end]
        found: tuple[Matrix, Matrix] = eigh_tridiagonal(
            self.diagonal,
            self.beside,
            select="i",
            select_range=(first, end - 1),
            check_finite=False,
            lapack_driver="stebz",
        )
        return found


def solve(sums: Sums, *, alpha: float | None, ridge: float) -> tuple[Matrix, int]:
    """Return weights ``[d, C]`` and their rank, as ``Factorisation.of(sums.gram()).solve`` does.

    Warns
    -----
    BelowFloorWarning
        If the tolerance is below what the sums can hold.
    """
    width, found = len(sums.square), None
    if width >= _SMALL and sums.trace > 0:
        if ridge and alpha is None:
            found = _ridged(sums, ridge)
        else:
            reduced = Tridiagonal.of(sums)
            shrunk = sums.before / float(reduced.eigenvalues[-1])
            cut, _ = tolerance(sums.count, width, alpha, ridge=ridge, shrunk=shrunk)
            found = reduced.filtered(cut, ridge)
    if found is None:
        plain = Factorisation.of(sums.gram()).solve(alpha=alpha, ridge=ridge)
        found = plain.weights, plain.rank
    return found


def factorised(sums: Sums) -> Tridiagonal | Factorisation:
    """Return what many solutions can be had from."""
    if len(sums.square) >= _SMALL and sums.trace > 0:
        return Tridiagonal.of(sums)
    return Factorisation.of(sums.gram())


def solutions(
    source: Tridiagonal | Factorisation,
    ridges: Sequence[float],
    sizes: Sequence[int],
    ridge: float,
) -> Matrix:
    """Solve with each ridge, then (with ``ridge``) in each number of directions: ``[J, C, d]``."""
    if isinstance(source, Tridiagonal):
        return source.solutions(ridges, sizes, ridge)
    found = [source.solve(alpha=None, ridge=each) for each in ridges]
    found += [source.solve(alpha=None, ridge=ridge, rank=size) for size in sizes]
    return np.stack([each.weights.T for each in found])


def _ridged(sums: Sums, ridge: float) -> tuple[Matrix, int] | None:
    """Solve by Cholesky; None where the ridge is lost in the rounding of the sums."""
    square = sums.square.copy(order="F")
    square[np.diag_indices(len(square))] += ridge
    factor, failed = lapack.dpotrf(square, lower=1, clean=0, overwrite_a=1)
    if failed:
        return None
    weights, _ = lapack.dpotrs(factor, sums.cross, lower=1)
    return weights, len(square)


def _turned(reflectors: Matrix, scales: Matrix, columns: Matrix, trans: str) -> Matrix:
    """Return ``Q x`` for trans N, ``Q' x`` for T: LAPACK's dormtr, which scipy lacks, in dormqr."""
    work = 64 * (columns.shape[1] + 65)  # what dormqr asks for, with its largest blocks
    made = np.empty(columns.shape, order="F")
    made[0] = columns[0]  # the first reflector begins at the second row
    made[1:], _, _ = lapack.dormqr("L", trans, reflectors, scales, columns[1:], work)
    return made

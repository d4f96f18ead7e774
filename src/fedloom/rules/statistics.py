# SPDX-License-Identifier: Apache-2.0
"""``Gram``: the sums from which fast weights are solved, and all of a data set that they need.

Keys ``K`` (n x d) and values ``V`` (n x p) enter the least-squares problem ``min ||K W - V||`` only
through ``K'K`` and ``K'V`` (FAAST, arXiv 2605.04651; its pseudoinverse, by normal equations).
Both are sums over rows, so the Gram of two data sets is the sum of their Grams: any split, any
order, any grouping gives the same fast weights.  FAAST itself averages the solutions of chunks (its
Eq. 14, see ``fedloom.rules.paper_bank``), which is another and inexact thing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.wire import Arrays

_ROWS = 4096  # cast up and multiplied at a time: float64 copies of whole data sets are not needed
GRAM, CROSS, SQUARES = "gram", "cross", "squares"


@functools.lru_cache(maxsize=4)
def _upper(size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    return np.triu_indices(size)


@dataclass(frozen=True, eq=False)
class Gram:
    """Sums over the rows of a data set, in float64.

    >>> keys, values = np.eye(3)[:2], np.ones((2, 1))
    >>> whole = Gram.of(keys, values)
    >>> halves = Gram.of(keys[:1], values[:1]) + Gram.of(keys[1:], values[1:])
    >>> whole.count, bool((whole.dense() == halves.dense()).all())
    (2, True)
    """

    packed: NDArray[np.float64]
    """Upper triangle of ``K'K``, row after row: ``[d (d + 1) / 2]``. It cannot be asymmetric."""
    cross: NDArray[np.float64]
    """``K'V``: ``[d, p]``."""
    squares: float
    """Sum of all squared entries of ``V``: what there is to explain."""
    count: float
    """Rows; a whole number unless the sums were discounted."""
    before: float = 0.0
    """Largest trace of ``K'K`` from which rows were taken out: its rounding stayed behind."""

    @classmethod
    def zero(cls, keys: int, values: int) -> Gram:
        """Return the sums over no row, for keys and values of these widths."""
        return cls(np.zeros(keys * (keys + 1) // 2), np.zeros((keys, values)), 0.0, 0)

    @classmethod
    def of(cls, keys: NDArray[Any], values: NDArray[Any]) -> Gram:
        """Sum over rows of ``keys`` ``[n, d]`` and ``values`` ``[n, p]`` of any float dtype.

        Raises
        ------
        ValueError
            If the two differ in rows, or a number is not finite.
        """
        if keys.ndim != 2 or values.ndim != 2 or len(keys) != len(values):
            raise ValueError(f"keys {keys.shape} and values {values.shape}: expected equal rows")
        square = np.zeros((keys.shape[1],) * 2)
        cross, squares = np.zeros((keys.shape[1], values.shape[1])), 0.0
        for start in range(0, len(keys), _ROWS):
            # Before the product: a float32 accumulator already loses what the filter looks for.
            k, v = (np.asarray(x[start : start + _ROWS], np.float64) for x in (keys, values))
            square += k.T @ k
            cross += k.T @ v
            squares += float(np.vdot(v, v))
        made = cls(square[_upper(len(square))], cross, squares, len(keys))
        if not made.is_finite():
            raise ValueError("keys or values hold a number that is not finite")
        return made

    @property
    def keys(self) -> int:
        """Width of the keys, d."""
        return int(self.cross.shape[0])

    @property
    def values(self) -> int:
        """Width of the values, p."""
        return int(self.cross.shape[1])

    def dense(self) -> NDArray[np.float64]:
        """Return ``K'K`` as a whole matrix ``[d, d]``."""
        square = np.zeros((self.keys, self.keys))
        square[_upper(self.keys)] = self.packed
        return square + np.triu(square, 1).T

    def trace(self) -> float:
        """Return the sum of all squared entries of ``K``."""
        rows = np.arange(self.keys)
        return float(self.packed[rows * self.keys - rows * (rows - 1) // 2].sum())

    def is_finite(self) -> bool:
        """Tell whether every number is finite."""
        return bool(
            np.isfinite(self.packed).all()
            and np.isfinite(self.cross).all()
            and np.isfinite([self.squares, self.count]).all()
        )

    def __add__(self, other: Gram) -> Gram:
        return self._with(other, 1.0)

    def __sub__(self, other: Gram) -> Gram:
        """Take rows out again; exact if they were in, to the rounding of what was there before."""
        return self._with(other, -1.0)

    def _with(self, other: Gram, sign: float) -> Gram:
        if self.cross.shape != other.cross.shape:
            raise ValueError(f"widths {self.cross.shape} and {other.cross.shape} differ")
        return Gram(
            self.packed + sign * other.packed,
            self.cross + sign * other.cross,
            self.squares + sign * other.squares,
            self.count + (other.count if sign > 0 else -other.count),
            max(self.before, other.before, self.trace() if sign < 0 else 0.0),
        )

    def discounted(self, factor: float) -> Gram:
        """Forget: every row so far counts ``factor`` of what it did.

        Applied before each addition, rows k additions back weigh ``factor ** k``.  Sums are kept
        and never their inverse, which would grow without bound in directions that no new row has.
        """
        if not 0 <= factor <= 1:
            raise ValueError(f"a discount of {factor}: expected a factor from 0 to 1")
        return Gram(
            factor * self.packed,
            factor * self.cross,
            factor * self.squares,
            factor * self.count,
            factor * self.before,
        )

    def mapped(self, table: NDArray[Any]) -> Gram:
        """Replace values that are rows of ``E`` ``[p, q]`` by index (one-hot) with those rows.

        ``K'(Y E) = (K'Y) E``: clients send class sums, and whoever has the label embeddings applies
        them once.  How many rows each class has is not in the sums, so ``squares`` of the embedded
        values is not known: it becomes NaN.
        """
        cross = self.cross @ np.asarray(table, np.float64)
        return Gram(self.packed, cross, np.nan, self.count, self.before)

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return what travels; ``count`` is the message's weight."""
        return {GRAM: self.packed, CROSS: self.cross, SQUARES: np.array([self.squares])}

    @classmethod
    def from_arrays(cls, arrays: Arrays, count: float) -> Gram:
        """Read what ``arrays`` returned."""
        return cls(arrays[GRAM], arrays[CROSS], float(arrays[SQUARES][0]), count)

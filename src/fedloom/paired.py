# SPDX-License-Identifier: Apache-2.0
"""Two adapters on the same rows: whether they differ by more than the draw of rows and seeds.

``intervals`` treats every column by itself; outcomes row by row allow more, since what makes a row
hard is hard for both.  Those rows stay where they are: this is for scripts that hold them
(``evaluation.score_rows``), not for what nodes send.  Differences are a less b throughout.
"""

# Shapes: S seed, R row.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedloom import seeds
from fedloom.intervals import Interval

_BLOCK = 1 << 22  # indices drawn at a time: 32 MB
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class McNemar:
    """Rows on which two classifiers part, and how surprising their split is."""

    only_a: int
    """Rows that a alone gets right."""
    only_b: int
    p: float
    """Two-sided exact p-value."""


def mcnemar(a: ArrayLike, b: ArrayLike) -> McNemar:
    """Test whether two classifiers, right or wrong on the same rows, are equally often right.

    Rows on which both are right or both wrong say nothing.  Of the others, a would win each with
    probability one half.

    Notes
    -----
    Q. McNemar, *Note on the sampling error of the difference between correlated proportions or
    percentages*, Psychometrika 12 (1947), 153-157, with the binomial in place of chi-squared.

    Examples
    --------
    >>> mcnemar([1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 0])
    McNemar(only_a=5, only_b=0, p=0.0625)
    """
    right_a, right_b = np.asarray(a, bool), np.asarray(b, bool)
    if right_a.shape != right_b.shape or right_a.ndim != 1:
        raise ValueError(
            f"outcomes of shapes {right_a.shape} and {right_b.shape}: expected the same rows twice"
        )
    only_a = int((right_a & ~right_b).sum())
    only_b = int((~right_a & right_b).sum())
    return McNemar(only_a, only_b, _sign_test(only_a, only_b))


def paired_bootstrap(
    differences: Sequence[ArrayLike], *, seed: int, draws: int = 10_000, level: float = 0.95
) -> Interval:
    """Give a percentile interval for the macro mean of row-wise differences.

    Parameters
    ----------
    differences
        For each client a less b on its rows, [R]; clients weigh equally and count as fixed, rows
        are drawn within each.
    seed
        Decides the draws.
    draws, level
        Bootstrap samples, and the share of them inside the interval.

    Notes
    -----
    B. Efron and R. Tibshirani, *An Introduction to the Bootstrap* (1993), chapter 13.  With n rows
    a percentile interval is narrower than Student's by about ``sqrt((n - 1) / n)``.
    """
    return seeded_bootstrap([differences], seed=seed, draws=draws, level=level)


def seeded_bootstrap(
    differences: Sequence[Sequence[ArrayLike]],
    *,
    seed: int,
    draws: int = 10_000,
    level: float = 0.95,
) -> Interval:
    """Give a percentile interval over seeds and, within each seed, rows.

    For runs whose seed also draws the test rows, as ``Partition`` does: rows are nested in seeds.
    Few seeds make the interval too narrow, by about ``sqrt((S - 1) / S)`` in its seeds' part.

    Parameters
    ----------
    differences
        Seed -> client -> a less b on that client's rows, [R].
    """
    held = [[_rows(rows) for rows in clients] for clients in differences]
    if not held or len({len(clients) for clients in held}) != 1 or not held[0]:
        raise ValueError("differences: expected at least one seed, each with the same clients")
    value = float(np.mean([[rows.mean() for rows in clients] for clients in held]))
    random = seeds.generator(seed, "bootstrap")
    # A seed that is drawn twice gets its rows drawn twice, independently.
    picked = random.integers(len(held), size=(draws, len(held)))
    means = np.zeros(draws)
    for index, clients in enumerate(held):
        for turn in range(len(held)):
            at = np.flatnonzero(picked[:, turn] == index)
            for rows in clients:
                means[at] += _resampled(rows, len(at), random) / (len(held) * len(clients))
    return _percentiles(value, means, level)


def crossed_bootstrap(
    differences_SR: ArrayLike, *, seed: int, draws: int = 10_000, level: float = 0.95
) -> Interval:
    """Give a percentile interval when every seed was tested on the same rows.

    Seeds and rows are drawn independently and cross: a row that is drawn is drawn for all seeds.

    Notes
    -----
    A. B. Owen, *The pigeonhole bootstrap*, Annals of Applied Statistics 1 (2007), 386-411: no
    bootstrap is exact for crossed effects, and this one errs on the wide side.
    """
    held = np.asarray(differences_SR, np.float64)
    if held.ndim != 2 or not held.size or not np.isfinite(held).all():
        raise ValueError(f"differences of shape {held.shape}: expected finite numbers, [S, R]")
    count_S, count_R = held.shape
    random = seeds.generator(seed, "bootstrap")
    means = np.empty(draws)
    for start, stop in _blocks(draws, count_R + count_S):
        size = stop - start
        weight_S = random.multinomial(count_S, np.full(count_S, 1 / count_S), size) / count_S
        weight_R = random.multinomial(count_R, np.full(count_R, 1 / count_R), size) / count_R
        means[start:stop] = np.einsum("ds,sr,dr->d", weight_S, held, weight_R, optimize=True)
    return _percentiles(float(held.mean()), means, level)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for having looked at several clients or baselines, in the order given.

    Notes
    -----
    S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian Journal of
    Statistics 6 (1979), 65-70: under any dependence, the chance of one false alarm or more stays
    below the level that the adjusted values are held against.

    Examples
    --------
    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _sign_test(wins: int, losses: int) -> float:
    """Return the two-sided p of so uneven a split of fair coins."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / (1 << n))


def _rows(rows: ArrayLike) -> Floats:
    held = np.asarray(rows, np.float64)
    if held.ndim != 1 or not held.size or not np.isfinite(held).all():
        raise ValueError(f"differences of shape {held.shape}: expected finite numbers, one a row")
    return held


def _resampled(rows: Floats, draws: int, random: np.random.Generator) -> Floats:
    """Return the means of ``draws`` samples with replacement, each as large as ``rows``."""
    means = np.empty(draws)
    for start, stop in _blocks(draws, len(rows)):
        means[start:stop] = rows[random.integers(len(rows), size=(stop - start, len(rows)))].mean(1)
    return means


def _blocks(draws: int, width: int) -> list[tuple[int, int]]:
    step = max(1, _BLOCK // width)
    return [(start, min(start + step, draws)) for start in range(0, draws, step)]


def _percentiles(value: float, means: Floats, level: float) -> Interval:
    if not 0 < level < 1:
        raise ValueError(f"confidence level {level}: expected between 0 and 1")
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high))

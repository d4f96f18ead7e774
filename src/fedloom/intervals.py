# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals from the sums that nodes send: counts, totals and sums of squares.

A report needs no single row of a client's test set, so neither does this module.  Intervals say
how far another draw of test rows could move a number; they say nothing about other seeds, other
clients or other models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class Interval:
    """An estimate and the limits of its confidence interval; infinite or nan if not known."""

    value: float
    low: float
    high: float


def wilson(correct: int, n: int, level: float = 0.95) -> Interval:
    """Give Wilson's score interval for ``correct`` successes among ``n``.

    It stays inside [0, 1] and keeps a width at 0 and n successes, where ``p +- z s`` has none.

    Raises
    ------
    ValueError
        Unless ``0 <= correct <= n`` and ``n >= 1``.

    Notes
    -----
    E. B. Wilson, *Probable inference, the law of succession, and statistical inference*, Journal
    of the American Statistical Association 22 (1927), 209-212: the p that solve
    ``|correct / n - p| = z sqrt(p (1 - p) / n)``.

    Examples
    --------
    >>> at = wilson(3, 12)
    >>> at.value, round(at.low, 3), round(at.high, 3)
    (0.25, 0.089, 0.532)
    """
    if not 0 <= correct <= n or n < 1:
        raise ValueError(f"{correct} correct of {n}: expected 0 <= correct <= n and n >= 1")
    share, z2_over_n = correct / n, _normal_critical(level) ** 2 / n
    centre = (share + z2_over_n / 2) / (1 + z2_over_n)
    half = math.sqrt(z2_over_n * share * (1 - share) + z2_over_n**2 / 4) / (1 + z2_over_n)
    # Rounding may leave 1e-17 on the wrong side of a limit that is exactly 0 or 1.
    low = 0.0 if correct == 0 else centre - half
    return Interval(share, low, 1.0 if correct == n else centre + half)


def mean_interval(total: float, sum_of_squares: float, n: int, level: float = 0.95) -> Interval:
    """Give Student's t interval for the mean of ``n`` values of which only the sums are known.

    One value has no spread to estimate: the interval is then infinite.  Cross-entropies are skewed
    to the right, so with a dozen rows the stated level is approximate.

    Raises
    ------
    ValueError
        If ``n`` is below 1.

    Notes
    -----
    Student (W. S. Gosset), *The probable error of a mean*, Biometrika 6 (1908), 1-25:
    ``mean +- t s / sqrt(n)`` with ``s^2 = (sum x^2 - (sum x)^2 / n) / (n - 1)`` and t of n - 1
    degrees of freedom.

    Examples
    --------
    >>> at = mean_interval(total=6.0, sum_of_squares=14.0, n=3)  # 1, 2, 3
    >>> at.value, round(at.high - at.value, 4)
    (2.0, 2.4841)
    """
    if n < 1:
        raise ValueError(f"mean of {n} values: expected at least 1")
    mean = total / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf)
    variance = (sum_of_squares - total * mean) / (n - 1)
    if variance < 0:  # equal values: the two sums cancel down to a rounding error
        variance = 0.0
    half = t_critical(level, n - 1) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half)


def macro(parts: Sequence[Interval]) -> Interval:
    """Average the clients' estimates with equal weight and carry their intervals along.

    The clients count as fixed and independent: what varies is which test rows each of them drew.

    Raises
    ------
    ValueError
        If there is no part.

    Notes
    -----
    G. Y. Zou, W. Huang and X. Zhang, *A note on confidence interval estimation for a linear
    function of binomial proportions*, Computational Statistics & Data Analysis 53 (2009),
    1080-1085: the squared distance from an estimate to its limit recovers the variance on that
    side, and the variances of independent parts add.  So Wilson limits stay asymmetric, a client
    with no correct answer does not count as certain, and t intervals add as standard errors do.

    Examples
    --------
    >>> macro([Interval(1.0, 0.7, 1.3), Interval(2.0, 1.6, 2.4)])
    Interval(value=1.5, low=1.25, high=1.75)
    """
    if not parts:
        raise ValueError("macro average of no client: expected at least one")
    value = math.fsum(part.value for part in parts) / len(parts)
    below = math.hypot(*(part.value - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    return Interval(value, value - below, value + above)


def worst_decile(values: Sequence[float], *, lowest: bool) -> tuple[float, tuple[int, ...]]:
    """Average the worst tenth of the clients, one at least, and tell their places, worst first.

    A mean over clients hides who pays for it (T. Li et al., *Fair resource allocation in federated
    learning*, arXiv 1905.10497, reports the same tenth).  The worst of several noisy values lies
    below what that client would get on other rows: compare it between methods, not with a mean.

    Parameters
    ----------
    values
        One a client.
    lowest
        Whether low values are the bad ones (accuracy) or high ones (cross-entropy).

    Raises
    ------
    ValueError
        If there is no value.

    Examples
    --------
    >>> worst_decile([0.4, 0.2, 0.3], lowest=True)
    (0.2, (1,))
    """
    if not values:
        raise ValueError("worst tenth of no client: expected at least one")
    order = sorted(range(len(values)), key=lambda i: values[i] if lowest else -values[i])
    worst = tuple(order[: math.ceil(len(values) / 10)])
    return math.fsum(values[i] for i in worst) / len(worst), worst


def t_critical(level: float, df: int) -> float:
    """Return the t with ``P(|T| <= t) = level`` for Student's T of ``df`` degrees of freedom.

    Raises
    ------
    ValueError
        Unless ``0 < level < 1`` and ``df >= 1``.

    Notes
    -----
    With ``T = sqrt(df) tan(angle)`` the density turns into ``c cos(angle)^(df - 1)``, so that
    ``P(|T| <= t) = 2 c`` times the integral of that cosine power from 0 to ``atan(t / sqrt(df))``,
    with ``c = Gamma((df + 1) / 2) / (sqrt(pi) Gamma(df / 2))``.  The integral is concave in its
    upper end, hence Newton's steps from 0 climb to the root and never pass it.  From a hundred
    thousand degrees on, the first term of the expansion about the normal quantile z,
    ``z + (z^3 + z) / (4 df)`` (Abramowitz & Stegun 26.7.5), is as good.  Levels up to 0.999 come
    with eight correct digits.

    Examples
    --------
    >>> round(t_critical(0.95, 11), 4), round(t_critical(0.95, 1), 4)
    (2.201, 12.7062)
    """
    if df < 1:
        raise ValueError(f"{df} degrees of freedom: expected at least 1")
    z = _normal_critical(level)
    if df > 1e5:
        return z + (z**3 + z) / (4 * df)
    nodes, weights = np.polynomial.legendre.leggauss(64)
    log_c = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - math.log(math.pi) / 2
    double_c, angle = 2 * math.exp(log_c), 0.0
    for _ in range(100):  # six or seven do; df = 2 at level 1 - 1e-12 takes about 20
        powers = np.cos(angle / 2 * (nodes + 1)) ** (df - 1)
        held = double_c * angle / 2 * float(weights @ powers)
        step = (level - held) / (double_c * math.cos(angle) ** (df - 1))
        angle += step
        if step <= 1e-15 * angle:
            break
    return math.sqrt(df) * math.tan(angle)


def _normal_critical(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"confidence level {level}: expected between 0 and 1")
    return NormalDist().inv_cdf((1 + level) / 2)

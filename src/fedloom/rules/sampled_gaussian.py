# SPDX-License-Identifier: Apache-2.0
"""Renyi moments of the sampled Gaussian mechanism, and what many rounds of it cost.

Each round every client is drawn with probability q, by itself and in secret; a client's part is at
most 1 long and noise of standard deviation z is added (Mironov, Talwar and Zhang, arXiv
1908.10530).  For an order a > 1, with ``N_0`` and ``N_1`` normal around 0 and 1,

    rdp(a) = log E_{x ~ N_0} [ ((1 - q) + q N_1(x) / N_0(x)) ^ a ] / (a - 1)

and rounds add up.  The other direction of the divergence is never larger (theorem 5 there).  The
bound holds for Poisson samples only: neither for a fixed number drawn without replacement, nor for
draws that others can repeat.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from fedloom.errors import Refusal

ORDERS = tuple(
    float(a)
    for a in sorted(
        {*np.geomspace(1.01, 11, 60).round(4), *range(11, 65), *np.geomspace(65, 2048, 30).round()}
    )
)
"""Small steps where a large epsilon has its best order, wide ones far up where a small one has."""


def naive_moments(rate: float, multiplier: float, order: int) -> float:
    """Return ``rdp`` of a whole order by the binomial sum as it stands in the paper.

    >>> naive_moments(1.0, 2.0, 4)  # all are drawn: order / (2 z^2)
    0.5
    """
    total = 0.0
    for k in range(order + 1):
        chosen = math.comb(order, k) * (1 - rate) ** (order - k) * rate**k
        total += chosen * math.exp((k * k - k) / (2 * multiplier**2))
    return math.log(total) / (order - 1)


@functools.lru_cache(maxsize=4096)
def moments(rate: float, multiplier: float, order: float) -> float:
    """Return ``rdp`` of any order above 1: the integral by the trapezoid rule, in logarithms.

    The integrand is analytic up to ``pi z^2`` off the real axis and falls as a Gaussian of width
    z, so a step of ``min(z, 2 z^2) / 4`` leaves an error of about 1e-17, and ten widths beyond the
    humps at 0 and ``order`` leave less.
    """
    if rate == 1.0:
        return order / (2 * multiplier**2)
    variance = multiplier**2
    step = min(multiplier, 2 * variance) / 4
    margin = 10 * multiplier
    x_N = np.arange(-margin, order + margin + step, step)
    ratio_N = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x_N - 1) / (2 * variance))
    terms_N = order * ratio_N - x_N**2 / (2 * variance)
    largest = float(terms_N.max())
    whole = largest + math.log(float(np.exp(terms_N - largest).sum()))
    moment = whole + math.log(step) - 0.5 * math.log(2 * math.pi * variance)
    return max(0.0, moment) / (order - 1)


def classic_epsilon(moment: float, order: float, delta: float) -> float:
    """Turn a moment into an epsilon by Mironov's own lemma (2017): looser, and widely quoted."""
    return moment - math.log(delta) / (order - 1)


def tight_epsilon(moment: float, order: float, delta: float) -> float:
    """Turn a moment into an epsilon (Canonne, Kamath and Steinke 2020, proposition 12)."""
    return moment + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def epsilon(
    rate: float,
    multiplier: float,
    rounds: int,
    delta: float,
    orders: Sequence[float] = ORDERS,
    convert: Callable[[float, float, float], float] = tight_epsilon,
) -> float:
    """Return the epsilon of so many rounds at ``delta``, by the best of the orders.

    >>> round(epsilon(0.01, 1.0, 300, 1e-5), 2) < round(epsilon(1.0, 1.0, 300, 1e-5), 2)
    True
    """
    if not (0 < rate <= 1 and multiplier > 0 and 0 < delta < 1):
        raise Refusal(
            f"rate {rate}, noise {multiplier}, delta {delta}: expected a rate above 0, at most 1,"
            " noise above 0, and delta between 0 and 1"
        )
    if rounds == 0:
        return 0.0
    found = (convert(rounds * moments(rate, multiplier, a), a, delta) for a in orders)
    return max(0.0, min(found))


def multiplier_for(rate: float, rounds: int, target: float, delta: float) -> float:
    """Return the least noise multiplier, to four digits upwards, that keeps ``(target, delta)``."""
    if not (target > 0 and math.isfinite(target)):
        raise Refusal(f"an epsilon of {target}: expected a finite number above 0")
    low, high = 0.0, 0.25
    while epsilon(rate, high, rounds, delta) > target:
        low, high = high, 2 * high
        if high > 1e6:
            raise Refusal(f"epsilon {target} at delta {delta} over {rounds} rounds: out of reach")
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        kept = middle > 0.05 and epsilon(rate, middle, rounds, delta) <= target
        low, high = (low, middle) if kept else (middle, high)
    return high

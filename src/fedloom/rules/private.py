# SPDX-License-Identifier: Apache-2.0
"""Differential privacy for sums over rows: bounds, sensitivity, Gaussian noise, its price.

A row ``(k, v)`` adds ``k k'`` and ``k v'`` to a ``Gram``.  With ``|k| <= B_k`` and ``|v| <= B_v``
(Frobenius norms throughout)

    one row more or less:    |k k'|^2 + |k v'|^2 = |k|^4 + |k|^2 |v|^2 <= B_k^4 + B_k^2 B_v^2
    one row for another:     2 B_k^4 + 2 B_k^2 B_v^2 + B_v^4 / 2   if B_v^2 <= 2 B_k^2,
                             else 4 B_k^2 B_v^2                    (both attained; below twice)

The second: for rows of lengths s >= r with keys at cosine c >= 0 and values opposed and of full
length, which is the worst sign, the squared distance is
``s^4 + r^4 - 2 s^2 r^2 c^2 + B_v^2 (s^2 + r^2 + 2 s r c)``.  It grows with s; its maximum over c,
at ``c = min(1, B_v^2 / (2 s r))``, grows with r; so both are ``B_k``.

Noise goes on the packed triangle and is therefore symmetric.  Counted once, as they are packed, the
entries of ``k k'`` have the norm ``sqrt((|k|^4 + sum k_i^4) / 2)``, which is that of the whole
matrix only for a key along an axis: noise of ``sigma`` on every packed entry is enough, and more
than enough.  Counted ``sqrt(2)`` times, entries off the diagonal make up the whole matrix's norm
for every key, and ``sigma`` on them is ``sigma / sqrt(2)`` on the entry itself: the same guarantee
with half the variance.  That is what ``noisy`` adds.

Only ``K'K`` and ``K'V`` are released.  The number of rows and ``|V|^2`` would be two more things
that a row changes; the filter that needs the one is not for noisy sums, and the diagnostic that
needs the other is given up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedloom import ciphers
from fedloom.ciphers import Stream
from fedloom.errors import Refusal
from fedloom.rules.solving import FastWeights
from fedloom.rules.statistics import Gram

Neighbours = Literal["add-remove", "replace-one"]
"""What two data sets that must look alike differ in: a row more, or another row in its place."""


def clip_rows(rows: NDArray[Any], bound: float) -> NDArray[np.float64]:
    """Shorten rows that are longer than ``bound`` to it; the others stay as they are: ``[n, d]``.

    Raises
    ------
    Refusal
        If a number is not finite, or the bound is not positive.
    """
    plain = np.asarray(rows, np.float64)
    if not (bound > 0 and np.isfinite(bound) and np.isfinite(plain).all()):
        raise Refusal(f"rows to be clipped to {bound}: expected finite numbers, a bound above 0")
    # By the largest entry first: squares of huge ones are infinite, and all of a row would be lost.
    largest = np.abs(plain).max(axis=1, keepdims=True, initial=0.0)
    scaled = plain / np.where(largest > 0, largest, 1.0)
    norms = np.linalg.norm(scaled, axis=1, keepdims=True)
    long = norms * largest > bound
    return np.where(long, scaled * (bound / np.where(norms > 0, norms, 1.0)), plain)


@dataclass(frozen=True)
class Bounds:
    """Largest norms of a key and of a value; what a guarantee rests on."""

    key: float = 1.0
    value: float = 1.0

    def gram(self, keys: NDArray[Any], values: NDArray[Any]) -> Gram:
        """Sum over rows after clipping both to their bounds. Nothing else is safe to ``noisy``."""
        return Gram.of(clip_rows(keys, self.key), clip_rows(values, self.value))

    def sensitivity(self, neighbours: Neighbours = "add-remove") -> float:
        """Return how far one row can move ``(K'K, K'V)``, in the joint Frobenius norm."""
        a, b = self.key**2, self.value**2
        if neighbours == "add-remove":
            return math.sqrt(a * a + a * b)
        return math.sqrt(2 * a * a + 2 * a * b + b * b / 2 if b <= 2 * a else 4 * a * b)


def bound_client(gram: Gram, bound: float) -> Gram:
    """Shrink a client's sums to a joint Frobenius norm of ``bound``: then it hides a whole client.

    A client more or less moves the total by ``bound`` at most, however many rows it has; one
    client for another by twice that.
    """
    factor = min(1.0, bound / norm) if (norm := joint_norm(gram)) > 0 else 1.0
    return Gram(factor * gram.packed, factor * gram.cross, math.nan, gram.count)


def joint_norm(gram: Gram) -> float:
    """Return the Frobenius norm of ``K'K`` and ``K'V`` together."""
    return float(np.hypot(np.linalg.norm(gram.packed / _scale(gram)), np.linalg.norm(gram.cross)))


def noisy(gram: Gram, sigma: float, stream: Stream, bounds: Bounds | None = None) -> Gram:
    """Add Gaussian noise: ``sigma`` on the diagonal and ``K'V``, ``sigma / sqrt(2)`` off it.

    Parameters
    ----------
    stream
        Of a fresh secret key; whoever knows it takes the noise off again. ``fresh`` makes one.
    bounds
        What the rows were clipped to. Sums whose trace cannot come of such rows are refused; that
        finds gross mistakes, not every one.

    Returns
    -------
    Gram
        Symmetric, maybe with negative eigenvalues. ``squares`` is NaN, and ``count`` no longer the
        number of rows but what the noisy trace says of it, at least one.
    """
    if not (sigma > 0 and math.isfinite(sigma)):
        raise Refusal(f"noise of {sigma}: expected a finite number above 0")
    if bounds and gram.trace() > gram.count * bounds.key**2 * (1 + 1e-9):
        raise Refusal(
            f"keys of mean square {gram.trace() / max(gram.count, 1):.3g} under a bound of"
            f" {bounds.key:.3g}: clip the rows before they are summed, or nothing is guaranteed"
        )
    drawn = sigma * stream.normals(gram.packed.size + gram.cross.size)
    packed = gram.packed + drawn[: gram.packed.size] * _scale(gram)
    cross = gram.cross + drawn[gram.packed.size :].reshape(gram.cross.shape)
    made = Gram(packed, cross, math.nan, 1)
    return Gram(packed, cross, math.nan, max(1.0, made.trace() / (bounds or Bounds()).key ** 2))


def fresh(source: ciphers.Source = ciphers.system) -> Stream:
    """Return a stream of a new key for one release."""
    return Stream(source(ciphers.KEY_BYTES))


def _scale(gram: Gram) -> NDArray[np.float64]:
    """Return each packed entry's share of ``sigma``: 1 on the diagonal, ``sqrt(1/2)`` off it."""
    scale = np.full(gram.packed.size, math.sqrt(0.5))
    rows = np.arange(gram.keys)
    scale[rows * gram.keys - rows * (rows - 1) // 2] = 1.0
    return scale


def ridge_after(sigma: float, keys: int) -> float:
    """Return the ridge for sums made ``noisy``: the largest eigenvalue that the noise may make.

    Symmetric noise of standard deviation ``s`` off the diagonal has eigenvalues within
    ``2 s sqrt(d)`` (Wigner's semicircle); here ``s = sigma / sqrt(2)``.  FAAST's filter is relative
    to the largest singular value and takes noise for signal.
    """
    return 2.0 * (sigma / math.sqrt(2.0)) * math.sqrt(keys)


def solve_noisy(gram: Gram, sigma: float, ridge: float | None = None) -> FastWeights:
    """Solve sums that were made ``noisy``: no direction dropped, each held down by the ridge.

    Negative eigenvalues, which no sum of rows has, become zero first; this costs no privacy, nor
    does any number of ridges.  To drop those directions, as a filter would, loses what ``K'V``
    says along them: over 5 points of accuracy in ``benchmarks/faast/privacy.py`` at epsilon 0.5.

    Parameters
    ----------
    sigma
        What ``noisy`` was given; under masks, that of the sum.
    ridge : float, optional
        ``ridge_after`` if left out.
    """
    held = ridge_after(sigma, gram.keys) if ridge is None else ridge
    if not held > 0:
        raise Refusal(f"a ridge of {held} for noisy sums: expected above 0")
    values, vectors = np.linalg.eigh(gram.dense())
    raised = np.clip(values, 0.0, None) + held
    weights = vectors @ ((vectors.T @ gram.cross) / raised[:, None])
    condition = math.sqrt(raised[-1] / raised[0])
    return FastWeights(weights, gram.keys, 0.0, math.nan, condition)


def client_sigma(sigma: float, finishers: int, helpers: int = 0) -> float:
    """Return the noise of one client so that a masked sum over clients holds ``sigma`` or more.

    Parameters
    ----------
    finishers
        How many clients finish at least: the summation's threshold, not how many were asked. If
        more do, there is more noise than was needed.
    helpers
        How many of them may tell the server their own noise.
    """
    honest = finishers - helpers
    if helpers < 0 or honest < 1:
        raise Refusal(f"{helpers} of {finishers} clients tell: expected fewer than all")
    return sigma / math.sqrt(honest)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def gaussian_delta(epsilon: float, ratio: float) -> float:
    """Return the exact ``delta`` of Gaussian noise at ``epsilon`` (Balle and Wang 2018, theorem 8).

    Parameters
    ----------
    ratio
        Sensitivity over sigma.
    """
    near = _normal_cdf(ratio / 2 - epsilon / ratio)
    far = _normal_cdf(-ratio / 2 - epsilon / ratio)
    # exp(700) is about as large as a float64 gets; a smaller factor only overstates delta.
    return max(0.0, near - (math.exp(min(epsilon, 700.0)) * far if far > 0 else 0.0))


def calibrate(epsilon: float, delta: float, sensitivity: float = 1.0) -> float:
    """Return the smallest ``sigma`` that keeps ``(epsilon, delta)``: the analytic Gaussian.

    Raises
    ------
    Refusal
        If the two are no guarantee.

    >>> round(calibrate(1.0, 1e-5), 4)
    3.7306
    """
    _check(epsilon, delta)
    # delta falls as sigma grows; the end of the bracket that keeps the promise is returned.
    return sensitivity / _last(lambda ratio: gaussian_delta(epsilon, ratio) <= delta)


def _last(holds: Callable[[float], bool]) -> float:
    """Return the largest number above 0 at which ``holds``, which then fails, to the last bit."""
    low = high = 1.0
    while not holds(low):
        low /= 2.0
    while holds(high):
        high *= 2.0
    while low < (middle := (low + high) / 2.0) < high:
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _check(epsilon: float, delta: float) -> None:
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise Refusal(f"epsilon {epsilon}, delta {delta}: expected above 0, and delta below 1")


@dataclass
class Accountant:
    """What all releases of the same rows cost together.

    Gaussian releases compose to one: those of ratios ``sensitivity / sigma`` are together as
    telling as one of the root of their squares' sum, also if each was chosen after seeing the
    others (Dong, Roth and Su 2022).  ``rho`` is its zero-concentrated form (Bun and Steinke 2016).

    >>> spent = Accountant()
    >>> for _ in range(4):
    ...     spent.spend(1.0, sigma=10.0)
    >>> round(spent.rho, 9), round(spent.epsilon(1e-5), 3)
    (0.02, 0.726)
    """

    rho: float = 0.0
    """Half the sum of squared ratios; adds up over releases."""

    def spend(self, sensitivity: float, sigma: float) -> None:
        """Enter one release."""
        if not (sensitivity > 0 and sigma > 0):
            raise Refusal(f"sensitivity {sensitivity}, sigma {sigma}: expected both above 0")
        self.rho += (sensitivity / sigma) ** 2 / 2

    def delta(self, epsilon: float) -> float:
        """Return the exact ``delta`` of all releases at ``epsilon``."""
        return gaussian_delta(epsilon, math.sqrt(2 * self.rho)) if self.rho else 0.0

    def epsilon(self, delta: float) -> float:
        """Return the exact ``epsilon`` of all releases at ``delta``."""
        _check(1.0, delta)
        if self.delta(0.0) <= delta:
            return 0.0
        return 1 / _last(lambda inverse: self.delta(1 / inverse) <= delta)

    def epsilon_by_moments(self, delta: float) -> float:
        """Return a bound on ``epsilon`` from Renyi moments alone (Canonne, Kamath, Steinke 2020).

        Never below ``epsilon``; the figure to hold against other accountants.
        """
        _check(1.0, delta)
        orders = 1.0 + np.geomspace(1e-3, 1e5, 20_000)
        bounds = (
            orders * self.rho
            + np.log1p(-1 / orders)
            - (math.log(delta) + np.log(orders)) / (orders - 1)
        )
        return max(0.0, float(bounds.min()))

    def sigma_left(self, epsilon: float, delta: float, sensitivity: float) -> float:
        """Return the least noise of one more release within a budget for all.

        Raises
        ------
        Refusal
            If the budget is spent.
        """
        allowed = calibrate(epsilon, delta) ** -2
        if (left := allowed - 2 * self.rho) <= 0:
            raise Refusal(
                f"epsilon {self.epsilon(delta):.3g} of {epsilon} at delta {delta} is spent: no"
                " further release of these rows"
            )
        return sensitivity / math.sqrt(left)

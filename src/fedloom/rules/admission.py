# SPDX-License-Identifier: Apache-2.0
"""What sums of a client must satisfy before they are added: a sum has no breakdown resistance.

These are consequences of being sums over rows of bounded length, so an honest client never fails
them; they bound what a dishonest one can do and do not exclude it.
"""

from __future__ import annotations

import numpy as np

from fedloom.errors import Refusal
from fedloom.rules.private import ridge_after
from fedloom.rules.statistics import Gram

_SLACK = 1e-6
"""Relative: keys may have been brought to length one in float32."""


def check_sums(
    gram: Gram,
    who: str,
    *,
    rows: int,
    key: float = 1.0,
    value: float = 1.0,
    rounding: float = 0.0,
) -> None:
    """Refuse what cannot be sums over at most ``rows`` rows of bounded keys and values.

    Parameters
    ----------
    who
        Names the client in the refusal.
    rows
        Rows that it said it has.
    key, value
        Bounds on the length of a key and of a value.
    rounding
        How far each number may be off, where they were added in fixed point.

    Raises
    ------
    Refusal
        Naming the client, what came and what was expected.
    """
    if not gram.is_finite():
        raise Refusal(f"{who}: its sums hold a value that is not finite")
    count = gram.count
    if not (count >= 1 and float(count).is_integer()):
        raise Refusal(f"{who}: sums over {count:g} rows came, expected a whole number from 1 up")
    if count > rows:
        raise Refusal(
            f"{who}: sums over {count:.0f} rows came, but it can have {rows} to sum; expected no"
            " more than were told at the roll call"
        )
    _check_bounds(gram, who, key, value, rounding)
    _check_positive(gram, who, gram.keys * rounding)


def check_noisy(gram: Gram, who: str, sigma: float) -> None:
    """Refuse what cannot be sums with Gaussian noise: all that noise leaves to be seen.

    Raises
    ------
    Refusal
        If a number is not finite, or an eigenvalue of K'K is far below what noise makes.
    """
    if not (np.isfinite(gram.packed).all() and np.isfinite(gram.cross).all()):
        raise Refusal(f"{who}: its sums hold a value that is not finite")
    # Beyond the edge of the spectrum by ten standard deviations of the largest single entry.
    _check_positive(gram, who, ridge_after(sigma, gram.keys) + 10 * sigma)


def _check_bounds(gram: Gram, who: str, key: float, value: float, rounding: float) -> None:
    most = gram.count * key**2
    if gram.trace() > most * (1 + _SLACK) + gram.keys * rounding:
        raise Refusal(
            f"{who}: the trace of K'K is {gram.trace():.6g}, expected at most {most:.6g} of"
            f" {gram.count:.0f} keys no longer than {key:g}"
        )
    budget = gram.count * value**2
    if not -rounding <= gram.squares <= budget * (1 + _SLACK) + rounding:
        raise Refusal(
            f"{who}: the squares of V sum to {gram.squares:.6g}, expected 0 to {budget:.6g} of"
            f" {gram.count:.0f} values no longer than {value:g}"
        )
    # Cauchy-Schwarz: (sum k_i v_j)^2 <= sum k_i^2 sum v_j^2.
    diagonal = gram.dense().diagonal() + rounding
    largest = np.maximum(np.abs(gram.cross).max(1, initial=0.0) - rounding, 0.0)
    excess = largest**2 - diagonal * budget * (1 + _SLACK)
    if (excess > _SLACK**2 * most * budget).any():
        worst = int(excess.argmax())
        raise Refusal(
            f"{who}: row {worst} of K'V is larger than keys of that size can make it"
            f" ({np.abs(gram.cross[worst]).max():.6g}); expected"
            f" C_ij^2 <= G_ii {budget:.6g}"
        )


def _check_positive(gram: Gram, who: str, slack: float) -> None:
    """A Gram matrix has no negative eigenvalue, but for rounding, or what else may be off."""
    lowest = float(np.linalg.eigvalsh(gram.dense())[0])
    allowed = -1e-10 * max(gram.trace(), 0.0) - slack - 1e-300
    if lowest < allowed:
        raise Refusal(
            f"{who}: K'K has an eigenvalue of {lowest:.3g}, expected none below 0; these are no"
            " sums of k k'"
        )

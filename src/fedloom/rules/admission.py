# SPDX-License-Identifier: Apache-2.0
"""What sums of a client must satisfy before they are added: a sum has no breakdown resistance.

These are consequences of being sums over rows of bounded length, so an honest client never fails
them; they bound what a dishonest one can do and do not exclude it.
"""

from __future__ import annotations

import numpy as np

from fedloom.errors import Refusal
from fedloom.rules.statistics import Gram

_SLACK = 1e-6
"""Relative: keys may have been brought to length one in float32."""


def check_sums(gram: Gram, who: str, *, rows: int, key: float = 1.0, value: float = 1.0) -> None:
    """Refuse what cannot be sums over at most ``rows`` rows of bounded keys and values.

    Parameters
    ----------
    who
        Names the client in the refusal.
    rows
        Rows that it said it has.
    key, value
        Bounds on the length of a key and of a value.

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
    _check_bounds(gram, who, key, value)
    _check_positive(gram, who)


def _check_bounds(gram: Gram, who: str, key: float, value: float) -> None:
    most = gram.count * key**2
    if gram.trace() > most * (1 + _SLACK):
        raise Refusal(
            f"{who}: the trace of K'K is {gram.trace():.6g}, expected at most {most:.6g} of"
            f" {gram.count:.0f} keys no longer than {key:g}"
        )
    budget = gram.count * value**2
    if not 0 <= gram.squares <= budget * (1 + _SLACK):
        raise Refusal(
            f"{who}: the squares of V sum to {gram.squares:.6g}, expected 0 to {budget:.6g} of"
            f" {gram.count:.0f} values no longer than {value:g}"
        )
    # Cauchy-Schwarz: (sum k_i v_j)^2 <= sum k_i^2 sum v_j^2.
    diagonal = gram.dense().diagonal()
    excess = (gram.cross**2).max(1, initial=0.0) - diagonal * budget * (1 + _SLACK)
    if (excess > _SLACK**2 * most * budget).any():
        worst = int(excess.argmax())
        raise Refusal(
            f"{who}: row {worst} of K'V is larger than keys of that size can make it"
            f" ({np.abs(gram.cross[worst]).max():.6g}); expected"
            f" C_ij^2 <= G_ii {budget:.6g}"
        )


def _check_positive(gram: Gram, who: str) -> None:
    """A Gram matrix has no negative eigenvalue, but for rounding."""
    lowest = float(np.linalg.eigvalsh(gram.dense())[0])
    allowed = -1e-10 * max(gram.trace(), 0.0) - 1e-300
    if lowest < allowed:
        raise Refusal(
            f"{who}: K'K has an eigenvalue of {lowest:.3g}, expected none below 0; these are no"
            " sums of k k'"
        )

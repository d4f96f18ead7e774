# SPDX-License-Identifier: Apache-2.0
"""What sums of a client must satisfy before they are added: a sum has no breakdown resistance.

These are consequences of being sums over rows of bounded length, so an honest client never fails
them; they bound what a dishonest one can do and do not exclude it.

The one that holds ``K'V`` against ``K'K``: ``K (K'K + delta I)^-1 K'`` has no eigenvalue above one,
for every ``delta >= 0``, so

    tr V'K (K'K + delta I)^-1 K'V  <=  |V|^2

and nobody can put a class's sum where it has no keys.  ``delta`` is what the arithmetic needs in
which the sums were made and travelled, and no more.  It implies the bound on a row of ``K'V``,
which is looked at first for the sake of its message, and ``K'K + delta I`` is factorised on the
way: that is the test for negative eigenvalues.
"""

from __future__ import annotations

import math

import numpy as np

from fedloom.errors import Refusal
from fedloom.rules.private import ridge_after
from fedloom.rules.statistics import Gram

_SLACK = 1e-6
"""Relative: keys may have been brought to length one in float32."""
_EPS = float(np.finfo(np.float64).eps)


def check_sums(
    gram: Gram,
    who: str,
    *,
    rows: int,
    key: float = 1.0,
    value: float | None = None,
    rounding: float = 0.0,
) -> None:
    """Refuse what cannot be sums over at most ``rows`` rows of bounded keys and values.

    Parameters
    ----------
    who
        Names the client in the refusal.
    rows
        The most that it can have.
    key, value
        Bounds on the length of a key and of a value; None where values are one-hot, whose squares
        sum to the number of rows.
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
            " more than were told at the roll call and the recipe lets one client have"
        )
    _check_bounds(gram, who, key, value, rounding)
    # Adding ``count`` products and factorising leave at most so much, relative to lengths.
    gamma = (count + gram.keys) * _EPS
    near = 1e-10 + 4 * gamma
    delta = near * max(gram.trace(), 0.0) + 2 * gram.keys * rounding + _EPS**2 * count * key**2
    most = math.sqrt(max(gram.squares, 0.0) + rounding) * (1 + _SLACK + 4 * gamma / math.sqrt(near))
    _check_together(gram, who, delta, most + math.sqrt(rounding * gram.values))


def check_rows(
    gram: Gram, who: str, *, least: int, most: int, clients: int = 1, sigma: float = 0.0
) -> None:
    """Refuse sums over fewer or more rows than the recipe lets so many clients sum.

    Parameters
    ----------
    least, most
        For one client.
    sigma
        Of the noise on the sums. Then their trace says how many keys of length one they are of, to
        ``sigma`` times the root of the keys' width, and only too many can be told.

    Raises
    ------
    Refusal
        Naming who sent them.
    """
    told = gram.trace() if sigma else gram.count
    if not sigma and told < least * clients:
        raise Refusal(
            f"{who}: sums over {told:.0f} rows came, fewer than faast.min-count = {least} for each"
            " client: whoever follows the recipe sends none"
        )
    if told > most * clients + 10 * sigma * math.sqrt(gram.keys):
        raise Refusal(
            f"{who}: sums over {told:.0f} rows came, expected at most {most} of each client; see"
            " faast.max-count and data.max-train"
        )


def check_noisy(gram: Gram, who: str, sigma: float) -> None:
    """Refuse what cannot be sums of keys of length one and one-hot values, with Gaussian noise.

    Noise hides most of what ``check_sums`` looks at. Eigenvalues are bounded by the edge of its
    spectrum and ten standard deviations more, of which six are spent on how far the edge itself may
    be; and rows are told by the trace, as in ``check_rows``.

    Raises
    ------
    Refusal
        If a number is not finite, an eigenvalue of K'K is far below what noise makes, or K'V is
        larger than such keys and such noise can make it.
    """
    if not (np.isfinite(gram.packed).all() and np.isfinite(gram.cross).all()):
        raise Refusal(f"{who}: its sums hold a value that is not finite")
    edge = ridge_after(sigma, gram.keys) + 10 * sigma
    rows = max(gram.trace() + 10 * sigma * math.sqrt(gram.keys), 0.0)
    noise = sigma * (math.sqrt(gram.keys * gram.values) + 6) / math.sqrt(4 * sigma)
    _check_together(gram, who, edge, math.sqrt(rows) + noise)


def _check_bounds(gram: Gram, who: str, key: float, value: float | None, rounding: float) -> None:
    most = gram.count * key**2
    if gram.trace() > most * (1 + _SLACK) + gram.keys * rounding:
        raise Refusal(
            f"{who}: the trace of K'K is {gram.trace():.6g}, expected at most {most:.6g} of"
            f" {gram.count:.0f} keys no longer than {key:g}"
        )
    budget = gram.count * (1.0 if value is None else value**2)
    least = budget * (1 - _SLACK) if value is None else 0.0
    if not least - rounding <= gram.squares <= budget * (1 + _SLACK) + rounding:
        wanted = f"{budget:.6g}, as they are one-hot" if value is None else f"0 to {budget:.6g}"
        raise Refusal(
            f"{who}: the squares of V sum to {gram.squares:.6g}, expected {wanted}, of"
            f" {gram.count:.0f} values"
        )
    # Cauchy-Schwarz for each row of K'V: |sum k_i v|^2 <= sum k_i^2 sum |v|^2.
    diagonal = gram.dense().diagonal() + rounding
    spread = rounding * math.sqrt(gram.values)
    with np.errstate(over="ignore"):  # foreign numbers, whose squares may be infinite
        largest = np.maximum(np.linalg.norm(gram.cross, axis=1) - spread, 0.0)
        excess = largest**2 - diagonal * budget * (1 + _SLACK)
    if (excess > _SLACK**2 * most * budget).any():
        worst = int(excess.argmax())
        raise Refusal(
            f"{who}: row {worst} of K'V is larger than keys of that size can make it"
            f" (length {largest[worst]:.6g}); expected |C_i|^2 <= G_ii {budget:.6g}"
        )


def _check_together(gram: Gram, who: str, delta: float, most: float) -> None:
    """Hold K'V against K'K, and that against having negative eigenvalues: one factorisation.

    Of ``[[K'K + delta I, .], [V'K, t I]]`` Cholesky's lower left block is ``V'K L^-T`` for ``L L' =
    K'K + delta I``; its squares sum to the trace that may be no more than ``most`` squared.
    """
    keys, size = gram.keys, gram.keys + gram.values
    scale = float(np.abs(gram.cross).max(initial=0.0)) or 1.0
    scaled = gram.cross.T / scale
    joint = np.zeros((size, size))
    joint[:keys, :keys], joint[keys:, :keys] = gram.dense(), scaled
    # More than the lower right block can lose: then only the first one can be to blame.
    t = 2 * float(np.vdot(scaled, scaled)) / delta + 1.0
    joint[np.diag_indices(size)] += np.repeat([delta, t], [keys, gram.values])
    try:
        lower = np.linalg.cholesky(joint)
    except np.linalg.LinAlgError:
        lowest = float(np.linalg.eigvalsh(gram.dense())[0])
        raise Refusal(
            f"{who}: K'K has an eigenvalue of {lowest:.3g}, expected none below 0; these are no"
            " sums of k k'"
        ) from None
    found = scale * float(np.linalg.norm(lower[keys:, :keys]))
    if found > most:
        raise Refusal(
            f"{who}: K'V lies where K'K has no keys: tr V'K (K'K)^-1 K'V is"
            f" {found * found:.6g}, expected at most {most * most:.6g}, the squares of V; no rows"
            " have these sums"
        )

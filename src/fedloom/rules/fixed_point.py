# SPDX-License-Identifier: Apache-2.0
"""Numbers as integers modulo 2**64: sums without any rounding, in which masks cancel to the bit.

A float is rounded once, to a multiple of ``2 ** -bits``; from there on additions and subtractions
are exact, in any order, and a deleted client leaves no trace.  With 40 bits after the point a sum
may reach ``2 ** 23`` in size before it wraps around.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = 40


def limit(bits: int = BITS) -> float:
    """Return the size that a *sum* must stay below: ``2 ** (63 - bits)``."""
    return 2.0 ** (63 - bits)


def encode(array: NDArray[Any], bits: int = BITS, parties: int = 1) -> NDArray[np.uint64]:
    """Round to multiples of ``2 ** -bits``, as residues modulo ``2 ** 64``.

    Parameters
    ----------
    parties
        How many such arrays will be added: each may be so much smaller than the limit.

    Raises
    ------
    OverflowError
        If a sum of such numbers could wrap around, or one is not finite.

    >>> encode(np.array([0.5, -0.25]), bits=2).tolist()
    [2, 18446744073709551615]
    """
    plain = np.asarray(array, np.float64)
    largest = float(np.abs(plain).max(initial=0.0))
    if not largest * parties < limit(bits):
        raise OverflowError(
            f"a number of size {largest:.3g} in sums over {parties}: expected below"
            f" {limit(bits) / parties:.3g} with {bits} bits after the point; use fewer bits or"
            " smaller keys"
        )
    return np.rint(plain * 2.0**bits).astype(np.int64).view(np.uint64)


def decode(residues: NDArray[np.uint64], bits: int = BITS) -> NDArray[np.float64]:
    """Read residues back as numbers, the upper half of them as negative.

    Residues above ``2 ** 53`` in size are rounded to float64 on the way out, and not before.
    """
    return residues.view(np.int64).astype(np.float64) * 2.0**-bits


def rounding_bound(parties: int, bits: int = BITS) -> float:
    """Return how far a sum over ``parties`` can be off in any entry: half a step for each.

    Numbers above ``2 ** (53 - bits)`` in size are multiples of the step already and lose nothing.

    >>> rounding_bound(100) < 5e-11
    True
    """
    return parties * 2.0 ** -(bits + 1)

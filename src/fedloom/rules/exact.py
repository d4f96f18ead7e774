# SPDX-License-Identifier: Apache-2.0
"""Sums as whole multiples of ``2 ** -bits``: what was added comes out again to the last bit.

A client rounds its own sums once (``faast.exact-bits``).  From there on the server's total is an
integer: an ``Update`` carries a sum as a float64 and what that rounded off, whose exact value is
the integer, and which two numbers they are depends on that alone (the first is the nearest float64,
the second the rest).  So the total without a client is, to the bit, that of a run which never had
it; below ``2 ** 63`` steps it is the same integer as of 64-bit words.

Keys and values are no longer than one, so no number of a sum over n rows is larger than n: that
bound, and not the numbers themselves, decides beforehand how many bits there is room for
(``FaastConfig.check_room``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rules.fixed_point import decode, encode
from fedloom.rules.statistics import Gram
from fedloom.wire import Arrays


def rounded(gram: Gram, bits: int) -> Gram:
    """Round a client's own sums, once.

    >>> made = rounded(Gram.of(np.array([[0.3]]), np.array([[1.0]])), bits=2)
    >>> made.packed.tolist(), made.cross.tolist()
    ([0.0], [[0.25]])
    """
    packed, cross = (decode(encode(part, bits), bits) for part in (gram.packed, gram.cross))
    return replace(gram, packed=packed, cross=cross)


def check_rounded(arrays: Arrays, bits: int, who: str) -> None:
    """Refuse numbers that are no multiples of a step: their sum would not be exact.

    Raises
    ------
    Refusal
        Naming the client and the array.
    """
    for name, array in arrays.items():
        steps = np.asarray(array, np.float64) * 2.0**bits  # exact: a power of two
        if not (steps == np.rint(steps)).all():
            raise Refusal(
                f"{who}: array {name} has numbers between multiples of 2^-{bits}; expected sums"
                f" rounded as faast.exact-bits = {bits} says"
            )


def steps(array: NDArray[Any], rest: NDArray[Any], bits: int) -> NDArray[np.int64]:
    """Return a total, as its nearest float64 and the rest, in whole steps."""
    return (encode(array, bits) + encode(rest, bits)).view(np.int64)

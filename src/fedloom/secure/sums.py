# SPDX-License-Identifier: Apache-2.0
"""Named sums in and out of 64-bit residues, and what the one rounding costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rules import fixed_point
from fedloom.secure.masks import Words
from fedloom.wire import Arrays, Listing, Update

WEIGHT = "weight"
"""Name under which an update's weight is summed with its arrays: counts are masked too."""

LOSS = "loss"
"""Name under which a client's loss, times its weight, may be summed besides."""


def encoded(arrays: Arrays, bits: int, parties: int) -> Words:
    """Round each array to residues; a sum over ``parties`` of its size must not wrap around.

    Raises
    ------
    Refusal
        If it could, or a number is not finite.
    """
    made: Words = {}
    for name, array in arrays.items():
        try:
            made[name] = fixed_point.encode(array, bits, parties)
        except OverflowError as error:
            raise Refusal(f"array {name}: {error}") from error
    return made


def decoded(words: Mapping[str, NDArray[np.uint64]], bits: int) -> dict[str, NDArray[np.float64]]:
    """Read residues of a sum as numbers."""
    return {name: fixed_point.decode(array, bits) for name, array in words.items()}


def as_sums(update: Update) -> dict[str, NDArray[np.float64]]:
    """Return what a linear rule needs of an update, all as arrays to be summed.

    Any rule that is a weighted mean divides the sum of the arrays by the sum of the weights, and
    needs no more.
    """
    if WEIGHT in update.sums:
        raise ValueError(f'an array named "{WEIGHT}": that name is the weight\'s')
    return {**update.whole(), WEIGHT: np.array([update.weight])}


def from_sums(sums: Arrays) -> Update:
    """Read the sum of what ``as_sums`` returned as one update."""
    rest = {name: array for name, array in sums.items() if name != WEIGHT}
    return Update.summed(rest, float(sums[WEIGHT][0]))


def masked_listing(arrays: Listing, extra: Iterable[str] = ()) -> Listing:
    """Return names, shapes and dtypes of masked words, given those of what is summed.

    Parameters
    ----------
    extra
        Names of single numbers that are summed besides.

    >>> masked_listing({"b": ((2, 3), "float32")}, ["weight"])
    {'b': ((2, 3), 'uint64'), 'weight': ((1,), 'uint64')}
    """
    shapes = {**{n: shape for n, (shape, _) in arrays.items()}, **dict.fromkeys(extra, (1,))}
    return {name: (shape, "uint64") for name, shape in sorted(shapes.items())}


def largest_error(parts: Iterable[Arrays], total: Mapping[str, NDArray[Any]]) -> float:
    """Return how far ``total`` is off the float64 sum of ``parts``, at most, over all entries."""
    exact: dict[str, NDArray[np.float64]] = {}
    for part in parts:
        for name, array in part.items():
            exact[name] = exact.get(name, np.float64(0.0)) + np.asarray(array, np.float64)
    return max(float(np.abs(total[n] - whole).max(initial=0.0)) for n, whole in exact.items())

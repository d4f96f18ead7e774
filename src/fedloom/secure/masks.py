# SPDX-License-Identifier: Apache-2.0
"""Masks: uniform 64-bit words that hide a number for good and cancel in the sum to the bit.

A number modulo ``2 ** 64`` plus a uniform one is uniform, whatever the number was.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedloom.ciphers import Stream

Words = dict[str, NDArray[np.uint64]]


def add(total: Words, seed: bytes) -> None:
    """Add a seed's mask to every array, in place and modulo ``2 ** 64``."""
    for name, words in _mask(total, seed).items():
        total[name] += words


def subtract(total: Words, seed: bytes) -> None:
    """Take a seed's mask away again."""
    for name, words in _mask(total, seed).items():
        total[name] -= words


def _mask(like: Mapping[str, NDArray[np.uint64]], seed: bytes) -> Words:
    """Draw a mask for each array, in sorted order of names: the same wherever it is drawn."""
    stream = Stream(seed)
    return {n: stream.words(like[n].size).reshape(like[n].shape) for n in sorted(like)}

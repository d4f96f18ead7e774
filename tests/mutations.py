"""Change bytes at random, and look whether what reads them refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fedloom.errors import Refusal

EVIL = ("../../x", "/etc/passwd", "a/../b", "", "w\x00", "..", "\\\\host\\x", "é" * 2000)

HOW_MANY = pytest.mark.parametrize(
    "count", [1500, pytest.param(10_000, marks=pytest.mark.slow)], ids=["some", "many"]
)


def attempt(call: Callable, *given):
    """Return what a call makes, or the sentence with which it refuses."""
    try:
        return call(*given), None
    except Refusal as refusal:
        return None, str(refusal)


def flipped(data: bytes, random: np.random.Generator) -> bytes:
    """Change, cut, lengthen or repeat bytes."""
    made = bytearray(data)
    match random.integers(6):
        case 0 if made:
            del made[int(random.integers(len(made))) :]
        case 1:
            made += random.bytes(int(random.integers(1, 40)))
        case 2 if made:
            at = int(random.integers(len(made)))
            made[at:at] = made[at : at + 8]
        case _ if made:
            for _ in range(int(random.integers(1, 4))):
                made[int(random.integers(len(made)))] ^= 1 << int(random.integers(8))
    return bytes(made)

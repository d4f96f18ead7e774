# SPDX-License-Identifier: Apache-2.0
"""Numbers of an update in 16, 8 or 4 bits: codes, the scales they need, and what they decode to.

``bfloat16`` keeps the upper half of a float32.  ``int8`` and ``int4`` divide runs of ``GROUP``
numbers by a step of their own, the largest of them over 127 or 7, itself a bfloat16 rounded up so
that nothing falls off the last level.  Rounding is to the nearest, half to even: the same numbers
give the same bytes on every machine, and no number moves by more than half a step.  That is not
unbiased; who sends such numbers keeps what was rounded off and adds it to what is sent next (error
feedback, arXiv 1901.09847), so that a sum over rounds is off by one round's rounding and no more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal

GROUP = 64
"""Neighbours that share a step."""
CODES = ("float32", "bfloat16", "int8", "int4")
_LEVELS = {"int8": 127, "int4": 7}


def code_bytes(code: str, numbers: int) -> int:
    """Count the bytes of so many numbers' codes."""
    per_two = {"float32": 8, "bfloat16": 4, "int8": 2, "int4": 1}[code]
    return -(-numbers * per_two // 2)


def scale_bytes(code: str, numbers: int) -> int:
    """Count the bytes of their steps."""
    return 2 * _groups(numbers) if code in _LEVELS else 0


def encode(numbers: NDArray[Any], code: str) -> tuple[bytes, bytes]:
    """Write finite numbers, whatever their shape, as codes and steps.

    >>> codes, steps = encode(np.float32([0.0, 1.0, -12.7]), "int8")
    >>> len(codes), len(steps), [f"{x:.1f}" for x in decode(codes, steps, "int8", 3)]
    (3, 2, ['0.0', '1.0', '-12.7'])
    """
    flat = np.ascontiguousarray(numbers, np.float32).ravel()
    if code == "float32":
        return flat.astype("<f4").tobytes(), b""
    if code == "bfloat16":
        return _nearest(flat).astype("<u2").tobytes(), b""
    step = _steps(flat, _LEVELS[code])
    each = _spread(step, flat.size)
    codes = np.rint(np.divide(flat, each, out=np.zeros_like(flat), where=each > 0))
    codes = codes.clip(-_LEVELS[code], _LEVELS[code]).astype(np.int8)
    scales = (step.view(np.uint32) >> 16).astype("<u2").tobytes()
    return (codes.tobytes() if code == "int8" else _nibbles(codes)), scales


def decode(codes: bytes, scales: bytes, code: str, count: int) -> NDArray[np.float32]:
    """Read so many numbers.

    Raises
    ------
    Refusal
        If there are not as many, a code is none, or a step is no finite number from 0 up.
    """
    for what, came, expected in (
        ("codes", len(codes), code_bytes(code, count)),
        ("steps", len(scales), scale_bytes(code, count)),
    ):
        if came != expected:
            raise Refusal(f"{came} bytes of {what} came for {count} numbers, expected {expected}")
    if code == "float32":
        return np.frombuffer(codes, "<f4").astype(np.float32)
    if code == "bfloat16":
        return _widened(codes)
    read = np.frombuffer(codes, np.int8) if code == "int8" else _from_nibbles(codes, count)
    if (np.abs(read.astype(np.int16)) > _LEVELS[code]).any():
        raise Refusal(f"a code beyond {_LEVELS[code]} came in {code}")
    step = _widened(scales)
    if not (np.isfinite(step).all() and (step >= 0).all()):
        raise Refusal(f"a step of {code} is no finite number from 0 up")
    with np.errstate(over="ignore"):  # what overflows is not finite, and refused as that
        found: NDArray[np.float32] = read.astype(np.float32) * _spread(step, count)
    return found


def rounded(array: NDArray[Any], code: str) -> NDArray[np.float32]:
    """Return what the receiver of an array will read."""
    return decode(*encode(array, code), code, array.size).reshape(array.shape)


def moved(start: NDArray[Any] | None, change: NDArray[Any]) -> NDArray[np.float32]:
    """Add a change to where it began, rounded once: both ends do, and get the same bits."""
    if start is None:
        return np.asarray(change, np.float32)
    with np.errstate(over="ignore"):
        return (np.asarray(start, np.float64) + np.asarray(change, np.float64)).astype(np.float32)


def _groups(count: int) -> int:
    return -(-count // GROUP)


def _steps(flat: NDArray[np.float32], levels: int) -> NDArray[np.float32]:
    """Return each group's step: the next number that bfloat16 holds, upwards."""
    padded = np.zeros(_groups(flat.size) * GROUP, np.float32)
    padded[: flat.size] = np.abs(flat)
    step = padded.reshape(-1, GROUP).max(1, initial=0.0) / np.float32(levels)
    bits = np.ascontiguousarray(step).view(np.uint32)
    cut = bits & np.uint32(0xFFFF0000)
    up = cut + np.where(bits != cut, np.uint32(0x10000), np.uint32(0))
    return up.astype(np.uint32).view(np.float32)


def _spread(step: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    return np.repeat(step, GROUP)[:count]


def _nearest(flat: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the upper half of each float32, rounded half to even."""
    bits = flat.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return ((bits + half) >> 16).astype(np.uint32)


def _widened(halves: bytes) -> NDArray[np.float32]:
    return (np.frombuffer(halves, "<u2").astype(np.uint32) << 16).view(np.float32)


def _nibbles(codes: NDArray[np.int8]) -> bytes:
    """Put two codes in a byte, the first one below; a code c is c + 8."""
    even = np.zeros(codes.size + codes.size % 2, np.uint8)
    even[: codes.size] = (codes + 8).astype(np.uint8)
    return (even[0::2] | (even[1::2] << 4)).tobytes()


def _from_nibbles(packed: bytes, count: int) -> NDArray[np.int8]:
    both = np.frombuffer(packed, np.uint8)
    flat = np.stack((both & 15, both >> 4), axis=1).ravel()[:count]
    return flat.astype(np.int8) - np.int8(8)

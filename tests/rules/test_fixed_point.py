# SPDX-License-Identifier: Apache-2.0
"""Integers modulo 2**64: exact in any order, and said so before they wrap around."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.rules.fixed_point import BITS, decode, encode, limit


def test_a_number_is_rounded_once():
    numbers = np.random.default_rng(0).normal(size=1000) * 1e3
    assert np.abs(decode(encode(numbers)) - numbers).max() <= 2.0 ** -(BITS + 1)


def test_sums_are_exact_in_any_order_and_delete_to_the_bit():
    parts = [encode(np.random.default_rng(s).normal(size=50) * 1e4) for s in range(30)]
    there, back = np.zeros(50, np.uint64), np.zeros(50, np.uint64)
    for part in parts:
        there = there + part
    for part in parts[::-1]:
        back = back + part
    np.testing.assert_array_equal(there, back)
    np.testing.assert_array_equal(there - parts[7], sum(parts[:7]) + sum(parts[8:]))
    assert decode(there) == pytest.approx(sum(decode(part) for part in parts), abs=1e-6)


def test_masks_cancel():
    secret = encode(np.array([1.5, -2.25]))
    mask = np.random.default_rng(0).integers(0, 2**64, size=2, dtype=np.uint64)
    assert decode(secret + mask - mask).tolist() == [1.5, -2.25]


@pytest.mark.parametrize("number", [limit() / 3, -limit() / 3, np.inf, np.nan])
def test_what_would_wrap_around_is_refused(number):
    with pytest.raises(OverflowError, match="bits after the point"):
        encode(np.array([number]), parties=3)


def test_just_below_the_limit_holds():
    number = np.nextafter(limit() / 2, 0)
    one = encode(np.array([number]), parties=2)
    assert decode(one + one)[0] == pytest.approx(2 * number)

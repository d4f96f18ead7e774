# SPDX-License-Identifier: Apache-2.0
"""Honest sums are never refused, and each lie that can be seen is told by its name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.errors import Refusal
from fedloom.rules.admission import check_sums
from fedloom.rules.reading import one_hot, unit
from fedloom.rules.statistics import Gram


def honest(rows=12, d=7, classes=3, seed=0, dtype=np.float64) -> Gram:
    random = np.random.default_rng(seed)
    keys = unit(random.normal(size=(rows, d)) + random.normal(size=d)).astype(dtype)
    return Gram.of(keys, one_hot(random.integers(classes, size=rows), classes))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40),
    d=st.integers(1, 30),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_no_honest_client_is_refused(rows, d, seed, dtype):
    check_sums(honest(rows, d, 4, seed, dtype), "client 1", rows=rows)


def test_rows_of_zeros_and_rows_all_alike_are_honest():
    alike = unit(np.ones((9, 5)))
    for keys in (np.zeros((9, 5)), alike, np.eye(5)[[0, 0, 0]]):
        labels = np.zeros(len(keys), np.int64)
        check_sums(Gram.of(keys, one_hot(labels, 2)), "client 1", rows=9)


def spoilt(how: str) -> Gram:
    gram = honest()
    packed, cross = gram.packed.copy(), gram.cross.copy()
    if how == "nan":
        packed[3] = np.nan
    if how == "eigenvalue":  # same trace, one entry off the diagonal blown up
        packed[1] = 5.0
    if how == "trace":
        packed *= 3
    if how == "cross":
        cross[2, 1] *= 50
    counts = {"none": 0, "half": 11.5, "many": 13}
    squares = {"squares": 40.0, "negative squares": -1.0}.get(how, gram.squares)
    return replace(
        gram, packed=packed, cross=cross, squares=squares, count=counts.get(how, gram.count)
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", "not finite"),
        ("eigenvalue", "eigenvalue of -"),
        ("trace", "trace of K'K"),
        ("cross", "row 2 of K'V"),
        ("squares", "squares of V"),
        ("negative squares", "squares of V"),
        ("none", "whole number"),
        ("half", "whole number"),
        ("many", "13 rows came, but it can have 12"),
    ],
)
def test_a_lie_is_named(how, said):
    with pytest.raises(Refusal, match=said) as caught:
        check_sums(spoilt(how), "client 4 (Dr. No)", rows=12)
    assert str(caught.value).startswith("client 4 (Dr. No): ")
    assert "\n" not in str(caught.value)


def test_bounds_are_the_callers():
    gram = honest()
    doubled = replace(gram, packed=4 * gram.packed, cross=2 * gram.cross)
    check_sums(doubled, "client 1", rows=12, key=2.0)
    with pytest.raises(Refusal, match="trace"):
        check_sums(doubled, "client 1", rows=12, key=1.9)

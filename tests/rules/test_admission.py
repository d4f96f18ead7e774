# SPDX-License-Identifier: Apache-2.0
"""Honest sums are never refused, and each lie that can be seen is told by its name."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.ciphers import Stream
from fedloom.errors import Refusal
from fedloom.rules.admission import check_noisy, check_rows, check_sums
from fedloom.rules.fixed_point import decode, encode, rounding_bound
from fedloom.rules.private import Bounds, bound_client, noisy
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


KINDS = ("any", "one class", "repeated", "some zeros", "nearly alike", "few directions")


def odd(kind: str, rows: int, d: int, seed: int, dtype=np.float64) -> Gram:
    """Sums that are honest and as hard on the arithmetic as rows of length one can be."""
    random = np.random.default_rng(seed)
    keys, labels = random.normal(size=(rows, d)), random.integers(4, size=rows)
    if kind == "one class":
        labels[:] = 2
    if kind == "repeated":
        keys = keys[random.integers(max(rows // 3, 1), size=rows)]
    if kind == "some zeros":
        keys[random.random(rows) < 0.5] = 0.0
    if kind == "nearly alike":
        keys = random.normal(size=d) + 10.0 ** -random.integers(1, 12) * keys
    if kind == "few directions":
        keys = keys[:, :2] @ random.normal(size=(min(d, 2), d)) if d > 1 else keys
    return Gram.of(unit(keys.astype(dtype)).astype(dtype), one_hot(labels, 4))


def travelled(grams: list[Gram], bits: int) -> Gram:
    """Add sums as masks do: in fixed point, each of the clients' rounded once."""
    arrays = [{**g.arrays(), "count": np.array([float(g.count)])} for g in grams]
    total = {n: decode(np.add.reduce([encode(a[n], bits) for a in arrays]), bits)
             for n in arrays[0]}  # fmt: skip
    return Gram.from_arrays(total, float(total["count"][0]))


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 60),
    d=st.integers(1, 48),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float32, np.float64]),
    parties=st.integers(1, 5),
    bits=st.sampled_from([24, 40, 52]),
)
def test_no_odd_but_honest_sums_are_refused(kind, rows, d, seed, dtype, parties, bits):
    grams = [odd(kind, rows, d, seed + i, dtype) for i in range(parties)]
    for gram in grams:
        check_sums(gram, "client 1", rows=rows)
    error = rounding_bound(parties, bits)
    check_sums(travelled(grams, bits), "all", rows=rows * parties, rounding=error)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 60),
    d=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    sigma=st.sampled_from([1e-3, 0.5, 5.0, 50.0]),
    bound=st.sampled_from([None, 3.0]),
)
def test_no_honest_sums_with_noise_are_refused(kind, rows, d, seed, sigma, bound):
    gram = odd(kind, rows, d, seed)
    gram = gram if bound is None else bound_client(gram, bound)
    made = noisy(gram, sigma, Stream(seed.to_bytes(32, "big")), None if bound else Bounds())
    check_noisy(made, "client 1", sigma)
    check_rows(made, "client 1", least=8, most=rows, sigma=sigma)


def test_a_class_cannot_pull_where_its_client_has_no_keys():
    """Eight rows' worth of sums that no eight rows have; each entry for itself could be."""
    key, pull = np.ones(64) / 8, np.tile([1.0, -1.0], 32) / 8
    assert key @ pull == 0
    square, cross = 8 * np.outer(key, key), 0.7 * 8 * np.outer(pull, [1.0, -1.0])
    lie = Gram(square[np.triu_indices(64)], cross, 8.0, 8)
    assert ((cross**2).sum(1) < np.diag(square) * 8).all()  # Cauchy-Schwarz, row by row
    with pytest.raises(Refusal, match="client 1: K'V lies where K'K has no keys"):
        check_sums(lie, "client 1", rows=8)
    check_sums(replace(lie, cross=8 * np.outer(key, [1.0, 0.0])), "client 1", rows=8)
    # Nor may what is in its keys' space be stretched beyond what its values can have.
    honest = Gram.of(unit(np.random.default_rng(1).normal(size=(8, 64))), one_hot(np.arange(8), 8))
    check_sums(honest, "client 3", rows=8)  # rows are told apart: all of |V|^2 is explained
    with pytest.raises(Refusal, match="no rows have these sums"):
        check_sums(replace(honest, cross=1.001 * honest.cross), "client 3", rows=8)


def test_one_hot_values_are_as_many_as_rows():
    gram = honest()
    check_sums(gram, "client 1", rows=12)
    for squares in (11.0, 13.0, 0.0):
        with pytest.raises(Refusal, match=r"squares of V sum to .* expected 12, as they are one-h"):
            check_sums(replace(gram, squares=squares), "client 1", rows=12)
    check_sums(replace(gram, squares=11.9), "client 1", rows=12, value=1.0)


def test_numbers_of_any_size_end_in_a_sentence():
    gram = honest()
    for size in (1e150, 1e300):
        turned = replace(gram, packed=size * gram.packed)
        for lie in (replace(gram, cross=size * gram.cross), turned):
            with pytest.raises(Refusal, match="client 1: "):
                check_sums(lie, "client 1", rows=12)
        with pytest.raises(Refusal, match=r"client 1: .* no keys"):
            check_noisy(replace(gram, cross=size * gram.cross), "client 1", 0.5)


def test_rows_are_held_against_what_a_client_may_have():
    gram = honest(rows=12)
    check_rows(gram, "client 1", least=12, most=12)
    with pytest.raises(Refusal, match=r"client 1: .*12 rows came, fewer than faast.min-count = 13"):
        check_rows(gram, "client 1", least=13, most=20)
    with pytest.raises(Refusal, match="12 rows came, expected at most 11 of each client"):
        check_rows(gram, "client 1", least=1, most=11)
    check_rows(gram, "all", least=6, most=6, clients=2)
    with pytest.raises(Refusal, match="fewer than"):
        check_rows(gram, "all", least=7, most=9, clients=2)
    # A noisy trace tells too many, and forgives what noise can make: 10 sigma sqrt(7).
    check_rows(gram, "client 1", least=20, most=8, sigma=0.2)
    with pytest.raises(Refusal, match="expected at most 8"):
        check_rows(gram, "client 1", least=20, most=8, sigma=0.1)
    assert 12 - 10 * 0.1 * math.sqrt(7) > 8

# SPDX-License-Identifier: Apache-2.0
"""Sums over rows: any split gives the same, and they say nothing about how many rows there were."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedloom.rules.statistics import CROSS, GRAM, Gram
from fedloom.wire import Update


def rows(n, d=7, p=3, seed=0, dtype=np.float64):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, d)).astype(dtype), random.normal(size=(n, p)).astype(dtype)


def test_the_sums_are_what_they_are_called():
    keys, values = rows(11)
    gram = Gram.of(keys, values)
    assert gram.dense() == pytest.approx(keys.T @ keys, abs=1e-12)
    assert (gram.dense() == gram.dense().T).all()
    assert gram.cross == pytest.approx(keys.T @ values, abs=1e-12)
    assert gram.squares == pytest.approx((values**2).sum())
    assert gram.trace() == pytest.approx((keys**2).sum())
    assert (gram.keys, gram.values, gram.count) == (7, 3, 11)


@pytest.mark.parametrize("cuts", [(0,), (1, 1), (3, 50), (13, 14, 15, 99)])
def test_any_split_has_the_same_sums(cuts):
    keys, values = rows(100)
    whole = Gram.of(keys, values)
    parts = [Gram.of(keys[a:b], values[a:b]) for a, b in itertools.pairwise((0, *cuts, 100))]
    for order in (parts, parts[::-1]):
        added = Gram.zero(7, 3)
        for part in order:
            added = added + part
        assert added.count == whole.count
        assert added.packed == pytest.approx(whole.packed, rel=1e-13, abs=1e-12)
        assert added.cross == pytest.approx(whole.cross, rel=1e-13, abs=1e-12)


def test_rows_beyond_a_block_are_summed_too(monkeypatch):
    monkeypatch.setattr("fedloom.rules.statistics._ROWS", 9)
    keys, values = rows(64)
    assert Gram.of(keys, values).dense() == pytest.approx(keys.T @ keys, abs=1e-12)


def test_half_precision_keys_are_cast_up_before_the_product():
    keys, values = rows(5000, d=4, p=1, dtype=np.float32)
    keys += np.float32(100.0)  # a mean direction that float32 sums would round into
    exact = keys.astype(np.float64).T @ keys.astype(np.float64)
    gram = Gram.of(keys, values)
    assert np.abs(gram.dense() / exact - 1).max() < 1e-14
    assert np.abs((keys.T @ keys) / exact - 1).max() > 1e-9  # what this guards against


def test_what_was_added_can_be_taken_out():
    one, two = Gram.of(*rows(40)), Gram.of(*rows(60, seed=1))
    left = one + two - two
    assert left.count == 40
    assert left.packed == pytest.approx(one.packed, abs=1e-12)
    assert left.squares == pytest.approx(one.squares)


def test_compensated_sums_delete_to_the_last_bit():
    parts = [Update.summed(Gram.of(*rows(20, seed=s)).arrays(), 20) for s in range(5)]
    without = parts[0] + parts[2] + parts[3] + parts[4]
    deleted = parts[0] + parts[1] + parts[2] + parts[3] + parts[4] + (-parts[1])
    assert deleted.weight == without.weight == 80
    for name, array in without.whole().items():
        np.testing.assert_array_equal(deleted.whole()[name], array)


def test_a_discount_weighs_every_earlier_row():
    (k1, v1), (k2, v2) = rows(30), rows(30, seed=1)
    gram = Gram.of(k1, v1).discounted(0.25) + Gram.of(k2, v2)
    joined = np.concatenate([0.5 * k1, k2]), np.concatenate([0.5 * v1, v2])
    weighted = Gram.of(*joined)
    assert gram.packed == pytest.approx(weighted.packed, abs=1e-12)
    assert gram.cross == pytest.approx(weighted.cross, abs=1e-12)
    assert gram.count == 37.5


def test_class_sums_become_sums_of_label_embeddings():
    keys, _ = rows(50)
    labels, table = np.arange(50) % 4, np.random.default_rng(2).normal(size=(4, 9))
    one_hot = Gram.of(keys, np.eye(4)[labels])
    assert one_hot.mapped(table).cross == pytest.approx(
        Gram.of(keys, table[labels]).cross, abs=1e-12
    )


def test_what_travels_has_one_size_and_no_key():
    few, many = Gram.of(*rows(2)).arrays(), Gram.of(*rows(5000)).arrays()
    assert {n: a.shape for n, a in few.items()} == {n: a.shape for n, a in many.items()}
    assert few[GRAM].shape == (28,)
    assert few[CROSS].shape == (7, 3)
    back = Gram.from_arrays(few, 2)
    assert (back.packed == few[GRAM]).all()


def test_one_row_shows_its_key_to_whoever_sees_its_sums():
    """Why bare sums are not private: docs/faast.md says so, and what to do."""
    key = np.random.default_rng(3).normal(size=(1, 6))
    gram = Gram.of(key, np.ones((1, 1)))
    values, vectors = np.linalg.eigh(gram.dense())
    seen = vectors[:, -1] * np.sqrt(values[-1])
    assert np.abs(np.abs(seen) - np.abs(key[0])).max() < 1e-12


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (np.ones((2, 3)), np.ones((3, 1))),
        (np.ones(3), np.ones((3, 1))),
        (np.array([[np.nan]]), np.ones((1, 1))),
    ],
)
def test_rows_that_cannot_be_summed_are_named(keys, values):
    with pytest.raises(ValueError, match=r"expected|finite"):
        Gram.of(keys, values)

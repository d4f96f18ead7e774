from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import rules
from fedloom.errors import Refusal
from fedloom.wire import Manifest, Update, arrays_digest


def contributions(seed: int, count: int) -> list[Update]:
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-6, 6, count)  # so that plain float64 sums would differ
    return [
        Update.of(
            {"w": (random.normal(size=7) * s).astype(np.float32)}, int(random.integers(1, 5000))
        )
        for s in scale
    ]


LIKE = {"w": np.zeros(7, np.float32)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_order_and_any_grouping_give_the_same_bits(seed, count, random):
    updates = contributions(seed, count)
    whole = rules.mean(updates, LIKE)["w"]
    random.shuffle(updates)
    cut = random.randint(0, count)
    groups = [rules.total(part) for part in (updates[:cut], updates[cut:]) if part]
    random.shuffle(groups)
    np.testing.assert_array_equal(rules.mean(groups, LIKE)["w"], whole)


def test_compensation_is_needed_and_works():
    """Without the residue the order of these three decides the sum."""
    updates = [Update.of({"w": np.array([x])}, 1) for x in (1.0, 2.0**80, -(2.0**80))]
    for order in permutations(updates):
        assert rules.total(order).mean()["w"][0] == 1.0 / 3


def test_mean_is_weighted_by_examples():
    a, b = (Update.of({"w": np.float32([x])}, n) for x, n in ((1.0, 1), (4.0, 2)))
    assert rules.mean([a, b], {"w": np.zeros(1, np.float32)})["w"][0] == 3.0


def test_mean_of_one_returns_its_bits():
    array = np.random.default_rng(0).normal(size=999).astype(np.float32)
    got = rules.mean([Update.of({"w": array}, 183)], {"w": array})["w"]
    np.testing.assert_array_equal(got, array)


def test_updates_of_different_adapters_do_not_add():
    a = Update.of({"w": np.zeros((3, 3))}, 1)
    with pytest.raises(ValueError, match="different adapters"):
        a + Update.of({"v": np.zeros((3, 3))}, 1)
    with pytest.raises(ValueError, match="differ"):  # numpy would broadcast this
        a + Update.of({"w": np.zeros((1, 3))}, 1)


def test_nothing_to_average_is_an_error():
    with pytest.raises(ValueError, match="no update"):
        rules.mean([], {})
    with pytest.raises(ValueError, match="above 0"):
        Update.of({"w": np.zeros(1)}, 0).mean()


def test_momentum_accumulates_steps():
    start, averaged = {"w": np.float32([1.0])}, {"w": np.float32([1.1])}
    fresh, velocity = rules.momentum(start, averaged, None, 0.5)
    assert fresh["w"] == averaged["w"]  # the first step is the mean's own
    again, velocity = rules.momentum(start, averaged, velocity, 0.5)
    step = np.float64(np.float32(1.1)) - 1.0
    assert velocity["w"][0] == pytest.approx(1.5 * step, rel=1e-15)
    assert again["w"][0] == np.float32(1.0 + 1.5 * step)


def manifest(**arrays) -> Manifest:
    return Manifest.of(arrays, method="fednl", version="1", base="b" * 64, tokenizer="t" * 64)


def test_manifest_round_trip_and_digest():
    made = manifest(b=np.zeros((2, 3), np.float32), a=np.zeros(1, np.float32))
    assert Manifest.from_json(made.to_json()) == made
    assert list(made.arrays) == ["a", "b"]
    assert made.nbytes() == 28
    assert made.digest() != manifest(a=np.zeros(1, np.float32)).digest()


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({}, "did not come"),
        ({"a": np.zeros(2, np.float32), "x": np.zeros(1)}, "not in the manifest"),
        ({"a": np.zeros(3, np.float32)}, r"\(3,\)"),
        ({"a": np.zeros(2, np.float64)}, "float64"),
        ({"a": np.float32([0, np.nan])}, "not finite"),
        ({"a": np.float32([0, np.inf])}, "not finite"),
    ],
)
def test_manifest_refuses_what_is_not_its(arrays, expected):
    with pytest.raises(Refusal, match=expected):
        manifest(a=np.zeros(2, np.float32)).check_arrays(arrays)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"arrays": 3}', '{"arrays": {"a": 1}}'])
def test_no_manifest_is_refused(text):
    with pytest.raises(Refusal, match="not an adapter manifest"):
        Manifest.from_json(text)


def test_digest_of_arrays_sees_names_dtypes_shapes_and_bits():
    a = np.zeros((2, 3), np.float32)
    digests = {
        arrays_digest(x)
        for x in (
            {"a": a},
            {"b": a},
            {"a": a.T},
            {"a": a.astype(np.float64)},
            {"a": a + np.float32(1e-45)},
        )
    }
    assert len(digests) == 5

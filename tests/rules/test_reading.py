# SPDX-License-Identifier: Apache-2.0
"""What fast weights read: scores, or embeddings compared with names."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.rules.candidates import best, candidates
from fedloom.rules.reading import one_hot, read, score_sums, unit
from fedloom.rules.solving import BelowFloorWarning, solve
from fedloom.rules.statistics import Gram

RANDOM = np.random.default_rng(3)
KEYS, TABLE = unit(RANDOM.normal(size=(20, 6))), unit(RANDOM.normal(size=(4, 6)))
LABELS = RANDOM.integers(4, size=20)


def test_weights_for_one_hot_values_read_label_embeddings_too():
    """``(K^+ Y) E`` is ``K^+ (Y E)``: the server never needs the embeddings."""
    hot = one_hot(LABELS, 4)
    direct = solve(Gram.of(KEYS, hot), alpha=1.0).weights
    embedded = solve(Gram.of(KEYS, hot @ TABLE), alpha=1.0).weights
    wanted = unit(KEYS @ embedded) @ TABLE.T
    assert read(KEYS, direct, TABLE) == pytest.approx(wanted, abs=1e-12)


def test_no_memory_is_the_zero_shot_head_to_the_bit():
    weights = RANDOM.normal(size=(6, 4))
    assert (read(KEYS, weights, TABLE, share=0.0) == unit(KEYS) @ TABLE.T).all()


def test_sums_are_those_of_a_softmax():
    scores = RANDOM.normal(size=(20, 4))
    logits = 3.0 * scores
    ce = -np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[np.arange(20), LABELS]
    found = score_sums(scores, LABELS, 3.0)
    assert found["gold-ce-sum"] == pytest.approx(ce.sum())
    assert found["gold-ce-sq-sum"] == pytest.approx((ce**2).sum())
    assert found["correct"] == (scores.argmax(1) == LABELS).sum()
    assert found["chance-sum"] == pytest.approx(5.0)
    assert found["chance-ce-sum"] == pytest.approx(20 * np.log(4))
    assert all(type(value) in (int, float) for value in found.values())
    far = score_sums(1e4 * scores, LABELS, 1.0)  # no overflow
    assert np.isfinite(far["gold-ce-sum"])


def test_unit_leaves_zeros_and_needs_no_warning():
    assert (unit(np.zeros((2, 3))) == 0).all()
    assert np.linalg.norm(unit(np.float32([[3, 4]]))) == pytest.approx(1.0, abs=1e-15)


def test_candidates_are_the_solutions_one_by_one():
    gram = Gram.of(KEYS, one_hot(LABELS, 4))
    found = candidates(gram, [0.1, 0.5, 1.0], ridge=0.01)
    for alpha, one in zip([0.1, 0.5, 1.0], found, strict=True):
        assert (one.weights == solve(gram, alpha=alpha, ridge=0.01).weights).all()
    (floored,) = candidates(gram, [9.0])  # told, not warned of: there may be a hundred clients
    assert floored.floored
    with pytest.warns(BelowFloorWarning):
        solve(gram, alpha=9.0)


def test_best_takes_right_answers_before_cross_entropy_before_place():
    assert best([(3, 0.1), (5, 9.0), (5, 8.0)]) == 2
    assert best([(3, 0.1), (3, 0.1)]) == 0

"""Rows that leave again, and the paper's mean of chunks."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.classifier import FaastClassifier
from fedloom.errors import Refusal
from fedloom.rules.solving import naive_solve, solve
from fedloom.rules.statistics import Gram


def unit_rows(count, width, classes=3, seed=0):
    random = np.random.default_rng(seed)
    keys = random.normal(size=(count, width))
    labels = np.arange(count) % classes
    return keys / np.linalg.norm(keys, axis=1, keepdims=True), labels


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("width", [16, 64])  # solved plainly and reduced
def test_what_is_left_of_many_rows_has_no_direction_of_their_rounding(width):
    """12 of 20,000 rows: by what is left alone, noise passed for ten directions more."""
    keys, labels = unit_rows(20_000, width)
    model = FaastClassifier(alpha=None).fit(keys, labels).forget(keys[12:], labels[12:])
    fresh = FaastClassifier(alpha=None).fit(keys[:12], labels[:12])
    assert model.rank_ == fresh.rank_ == 12
    # eps times the trace before, 20,000, over the smallest eigenvalue that is kept
    smallest = np.linalg.svd(keys[:12], compute_uv=False)[-1] ** 2
    assert distance(model.weights_, fresh.weights_) < 2.2e-16 * 20_000 / smallest
    left = Gram.of(keys, np.eye(3)[labels]) - Gram.of(keys[12:], np.eye(3)[labels[12:]])
    assert solve(left, alpha=None).rank == 12


@pytest.mark.parametrize("alpha", [None, 0.8])
def test_forgetting_half_is_a_fit_without_to_1e_12(alpha):
    keys, labels = unit_rows(2000, 40)
    model = FaastClassifier(alpha=alpha).fit(keys, labels).forget(keys[::2], labels[::2])
    without = FaastClassifier(alpha=alpha).fit(keys[1::2], labels[1::2])
    assert distance(model.weights_, without.weights_) < 1e-12
    assert (model.rank_, model.gram_.count) == (without.rank_, 1000)


def test_sums_that_were_larger_stay_coarser():
    """What came back in does not make the lost digits whole."""
    keys, labels = unit_rows(20_000, 64)
    model = FaastClassifier(alpha=None).fit(keys, labels)
    model.forget(keys[12:], labels[12:]).partial_fit(keys[12:20], labels[12:20])
    assert model.rank_ == 20
    assert model.gram_.before == pytest.approx(20_000)
    assert FaastClassifier(alpha=0.8).fit(keys, labels).gram_.before == 0.0
    halved = model.gram_.discounted(0.5) + Gram.zero(64, 3)
    assert halved.before == halved.mapped(np.eye(3)).before == pytest.approx(10_000)


@pytest.mark.parametrize("table", [None, np.array([[1.0, 2.0], [0.5, -1.0]])])
def test_the_paper_s_mode_is_equation_14(table):
    """65,536 rows are held; ten more, and the oldest 8192 are solved by themselves."""
    random, count = np.random.default_rng(0), 65_546
    keys = random.normal(size=(count, 2)) * [3.0, 1.0] + [0.0, 1.0]
    labels = (keys[:, 0] + random.normal(size=count) > np.linspace(-2, 2, count)).astype(int)
    model = FaastClassifier(mode="paper", alpha=1.0, discount=0.5, values=table)
    for part in np.array_split(np.arange(count), 3):
        model.partial_fit(keys[part], labels[part])
    values = np.eye(2)[labels] if table is None else table[labels]
    old, rest = slice(0, 8192), slice(8192, None)
    share = (count - 8192) / (0.5 * 8192 + count - 8192)
    wanted = (1 - share) * naive_solve(keys[old], values[old], alpha=1.0)
    wanted += share * naive_solve(keys[rest], values[rest], alpha=1.0)
    assert distance(model.weights_, wanted) < 1e-12
    left = ((keys @ wanted - values) ** 2).sum() / (values**2).sum()
    assert model.explained_ == pytest.approx(1 - left)
    assert model.rank_ is None
    exact = FaastClassifier(alpha=1.0, values=table).fit(keys, labels)
    assert distance(model.weights_, exact.weights_) > 1e-2  # it is another thing
    assert exact.explained_ > model.explained_
    assert model.score(keys, labels) > 0.6


def test_in_one_bank_the_paper_s_mode_is_exact():
    keys, labels = unit_rows(300, 40)
    paper, exact = (FaastClassifier(mode=mode).fit(keys, labels) for mode in ("paper", "exact"))
    assert paper.alpha_ == exact.alpha_
    assert distance(paper.weights_, exact.weights_) < 1e-10
    with pytest.raises(Refusal, match="cannot forget"):
        paper.forget(keys[:3], labels[:3])


def test_the_bank_does_not_hold_the_caller_s_rows():
    keys, labels = unit_rows(50, 6)
    model = FaastClassifier(mode="paper", alpha=1.0).partial_fit(keys[:40], labels[:40])
    wanted = naive_solve(keys, np.eye(3)[labels], alpha=1.0)
    rest = keys[40:].copy()
    keys[:] = 0.0
    assert distance(model.partial_fit(rest, labels[40:]).weights_, wanted) < 1e-12


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mode": "both"}, 'expected "exact" or "paper"'),
        ({"mode": "paper", "ridge": "auto"}, "no ridge"),
        ({"mode": "paper", "alpha": None}, "expected a filter"),
        ({"discount": 1.5}, "discount 1.5"),
    ],
)
def test_modes_that_cannot_be_are_refused(how, said):
    with pytest.raises(Refusal, match=said):
        FaastClassifier(**how).fit(*unit_rows(20, 4))

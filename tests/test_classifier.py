"""Fast weights as an estimator: an oracle, sums in any order, choosing, scikit-learn's checks."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.utils.estimator_checks import parametrize_with_checks

from fedloom import seeds
from fedloom.classifier import FaastClassifier
from fedloom.data.labelled import load_labelled
from fedloom.errors import Refusal
from fedloom.models.encoders import load_encoder


@parametrize_with_checks(
    [FaastClassifier(), FaastClassifier(alpha=0.8, ridge=1e-6, intercept=True)]
)
def test_scikit_learn_finds_nothing_wrong(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    """Return relu features and labels, shuffled."""
    data = load_labelled("packaged:digits")
    keys = load_encoder("relu:128:pixels:64").encode(data.items).astype(np.float64)
    order = seeds.generator(0, "digits").permutation(len(data))
    return keys[order], data.labels[order]


def close(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.2])
@pytest.mark.parametrize("rows", [40, 128, 1000])  # fewer than features, as many, more
def test_weights_are_numpy_s_least_squares(digits, alpha, rows):
    keys, labels = (x[:rows] for x in digits)
    model = FaastClassifier(alpha=alpha).fit(keys, labels)
    one_hot = (labels[:, None] == model.classes_).astype(float)
    oracle, *_ = np.linalg.lstsq(keys, one_hot, rcond=rows**-alpha)
    assert close(model.weights_, oracle) < 1e-8
    held = 1 - np.linalg.norm(keys @ oracle - one_hot) ** 2 / rows
    assert model.explained_ == pytest.approx(held, abs=1e-9)
    assert model.weights_.shape == (128, len(model.classes_))  # however many rows


def test_few_rows_are_solved_the_same_from_rows_and_from_sums(digits):
    keys, labels = (x[:90] for x in digits)
    for how in ({"alpha": 0.9}, {"alpha": None, "ridge": 0.01}):
        by_rows = FaastClassifier(**how).fit(keys, labels)
        by_sums = FaastClassifier(**how).partial_fit(keys[:45], labels[:45], classes=range(10))
        by_sums.partial_fit(keys[45:], labels[45:])
        assert how.get("ridge") or by_rows.rank_ == by_sums.rank_
        assert close(by_sums.weights_, by_rows.weights_) < 1e-9
        assert by_sums.explained_ == pytest.approx(by_rows.explained_)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_split_in_any_order_gives_the_same(digits, data):
    keys, labels = (x[:400] for x in digits)
    cuts = sorted(data.draw(st.sets(st.integers(1, 399), max_size=9)))
    parts = np.split(data.draw(st.permutations(range(400))), cuts)
    model = FaastClassifier(alpha=0.8)
    for part in parts:
        model.partial_fit(keys[part], labels[part], classes=range(10))
    whole = FaastClassifier(alpha=0.8).fit(keys, labels)
    assert close(model.weights_, whole.weights_) < 1e-11
    assert (model.predict(keys) == whole.predict(keys)).all()


def test_forgetting_is_a_fit_without(digits):
    keys, labels = digits
    model = FaastClassifier(alpha=0.8).fit(keys, labels).forget(keys[200:900], labels[200:900])
    kept = np.r_[0:200, 900 : len(keys)]
    without = FaastClassifier(alpha=0.8).fit(keys[kept], labels[kept])
    assert close(model.weights_, without.weights_) < 1e-11
    assert (model.class_counts_ == without.class_counts_).all()
    with pytest.raises(Refusal, match="expected rows that were put in"):
        without.forget(keys[labels == 3], labels[labels == 3])
    with pytest.raises(Refusal, match="some others to stay"):
        without.forget(keys[kept], labels[kept])


def test_what_is_chosen_is_chosen_without_the_rows_that_it_is_tested_on(digits):
    """The choice depends on the fitted rows alone, and beats the ends of the grid on others."""
    keys, labels = digits
    model = FaastClassifier().fit(keys[:1000], labels[:1000])
    again = FaastClassifier().fit(keys[:1000], labels[:1000])
    assert (model.alpha_, model.scale_) == (again.alpha_, again.scale_)
    assert np.array_equal(model.weights_, again.weights_)
    fixed = FaastClassifier(alpha=model.alpha_).fit(keys[:1000], labels[:1000])
    assert close(model.weights_, fixed.weights_) < 1e-9  # all rows are in it
    rest = keys[1000:], labels[1000:]
    assert model.score(*rest) > FaastClassifier(alpha=0.2).fit(keys[:1000], labels[:1000]).score(
        *rest
    )
    assert model.score(*rest) > 0.93


def test_one_row_a_class_leaves_nothing_to_choose_on(digits):
    keys, labels = digits
    first = [int(np.flatnonzero(labels == c)[0]) for c in range(10)]
    model = FaastClassifier(prior=0.0).fit(keys[first], labels[first])
    assert model.alpha_ == 0.8
    assert (model.predict(keys[first]) == labels[first]).all()


def _space(rows, noise=0.8, seed=0):
    """Draw keys around the embeddings of their classes, in one space."""
    random = np.random.default_rng(seed)
    table = random.normal(size=(5, 16))
    labels = random.integers(5, size=rows)
    keys = table[labels] + noise * random.normal(size=(rows, 16))
    return keys / np.linalg.norm(keys, axis=1, keepdims=True), labels, table


def test_label_embeddings_are_the_values():
    keys, labels, table = _space(300)
    model = FaastClassifier(alpha=1.0, values=table).fit(keys, labels)
    oracle, *_ = np.linalg.lstsq(keys, table[labels], rcond=300**-1.0)
    assert close(model.weights_, oracle) < 1e-10
    read = keys @ oracle
    cosines = read @ table.T / np.outer(np.linalg.norm(read, axis=1), np.linalg.norm(table, axis=1))
    assert np.allclose(model.decision_function(keys), cosines)
    left = ((read - table[labels]) ** 2).sum() / (table[labels] ** 2).sum()
    assert model.explained_ == pytest.approx(1 - left)


def test_prior_mixes_with_the_zero_shot_head_by_n_over_n_plus_n0():
    keys, labels, table = _space(60)
    weights = FaastClassifier(alpha=1.0, values=table).fit(keys, labels).weights_
    model = FaastClassifier(alpha=1.0, values=table, prior=30.0).fit(keys, labels)
    share = 60 / 90
    read = (1 - share) * keys + share * keys @ weights
    read /= np.linalg.norm(read, axis=1, keepdims=True)
    names = table / np.linalg.norm(table, axis=1, keepdims=True)
    assert np.allclose(model.decision_function(keys), read @ names.T)
    zero_shot = FaastClassifier(alpha=1.0, values=table, prior=1e12).fit(keys, labels)
    assert (zero_shot.predict(keys) == (keys @ names.T).argmax(axis=1)).all()


def test_prior_is_chosen_where_few_rows_help_little():
    keys, labels, table = _space(2000, noise=2.0)
    few = FaastClassifier(values=table, prior="auto").fit(keys[:15], labels[:15])
    alone = FaastClassifier(values=table).fit(keys[:15], labels[:15])
    assert few.prior_ > 0
    assert few.score(keys[15:], labels[15:]) > alone.score(keys[15:], labels[15:])


def test_probabilities_are_sharpened_on_validation(digits):
    keys, labels = digits
    model = FaastClassifier().fit(keys[:1000], labels[:1000])
    chances = model.predict_proba(keys[1000:])
    assert np.allclose(chances.sum(axis=1), 1)
    assert (chances.argmax(axis=1) == model.predict(keys[1000:])).all()
    right = chances[np.arange(len(chances)), labels[1000:]]
    assert -np.log(right).mean() < 0.5  # scores as they are: about 1.7
    assert model.scale_ > 1


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"alpha": "best"}, 'alpha best: expected a number from 0 or "auto"'),
        ({"ridge": -1.0}, "ridge -1.0"),
        ({"prior": None}, "prior None"),
        ({"prior": 1.0}, "a prior without values"),
        ({"values": np.ones((3, 4))}, "expected a row for each of 10 classes"),
        ({"values": np.zeros((10, 4))}, "a row of zeros"),
        ({"values": np.ones((10, 4)), "prior": 1.0}, "expected both in one space"),
        ({"validation_share": 1.0}, "validation_share"),
    ],
)
def test_parameters_that_cannot_be_are_refused(digits, how, said):
    with pytest.raises(Refusal, match=said):
        FaastClassifier(**how).fit(*digits)


def test_a_class_that_was_never_named_is_refused(digits):
    keys, labels = digits
    model = FaastClassifier(alpha=0.8).partial_fit(keys[:5], labels[:5])
    with pytest.raises(Refusal, match="name all classes at the first partial_fit"):
        model.partial_fit(keys, labels)


def test_it_lives_among_scikit_learn_s_tools():
    keys, labels = load_digits(return_X_y=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cross_val_score(clone(FaastClassifier(intercept=True)), keys, labels, cv=3)
    assert found.mean() > 0.85

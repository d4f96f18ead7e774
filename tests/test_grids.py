"""The choice on held-out rows against one that tries everything in turn."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom import quick_solve
from fedloom.classifier import FaastClassifier
from fedloom.grids import ALPHAS, RIDGES, SCALES, HeldOut, Reader, log_losses, log_softmax
from fedloom.rules.solving import Factorisation, floor
from fedloom.rules.statistics import Gram


def rows_of(classes, width, count, seed=0):
    random = np.random.default_rng(seed)
    centres = random.normal(size=(classes, width))
    labels = random.integers(classes, size=count)
    keys = centres[labels] + 2.0 * random.normal(size=(count, width))
    return keys.astype(np.float32), labels, centres


def log_loss(scores, labels):
    return float(-log_softmax(scores)[np.arange(len(labels)), labels].mean())


def naive(reader, weights, priors, count, keys, labels):
    """Score each candidate with each prior at each scale; keep the first best."""
    best = (np.inf, np.inf), None
    for j in range(len(weights)):
        for prior in priors:
            fast = reader.embedded(keys @ weights[j].T)
            scores = reader.scores(keys, fast, count, prior)
            wrong = (scores.argmax(axis=1) != labels).mean()
            loss, scale = min((log_loss(s * scores, labels), s) for s in SCALES)
            if (wrong, loss) < best[0]:
                best = (wrong, loss), (j, prior, scale)
    return best[1]


@pytest.mark.parametrize("held", [6, 40, 1500])  # few: many candidates tie; many: several blocks
@pytest.mark.parametrize("named", [False, True])
def test_the_choice_is_that_of_trying_each_in_turn(held, named):
    keys, labels, centres = rows_of(4, 8, 2000)
    weights = np.random.default_rng(3).normal(size=(12, 4, 8)) * 0.05
    weights += np.linalg.lstsq(keys[:50], np.eye(4)[labels[:50]], rcond=None)[0].T
    weights[7] = weights[3]  # a tie to the last digit: the first is taken
    reader = Reader(centres if named else None)
    priors = (0.0, 10.0, 100.0) if named else (0.0,)
    rows = np.random.default_rng(4).permutation(2000)[:held]
    found = HeldOut(keys, labels, rows).best(reader, weights, priors, 50.0)
    wanted = naive(reader, weights, priors, 50.0, keys[rows].astype(float), labels[rows])
    assert found == wanted


def test_losses_at_all_scales_are_each_by_itself():
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(300, 7)), random.integers(7, size=300)
    wanted = [log_loss(scale * scores, labels) for scale in SCALES]
    assert log_losses(scores, labels) == pytest.approx(wanted, rel=1e-12)


def test_a_tie_is_no_right_answer():
    """Weights of zeros answer nothing; taken as right, they would win every choice."""
    keys, labels, _ = rows_of(3, 6, 90)
    weights = np.zeros((2, 3, 6))
    weights[1] = np.linalg.lstsq(keys, np.eye(3)[labels], rcond=None)[0].T
    found = HeldOut(keys, labels, np.arange(90)).best(Reader(None), weights, (0.0,), 1.0)
    assert found[0] == 1


def test_more_than_one_thing_can_win():
    """The naive twin above would agree with a choice that never moved."""
    keys, labels, _ = rows_of(3, 6, 600)
    chosen = set()
    for seed in range(8):
        weights = np.random.default_rng(seed).normal(size=(5, 3, 6)) / 10**seed
        chosen.add(HeldOut(keys, labels, np.arange(600)).best(Reader(None), weights, (0.0,), 1.0))
    assert len({found[0] for found in chosen}) > 2
    assert len({found[2] for found in chosen}) > 1


@pytest.mark.parametrize(("width", "count"), [(48, 600), (48, 50), (8, 300)])
def test_the_estimator_chooses_as_an_eigendecomposition_would(width, count):
    """Reduced, from few rows and narrow: filters and ridges from one ``Factorisation`` each."""
    keys, labels, _ = rows_of(5, width, count)
    model = FaastClassifier(ridge="auto").fit(keys, labels)
    held = model._held_out(labels)
    fitted = keys[~held].astype(float)
    plain = Factorisation.of(Gram.of(fitted, np.eye(5)[labels[~held]]))
    mean = (fitted**2).sum() / width
    found = [(None, share, plain.solve(alpha=None, ridge=share * mean)) for share in RIDGES]
    for alpha in (a for a in ALPHAS if count**-a >= floor(width)):
        solved = plain.solve(alpha=alpha)
        if solved.rank > max([f.rank for a, _, f in found if a is not None], default=0):
            found.append((alpha, 0.0, solved))
    weights = np.stack([each.weights.T for *_, each in found])
    place, _, scale = naive(
        Reader(None), weights, (0.0,), 1.0, keys[held].astype(float), labels[held]
    )
    alpha, share, _ = found[place]
    assert (model.alpha_, model.scale_) == (alpha, scale)
    assert model.ridge_ == pytest.approx(share * (keys.astype(float) ** 2).sum() / width)


def test_one_reduction_and_no_eigendecomposition_serves_a_fit(monkeypatch):
    calls, reduced = [], []
    eigh, of = np.linalg.eigh, quick_solve.Tridiagonal.of.__func__
    monkeypatch.setattr(np.linalg, "eigh", lambda a: calls.append(1) or eigh(a))
    monkeypatch.setattr(
        quick_solve.Tridiagonal, "of", classmethod(lambda c, s: reduced.append(1) or of(c, s))
    )
    keys, labels, _ = rows_of(5, 48, 600)
    model = FaastClassifier(ridge="auto").fit(keys, labels)
    assert not calls
    assert len(reduced) == (1 if model.alpha_ is None else 2)  # a ridge's last solve needs none

# SPDX-License-Identifier: Apache-2.0
"""``FaastClassifier``: fast weights on frozen features, as an estimator of scikit-learn.

FAAST (arXiv 2605.04651) reads a class off ``q W`` with ``W = K^+ V``: keys are features, values
are label embeddings or one-hot.  There is nothing to iterate: sums, one factorisation, products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedloom import quick_solve
from fedloom.errors import Refusal
from fedloom.grids import (
    ALPHA,
    ALPHAS,
    CLIP_SCALE,
    PRIOR,
    PRIORS,
    RIDGES,
    SCALE,
    Choice,
    HeldOut,
    Reader,
    log_softmax,
)
from fedloom.quick_solve import Rows, Sums
from fedloom.rules.paper_bank import PaperBank
from fedloom.rules.solving import Factorisation, floor, tolerance
from fedloom.rules.statistics import Gram

Matrix = NDArray[np.float64]


class FaastClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classify by fast weights, solved in closed form from sums over the rows.

    Rows can be added (``partial_fit``) and taken out again (``forget``), in any order and grouping:
    with a given ``alpha`` the weights are those of one fit on the rows that are in.

    Parameters
    ----------
    alpha : float, None or "auto"
        Singular values of the features at or below ``N ** -alpha`` of the largest are dropped
        (None: only what float64 sums cannot hold).  "auto" takes the best of a grid on a validation
        split; all are solved from one factorisation.
    ridge : float or "auto"
        Added to the mean eigenvalue's share of the diagonal: ``ridge * trace(K'K) / d``.  "auto"
        puts ridges without a filter beside the alphas of the grid.
    values : array of shape (C, p), optional
        Embeddings of the classes, in sorted order of the classes; one-hot if left out.  Scores are
        cosines with them.
    prior : float or "auto"
        ``N0``: with ``r = N / (N + N0)``, ``(1 - r) x + r x W`` is read.  Above 0, features and
        values must share a space (``p = d``), as those of a CLIP do.
    intercept : bool
        Give each row a feature that is 1.  FAAST has none.
    validation_share : float
        Of each class's rows, the share on which "auto" chooses; all rows are in the final fit.
    random_state : int, RandomState or None
        Draws the validation split.
    mode : "exact" or "paper"
        "paper" is the paper's Eq. 14, a running mean of the solutions of chunks, and **inexact**:
        it is here to be compared with.  It keeps up to 65,536 rows, solves the oldest 8192 when
        there are more, and mixes the rest in for reading; no ridge, and no row can be forgotten.
    discount : float
        gamma of Eq. 14: what a row counts for after another chunk; 1 in the paper's tests, 0.9 in
        its training.  For ``mode="paper"`` alone.

    Attributes
    ----------
    gram_ : Gram
        Sums over all rows that are in, with one-hot values.
    weights_ : array of shape (d, p)
        ``W``, and all that a reader needs to keep.
    rank_ : int or None
        Directions of the features that were kept; None for ``mode="paper"``, where chunks differ.
    explained_ : float
        ``1 - ||K W - V||^2 / ||V||^2`` over the rows that are in.
    alpha_, ridge_, prior_, scale_ : float
        What was chosen or given; ``scale_`` is what ``predict_proba`` multiplies scores by.
    classes_ : array of shape (C,)
    class_counts_ : array of shape (C,)
        Rows that are in, by class.
    n_features_in_ : int

    Examples
    --------
    >>> keys = np.eye(4)[[0, 1, 2, 3] * 5] + 0.01
    >>> model = FaastClassifier().fit(keys, ["cat", "cat", "dog", "dog"] * 5)
    >>> model.predict(keys[:3]).tolist(), model.rank_
    (['cat', 'cat', 'dog'], 4)
    """

    weights_: Matrix
    rank_: int | None
    classes_: NDArray[Any]
    class_counts_: NDArray[np.int64]

    def __init__(
        self,
        *,
        alpha: float | str | None = "auto",
        ridge: float | str = 0.0,
        values: ArrayLike | None = None,
        prior: float | str = 0.0,
        intercept: bool = False,
        validation_share: float = 0.2,
        random_state: Any = 0,
        mode: str = "exact",
        discount: float = 1.0,
    ) -> None:
        self.alpha, self.ridge, self.values, self.prior = alpha, ridge, values, prior
        self.intercept, self.validation_share = intercept, validation_share
        self.random_state, self.mode, self.discount = random_state, mode, discount

    def fit(self, X: ArrayLike, y: ArrayLike) -> FaastClassifier:
        """Sum, choose what is "auto", factorise and solve."""
        keys, labels = self._start(X, y, None)
        self._begin(keys, labels)
        return self

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None
    ) -> FaastClassifier:
        """Add rows.

        What is "auto" is chosen on the first rows and stays.  All classes must be named at
        the first call if some come later.
        """
        if not hasattr(self, "_sums"):
            keys, labels = self._start(X, y, classes)
            self._begin(keys, labels)
            return self
        self._change(X, y, 1)
        return self

    def forget(self, X: ArrayLike, y: ArrayLike) -> FaastClassifier:
        """Take rows out that were put in; the weights are those of a fit without them.

        What was chosen on a validation split stays as it is.  Sums keep the rounding of all that
        was ever in them, ``eps`` times the largest trace: directions below it are dropped, and the
        weights are as exact as that is small beside the smallest eigenvalue kept.

        Raises
        ------
        Refusal
            If so many rows of a class never came in, none would be left, or the mode is "paper".
        """
        check_is_fitted(self)
        if self.mode == "paper":
            raise Refusal('mode "paper" mixes solutions and cannot forget a row: take mode "exact"')
        self._change(X, y, -1)
        return self

    @property
    def gram_(self) -> Gram:
        """Sums over all rows that are in, packed."""
        return self._sums.gram()

    def decision_function(self, X: ArrayLike) -> Matrix:
        """Score rows ``(n, C)``, or ``(n,)`` as second class over first if there are two."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Name the class with the highest score."""
        best = self._scores(X).argmax(axis=1)
        return cast(NDArray[Any], self.classes_[best])

    def predict_proba(self, X: ArrayLike) -> Matrix:
        """Return a softmax of the scores ``(n, C)``; sharpened on the validation split."""
        scores = self._scores(X)
        return np.exp(log_softmax(self.scale_ * scores))

    def _start(self, X: ArrayLike, y: ArrayLike, classes: Any) -> tuple[Matrix, Rows]:
        """Check first rows and learn the classes."""
        self._check_parameters()
        keys, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if classes is None else np.asarray(classes))
        self._reader = Reader(self._read_values(keys.shape[1]))
        return self._extended(keys), self._indices(labels)

    def _begin(self, keys: Matrix, labels: Rows) -> None:
        held_out = self._held_out(labels)
        classes = len(self.classes_)
        fitted, held = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        self._sums = Sums.of(keys, labels, classes, fitted)
        self._choice = self._given()
        if len(held):
            self._choice = self._choose(keys, labels, fitted, HeldOut(keys, labels, held))
            self._sums += Sums.of(keys, labels, classes, held)
        self.class_counts_ = np.bincount(labels, minlength=classes)
        if self.mode == "paper":
            self._bank = PaperBank(cast(float, self._choice.alpha), discount=self.discount)
            self._bank.add(np.array(keys, np.float64), np.eye(classes)[labels])
            self._mix()
        else:
            self._finish(_dual(keys, labels, classes) if len(keys) <= keys.shape[1] else None)

    def _change(self, X: ArrayLike, y: ArrayLike, sign: int) -> None:
        keys, labels = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=False)
        check_classification_targets(labels)
        indices, classes = self._indices(labels), len(self.classes_)
        counts = self.class_counts_ + sign * np.bincount(indices, minlength=classes)
        if (counts < 0).any() or not counts.any():
            raise Refusal(
                f"forgetting {len(labels)} rows leaves {counts.tolist()} rows by class: expected"
                " rows that were put in, and some others to stay"
            )
        keys = self._extended(keys)
        change = Sums.of(keys, indices, classes, np.arange(len(keys)))
        self._sums = self._sums + change if sign > 0 else self._sums - change
        self.class_counts_ = counts
        if self.mode == "paper":
            self._bank.add(np.array(keys, np.float64), np.eye(classes)[indices])
            self._mix()
        else:
            self._finish(None)

    def _finish(self, dual: Factorisation | None) -> None:
        """Solve with what was chosen, from few rows if they are at hand, and tell about it."""
        alpha, ridge = self._choice.alpha, self._choice.ridge * self._mean_eigenvalue()
        if dual is None:
            weights, self.rank_ = quick_solve.solve(self._sums, alpha=alpha, ridge=ridge)
        else:
            found = dual.solve(alpha=alpha, ridge=ridge)
            weights, self.rank_ = found.weights, found.rank
        self._tell(weights, ridge)
        # 2 tr W'K'V - tr W'K'KW, as (K'K + ridge I) W = K'V in the kept directions.
        cross = self._reader.embedded(self._sums.cross)
        gained = np.vdot(self.weights_, cross) + ridge * np.vdot(self.weights_, self.weights_)
        self.explained_ = float(gained) / self._squares()

    def _mix(self) -> None:
        """Read the paper's bank."""
        self.rank_ = None
        self._tell(self._bank.weights(), 0.0)
        cross = self._reader.embedded(self._sums.cross)
        gained = np.vdot(self.weights_, 2.0 * cross - self._sums.times(self.weights_))
        self.explained_ = float(gained) / self._squares()

    def _tell(self, weights: Matrix, ridge: float) -> None:
        self.weights_ = self._reader.embedded(weights)
        self.alpha_, self.ridge_ = self._choice.alpha, ridge
        self.prior_, self.scale_ = self._choice.prior, self._choice.scale

    def _squares(self) -> float:
        """Return ``||V||^2`` over the rows that are in."""
        table = self._reader.table
        each = np.ones(len(self.classes_)) if table is None else (table**2).sum(axis=1)
        return float(self.class_counts_ @ each)

    def _mean_eigenvalue(self) -> float:
        return self._sums.trace / len(self._sums.square)

    def _choose(self, keys: Matrix, labels: Rows, fitted: Rows, held: HeldOut) -> Choice:
        """Sweep filters, ridges and priors from one factorisation of the sums so far."""
        classes, width, count = len(self.classes_), keys.shape[1], len(fitted)
        source = (
            _dual(keys[fitted], labels[fitted], classes)
            if count <= width
            else quick_solve.factorised(self._sums)
        )
        given, mean = self._given(), self._mean_eigenvalue()
        ridge, shares = given.ridge * mean, RIDGES if self.ridge == "auto" else ()
        sizes: list[int] = []
        choices = [dataclasses.replace(given, alpha=None, ridge=share) for share in shares]
        for alpha in self._alphas(len(source.sigma), len(labels)):
            cut, _ = tolerance(count, len(source.sigma), alpha, ridge=ridge)
            size = int((source.sigma > cut * source.sigma[0]).sum())
            if size > max(sizes, default=0):  # the same directions are the same solution
                sizes.append(size)
                choices.append(dataclasses.replace(given, alpha=alpha))
        if not choices:
            return given
        weights = quick_solve.solutions(source, [s * mean for s in shares], sizes, ridge)
        place, prior, scale = held.best(self._reader, weights, self._priors(count), count)
        return dataclasses.replace(choices[place], prior=prior, scale=scale)

    def _alphas(self, directions: int, count: int) -> Sequence[float | None]:
        if self.alpha != "auto":
            return [self._given().alpha]
        return [a for a in ALPHAS if count**-a >= floor(directions)] or [None]

    def _priors(self, count: float) -> Sequence[float]:
        return [p * count for p in PRIORS] if self.prior == "auto" else [self._given().prior]

    def _given(self) -> Choice:
        """Read the parameters, with the released code's numbers where they say "auto"."""
        return Choice(
            ALPHA if self.alpha == "auto" else cast("float | None", self.alpha),
            0.0 if self.ridge == "auto" else float(self.ridge),
            PRIOR if self.prior == "auto" else float(self.prior),
            SCALE if self._reader.table is None else CLIP_SCALE,
        )

    def _held_out(self, labels: Rows) -> NDArray[np.bool_]:
        """Draw a share of each class that has a row to spare; at least one of those."""
        held_out = np.zeros(len(labels), bool)
        if "auto" not in [x for x in (self.alpha, self.ridge, self.prior) if isinstance(x, str)]:
            return held_out
        random = check_random_state(self.random_state)
        for index in range(len(self.classes_)):
            rows = random.permutation(np.flatnonzero(labels == index))
            spared = min(max(1, round(self.validation_share * len(rows))), len(rows) - 1)
            held_out[rows[: max(spared, 0)]] = True
        return held_out

    def _scores(self, X: ArrayLike) -> Matrix:
        check_is_fitted(self)
        keys = self._extended(validate_data(self, X, dtype=[np.float64, np.float32], reset=False))
        return self._reader.scores(keys, keys @ self.weights_, self._sums.count, self.prior_)

    def _extended(self, keys: Matrix) -> Matrix:
        if not self.intercept:
            return keys
        return np.concatenate([keys, np.ones((len(keys), 1), keys.dtype)], axis=1)

    def _indices(self, labels: ArrayLike) -> Rows:
        labels = column_or_1d(labels)
        indices = np.searchsorted(self.classes_, labels)
        known = self.classes_[np.minimum(indices, len(self.classes_) - 1)] == labels
        if not known.all():
            raise Refusal(
                f"{int((~known).sum())} rows have a class that is none of the"
                f" {len(self.classes_)} known: name all classes at the first partial_fit"
            )
        return indices

    def _read_values(self, width: int) -> Matrix | None:
        if self.values is None:
            if self.prior:
                raise Refusal("a prior without values: expected label embeddings, or prior 0")
            return None
        table = np.asarray(self.values, np.float64)
        if table.ndim != 2 or len(table) != len(self.classes_):
            raise Refusal(
                f"values of shape {table.shape}: expected a row for each of"
                f" {len(self.classes_)} classes"
            )
        if not np.isfinite(table).all() or not table.any(axis=1).all():
            raise Refusal("values with a row of zeros, or a number that is not finite")
        if self.prior and table.shape[1] != width:
            raise Refusal(
                f"a prior with {width} features and embeddings of {table.shape[1]}: expected"
                " both in one space; set the prior to 0"
            )
        return table

    def _check_parameters(self) -> None:
        for name in ("alpha", "ridge", "prior"):
            told = getattr(self, name)
            if told == "auto" or (name == "alpha" and told is None):
                continue
            if isinstance(told, str) or told is None or not told >= 0:
                raise Refusal(f'{name} {told}: expected a number from 0 or "auto"')
        if not 0 < self.validation_share < 1:
            raise Refusal(f"validation_share {self.validation_share}: expected 0 to 1")
        if self.mode not in ("exact", "paper"):
            raise Refusal(f'mode {self.mode}: expected "exact" or "paper"')
        if self.mode == "paper" and (self.ridge != 0 or self.alpha is None):
            raise Refusal(
                f'mode "paper" with alpha {self.alpha} and ridge {self.ridge}: expected a filter'
                " and no ridge"
            )
        if not 0 <= self.discount <= 1:
            raise Refusal(f"discount {self.discount}: expected 0 to 1")


def _dual(keys: Matrix, labels: Rows, classes: int) -> Factorisation:
    """Factorise ``K K'`` (n x n), which is the smaller where rows are few."""
    k = np.asarray(keys, np.float64)
    eigen, vectors = np.linalg.eigh(k @ k.T)
    sigma, left = np.sqrt(np.clip(eigen[::-1], 0.0, None)), vectors[:, ::-1]
    safe = np.where(sigma > 0, sigma, 1.0)  # what is divided by 1 instead is filtered out
    projected = sigma[:, None] * (left.T @ np.eye(classes)[labels])
    return Factorisation(sigma, k.T @ left / safe, projected, float(len(k)), len(k))

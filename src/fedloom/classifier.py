# SPDX-License-Identifier: Apache-2.0
"""``FaastClassifier``: fast weights on frozen features, as an estimator of scikit-learn.

FAAST (arXiv 2605.04651) reads a class off ``q W`` with ``W = K^+ V``: keys are features, values
are label embeddings or one-hot.  There is nothing to iterate: sums, one factorisation, products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from fedloom.errors import Refusal
from fedloom.rules.solving import Factorisation, FastWeights, floor
from fedloom.rules.statistics import Gram

Matrix = NDArray[np.float64]

ALPHA = 0.8
"""Where no row can be spared for validation; the released code's for classification."""
PRIOR = 400.0
"""The same for the weight of the zero-shot head; the released code's for CIFAR-10."""
ALPHAS = tuple(np.linspace(0.2, 2.0, 19).round(2).tolist())
RIDGES = tuple((10.0 ** np.arange(-4.0, 2.5, 0.5)).tolist())
"""Shares of the mean eigenvalue of ``K'K``."""
PRIORS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Times the number of rows: from no zero-shot head to almost nothing else."""
SCALES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_SCALE, _CLIP_SCALE = 10.0, 100.0
"""Of one-hot scores, and of cosines as CLIP has it, where no validation split tells."""
_ROWS = 1 << 16


@dataclasses.dataclass(frozen=True)
class _Choice:
    """What a validation split decides; everything else is closed form."""

    alpha: float | None = ALPHA
    ridge: float = 0.0
    """Share of the mean eigenvalue, so that it means the same for more rows."""
    prior: float = 0.0
    scale: float = _SCALE


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

    Attributes
    ----------
    gram_ : Gram
        Sums over all rows that are in, with one-hot values.
    weights_ : array of shape (d, p)
        ``W``, and all that a reader needs to keep.
    rank_ : int
        Directions of the features that were kept.
    explained_ : float
        ``1 - ||K W - V||^2 / ||V||^2`` over the rows.
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

    gram_: Gram
    weights_: Matrix
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
    ) -> None:
        self.alpha, self.ridge, self.values, self.prior = alpha, ridge, values, prior
        self.intercept, self.validation_share = intercept, validation_share
        self.random_state = random_state

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
        if not hasattr(self, "gram_"):
            keys, labels = self._start(X, y, classes)
            self._begin(keys, labels)
            return self
        self._change(X, y, 1)
        return self

    def forget(self, X: ArrayLike, y: ArrayLike) -> FaastClassifier:
        """Take rows out that were put in; the weights are those of a fit without them.

        What was chosen on a validation split stays as it is.

        Raises
        ------
        Refusal
            If so many rows of a class never came in, or none would be left.
        """
        check_is_fitted(self)
        self._change(X, y, -1)
        return self

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
        return np.exp(_log_softmax(self.scale_ * scores))

    def _start(self, X: ArrayLike, y: ArrayLike, classes: Any) -> tuple[Matrix, NDArray[np.intp]]:
        """Check first rows and learn the classes."""
        self._check_parameters()
        keys, labels = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(labels)
        self.classes_ = np.unique(labels if classes is None else np.asarray(classes))
        self._table = self._read_values(keys.shape[1])
        return self._extended(keys), self._indices(labels)

    def _begin(self, keys: Matrix, labels: NDArray[np.intp]) -> None:
        held_out = self._held_out(labels)
        classes = len(self.classes_)
        summed, labelled = keys[~held_out], labels[~held_out]
        self.gram_ = _sum(summed, labelled, classes)
        self._choice = self._given()
        if held_out.any():
            self._choice = self._choose(
                _factorise(self.gram_, summed, labelled),
                np.bincount(labelled, minlength=classes),
                keys[held_out],
                labels[held_out],
            )
            self.gram_ += _sum(keys[held_out], labels[held_out], classes)
        self.class_counts_ = np.bincount(labels, minlength=classes)
        self._finish(_factorise(self.gram_, keys, labels))

    def _change(self, X: ArrayLike, y: ArrayLike, sign: int) -> None:
        keys, labels = validate_data(self, X, y, dtype=[np.float64, np.float32], reset=False)
        check_classification_targets(labels)
        indices = self._indices(labels)
        counts = self.class_counts_ + sign * np.bincount(indices, minlength=len(self.classes_))
        if (counts < 0).any() or not counts.any():
            raise Refusal(
                f"forgetting {len(labels)} rows leaves {counts.tolist()} rows by class: expected"
                " rows that were put in, and some others to stay"
            )
        change = _sum(self._extended(keys), indices, len(self.classes_))
        self.gram_ = self.gram_ + change if sign > 0 else self.gram_ - change
        self.class_counts_ = counts
        self._finish(Factorisation.of(self.gram_))

    def _finish(self, factorised: Factorisation) -> None:
        """Solve with what was chosen, and tell about it."""
        choice = self._choice
        ridge = choice.ridge * self.gram_.trace() / self.gram_.keys
        embedded = self._embedded(factorised, self.class_counts_)
        found = embedded.solve(alpha=choice.alpha, ridge=ridge)
        self.weights_, self.rank_, self.explained_ = found.weights, found.rank, found.explained
        self.alpha_, self.ridge_ = choice.alpha, ridge
        self.prior_, self.scale_ = choice.prior, choice.scale

    def _choose(
        self,
        factorised: Factorisation,
        counts: NDArray[np.int64],
        keys: Matrix,
        labels: NDArray[np.intp],
    ) -> _Choice:
        """Sweep filters, ridges and priors from one factorisation; most right answers win.

        Ties go to the lower log-loss, so that the choice does not hang on one row.
        """
        embedded = self._embedded(factorised, counts)
        keys = np.asarray(keys, np.float64)  # once, and not in each product
        best, lowest = self._given(), (np.inf, np.inf)
        for choice, found in self._candidates(embedded, len(labels)):
            fast = keys @ found.weights
            for prior in self._priors(embedded.count):
                scores = self._compare(self._mixed(keys, fast, embedded.count, prior))
                wrong = float((scores.argmax(axis=1) != labels).mean())
                if wrong > lowest[0]:
                    continue
                loss, scale = min((_log_loss(s * scores, labels), s) for s in SCALES)
                if (wrong, loss) < lowest:
                    lowest = wrong, loss
                    best = dataclasses.replace(choice, prior=prior, scale=scale)
        return best

    def _candidates(
        self, embedded: Factorisation, held_out: int
    ) -> Iterator[tuple[_Choice, FastWeights]]:
        given, mean = self._given(), float((embedded.sigma**2).sum()) / len(embedded.basis)
        alphas: Sequence[float | None] = (given.alpha,)
        if self.alpha == "auto":
            lowest = floor(len(embedded.sigma))
            count = embedded.count + held_out  # of the final fit
            alphas = [a for a in ALPHAS if count**-a >= lowest] or [None]
        if self.ridge == "auto":
            for share in RIDGES:
                found = embedded.solve(alpha=None, ridge=share * mean)
                yield dataclasses.replace(given, alpha=None, ridge=share), found
        rank = 0
        for alpha in alphas:
            found = embedded.solve(alpha=alpha, ridge=given.ridge * mean)
            if found.rank > rank:  # another alpha with the same directions is the same solution
                rank = found.rank
                yield dataclasses.replace(given, alpha=alpha), found

    def _priors(self, count: float) -> Sequence[float]:
        return [p * count for p in PRIORS] if self.prior == "auto" else [self._given().prior]

    def _given(self) -> _Choice:
        """Read the parameters, with the released code's numbers where they say "auto"."""
        return _Choice(
            ALPHA if self.alpha == "auto" else cast("float | None", self.alpha),
            0.0 if self.ridge == "auto" else float(self.ridge),
            PRIOR if self.prior == "auto" else float(self.prior),
            _SCALE if self._table is None else _CLIP_SCALE,
        )

    def _held_out(self, labels: NDArray[np.intp]) -> NDArray[np.bool_]:
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
        return self._compare(self._mixed(keys, keys @ self.weights_, self.gram_.count, self.prior_))

    def _mixed(self, keys: Matrix, fast: Matrix, count: float, prior: float) -> Matrix:
        """Mix with the zero-shot head, in the embeddings' space."""
        if not prior:
            return fast
        share = count / (count + prior)
        return (1.0 - share) * keys[:, : fast.shape[1]] + share * fast

    def _compare(self, read: Matrix) -> Matrix:
        """Score what was read ``(n, p)`` by class: cosines with the embeddings, if any."""
        if self._table is None:
            return read
        lengths = np.linalg.norm(read, axis=1, keepdims=True)
        table = self._table / np.linalg.norm(self._table, axis=1, keepdims=True)
        return cast(Matrix, read / np.maximum(lengths, 1e-300) @ table.T)

    def _embedded(self, factorised: Factorisation, counts: NDArray[np.int64]) -> Factorisation:
        """Put the embeddings in the place of one-hot values: ``K'(Y E) = (K'Y) E``."""
        if self._table is None:
            return factorised
        squares = float(counts @ (self._table**2).sum(axis=1))
        projected = factorised.projected @ self._table
        return dataclasses.replace(factorised, projected=projected, squares=squares)

    def _extended(self, keys: Matrix) -> Matrix:
        if not self.intercept:
            return keys
        return np.concatenate([keys, np.ones((len(keys), 1), keys.dtype)], axis=1)

    def _indices(self, labels: ArrayLike) -> NDArray[np.intp]:
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


def _sum(keys: Matrix, labels: NDArray[np.intp], classes: int) -> Gram:
    """Sum over rows with one-hot values, which are never all in memory."""
    total, one_hot = Gram.zero(keys.shape[1], classes), np.eye(classes)
    for start in range(0, len(keys), _ROWS):
        rows = slice(start, start + _ROWS)
        total += Gram.of(keys[rows], one_hot[labels[rows]])
    return total


def _factorise(gram: Gram, keys: Matrix, labels: NDArray[np.intp]) -> Factorisation:
    """Factorise the smaller of ``K'K`` (d x d) and ``K K'`` (n x n)."""
    if len(keys) > gram.keys or gram.count != len(keys):
        return Factorisation.of(gram)
    k = np.asarray(keys, np.float64)
    eigen, vectors = np.linalg.eigh(k @ k.T)
    sigma, left = np.sqrt(np.clip(eigen[::-1], 0.0, None)), vectors[:, ::-1]
    safe = np.where(sigma > 0, sigma, 1.0)  # what is divided by 1 instead is filtered out
    projected = sigma[:, None] * (left.T @ np.eye(gram.values)[labels])
    return Factorisation(sigma, k.T @ left / safe, projected, gram.squares, gram.count)


def _log_softmax(scores: Matrix) -> Matrix:
    shifted = scores - scores.max(axis=1, keepdims=True)
    return cast(Matrix, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def _log_loss(scores: Matrix, labels: NDArray[np.intp]) -> float:
    return float(-_log_softmax(scores)[np.arange(len(labels)), labels].mean())

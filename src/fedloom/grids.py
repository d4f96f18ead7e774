# SPDX-License-Identifier: Apache-2.0
"""What a classifier of fast weights may choose from, and the choice on rows held out.

All candidates' weights lie side by side, so that one product scores them all.  How sharp scores
are is asked only of those that tie for the most right answers: it decides among them alone.
"""

# Shapes: n row, d width of the keys, C classes, p width of the values, J candidates.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fedloom.quick_solve import Rows, blocks

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
SCALES = tuple((2.0 ** np.arange(8.0)).tolist())
"""Each twice the one before: ``log_losses`` squares its exponentials."""
_NUMBERS = 1 << 20  # scores at a time
SCALE, CLIP_SCALE = 10.0, 100.0
"""Of one-hot scores, and of cosines as CLIP has it, where no validation split tells."""


@dataclass(frozen=True)
class Choice:
    """What a validation split decides; everything else is closed form."""

    alpha: float | None = ALPHA
    ridge: float = 0.0
    """Share of the mean eigenvalue, so that it means the same for more rows."""
    prior: float = 0.0
    scale: float = SCALE


@dataclass(frozen=True, eq=False)
class Reader:
    """How classes are read off keys and weights."""

    table: Matrix | None
    """Embeddings of the classes ``[C, p]``; one-hot if there are none."""

    def scores(self, keys: Matrix, fast: Matrix, count: float, prior: float) -> Matrix:
        """Score rows ``(n, C)`` of which ``fast`` ``(n, p)`` was read, after ``count`` rows."""
        if prior:
            share = count / (count + prior)
            fast = (1.0 - share) * keys[:, : fast.shape[1]] + share * fast
        if self.table is None:
            return fast
        lengths = np.linalg.norm(fast, axis=1, keepdims=True)
        table = self.table / np.linalg.norm(self.table, axis=1, keepdims=True)
        return cast(Matrix, fast / np.maximum(lengths, 1e-300) @ table.T)

    def ranked(self, keys: Matrix, every: Matrix, count: float, prior: float) -> Matrix:
        """Score as ``scores`` does but for a factor a row, which no order of classes depends on.

        ``every`` ``(J, C, n)`` is what candidates of one-hot values read.
        """
        if self.table is None:
            return every
        names = self.table / np.linalg.norm(self.table, axis=1, keepdims=True)
        read = (names @ self.table.T) @ every
        if not prior:
            return cast(Matrix, read)
        share = count / (count + prior)
        zero_shot = names @ keys[:, : names.shape[1]].T
        return cast(Matrix, (1.0 - share) * zero_shot + share * read)

    def embedded(self, classes: Matrix) -> Matrix:
        """Put the embeddings in the place of one-hot values: ``K'(Y E) = (K'Y) E``."""
        return classes if self.table is None else classes @ self.table


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows to choose on, which are in none of the candidates."""

    keys: NDArray[np.floating]
    """All rows, of which ``rows`` count; cast up a block at a time."""
    labels: Rows
    rows: Rows

    def best(
        self, reader: Reader, weights: Matrix, priors: Sequence[float], count: float
    ) -> tuple[int, float, float]:
        """Return the candidate of ``weights`` ``[J, C, d]``, the prior and the scale.

        The most right answers win; ties go to the lower log-loss, so that the choice does not hang
        on one row, and then to the first.
        """
        candidates, classes, _ = weights.shape
        wrong = np.zeros((candidates, len(priors)), np.intp)
        side_by_side = weights.reshape(candidates * classes, -1)
        for rows in blocks(self.rows, max(_NUMBERS // len(side_by_side), 32)):
            keys, labels = np.asarray(self.keys[rows], np.float64), self.labels[rows]
            every = (side_by_side @ keys.T).reshape(candidates, classes, len(rows))
            for place, prior in enumerate(priors):
                wrong[:, place] += _wrong(reader.ranked(keys, every, count, prior), labels)
        keys, labels = np.asarray(self.keys[self.rows], np.float64), self.labels[self.rows]
        found: list[tuple[float, int, int, float, float]] = []
        for candidate, place in np.argwhere(wrong == wrong.min()):
            fast = reader.embedded(keys @ weights[candidate].T)
            scores = reader.scores(keys, fast, count, priors[place])
            loss, scale = min(zip(log_losses(scores, labels), SCALES, strict=True))
            found.append((loss, len(found), int(candidate), priors[place], scale))
        return min(found)[2:]


def _wrong(scores: Matrix, labels: Rows) -> NDArray[np.intp]:
    """Count for each of ``(J, C, n)`` the rows whose class is not above all others.

    Overwrites the scores of the right classes.
    """
    places = np.arange(len(labels))
    own = scores[:, labels, places]
    scores[:, labels, places] = -np.inf
    return np.asarray(np.count_nonzero(own <= scores.max(axis=1), axis=1))


def log_softmax(scores: Matrix) -> Matrix:
    """Return log-probabilities of classes ``(n, C)``."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    return cast(Matrix, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def log_losses(scores: Matrix, labels: Rows) -> list[float]:
    """Return the mean negative log-probability of the right class, at each of ``SCALES``."""
    shifted = (scores - scores.max(axis=1, keepdims=True)).T
    own = float(shifted[labels, np.arange(len(labels))].mean())
    raised, found = np.exp(shifted), []
    for scale in SCALES:
        found.append(float(np.log(raised.sum(axis=0)).mean()) - scale * own)
        raised = raised * raised
    return found

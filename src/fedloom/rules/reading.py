# SPDX-License-Identifier: Apache-2.0
"""What is read with fast weights: scores of classes, and how right they are.

Values are one-hot, so ``q W`` are scores.  With label embeddings ``E`` ``[C, d]`` the same weights
read an embedding ``q W E``, which is mixed with the query itself as FAAST's vision code does
(arXiv 2605.04651): ``y = (1 - r) q + r q W E``, scored by its cosine with each class's name.  With
``r = 0`` that is the zero-shot head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unit(rows: NDArray[Any]) -> NDArray[np.float64]:
    """Bring rows to length one in float64; a row of zeros stays."""
    plain = np.asarray(rows, np.float64)
    length = np.linalg.norm(plain, axis=-1, keepdims=True)
    made: NDArray[np.float64] = np.zeros_like(plain)
    np.divide(plain, length, out=made, where=length > 0)
    return made


def read(
    keys: NDArray[Any],
    weights: NDArray[Any],
    table: NDArray[Any] | None = None,
    share: float = 1.0,
) -> NDArray[np.float64]:
    """Score classes for queries ``[n, d]``: ``[n, C]``.

    Parameters
    ----------
    weights
        ``[d, C]``, solved for one-hot values.
    table
        Label embeddings of length one ``[C, d]``; without them ``q W`` are the scores.
    share
        r: how much of what is read is the memory's.
    """
    scores: NDArray[np.float64] = np.asarray(keys, np.float64) @ np.asarray(weights, np.float64)
    if table is not None:
        scores = unit((1.0 - share) * keys + share * (scores @ table)) @ table.T
    return scores


def score_sums(
    scores: NDArray[np.float64], labels: NDArray[np.int64], scale: float
) -> dict[str, int | float]:
    """Add up a set's outcomes: what a client tells of its rows.

    ``gold-ce`` is the cross-entropy, in nats, of the softmax over ``scale`` times the scores.
    """
    n, classes = scores.shape
    scaled = scale * scores
    scaled = scaled - scaled.max(1, keepdims=True)
    ce = np.log(np.exp(scaled).sum(1)) - scaled[np.arange(n), labels]
    return {
        "correct": int((scores.argmax(1) == labels).sum()),
        "gold-ce-sum": float(ce.sum()),
        "gold-ce-sq-sum": float((ce**2).sum()),
        "chance-sum": n / classes,
        "chance-ce-sum": float(n * np.log(classes)),
    }


def one_hot(labels: NDArray[np.int64], classes: int) -> NDArray[np.float64]:
    """Return values ``[n, C]`` for labels ``[n]``."""
    return np.eye(classes)[labels]

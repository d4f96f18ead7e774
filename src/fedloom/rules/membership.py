# SPDX-License-Identifier: Apache-2.0
"""How well rows that were summed are told from rows that were not, by the weights alone.

Least squares fits the rows that it has seen better than others of their kind, and most of all where
there are few rows for the width of the keys.  The simplest attack on that reads a row's own class
(membership inference by the loss: Yeom et al., arXiv 1709.01604) and needs no other model.  It is a
floor: a stronger attack may tell more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Side = tuple[NDArray[Any], NDArray[Any]]
"""Keys ``[n, d]`` and labels ``[n]``."""


def membership_auc(weights: NDArray[Any], seen: Side, unseen: Side) -> float:
    """Return how often a row that was summed fits its class better than one that was not.

    Parameters
    ----------
    weights
        ``[d, C]``, solved for one-hot values.
    seen, unseen
        Rows of one kind, such as one client's: what else tells the two apart would count, too.

    Returns
    -------
    float
        Area under the ROC curve: 0.5 if they cannot be told apart; NaN without rows.

    >>> rows = np.eye(2), np.array([0, 1])
    >>> others = -np.eye(2), rows[1]
    >>> membership_auc(np.eye(2), rows, rows), membership_auc(np.eye(2), rows, others)
    (0.5, 1.0)
    """
    scores = [_fit(weights, *side) for side in (seen, unseen)]
    if not all(len(part) for part in scores):
        return float("nan")
    ours, theirs = scores[0], np.sort(scores[1])
    below = np.searchsorted(theirs, ours, side="left")
    no_higher = np.searchsorted(theirs, ours, side="right")
    return float((below + no_higher).sum() / (2 * len(ours) * len(theirs)))  # a tie is a half


def _fit(weights: NDArray[Any], keys: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.float64]:
    """Return minus the squared distance of what each row reads from its one-hot value: ``[n]``."""
    off = np.asarray(keys, np.float64) @ weights
    off[np.arange(len(labels)), labels] -= 1.0
    return np.asarray(-(off**2).sum(axis=1), np.float64)

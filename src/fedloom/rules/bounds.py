# SPDX-License-Identifier: Apache-2.0
"""How far one client moved the adapter, and how far it may: an average has no breakdown resistance.

A bound that is set holds in every round.  The relative bound is a multiple of the median of norms
that were accepted in earlier rounds, so that no order of replies decides; half of the clients would
have to lie to move it.  Two norms have no median that tells which is the odd one: below ``LEAST``
there is no relative bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.errors import Refusal
from fedloom.rules.controls import CONTROL
from fedloom.wire import Arrays, Update

LEAST = 3
"""Fewer norms than this bound nobody."""
WINDOW = 3
"""Rounds that are looked back on: norms fall as learning settles."""
NORM, MOVE = "update-norm", "control-move"
"""Names of the two norms among a client's metrics: of the adapter, and of SCAFFOLD's controls."""


def change_norms(update: Update, sent: Arrays) -> dict[str, float]:
    """Measure one contribution's change against what its sender was sent.

    An array that was not sent counts as it came, and so does a control, which is a move already.

    >>> sent = {"w": np.float32([1.0, 1.0])}
    >>> change_norms(Update.of({"w": np.float32([4.0, 5.0])}, 10), sent)
    {'update-norm': 5.0}

    Raises
    ------
    Refusal
        If a norm is not finite.
    """
    squares: dict[str, float] = {NORM: 0.0}
    for name, mean in update.mean().items():
        start = sent.get(name)
        is_control = name.startswith(CONTROL)
        moves = is_control or start is None or start.shape != mean.shape
        with np.errstate(over="ignore"):
            change = mean if moves else mean - np.asarray(start, np.float64)
            square = float(np.square(change).sum())
        key = MOVE if is_control else NORM
        squares[key] = squares.get(key, 0.0) + square
    norms = {key: math.sqrt(square) for key, square in squares.items()}
    if not all(map(math.isfinite, norms.values())):
        raise Refusal("the norm of its change is not finite")
    return norms


@dataclass(frozen=True)
class NormBound:
    """A bound on norms, absolute, relative, or both."""

    most: float = 0.0
    """0 sets none."""
    factor: float = 0.0
    """Of the median; 0 sets none."""

    def median(
        self, rows: Iterable[Mapping[str, Any]], server_round: int, key: str = NORM
    ) -> float | None:
        """Return the median of what was accepted in the last rounds before this one, if known.

        Parameters
        ----------
        rows
            Metrics of training with ``round`` and norms, of accepted replies alone.
        """
        if not self.factor:
            return None
        by_round: dict[int, list[float]] = {}
        for row in rows:
            if key in row and row["round"] < server_round:
                by_round.setdefault(int(row["round"]), []).append(float(row[key]))
        recent = sorted(by_round)[-WINDOW:]
        return self.median_of([norm for r in recent for norm in by_round[r]])

    def median_of(self, norms: Sequence[float]) -> float | None:
        """Return the median, if these norms are enough to have one that bounds anybody."""
        if not self.factor or len(norms) < LEAST:
            return None
        return statistics.median(norms) or None

    def check(self, norm: float, median: float | None = None, what: str = "its change") -> None:
        """Refuse what is over a bound."""
        if self.most and norm > self.most:
            raise Refusal(f"the norm of {what} is {norm:.4g}, expected at most {self.most:g}")
        if median is not None and norm > self.factor * median:
            raise Refusal(
                f"the norm of {what} is {norm:.4g}, {norm / median:.3g} times the median of"
                f" accepted ones; expected at most {self.factor:g} times"
            )

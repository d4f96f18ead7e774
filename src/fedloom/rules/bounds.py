# SPDX-License-Identifier: Apache-2.0
"""How far one client moved the adapter, and how far it may: an average has no breakdown resistance.

A bound that is set holds in every round.  The relative bound is a multiple of the median of others'
norms, wider for who has more to do: a client that takes ``s`` times the median's steps goes at most
``s`` times as far.  Half of the clients would have to lie to move a median.  Two norms have no
median that tells which is the odd one: below ``LEAST`` there is no relative bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.errors import Refusal
from fedloom.rules.contributions import A, B, module_of
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
    Where neither factor of a pair was sent (FLoRA), their product counts: what A was drawn as
    would hide how far B was moved from zero.

    >>> sent = {"w": np.float32([1.0, 1.0])}
    >>> change_norms(Update.of({"w": np.float32([4.0, 5.0])}, 10), sent)
    {'update-norm': 5.0}

    Raises
    ------
    Refusal
        If a norm is not finite.
    """
    squares: dict[str, float] = {NORM: 0.0}
    means = update.mean()
    with np.errstate(over="ignore", invalid="ignore"):
        for name, mean in means.items():
            if (module := _drawn_pair(name, means, sent)) is not None:
                if name.endswith(A):
                    squares[NORM] += _product_square(means[module + B], mean)
                continue
            start = sent.get(name)
            is_control = name.startswith(CONTROL)
            moves = is_control or start is None or start.shape != mean.shape
            change = mean if moves else mean - np.asarray(start, np.float64)
            key = MOVE if is_control else NORM
            squares[key] = squares.get(key, 0.0) + float(np.square(change).sum())
    if not all(map(math.isfinite, squares.values())):
        raise Refusal("the norm of its change is not finite")
    return {key: math.sqrt(square) for key, square in squares.items()}


def _drawn_pair(name: str, means: Arrays, sent: Arrays) -> str | None:
    """Name the projection of a factor that came whole though nothing of it was sent."""
    module = module_of(name)
    if module is None or name.startswith(CONTROL):
        return None
    a, b = module + A, module + B
    if a in sent or b in sent or a not in means or b not in means:
        return None
    return module if means[b].ndim == means[a].ndim == 2 else None


def _product_square(b: NDArray[Any], a: NDArray[Any]) -> float:
    """Return ``|B A|_F^2 = tr(B^T B A A^T)`` without the product."""
    return max(float(((b.T @ b) * (a @ a.T)).sum()), 0.0)


@dataclass(frozen=True)
class Move:
    """How far somebody went, and how far its work could have taken it."""

    norm: float
    reach: float = 1.0
    """``rules.workload.reach``; 0 where nothing is known about work."""

    def suggests(self, reach: float) -> float:
        """Return how far who has so much to do may be thought to go, if this one was honest.

        With ``s`` times the work at most ``s`` times as far, with less of it as far.

        >>> Move(2.0, reach=4.0).suggests(12.0), Move(2.0, reach=4.0).suggests(1.0)
        (6.0, 2.0)
        """
        return self.norm * max(1.0, reach / self.reach) if self.reach else self.norm


def typical_of(moves: Sequence[Move], reach: float = 1.0, least: int = LEAST) -> float | None:
    """Return how far these let one think that a client with so much to do goes, if they can tell.

    It is the median of what they suggest, of all of them or of those alone that had no more to do,
    whichever is less: among many large clients a small one would have the large ones' room.  Of an
    even number the lower one of the middle two counts: half of them may lie.

    >>> typical_of([Move(1.0, 4.0), Move(300.0, 1.0), Move(2.0, 2.0), Move(3.0, 3.0)])
    2.0
    """
    if len(moves) < least:
        return None
    enough = sorted(move.reach for move in moves)[least - 1]
    peers = [move for move in moves if move.reach <= max(reach, enough)]
    medians = [
        statistics.median_low([move.suggests(reach) for move in some]) for some in (moves, peers)
    ]
    return min((median for median in medians if median), default=None)


def recent(
    rows: Iterable[Mapping[str, Any]],
    server_round: int,
    key: str = NORM,
    alike: Callable[[int], bool] = lambda earlier: True,
) -> list[Mapping[str, Any]]:
    """Return what was accepted in the last rounds before this one.

    Parameters
    ----------
    rows
        Metrics of training with ``round`` and norms, of accepted replies alone.
    alike
        Whether an earlier round trained what this one does.
    """
    found = [row for row in rows if key in row and row["round"] < server_round]
    found = [row for row in found if alike(int(row["round"]))]
    last = sorted({row["round"] for row in found})[-WINDOW:]
    return [row for row in found if row["round"] in last]


@dataclass(frozen=True)
class NormBound:
    """A bound on norms, absolute, relative, or both."""

    most: float = 0.0
    """0 sets none."""
    factor: float = 0.0
    """Of the median; 0 sets none."""

    def check(self, norm: float, what: str = "its change") -> None:
        """Refuse what is over the absolute bound."""
        if self.most and norm > self.most:
            raise Refusal(f"the norm of {what} is {norm:.4g}, expected at most {self.most:g}")

    def admits(self, move: Move, typical: Iterable[float]) -> bool:
        """Whether a move is within the relative bound by one of these medians, or there is none."""
        medians = list(typical)
        near = any(move.norm <= self.factor * median for median in medians)
        return near or not self.factor or not medians

    def reason(self, move: Move, typical: Iterable[float], what: str = "its change") -> str:
        """Say how a move is over the relative bound, by the median that is kindest to it."""
        median = max(typical)
        return (
            f"the norm of {what} is {move.norm:.4g}, {move.norm / median:.3g} times the median of"
            f" accepted ones; expected at most {self.factor:g} times (gate.norm-factor),"
            f" {self.factor * median:.4g} for its rows and rank"
        )

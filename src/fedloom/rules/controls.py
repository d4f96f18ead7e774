# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD's control variates on the server (arXiv 1910.06378, Algorithm 1).

They travel beside theta, under names of their own: down goes ``c``, up comes how far the client's
control moved.  Theta is averaged over the sampled clients by examples; ``c`` moves by the plain sum
over **all** clients' number, drawn or not, so that it stays the mean of all clients' controls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedloom.wire import Arrays, Update

Value = TypeVar("Value")

CONTROL = "control/"
"""Prefix of a control's name; the rest is the name of the array that it corrects."""


def without_controls(named: Mapping[str, Value]) -> dict[str, Value]:
    """Leave out the controls."""
    return {name: value for name, value in named.items() if not name.startswith(CONTROL)}


def only_controls(named: Mapping[str, Value]) -> dict[str, Value]:
    """Keep the controls, by the names of the arrays that they correct."""
    return {n.removeprefix(CONTROL): x for n, x in named.items() if n.startswith(CONTROL)}


def control_names(named: Mapping[str, Value]) -> dict[str, Value]:
    """Name arrays as controls: what ``only_controls`` undoes."""
    return {CONTROL + name: value for name, value in named.items()}


class ControlSum:
    """Take the moves of the controls out of updates that pass by, and add them to ``c``.

    Without controls it is no more than the stream itself.

    >>> sums = ControlSum({"control/w": np.zeros(1)}, clients=4)
    >>> update = Update.of({"w": np.ones(1), "control/w": np.full(1, 2.0)}, weight=3)
    >>> [sorted(rest.sums) for rest in sums.set_aside([update])], sums.moved()
    ([['w']], {'control/w': array([0.5])})
    """

    def __init__(self, sent: Arrays, clients: int) -> None:
        self._sent = {n: a for n, a in sent.items() if n.startswith(CONTROL)}
        self._clients = clients
        self._total: Update | None = None

    def set_aside(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Yield each update without its controls, whose moves count the same for every client."""
        for update in updates:
            if self._sent:
                mean = update.mean()
                moves = Update.of({name: mean[name] for name in self._sent}, 1.0)
                self._total = moves if self._total is None else self._total + moves
            yield Update(
                without_controls(update.sums),
                update.weight,
                without_controls(update.residue),
                update.origin,
            )

    def moved(self) -> dict[str, NDArray[Any]]:
        """Return ``c + sum of moves / clients``."""
        if self._total is None:
            return dict(self._sent)
        moves, weight = self._total.mean(), self._total.weight
        return {
            name: (np.asarray(c, np.float64) + moves[name] * weight / self._clients).astype(c.dtype)
            for name, c in self._sent.items()
        }

# SPDX-License-Identifier: Apache-2.0
"""FAAST's own incremental rule (its Eq. 14): a running mean of the solutions of chunks.

It is what the released code does, and **not** the least-squares solution over all rows: with skewed
clients it collapses, as any average of separately solved weights does.  It is here to be compared
with; ``fedloom.rules.solving`` solves the union exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.rules.solving import naive_solve

Rows = tuple[NDArray[Any], NDArray[Any]]


@dataclass
class PaperBank:
    """A bank of pairs; when it is full, the oldest are solved, mixed in and dropped.

    ``W <- (1 - r) W + r W_c`` with ``r = N_c / (gamma N_0 + N_c)``, and then
    ``N_0 <- gamma N_0 + N_c``; ``W_c`` is the chunk's own solution, under
    its own tolerance ``N_c ** -alpha``.
    """

    alpha: float = 1.0
    capacity: int = 65536
    """Pairs that the bank holds."""
    chunk: int = 8192
    """Pairs that are solved together."""
    discount: float = 1.0
    """gamma: 1 at inference, 0.9 while the paper's read-out is trained."""
    _weights: NDArray[np.float64] | None = None
    _solved: float = 0.0
    _held: list[Rows] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= self.capacity:
            raise ValueError(f"chunk {self.chunk}: expected 1 to the bank's {self.capacity}")

    def add(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Put pairs in; solve the oldest chunks while the bank is over its capacity."""
        self._held.append((keys, values))
        while sum(len(k) for k, _ in self._held) > self.capacity:
            k, v = self._joined()
            self._weights, self._solved = self._mixed(k[: self.chunk], v[: self.chunk])
            self._held = [(k[self.chunk :], v[self.chunk :])]

    def weights(self) -> NDArray[np.float64]:
        """Return the weights to read with: what is left in the bank is mixed in for reading only.

        Raises
        ------
        ValueError
            If no pair was ever put in.
        """
        k, v = self._joined()
        if len(k):
            return self._mixed(k, v)[0]
        if self._weights is None:
            raise ValueError("an empty bank: expected at least one pair")
        return self._weights

    def _joined(self) -> Rows:
        if not self._held:
            return np.zeros((0, 0)), np.zeros((0, 0))
        keys, values = zip(*self._held, strict=True)
        return np.concatenate(keys), np.concatenate(values)

    def _mixed(self, keys: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[np.float64], float]:
        fresh, before = naive_solve(keys, values, alpha=self.alpha), self.discount * self._solved
        share = len(keys) / (before + len(keys))
        if self._weights is not None:
            fresh = (1.0 - share) * self._weights + share * fresh
        return fresh, before + len(keys)


def averaged(solutions: Iterable[tuple[NDArray[Any], float]]) -> NDArray[np.float64]:
    """Average fast weights that clients solved alone, by their rows: what one should not do.

    The same as Eq. 14 with a client for a chunk and no discount.
    """
    mixed, rows = None, 0.0
    for weights, count in solutions:
        share = count / (rows + count)
        mixed = weights.astype(np.float64) if mixed is None else mixed + share * (weights - mixed)
        rows += count
    if mixed is None:
        raise ValueError("no solution came: there is nothing to average")
    return mixed

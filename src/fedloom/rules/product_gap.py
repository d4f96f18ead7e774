# SPDX-License-Identifier: Apache-2.0
"""How far averaging LoRA's factors apart is from averaging what they do.

The mean of products is not the product of means: ``sum_k w_k B_k A_k`` against
``(sum_k w_k B_k)(sum_k w_k A_k)``.  FedNL averages the factors, as its eq. (6) does with all of
theta, so the gap is worth a line in every round's log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from fedloom import seeds
from fedloom.wire import Update

_A, _B = ".lora_A.", ".lora_B."


class ProductGap:
    """Estimate the gap's Frobenius norm from products with random probes, as updates pass by.

    For standard normal ``x``, ``E |M x|^2 = |M|_F^2``: with ``probes`` columns the squared norm is
    unbiased and its relative standard deviation at most ``sqrt(2 / probes)``.  Only
    ``out x probes`` numbers a projection are kept, never a dense product and never a client's
    factors.

    >>> a, b = np.ones((1, 2)), np.ones((3, 1))
    >>> gap = ProductGap(seed=0)
    >>> for sign in (1, -1):  # B A is the same twice, both factors average to zero
    ...     gap.add(Update.of({"q.lora_A.weight": sign * a, "q.lora_B.weight": sign * b}, 1))
    >>> gap.relative()
    1.0
    """

    def __init__(self, seed: int, probes: int = 64) -> None:
        self._seed, self._count = seed, probes
        self._probes: dict[str, NDArray[np.float64]] = {}
        self._products: dict[str, NDArray[np.float64]] = {}
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._weight = 0.0

    def watch(self, updates: Iterable[Update]) -> Iterator[Update]:
        """Pass updates through, looking at each."""
        for update in updates:
            self.add(update)
            yield update

    def add(self, update: Update) -> None:
        """Look at one client's update."""
        weight = update.weight
        for name in (name for name in update.sums if _A in name):
            a, b = update.sums[name], update.sums[name.replace(_A, _B)]
            x = self._probe(name, a.shape[1])
            # Sums carry the weight once each; a product of two carries it twice.
            self._accumulate(self._products, name, b @ (a @ x) / weight)
            self._accumulate(self._sums, name, a)
            self._accumulate(self._sums, name.replace(_A, _B), b)
        self._weight += weight

    def relative(self) -> float:
        """Return the norm of the gap over the norm of the mean product; 0 without LoRA."""
        gap = whole = 0.0
        for name, product in self._products.items():
            a, b = self._sums[name] / self._weight, self._sums[name.replace(_A, _B)] / self._weight
            mean = product / self._weight
            gap += float(np.square(mean - b @ (a @ self._probes[name])).sum())
            whole += float(np.square(mean).sum())
        return float(np.sqrt(gap / whole)) if whole else 0.0

    def _probe(self, name: str, size: int) -> NDArray[np.float64]:
        if name not in self._probes:
            random = seeds.generator(self._seed, name, "probe")
            self._probes[name] = random.standard_normal((size, self._count))
        return self._probes[name]

    @staticmethod
    def _accumulate(
        into: dict[str, NDArray[np.float64]], name: str, value: NDArray[np.float64]
    ) -> None:
        into[name] = into[name] + value if name in into else value

# SPDX-License-Identifier: Apache-2.0
"""How far a round's adapter is from what its clients did: ``|D - made| / |D|``, measured.

``D = sum_k w_k s_k B_k A_k``.  The mean of products is not the product of means, so averaging the
factors apart leaves a gap; an exact rule leaves rounding.  Either is worth a line in every round's
log, and is measured from what came and what was made, not taken from what a rule promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import seeds
from fedloom.rules.contributions import A, B, module_of
from fedloom.rules.factors import Factors
from fedloom.wire import Arrays, Update


class ProductGap:
    """Estimate the gap's Frobenius norm from products with random probes, as updates pass by.

    For standard normal ``x``, ``E |M x|^2 = |M|_F^2``: with ``probes`` columns the squared norm is
    unbiased and its relative standard deviation at most ``sqrt(2 / probes)``.  Only
    ``out x probes`` numbers a projection are kept, never a dense product and never a client's
    factors; ranks may differ.

    Parameters
    ----------
    seed
        Of the probes.
    still
        Factors that no update carries because the round leaves them where they are.
    probes
        Columns of the probe.

    Examples
    --------
    >>> a, b = np.ones((1, 2)), np.ones((3, 1))
    >>> gap = ProductGap(seed=0)
    >>> for sign in (1, -1):  # B A is the same twice, both factors average to zero
    ...     gap.add(Update.of({"q.lora_A.weight": sign * a, "q.lora_B.weight": sign * b}, 1))
    >>> gap.relative({"q": Factors(0 * b, 0 * a)}), gap.relative({"q": Factors(b, a)})
    (1.0, 0.0)
    """

    def __init__(self, seed: int, still: Arrays | None = None, probes: int = 64) -> None:
        self._seed, self._still, self._count = seed, still or {}, probes
        self._probes: dict[str, NDArray[np.float64]] = {}
        self._products: dict[str, NDArray[np.float64]] = {}
        self._weight = 0.0

    def watch(
        self, updates: Iterable[Update], scale_of: Callable[[int], float] | None = None
    ) -> Iterator[Update]:
        """Pass updates through, looking at each; ``scale_of`` is ``s_k`` by the update's origin."""
        for update in updates:
            self.add(update, scale_of(update.origin) if scale_of else 1.0)
            yield update

    def add(self, update: Update, scale: float = 1.0) -> None:
        """Look at one client's update, which it multiplies by ``scale``."""
        found = {module for name in update.sums if (module := module_of(name)) is not None}
        for module in sorted(found):
            a, b = self._factor(update, module + A), self._factor(update, module + B)
            product = update.weight * scale * (b @ (a @ self._probe(module, a.shape[1])))
            known = self._products.get(module)
            self._products[module] = product if known is None else known + product
        self._weight += update.weight

    def relative(self, made: Mapping[str, Factors]) -> float:
        """Return the norm of ``D`` less ``made``, scale inside, over that of ``D``; 0 if both are.

        ``made`` has every projection that came.
        """
        gap = whole = 0.0
        for module, product in self._products.items():
            mean = product / self._weight
            mine = made[module].b @ (made[module].a @ self._probes[module])
            gap += float(np.square(mean - mine).sum())
            whole += float(np.square(mean).sum())
        return float(np.sqrt(gap / whole)) if whole else 0.0

    def _factor(self, update: Update, name: str) -> NDArray[Any]:
        return update.sums[name] / update.weight if name in update.sums else self._still[name]

    def _probe(self, module: str, size: int) -> NDArray[np.float64]:
        if module not in self._probes:
            random = seeds.generator(self._seed, module, "probe")
            self._probes[module] = random.standard_normal((size, self._count))
        return self._probes[module]

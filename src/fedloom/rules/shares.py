# SPDX-License-Identifier: Apache-2.0
"""How a client's sums are given away: bare, under masks, with noise, or with both.

One mode is agreed on for a run; this is what the two ends must have alike: which arrays travel, how
much noise a release takes, and what the total is solved with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from fedloom.config import FaastConfig
from fedloom.rules.private import Accountant, Bounds, bound_client, calibrate
from fedloom.rules.statistics import CROSS, GRAM, SQUARES, Gram
from fedloom.wire import Listing, Update

COUNT = "count"
"""Rows, where masks hide them too: an array like the others, and no metric."""


@dataclass(frozen=True)
class Noise:
    """What one release of sums promises, and the noise that keeps it.

    >>> given = FaastConfig(shares="private", epsilon=1.0)
    >>> noise = Noise.of(given)
    >>> round(noise.sensitivity, 3), round(noise.sigma, 3), round(noise.spent(2), 3)
    (1.414, 5.276, 1.465)
    """

    epsilon: float
    delta: float
    client_bound: float | None
    """Largest joint norm of a client's sums, where whole clients are protected and not rows."""
    bounds: Bounds = Bounds(1.0, 1.0)  # noqa: RUF009 - frozen
    """Keys have length one, and so have one-hot values."""

    @classmethod
    def of(cls, given: FaastConfig) -> Noise:
        """Read a recipe."""
        whole = given.protects == "client"
        return cls(given.epsilon, given.delta, given.client_bound if whole else None)

    @property
    def sensitivity(self) -> float:
        """How far one row, or one client, more or less moves the sums."""
        return self.bounds.sensitivity() if self.client_bound is None else self.client_bound

    @functools.cached_property
    def sigma(self) -> float:
        """Noise of one release."""
        return calibrate(self.epsilon, self.delta, self.sensitivity)

    def bounded(self, gram: Gram) -> Gram:
        """Shrink a client's sums, if it is whole clients that are protected."""
        return gram if self.client_bound is None else bound_client(gram, self.client_bound)

    def spent(self, releases: int) -> float:
        """Return the epsilon of so many releases of the same rows, at ``delta``."""
        accountant = Accountant()
        for _ in range(releases):
            accountant.spend(self.sensitivity, self.sigma)
        return accountant.epsilon(self.delta)


def listing(given: FaastConfig, keys: int, classes: int) -> Listing:
    """Return names, shapes and dtypes of one reply's arrays: the same for every number of rows."""
    shapes: dict[str, tuple[int, ...]] = {
        GRAM: (keys * (keys + 1) // 2,),
        CROSS: (keys, classes),
    }
    if not given.private:  # the exact count and |V|^2 would be two more things that a row changes
        shapes[SQUARES] = (1,)
        if given.masked:
            shapes[COUNT] = (1,)
    dtype = "uint64" if given.masked else "float64"
    return {name: (shape, dtype) for name, shape in sorted(shapes.items())}


def gram_of(update: Update) -> Gram:
    """Make a Gram of one reply or of a total: the only place that reads sums off an update."""
    arrays = update.whole()
    return Gram.from_arrays({SQUARES: np.array([np.nan]), **arrays}, update.weight)

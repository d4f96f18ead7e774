# SPDX-License-Identifier: Apache-2.0
"""Whom each round asks: drawn from (seed, round), so anybody can tell who was asked how often."""

from __future__ import annotations

import math
from collections import Counter

from fedloom import seeds
from fedloom.config import RunConfig


def drawn(seed: int, server_round: int, fraction: float, count: int) -> list[int]:
    """Return the places, among ``count``, that a round asks, in order.

    >>> len(drawn(0, 1, 0.25, 10)), drawn(0, 1, 0.3, 10) == drawn(0, 1, 0.3, 10)
    (3, True)
    """
    size = max(1, math.ceil(fraction * count - 1e-9))
    random = seeds.generator(seed, server_round, "sampling")
    return sorted(int(i) for i in random.choice(count, size=size, replace=False))


def most_asked(config: RunConfig) -> int:
    """Return in how many rounds of a run the client is asked that is asked most often."""
    asked: Counter[int] = Counter()
    for server_round in range(1, config.rounds + 1):
        count, fraction = config.clients.count, config.sampling.fraction
        asked.update(drawn(config.seed, server_round, fraction, count))
    return max(asked.values())

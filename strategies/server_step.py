# SPDX-License-Identifier: Apache-2.0
"""Where the server goes when the replies have been averaged: to the mean, or a step along it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import rules
from fedloom.config import ServerConfig
from fedloom.strategies.checkpoint import State
from fedloom.wire import Arrays


class ServerStep:
    """``server.optimizer``, ``server.momentum`` and ``server.learning-rate``, with their state.

    Attributes
    ----------
    velocity, moments
        FedAvgM's and FedAdam's memory of earlier rounds; ``None`` before the first.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.velocity: dict[str, NDArray[np.float64]] | None = None
        self.moments: rules.Moments | None = None

    def step(
        self,
        start: Arrays,
        averaged: dict[str, NDArray[Any]],
        server_round: int = 1,
        rounds: int = 1,
    ) -> dict[str, NDArray[Any]]:
        """Return the new arrays; without an optimiser and at rate 1 they are the mean itself."""
        config = self._config
        lora, memory = config.rates(server_round, rounds)
        rate = {name: memory if rules.is_memory_array(name) else lora for name in averaged}
        if config.optimizer == "adam":
            made, self.moments = rules.adam(
                start,
                averaged,
                self.moments,
                rate=rate,
                beta1=config.momentum,
                beta2=config.second_momentum,
                tau=config.adaptivity,
            )
            return made
        if not config.momentum and all(each == 1 for each in rate.values()):
            return averaged
        made, self.velocity = rules.momentum(start, averaged, self.velocity, config.momentum, rate)
        return made

    def state(self) -> State:
        """Return the memory of earlier rounds."""
        arrays: dict[str, NDArray[Any]] = {}
        arrays |= {f"velocity/{n}": a for n, a in (self.velocity or {}).items()}
        if self.moments is not None:
            arrays |= {f"first/{n}": a for n, a in self.moments.first.items()}
            arrays |= {f"second/{n}": a for n, a in self.moments.second.items()}
        return State(arrays)

    def restore(self, state: State) -> None:
        """Remember what an earlier process did."""
        kinds: dict[str, dict[str, NDArray[np.float64]]] = {
            "velocity": {},
            "first": {},
            "second": {},
        }
        for name, array in state.arrays.items():
            kind, _, rest = name.partition("/")
            kinds[kind][rest] = array
        self.velocity = kinds["velocity"] or None
        self.moments = rules.Moments(kinds["first"], kinds["second"]) if kinds["first"] else None

# SPDX-License-Identifier: Apache-2.0
"""One client's work in one message, and the plain way to do it (FedAvg).

A method is a class with ``fit``, which leaves the adapter as the arrays to be sent, and, where a
client ends up with an adapter of its own, ``personalise``.  It is made for one message and holds
nothing afterwards; what must last is kept at ``work.home``.  All training is ``train_locally``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom import seeds
from fedloom.adapters.attach import Adapter
from fedloom.config import RunConfig
from fedloom.local.home import Home
from fedloom.training import StepHook, TrainingReport, train_locally
from fedloom.wire import Arrays


@dataclass(frozen=True, kw_only=True)
class Work:
    """An adapter that holds what was received, one client's rows, and its place in the run."""

    adapter: Adapter
    rows: Sequence[Any]
    """Training rows."""
    loss: Callable[[list[Any]], tuple[Tensor, int]]
    length: Callable[[Any], int]
    config: RunConfig
    home: Home
    round: int
    """The round to train in; for a personal adapter that is only scored, the next one."""
    partition: int
    last: bool = False
    """Whether this is the run's last round."""
    steps: int = 0
    """Optimiser steps, where they are not the recipe's."""

    def seed(self, purpose: str) -> int:
        """Split the run's seed by round, partition and purpose."""
        return seeds.split(self.config.seed, self.round, self.partition, purpose)

    def train(self, purpose: str = "training", hooks: Sequence[StepHook] = ()) -> TrainingReport:
        """Run the one local training loop on the adapter as it stands."""
        config = self.config.train.in_round(self.round, self.config.rounds)
        if self.steps:
            config = replace(config, max_steps=self.steps)
        if purpose != "training":  # FedProx's pull is for what is sent
            config = replace(config, proximal_mu=0.0)
        return train_locally(
            self.adapter,
            self.rows,
            self.loss,
            self.length,
            config,
            seed=self.seed(purpose),
            hooks=hooks,
        )

    def tensors(self, arrays: Arrays) -> dict[str, Tensor]:
        """Put arrays where the parameters of their names are."""
        named = self.adapter.parameters()
        return {name: torch.from_numpy(array).to(named[name]) for name, array in arrays.items()}


@dataclass(frozen=True)
class Trained:
    """What ``fit`` has to say."""

    report: TrainingReport
    metrics: Mapping[str, float] = field(default_factory=dict)
    beside: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arrays to send beside the adapter's."""


class Plain:
    """FedAvg: local steps from what was received (arXiv 1602.05629)."""

    def fit(self, work: Work, received: Arrays) -> Trained:
        """Train from what was received, which the adapter holds; a control beside it, it cannot."""
        return Trained(work.train())

    def beside(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Return the first of what travels beside these arrays, by name."""
        return {}

    def is_personal(self, work: Work) -> bool:
        """Tell whether clients have adapters of their own to be scored in this round."""
        return False

    def personalise(self, work: Work, received: Arrays) -> None:
        """Turn the adapter, which holds what was received, into this client's own."""

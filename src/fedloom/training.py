# SPDX-License-Identifier: Apache-2.0
"""The one local training loop: examples in, trained arrays and metrics out.

It is Algorithm 1's inner part (arXiv 2605.16350): for each batch the memory starts at zero, runs
inside the forward pass, and one optimiser step follows back-propagation through its whole path.
No Flower, no globals; the optimiser is born and dies here.  What a method adds to the plain step
(a pull, a correction, a record of the gradients) is a ``StepHook``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom import seeds
from fedloom.config import TrainConfig
from fedloom.errors import Refusal
from fedloom.rules import is_memory_array

Example = TypeVar("Example")
_POOL = 8  # batches that are sorted by length together, to pad little and still shuffle well


class Trainable(Protocol):
    """What the loop trains: an ``Adapter``, or the read-outs of a ``FastMemory``."""

    @property
    def model(self) -> nn.Module:
        """What is switched to training and back."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return what is trained, by name."""


@dataclass(frozen=True)
class TrainingReport:
    """What one client's round did."""

    examples: int
    """Examples that the client holds: its weight in the mean."""
    steps: int
    tokens: int
    loss: float
    """Mean over the examples seen, each scored before the step that learnt from it; nats."""
    loss_first: float
    loss_last: float
    seconds: float


class StepHook:
    """What a method adds to each step; this one adds nothing.

    Each call is given the trainable parameters by name.  One hook serves one call of
    ``train_locally``.
    """

    def begin(self, named: Mapping[str, nn.Parameter]) -> None:
        """Look at the start."""

    def after_backward(self, named: Mapping[str, nn.Parameter]) -> None:
        """Read or change the gradients, before they are clipped."""

    def after_step(self, named: Mapping[str, nn.Parameter]) -> None:
        """Look at what the optimiser did."""


class Pull(StepHook):
    """Add ``strength w (theta - anchor)`` to the gradient.

    It is that of ``strength / 2 sum w (theta - anchor)^2``: in the gradient and not in AdamW's
    weight decay, which would bypass the moments and pull towards zero.  FedProx (arXiv 1812.06127)
    anchors at the start, where all ``w`` are one.

    Parameters
    ----------
    anchors : mapping, optional
        Where to pull; the start of the training if left out.
    weights : mapping, optional
        ``w`` for each coordinate; all one if left out.
    """

    def __init__(
        self,
        strength: float,
        anchors: Mapping[str, Tensor] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._strength, self._anchors, self._weights = strength, anchors, weights

    def begin(self, named: Mapping[str, nn.Parameter]) -> None:
        """Note where to pull."""
        if self._anchors is None:
            self._anchors = {name: p.detach().clone() for name, p in named.items()}

    def after_backward(self, named: Mapping[str, nn.Parameter]) -> None:
        """Add the pull."""
        for name, parameter in named.items():
            if parameter.grad is not None and self._anchors is not None:
                away = parameter.detach() - self._anchors[name]
                if self._weights is not None:
                    away = away * self._weights[name]
                parameter.grad.add_(away, alpha=self._strength)


def train_locally(
    adapter: Trainable,
    examples: Sequence[Example],
    loss: Callable[[list[Example]], tuple[Tensor, int]],
    length: Callable[[Example], int],
    config: TrainConfig,
    *,
    seed: int,
    hooks: Sequence[StepHook] = (),
) -> TrainingReport:
    """Train ``adapter`` in place on ``examples``.

    Parameters
    ----------
    loss : callable
        Batch -> (mean loss over the batch, tokens in it).
    length : callable
        Example -> tokens, for batches of like length.
    seed : int
        Decides the order of the examples and dropout, nothing else.
    hooks : sequence of StepHook
        What a method adds to the steps, in this order; ``train.proximal-mu`` comes last.

    Raises
    ------
    Diverged
        If a loss is not finite: the arrays would be poisoned.
    """
    started = time.perf_counter()
    named = adapter.parameters()
    parameters = list(named.values())
    optimiser = _optimiser(named, config)
    hooks = [*hooks, *([Pull(config.proximal_mu)] if config.proximal_mu else [])]
    batches = _batches(examples, length, config, seed)
    losses: list[float] = []
    sizes: list[int] = []
    tokens = 0
    with torch.random.fork_rng(devices=_devices(parameters)):
        torch.manual_seed(seeds.split(seed, "dropout"))
        adapter.model.train()
        for hook in hooks:
            hook.begin(named)
        for batch in batches:
            value, seen = loss(batch)
            _backward(value, optimiser)
            for hook in hooks:
                hook.after_backward(named)
            if config.clip_norm:
                torch.nn.utils.clip_grad_norm_(parameters, config.clip_norm)
            optimiser.step()
            for hook in hooks:
                hook.after_step(named)
            losses.append(value.item())
            sizes.append(len(batch))
            tokens += seen
        adapter.model.eval()
    mean = float(np.average(losses, weights=sizes))
    seconds = time.perf_counter() - started
    return TrainingReport(len(examples), len(losses), tokens, mean, losses[0], losses[-1], seconds)


def _optimiser(named: dict[str, nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    memory_rate = config.memory_learning_rate or config.learning_rate
    groups = [
        {"params": [p for n, p in named.items() if is_memory_array(n) == memory], "lr": rate}
        for memory, rate in ((False, config.learning_rate), (True, memory_rate))
    ]
    groups = [group for group in groups if group["params"]]
    kind = torch.optim.SGD if config.optimizer == "sgd" else torch.optim.AdamW
    return kind(groups, weight_decay=config.weight_decay)


def _backward(value: Tensor, optimiser: torch.optim.Optimizer) -> None:
    check_finite(value)
    optimiser.zero_grad(set_to_none=True)
    value.backward()


class Diverged(Refusal, FloatingPointError):
    """A loss that is not finite: its words hold no data, so they may leave a node."""


def check_finite(loss: Tensor) -> None:
    """Raise ``Diverged`` for a loss that would poison the arrays."""
    if not math.isfinite(loss.item()):
        raise Diverged(f"the training loss is {loss.item()}; try a lower learning rate")


def _devices(parameters: list[nn.Parameter]) -> list[torch.device]:
    return sorted({p.device for p in parameters if p.device.type == "cuda"}, key=str)


def _batches(
    examples: Sequence[Example], length: Callable[[Example], int], config: TrainConfig, seed: int
) -> Iterator[list[Example]]:
    """Yield batches, epoch after epoch, until ``max_steps``; the last of an epoch may be small."""
    taken = 0
    for epoch in itertools.count() if config.max_steps else range(config.epochs):
        random = seeds.generator(seed, epoch, "order")
        for batch in one_epoch(examples, length, config.batch_size, random):
            if config.max_steps and taken == config.max_steps:
                return
            taken += 1
            yield batch


def one_epoch(
    examples: Sequence[Example],
    length: Callable[[Example], int],
    size: int,
    random: np.random.Generator,
) -> Iterator[list[Example]]:
    """Yield every example once, in batches of like length and drawn order."""
    order = [examples[i] for i in random.permutation(len(examples))]
    batches: list[list[Example]] = []
    for start in range(0, len(order), size * _POOL):
        pool = sorted(order[start : start + size * _POOL], key=length)
        batches += [pool[i : i + size] for i in range(0, len(pool), size)]
    for index in random.permutation(len(batches)):
        yield batches[index]

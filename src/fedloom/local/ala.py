# SPDX-License-Identifier: Apache-2.0
"""FedALA: learn how much of the global adapter to take, coordinate by coordinate (2212.01197).

At a round's start a client mixes its adapter of last time with the received one, ``old + (theta -
old) W``, with ``W`` in [0, 1] learnt on part of its rows by ``W <- clip(W - rate grad (theta -
old))``.  Only the layers next to the output are mixed.  The authors' code looks at the first
parameter alone to see whether there is anything to mix; under peft that one is frozen and the
method turns itself off without a word.  Here all trainable arrays count.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom import seeds
from fedloom.local.work import Plain, Trained, Work
from fedloom.training import check_finite, one_epoch
from fedloom.wire import Arrays

_SETTLED = 0.1  # standard deviation of the last losses that counts as converged
_LAST = 10  # losses


class FedALA(Plain):
    """Local steps from a learnt mix; the adapter of last time and ``W`` stay at home."""

    def fit(self, work: Work, received: Arrays) -> Trained:
        """Mix, train, and keep both."""
        weights, passes = self._mix(work, received)
        report = work.train()
        work.home.keep("local", work.adapter.arrays(), work.round)
        metrics: dict[str, float] = {"ala-passes": passes}
        if weights:
            work.home.keep("ala", weights, work.round)
            flat = np.concatenate([w.ravel() for w in weights.values()])
            metrics |= {"ala-mean": float(flat.mean()), "ala-min": float(flat.min())}
        return Trained(report, metrics)

    def is_personal(self, work: Work) -> bool:
        """Score the mix wherever the global adapter is scored."""
        return True

    def personalise(self, work: Work, received: Arrays) -> None:
        """Mix as the next round would start; nothing is kept."""
        self._mix(work, received)

    def _mix(self, work: Work, sent: Arrays) -> tuple[dict[str, NDArray[Any]], int]:
        """Set the mix on the adapter, which holds ``sent``; return ``W`` and the passes it took."""
        old = work.home.find("local", work.round)
        if old is None or all(np.array_equal(old[name], sent[name]) for name in sent):
            return {}, 0  # round 1, or nothing to choose between
        kept = work.home.find("ala", work.round)
        names = _top(list(sent), work.config.local.ala_layers)
        weights = {name: np.ones_like(sent[name]) for name in names} if kept is None else kept
        learnt = work.tensors(weights)
        passes = _learn(work, work.tensors(old), work.tensors(sent), learnt, first=kept is None)
        return {name: w.cpu().numpy() for name, w in learnt.items()}, passes


def _top(names: list[str], layers: int) -> list[str]:
    """Return the arrays of so many decoder layers next to the output; 0 is all.

    >>> _top(["layers.0.q", "layers.1.q", "layers.1.v"], 1)
    ['layers.1.q', 'layers.1.v']
    """
    found = {name: re.search(r"layers\.(\d+)\.", name) for name in names}
    at = {name: int(match[1]) for name, match in found.items() if match}
    first = sorted(set(at.values()))[-layers:]
    return [name for name in names if at.get(name, first[0]) in first]


def _learn(
    work: Work,
    old: dict[str, Tensor],
    sent: dict[str, Tensor],
    weights: dict[str, Tensor],
    *,
    first: bool,
) -> int:
    """Learn ``weights`` in place, leave the mix on the adapter and return the passes.

    The first time until the last losses hardly differ, later in one pass.
    """
    local, named = work.config.local, work.adapter.parameters()
    mixed = {name: named[name] for name in weights}
    batches = _sample(work)
    losses: list[float] = []
    _set_mix(mixed, old, sent, weights)
    while True:
        for batch in batches:
            value, _ = work.loss(batch)
            check_finite(value)
            slopes = torch.autograd.grad(value, list(mixed.values()), allow_unused=True)
            for name, slope in zip(mixed, slopes, strict=True):
                if slope is not None:
                    step = local.ala_rate * slope * (sent[name] - old[name])
                    weights[name].sub_(step).clamp_(0, 1)
            _set_mix(mixed, old, sent, weights)
        losses.append(value.item())
        settled = len(losses) > _LAST and np.std(losses[-_LAST:]) < _SETTLED
        if not first or settled or len(losses) == local.ala_passes:
            return len(losses)


def _set_mix(
    mixed: dict[str, torch.nn.Parameter],
    old: dict[str, Tensor],
    sent: dict[str, Tensor],
    weights: dict[str, Tensor],
) -> None:
    with torch.no_grad():
        for name, parameter in mixed.items():
            parameter.copy_(old[name] + (sent[name] - old[name]) * weights[name])


def _sample(work: Work) -> list[list[Any]]:
    """Draw the rows to learn on, in batches that every pass repeats."""
    random = seeds.generator(work.seed("ala"))
    count = max(1, int(work.config.local.ala_share * len(work.rows)))
    drawn = [work.rows[i] for i in random.choice(len(work.rows), count, replace=False)]
    return list(one_epoch(drawn, work.length, work.config.train.batch_size, random))

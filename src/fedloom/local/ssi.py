# SPDX-License-Identifier: Apache-2.0
"""FedSSI: hold still what mattered to this client in earlier rounds (arXiv 2412.13779).

Made for a sequence of tasks; here each round is one, or its penalty would be zero for ever.  A
round starts at the global adapter that the last one ended with:

1. a surrogate ``v`` trains from there on ``loss`` with the pull ``q (v - start)``,
   ``q = (1 - lambda) / (2 lambda)``, inside the optimiser's gradient;
2. along its path synaptic intelligence (arXiv 1703.04200) adds up each coordinate's share in the
   fall of the loss, ``s_i = -sum g_i dv_i``, which gives ``Omega_i += max(s_i, 0) / (Dv_i^2 + xi)``
   **for the rounds to come**;
3. theta trains from the same start on ``loss + alpha sum Omega_i (theta_i - start_i)^2`` with the
   Omega of the rounds before, and is averaged.

The first round is FedAvg's.  Shares that raised the loss are cut at zero: a negative Omega would
push away from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.local.work import Plain, Trained, Work
from fedloom.training import Pull, StepHook
from fedloom.wire import Arrays

XI = 1e-3
"""Keeps the importance of a coordinate that hardly moved finite."""


class PathIntegral(StepHook):
    """Add up ``-g dv`` for each coordinate; to stand before hooks that change the gradient."""

    def begin(self, named: Mapping[str, nn.Parameter]) -> None:
        """Note the start."""
        self._start = {name: p.detach().clone() for name, p in named.items()}
        self._before = {name: p.clone() for name, p in self._start.items()}
        self._slope: dict[str, Tensor] = {}
        self._shares = {name: torch.zeros_like(p) for name, p in self._start.items()}

    def after_backward(self, named: Mapping[str, nn.Parameter]) -> None:
        """Note the loss's own gradient."""
        self._slope = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}

    def after_step(self, named: Mapping[str, nn.Parameter]) -> None:
        """Weigh the step by it."""
        for name, slope in self._slope.items():
            now = named[name].detach()
            self._shares[name] -= slope * (now - self._before[name])
            self._before[name].copy_(now)

    def importance(self) -> dict[str, NDArray[Any]]:
        """Return this path's part of Omega."""
        made = {}
        for name, share in self._shares.items():
            moved = self._before[name] - self._start[name]
            made[name] = (share.clamp(min=0) / (moved.square() + XI)).cpu().numpy()
        return made


class FedSSI(Plain):
    """Local steps under the penalty; Omega stays at home."""

    def fit(self, work: Work, received: Arrays) -> Trained:
        """Train the surrogate for its importance, then theta with what is known from before."""
        local, start = work.config.local, work.tensors(received)
        pull = Pull((1 - local.ssi_lambda) / (2 * local.ssi_lambda), anchors=start)
        path = PathIntegral()
        work.train("surrogate", hooks=(path, pull))
        fresh = path.importance()
        work.adapter.load(dict(received))
        omega = work.home.find("omega", work.round)
        hooks = []
        if omega is not None:
            hooks = [Pull(2 * local.ssi_weight, anchors=start, weights=work.tensors(omega))]
            fresh = {name: fresh[name] + omega[name] for name in fresh}
        report = work.train(hooks=hooks)
        work.home.keep("omega", fresh, work.round)
        norms = {"omega-norm": _norm(omega or {}), "omega-next": _norm(fresh)}
        return Trained(report, norms)


def _norm(arrays: Mapping[str, NDArray[Any]]) -> float:
    return float(np.sqrt(sum(np.square(a, dtype=np.float64).sum() for a in arrays.values())))

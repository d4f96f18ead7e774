# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD: correct each gradient by how this client's differ from all clients' (1910.06378).

The step uses ``g - c_k + c``.  The paper refreshes ``c_k`` by the gradient at the server's model
(option I, a pass of its own) or by ``c_k - c + (theta - theta_k) / (K lr)`` (option II), which
under SGD is the mean of the raw gradients along the local path.  Under AdamW that quotient is no
gradient, so the refresh here is that mean of local gradients itself, option I's kind of quantity
without its extra pass.  Raw means before correction, FedProx's pull and clipping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.local.work import Plain, Trained, Work
from fedloom.rules import control_names, only_controls
from fedloom.training import StepHook
from fedloom.wire import Arrays


class Correction(StepHook):
    """Add ``c - c_k`` to each gradient and keep the mean of the gradients before that."""

    def __init__(self, shift: Mapping[str, Tensor]) -> None:
        self._shift = shift
        self._sums: dict[str, Tensor] = {}
        self._steps = 0

    def begin(self, named: Mapping[str, nn.Parameter]) -> None:
        """Start the sums at zero."""
        self._sums = {name: torch.zeros_like(p) for name, p in named.items()}

    def after_backward(self, named: Mapping[str, nn.Parameter]) -> None:
        """Record, then correct."""
        self._steps += 1
        for name, parameter in named.items():
            if parameter.grad is not None:
                self._sums[name] += parameter.grad
                parameter.grad += self._shift[name]

    def mean(self) -> dict[str, NDArray[Any]]:
        """Return the mean raw gradient."""
        return {name: (s / self._steps).cpu().numpy() for name, s in self._sums.items()}


class Scaffold(Plain):
    """Local steps with control variates; ``c_k`` stays at home, its move is sent beside theta."""

    def fit(self, work: Work, received: Arrays) -> Trained:
        """Train with corrected gradients and refresh this client's control."""
        common = only_controls(received)
        kept = work.home.find("control", work.round)
        own = {name: np.zeros_like(c) for name, c in common.items()} if kept is None else kept
        hook = Correction(work.tensors({name: c - own[name] for name, c in common.items()}))
        report = work.train(hooks=(hook,))
        fresh = hook.mean()
        work.home.keep("control", fresh, work.round)
        moves = control_names({name: c - own[name] for name, c in fresh.items()})
        norm = float(np.sqrt(sum(np.square(c, dtype=np.float64).sum() for c in fresh.values())))
        return Trained(report, {"control-norm": norm}, moves)

    def beside(self, arrays: Arrays) -> dict[str, NDArray[Any]]:
        """Start all controls at zero."""
        return control_names({name: np.zeros_like(array) for name, array in arrays.items()})

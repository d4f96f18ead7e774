# SPDX-License-Identifier: Apache-2.0
"""Which layers listen to a sender: one gate a layer, soft while it is learnt, open or shut after.

C2C (arXiv 2510.03215, section 3.3) has such gates.  Here the noise is the binary concrete
distribution's (arXiv 1611.00712), drawn once for a row and a layer, as the parameter is a layer's.
"""

# Shapes: B row, L gated layer.

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EDGE = 1e-6


def temperature(step: int, steps: int, first: float = 1.0, last: float = 0.001) -> float:
    """Cool down over the steps that are really taken, the same factor a step.

    >>> temperature(0, 10), temperature(10, 10), temperature(99, 10)
    (1.0, 0.001, 0.001)
    """
    return float(first * (last / first) ** min(step / max(steps, 1), 1.0))


@dataclass(frozen=True)
class Draw:
    """What a training step needs to sample gates."""

    temperature: float
    random: torch.Generator


class LayerGates(nn.Module):
    """One logit a layer.

    Parameters
    ----------
    start : float
        First logit; 0 would count as shut at evaluation while it is open half the time in training.
    """

    def __init__(self, layers: int, start: float) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.full((layers,), start))

    def open(self) -> list[bool]:
        """Tell which are open when nothing is drawn."""
        return (self.logit.detach() > 0).tolist()

    def log_soft(self, rows: int, draw: Draw) -> Tensor:
        """Draw ``log g``, [B, L]: what is added to attention scores; 0 is open, -inf is shut."""
        shape = (rows, len(self.logit))
        u = torch.rand(shape, generator=draw.random).clamp(_EDGE, 1 - _EDGE)
        noise = (u.log() - torch.log1p(-u)).to(self.logit)
        return F.logsigmoid((self.logit + noise) / draw.temperature)

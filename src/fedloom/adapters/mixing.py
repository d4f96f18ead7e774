# SPDX-License-Identifier: Apache-2.0
"""How what a memory read is mixed with attention: the gate, and both at one scale.

FedNL (arXiv 2605.16350, section 2.2, eq. 14): ``y = (1 - alpha) o_softmax + alpha o_memory``.
"""

# Shapes: B sequence, T token, W model width.

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedloom.config import MemoryConfig

_EPS = 1e-6


class MemoryGate(nn.Module):
    """How much of the memory is heard: ``alpha`` in [0, 1].

    Section 2.2's "learnable scalar or vector" is a logit of width 1 or W; ``dynamic`` is a linear
    map of the layer's input to one number a token in TPTT's range, 0.1 to 0.9.  TPTT clips, which
    would cut the gradient of a gate that starts at 0.05 for good; here the sigmoid is squeezed.
    """

    def __init__(self, config: MemoryConfig, *, width: int) -> None:
        super().__init__()
        self.kind = config.gate
        if self.kind in ("vector", "scalar", "fixed"):
            size = width if self.kind == "vector" else 1
            start = torch.full((size,), config.gate_init)
            self.logit = nn.Parameter(start, requires_grad=self.kind != "fixed")
        elif self.kind == "dynamic":
            self.weight = nn.Parameter(torch.zeros(width))
            self.logit = nn.Parameter(torch.full((1,), config.gate_init))

    def forward(self, x: Tensor) -> Tensor:
        """Return alpha for layer input ``x`` [B, T, W]; broadcasts against [B, T, W]."""
        if self.kind == "shut":
            return x.new_zeros(1)
        if self.kind == "open":
            return x.new_ones(1)
        if self.kind == "dynamic":
            score = x.to(self.weight.dtype) @ self.weight + self.logit
            return 0.1 + 0.8 * torch.sigmoid(score)[..., None]
        return torch.sigmoid(self.logit)

    def values(self) -> Tensor:
        """Return the gate as far as it does not depend on the input, for reports."""
        if self.kind in ("shut", "open"):
            return torch.tensor([float(self.kind == "open")])
        return torch.sigmoid(self.logit.detach()).float().cpu()


def unit_rms(x: Tensor) -> Tensor:
    """RMS-normalise the last dimension, without an affine part."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)


def match_rms(x: Tensor, like: Tensor) -> Tensor:
    """Rescale ``x`` to the root mean square that ``like`` has over its last dimension."""
    return unit_rms(x) * (like.pow(2).mean(-1, keepdim=True) + _EPS**2).sqrt()

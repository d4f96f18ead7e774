# SPDX-License-Identifier: Apache-2.0
"""From one layer's features to a receiver's keys and values: a small projector and C2C's.

The small one is a factored linear map for each layer whose middle passes through one shared block:
without the block it is what a closed form can solve for, with it it is more.  C2C's (arXiv
2510.03215, as published in its code) has two separate streams a layer, each as wide as a model.
"""

# Shapes: B row, T token, I input feature, R rank, O output feature, H KV head, N receiver layer.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

C2C_WIDTH = 1024


class Block(nn.Module):
    """``x + W2 gelu(W1 norm(x))``, without biases."""

    def __init__(self, width: int, middle: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.into = nn.Linear(width, middle, bias=False)
        self.out = nn.Linear(middle, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the middle makes of ``x``."""
        added: Tensor = self.out(F.gelu(self.into(self.norm(x))))
        return x + added


class SmallProjector(nn.Module):
    """All layers' factored maps around one shared block.

    Parameters
    ----------
    layers, inputs, outputs, rank : int
        Receiver layers; width of the features; of keys and values together; of the middle.
    weights : int
        Numbers a token that say how strongly keys and values are added, a head each; 0 for none.
    """

    def __init__(self, layers: int, inputs: int, outputs: int, rank: int, weights: int) -> None:
        super().__init__()
        self.down_NIR = nn.Parameter(torch.empty(layers, inputs, rank))
        self.shift_NR = nn.Parameter(torch.zeros(layers, rank))
        self.block = Block(rank, 2 * rank)
        self.up_NRO = nn.Parameter(torch.empty(layers, rank, outputs))
        self.base_NO = nn.Parameter(torch.zeros(layers, outputs))
        self.weigh = nn.Linear(rank, weights) if weights else None
        nn.init.normal_(self.down_NIR, std=inputs**-0.5)
        nn.init.normal_(self.up_NRO, std=rank**-0.5)

    def forward(self, n: int, x_BTI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, T, O] of the ``n``-th layer, and weights in (0, 1) if it has some."""
        middle = self.block(x_BTI @ self.down_NIR[n] + self.shift_NR[n])
        weight = torch.sigmoid(self.weigh(middle)) if self.weigh is not None else None
        return middle @ self.up_NRO[n] + self.base_NO[n], weight

    @staticmethod
    def count(layers: int, inputs: int, outputs: int, rank: int, weights: int) -> int:
        """Count the parameters without making them."""
        each = inputs * rank + rank + rank * outputs + outputs
        shared = rank + 4 * rank * rank + (rank * weights + weights if weights else 0)
        return layers * each + shared


class C2CStream(nn.Module):
    """Keys or values of one layer, as in C2C: 3 layers of width 1024 and a branch for weights."""

    def __init__(self, inputs: int, outputs: int, weights: int, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(inputs, width)
        self.trunk = Block(width, width)
        self.branch = Block(width, width)
        self.out = nn.Linear(width, outputs)
        self.weigh = (
            nn.Sequential(Block(width, width), nn.Linear(width, weights)) if weights else None
        )

    def forward(self, x_BTI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, T, O] and weights [B, T, H]."""
        middle = self.trunk(self.into(x_BTI))
        weight = torch.sigmoid(self.weigh(middle)) if self.weigh is not None else None
        return self.out(self.branch(middle)), weight


class C2CProjector(nn.Module):
    """All layers' streams; nothing is shared, and keys do not see values.

    ``inputs`` and ``outputs`` count keys and values together, as in ``SmallProjector``; of the
    inputs the first half of each source are keys.
    """

    def __init__(self, layers: int, inputs: int, outputs: int, weights: int, width: int) -> None:
        super().__init__()
        shape = (inputs // 2, outputs // 2, weights // 2, width)
        self.keys = nn.ModuleList(C2CStream(*shape) for _ in range(layers))
        self.values = nn.ModuleList(C2CStream(*shape) for _ in range(layers))

    def forward(self, n: int, x_BTI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return outputs [B, T, O] of the ``n``-th layer, and weights in (0, 1) if it has some."""
        keys, values = x_BTI.chunk(2, dim=-1)
        (k, a), (v, b) = self.keys[n](keys), self.values[n](values)
        weight = torch.cat((a, b), dim=-1) if a is not None and b is not None else None
        return torch.cat((k, v), dim=-1), weight

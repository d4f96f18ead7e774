# SPDX-License-Identifier: Apache-2.0
"""EfficientNet-lite0 without its classifier, with the names of the released weights.

Inverted residual blocks without squeeze and excitation, ReLU6, and TensorFlow's "same" padding,
which is uneven where a stride is two (Tan & Le, arXiv 1905.11946; lite0: TensorFlow's tpu models).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 1280
STAGES = (  # blocks, kernel, stride of the first, expansion, width
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM = 32


class SameConv(nn.Conv2d):
    """A convolution whose output is its input's size over the stride, rounded up."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1):
        super().__init__(inner, outer, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Pad, the odd pixel at the end, and convolve: ``[B, inner, H, W]`` to outer."""
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        lacking = [max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:]]
        up, left = (n // 2 for n in lacking)
        down, right = (n - n // 2 for n in lacking)
        return super().forward(functional.pad(x, (left, right, up, down)))


def _norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class Block(nn.Module):
    """Widen, convolve each channel alone, narrow; add the input where the shape allows."""

    def __init__(self, inner: int, outer: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inner * expansion
        self.expands, self.adds = expansion > 1, stride == 1 and inner == outer
        if self.expands:
            self._expand_conv, self._bn0 = SameConv(inner, wide, 1), _norm(wide)
        self._depthwise_conv = SameConv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv, self._bn2 = SameConv(wide, outer, 1), _norm(outer)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, inner, H, W]`` to ``[B, outer, H / stride, W / stride]``."""
        y = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        narrow: Tensor = self._bn2(self._project_conv(y))
        return x + narrow if self.adds else narrow


class EfficientNetLite0(nn.Module):
    """4.65M parameters with the classifier of ImageNet, which is left out here."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, _STEM, 3, 2), _norm(_STEM)
        self._blocks = nn.ModuleList()
        inner = _STEM
        for count, kernel, stride, expansion, outer in STAGES:
            for i in range(count):
                self._blocks.append(Block(inner, outer, kernel, 1 if i else stride, expansion))
                inner = outer
        self._conv_head, self._bn1 = SameConv(inner, WIDTH, 1), _norm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the last map: pictures ``[B, 3, H, W]`` to ``[B, 1280]``."""
        x = functional.relu6(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = functional.relu6(self._bn1(self._conv_head(x)))
        return torch.mean(x, dim=(2, 3))

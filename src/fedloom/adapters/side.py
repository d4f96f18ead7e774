# SPDX-License-Identifier: Apache-2.0
"""The side adapter: what an exact LoRA rule cannot put back into LoRA, beside the frozen weights.

FLoRA (arXiv 2409.05976) and FedEx-LoRA (2410.09432) add to ``W0`` what their clients' adapters
have done.  Here ``W0`` stays as it is, also where it has four bits and would round the sum away:
each projection's output gets ``(x A^T) B^T`` of a thin pair that is not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import peft
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedloom.errors import Refusal
from fedloom.rules.exchange import SIDE_A, SIDE_B


class SideAdapter:
    """Thin pairs on the projections that peft has put LoRA on; silent while peft's is disabled."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self.arrays: dict[str, NDArray[Any]] = {}
        """What hangs, by the names it has on the wire."""

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take these pairs in the place of all that were there.

        Raises
        ------
        Refusal
            For a projection without LoRA, or a pair that does not fit it.
        """
        self.clear()
        self.arrays = dict(arrays)
        for name, a in arrays.items():
            if name.endswith(SIDE_A):
                module = name[: -len(SIDE_A)]
                self._hang(module, a, arrays.get(module + SIDE_B))

    def clear(self) -> None:
        """Take all pairs off."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.arrays = [], {}

    def _hang(self, module: str, a: NDArray[Any], b: NDArray[Any] | None) -> None:
        try:
            layer = self._model.get_submodule(module)
        except AttributeError:
            layer = None
        if not isinstance(layer, peft.tuners.lora.LoraLayer):
            raise Refusal(f"array {module + SIDE_A}: the model has no LoRA there; expected one")
        base = cast(nn.Module, layer.get_base_layer())
        wanted = (layer.out_features, a.shape[0]), (a.shape[0], layer.in_features)
        came = (None if b is None else b.shape), a.shape
        if b is None or came != wanted:
            raise Refusal(f"array {module + SIDE_B}: pair {came} came, expected {wanted}")
        place = next(base.parameters()).device
        a_t, b_t = (torch.from_numpy(np.ascontiguousarray(x)).to(place) for x in (a, b))
        self._handles.append(base.register_forward_hook(_adds(layer, a_t, b_t)))


def _adds(layer: Any, a: Tensor, b: Tensor) -> Callable[..., Tensor | None]:
    def add(_base: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if layer.disable_adapters:
            return None
        wide = output.to(torch.promote_types(output.dtype, a.dtype))
        return (wide + (inputs[0].to(a.dtype) @ a.T) @ b.T).to(output.dtype)

    return add


def load_side(model: peft.PeftModel, folder: Path) -> SideAdapter:
    """Hang the side adapter that a run left in its ``adapter/`` on a model that peft has loaded.

    ``peft.PeftModel.from_pretrained(base, folder)`` loads the rest.  A folder without
    ``side.safetensors`` needs no side, and gets an empty one.
    """
    side = SideAdapter(model)
    path = folder / "side.safetensors"
    if path.exists():
        side.load(load_file(path))
    return side


def saved_arrays(folder: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of a run's ``adapter/``: LoRA, memory and side, for ``Adapter.load``."""
    arrays: dict[str, NDArray[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        arrays |= load_file(path)
    return arrays

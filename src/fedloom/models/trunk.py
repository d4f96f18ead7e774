# SPDX-License-Identifier: Apache-2.0
"""The layers below the lowest adapted one: frozen, so each row's way through them is walked once.

With ``last-layers`` set, nothing that is trained lies below: what a row looks like when it arrives
there never changes.  On a CPU this is most of an epoch's work, done once instead of every epoch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedloom.errors import Refusal

_PROBE = 5  # tokens of the row on which a cut model is held against the whole one


class Trunk:
    """Remember hidden states at the cut, and run what is above it.

    Parameters
    ----------
    model : PreTrainedModel
        The frozen model, with or without an adapter above the cut.
    first : int
        Index of the lowest adapted layer: layers below it are the trunk.
    budget : int
        Bytes of hidden states to keep; rows beyond are computed each time.

    Raises
    ------
    Refusal
        If this kind of model cannot be cut: its layers above, fed with what those below made, give
        something else than the whole.
    """

    def __init__(self, model: PreTrainedModel, first: int, budget: int) -> None:
        self._decoder = cast(Any, model.get_decoder())
        if not hasattr(self._decoder, "norm"):
            raise _cannot(self._decoder)
        layers = list(self._decoder.layers)
        kinds = getattr(model.config.get_text_config(), "layer_types", None)
        if kinds and kinds[first:] != kinds[: len(kinds) - first]:  # masks go by place in the loop
            raise _cannot(self._decoder)
        self._low, self._high = nn.ModuleList(layers[:first]), nn.ModuleList(layers[first:])
        self._device = next(model.parameters()).device
        self._kept: dict[tuple[int, ...], Tensor] = {}
        self._left = 0
        self._check_cut()
        self._left = budget

    def hidden(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Return the decoder's output [B, T, W] for token rows, right-padded with what comes."""
        # Not inference tensors, wherever this is called: training uses what scoring kept.
        with torch.inference_mode(False), torch.no_grad():
            made = [self._of(tuple(row)) for row in rows]
        padded = nn.utils.rnn.pad_sequence(made, batch_first=True).to(self._device)
        with self._only(self._high, self._decoder.norm):
            found: Tensor = self._decoder(inputs_embeds=padded, use_cache=False).last_hidden_state
        return found

    def kept(self) -> int:
        """Count the rows that are remembered."""
        return len(self._kept)

    def _of(self, row: tuple[int, ...]) -> Tensor:
        """Return one row at the cut, [T, W]; alone in its batch, so that company changes no bit."""
        if row in self._kept:
            return self._kept[row]
        ids = torch.tensor([row], device=self._device)
        with self._only(self._low, nn.Identity()):
            made: Tensor = self._decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        size = made.numel() * made.element_size()
        if size <= self._left:
            self._left -= size
            self._kept[row] = made
        return made

    @contextmanager
    def _only(self, layers: nn.ModuleList, norm: nn.Module) -> Iterator[None]:
        """Let the decoder consist of these layers for as long as the block lasts."""
        decoder = self._decoder
        before = decoder.layers, decoder.norm
        decoder.layers, decoder.norm = layers, norm
        try:
            yield
        finally:
            decoder.layers, decoder.norm = before

    def _check_cut(self) -> None:
        ids = list(range(1, 1 + _PROBE))
        with torch.no_grad():
            whole = self._decoder(
                input_ids=torch.tensor([ids], device=self._device), use_cache=False
            ).last_hidden_state
            apart = self.hidden([ids])
        if not torch.allclose(whole, apart, rtol=1e-3, atol=1e-3 * float(whole.abs().max())):
            raise _cannot(self._decoder)


def _cannot(decoder: nn.Module) -> Refusal:
    name = type(decoder).__name__
    return Refusal(f"train.keep-trunk: a {name} cannot be cut between layers; set it to 0")

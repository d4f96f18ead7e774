# SPDX-License-Identifier: Apache-2.0
"""From support text to the sums of which fast weights are made, in one forward pass a sequence.

A pair is two neighbouring tokens of one sequence, both unmasked.  Its key is the residual stream at
t.  Its value is the same place's at t + 1 for a middle memory, and what the model's input embedding
module returns for token t + 1 for the output memory: no position is in it, and Gemma's scale is.
All places are collected on the way, before any memory is read, so that deeper sums do not
depend on shallower memories (FAAST, arXiv 2605.04651, as in its released code).
"""

# Shapes: B batch, T token, D width of the residual stream, N pair.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from fedloom.adapters.fast_weights import ReadOut, decoder_of, hung_on, module_at
from fedloom.rules.statistics import Gram

Grams = dict[int, Gram]
"""Place -> sums over its pairs."""


@dataclass(frozen=True)
class Passage:
    """A sequence of support text."""

    ids: tuple[int, ...]
    first: int = 1
    """Index of the first token that is to be predicted: those before are read only, as a prompt."""


def compile_sums(
    model: PreTrainedModel,
    passages: Iterable[Passage],
    *,
    places: Sequence[int],
    readouts: Mapping[int, ReadOut] | None = None,
    batch_size: int = 1,
) -> Grams:
    """Sum over all pairs of ``passages``, at all ``places`` in one pass of each passage.

    Nothing is trained and no graph is made: the model runs in inference mode.

    Parameters
    ----------
    readouts : mapping, optional
        Those of the middle places: their gates weigh the values.
    batch_size : int
        Passages that are padded to one another and read together.
    """
    width = model.config.get_text_config().hidden_size
    sums = {place: Gram.zero(width, width) for place in places}
    device = model.get_input_embeddings().weight.device
    for batch in _batches(passages, batch_size):
        length = max(len(p.ids) for p in batch)
        ids = torch.tensor([[*p.ids, *[0] * (length - len(p.ids))] for p in batch], device=device)
        real = torch.tensor([[i < len(p.ids) for i in range(length)] for p in batch], device=device)
        first = torch.tensor([p.first for p in batch], device=device)
        made = batch_pairs(model, ids, real, places, first_B=first, readouts=readouts)
        for place, (keys_ND, values_ND) in made.items():
            if len(keys_ND):
                sums[place] += Gram.of(_array(keys_ND), _array(values_ND))
    return sums


@torch.inference_mode()
def batch_pairs(
    model: PreTrainedModel,
    ids_BT: Tensor,
    real_BT: Tensor,
    places: Sequence[int],
    *,
    first_B: Tensor | None = None,
    readouts: Mapping[int, ReadOut] | None = None,
) -> dict[int, tuple[Tensor, Tensor]]:
    """Return keys ``[N, D]`` and values ``[N, D]`` of one batch at each place.

    Parameters
    ----------
    real_BT : Tensor
        False where padding stands, on either side.
    first_B : Tensor, optional
        For each row the index among its real tokens of the first that is predicted.
    """
    real_BT = real_BT.bool()
    index_BT = real_BT.long().cumsum(1) - 1
    paired = real_BT[:, :-1] & real_BT[:, 1:]
    if first_B is not None:
        paired &= index_BT[:, 1:] >= first_B[:, None]
    memory, last = hung_on(model), len(decoder_of(model).layers)
    with memory.off() if memory else nullcontext():
        states = residuals(model, ids_BT, places, real_BT=real_BT)
    made = {}
    for place, stream_BTD in states.items():
        keys_ND = stream_BTD[:, :-1][paired]
        if place == last:
            values_ND = model.get_input_embeddings()(ids_BT)[:, 1:][paired]
        else:
            values_ND = stream_BTD[:, 1:][paired]
            if readouts and place in readouts:
                values_ND = readouts[place].gated(keys_ND, values_ND)
        made[place] = keys_ND, values_ND
    return made


def residuals(
    model: PreTrainedModel,
    ids_BT: Tensor,
    places: Sequence[int],
    *,
    real_BT: Tensor | None = None,
) -> dict[int, Tensor]:
    """Return the residual stream ``[B, T, D]`` at each place, in one forward pass of the decoder.

    What hangs on the model is heard below a place, and at it if it was hung first.
    """
    decoder, seen = decoder_of(model), dict[int, Tensor]()
    how: dict[str, Any] = {}
    if real_BT is not None and not real_BT.all():
        # Positions count real tokens, so that padding on the left moves no rotation.
        how = {
            "attention_mask": real_BT.long(),
            "position_ids": (real_BT.long().cumsum(1) - 1).clamp_min(0),
        }
    with _tapped(decoder, places, seen):
        decoder(input_ids=ids_BT, use_cache=False, **how)
    return {place: seen[place] for place in places}


@contextmanager
def _tapped(decoder: Any, places: Sequence[int], seen: dict[int, Tensor]) -> Iterator[None]:
    def tap(place: int) -> Any:
        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            seen[place] = inputs[0]

        return note

    handles = [module_at(decoder, p).register_forward_pre_hook(tap(p)) for p in places]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batches(passages: Iterable[Passage], size: int) -> Iterator[list[Passage]]:
    batch: list[Passage] = []
    for passage in passages:
        if len(passage.ids) > max(passage.first, 1):  # else it holds no pair: no pass for it
            batch.append(passage)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _array(x: Tensor) -> NDArray[Any]:
    narrow = x.dtype in (torch.bfloat16, torch.float16)  # numpy has no bfloat16
    made: NDArray[np.floating[Any]] = (x.float() if narrow else x).numpy(force=True)
    return made

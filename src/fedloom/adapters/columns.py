# SPDX-License-Identifier: Apache-2.0
"""Foreign slots in a model's attention: some layers have them, some do not, each exactly.

transformers makes one mask for all layers of a kind and takes for granted that they hold the same
tokens.  The attention function registered here puts the mask's columns for foreign slots on layer
by layer, so that a layer without them computes what it would compute alone.  What a pass needs to
know travels in a context variable; where it is not set, the functions are transformers' own.
"""

# Shapes: B row, Q query, P foreign slot, N own token.

from __future__ import annotations

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from fedloom.errors import Refusal

NAME = "fedloom_columns"


@dataclass(frozen=True)
class Columns:
    """The foreign slots of one pass.

    Attributes
    ----------
    first : int
        Slots of the layer by which transformers sizes the mask: the first that sees everything.
    real : mapping
        Layer -> [B, P], False for padding; layers without slots are not there.
    bias : mapping
        Layer -> [B, P], added to the scores: the logarithm of gates, and each sender's own.
    """

    first: int
    real: Mapping[int, Tensor]
    bias: Mapping[int, Tensor]

    def widen(self, layer: int, own: Tensor, dtype: torch.dtype) -> Tensor:
        """Put a layer's slots before its own tokens in the mask, [B, 1, Q, P + N]."""
        if layer not in self.real:
            return own
        real = self.real[layer][:, None, None].expand(-1, -1, own.shape[2], -1)
        seen = torch.cat((real, own.expand(len(real), -1, -1, -1)), dim=-1)
        if layer not in self.bias:
            return seen
        added = self.bias[layer].to(dtype)[:, None, None].expand_as(real)
        scores = torch.cat((added, added.new_zeros(()).expand(*seen.shape[:3], own.shape[3])), -1)
        return scores.masked_fill(~seen, torch.finfo(dtype).min)


_NOW: contextvars.ContextVar[Columns | None] = contextvars.ContextVar("columns", default=None)


@contextmanager
def showing(columns: Columns | None) -> Iterator[None]:
    """Let the passes of this block see foreign slots, in this thread alone."""
    token = _NOW.set(columns)
    try:
        yield
    finally:
        _NOW.reset(token)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **told: Any,
) -> tuple[Tensor, None]:
    columns = _NOW.get()
    if columns is not None:
        assert attention_mask is not None  # ``_mask`` always writes it out
        layer = module.layer_idx
        attention_mask = columns.widen(int(layer), attention_mask, query.dtype)  # type: ignore[arg-type]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **told)  # type: ignore[no-any-return]


def _mask(*args: Any, **told: Any) -> Tensor | None:
    """Write the mask of a layer's own tokens: foreign slots are taken off its sizes again."""
    columns = _NOW.get()
    if columns is not None:
        told["allow_is_causal_skip"] = False
        if told.get("local_size") is None:  # layers that slide a window hold no foreign slots
            told["kv_length"] -= columns.first
            told["q_offset"] -= columns.first
    return sdpa_mask(*args, **told)  # type: ignore[no-any-return]


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def teach(model: PreTrainedModel) -> None:
    """Let a model use these functions, for good: without slots they are sdpa's, bit for bit.

    Raises
    ------
    Refusal
        If the model does not attend by sdpa.
    """
    now = model.config._attn_implementation
    if now == NAME:
        return
    if now != "sdpa":
        raise Refusal(
            f"a model that attends by {now}: foreign slots need sdpa; load it with"
            ' attn_implementation="sdpa"'
        )
    model.set_attn_implementation(NAME)

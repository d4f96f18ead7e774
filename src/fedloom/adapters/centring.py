# SPDX-License-Identifier: Apache-2.0
"""Where raw keys and queries lie on average, so that the memory can look past it.

Raw keys of a pretrained head share a large mean: two of them are alike before either says what it
is about, and an associative memory tells them apart badly (SmolLM2-135M, layer 18: the query that
copies a token finds its key first among 39 at cosine 0.33 against 0.14 in 56 % of cases; centred,
at 0.79 against -0.02 in 95 %).  A learnt centre starts at the frozen model's means over one short
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

SINKS = 4  # first tokens, whose keys are unlike all others (arXiv 2309.17453)

TEXT = (
    "The harbour lay quiet under a pale sky. Two boats had come in before noon, and the men who"
    " unloaded them spoke of prices, of the weather in the north and of a letter that had not"
    " arrived. In the office, Mrs. Lind wrote the numbers down: 48 barrels, 16 crates, 7 lengths of"
    " rope. She asked who would pay for the broken lamp, and nobody answered. Later that year a new"
    " road was opened between the town and the mill; it saved an hour, and it changed who met whom."
    " Some questions are easy to ask and hard to settle. What does a good map leave out? How many"
    " words does a child know at three? A science begins when people agree on how to count, but it"
    " grows when someone counts again and finds a different sum. By evening the wind had turned,"
    " the first lights were lit along the quay, and the last train left at ten past nine."
)
"""A text of no one's data; what is in it matters little."""


def mean_projections(
    model: PreTrainedModel, attentions: Sequence[nn.Module], ids: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Return each attention layer's mean raw query [H * G * D] and key [H * D] over a text.

    Parameters
    ----------
    ids
        Token ids [1, T] of the text, T above 4.
    """
    seen: dict[int, Tensor] = {}

    def keep(module: nn.Module, _inputs: Any, output: Tensor) -> None:
        seen[id(module)] = output[0, SINKS:].mean(0).detach()

    pairs = [(a.get_submodule("q_proj"), a.get_submodule("k_proj")) for a in attentions]
    handles = [module.register_forward_hook(keep) for pair in pairs for module in pair]
    try:
        with torch.no_grad():
            cast(Any, model.get_decoder())(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [(seen[id(q)], seen[id(k)]) for q, k in pairs]

# SPDX-License-Identifier: Apache-2.0
"""Answers of several tokens: their training loss, and how likely a model finds each of a few.

The output matrix is applied at the answers' positions alone.  Candidates share their prompt: it is
read once, and what the model holds of it, memory included, is repeated for each of them.
"""

# Shapes: B row, T token, N labelled token, A candidate, L token of a candidate.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fedloom.models.trunk import Trunk


@dataclass(frozen=True)
class Labelled:
    """Tokens, some of which are to be learnt."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    """Ascending positions in ``ids`` of the tokens to be predicted; none is 0."""
    weights: tuple[float, ...] = ()
    """How much each of ``labels`` counts in the loss; none given: all the same."""

    def __post_init__(self) -> None:
        if not self.labels or min(self.labels) < 1 or max(self.labels) >= len(self.ids):
            raise ValueError(f"labels {self.labels} in a row of {len(self.ids)} tokens")
        if self.weights and (len(self.weights) != len(self.labels) or min(self.weights) <= 0):
            raise ValueError(f"weights {self.weights} of {len(self.labels)} labels")


def span_loss(
    model: PreTrainedModel, batch: Sequence[Labelled], trunk: Trunk | None = None
) -> Tensor:
    """Return the weighted mean cross-entropy of a batch's labelled tokens, in nats."""
    device = model.get_output_embeddings().weight.device
    hidden = _hidden(model, [row.ids for row in batch], trunk, device)
    where = [(i, at) for i, row in enumerate(batch) for at in row.labels]
    rows, places = torch.tensor(where, device=device).unbind(1)
    labels = torch.tensor([batch[i].ids[at] for i, at in where], device=device)
    logits_NV = model.get_output_embeddings()(hidden[rows, places - 1])
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    if not any(row.weights for row in batch):
        return F.cross_entropy(logits_NV.to(wide), labels)
    weights = [w for row in batch for w in row.weights or (1.0,) * len(row.labels)]
    each_N = F.cross_entropy(logits_NV.to(wide), labels, reduction="none")
    weights_N = torch.tensor(weights, device=device, dtype=wide)
    return (each_N * weights_N).sum() / weights_N.sum()


def candidate_scores(
    model: PreTrainedModel,
    prompt: Sequence[int],
    candidates: Sequence[Sequence[int]],
    cache: DynamicCache,
    *,
    chunk: int = 256,
) -> tuple[Tensor, int]:
    """Score candidates as what comes after the prompt.

    Parameters
    ----------
    cache
        A fresh cache; for a model with memory, a ``MemoryCache``.
    chunk
        Tokens of the prompt that are read at once.

    Returns
    -------
    Tensor
        Each candidate's log-probability, [A] in float64, summed over its tokens.
    int
        The token that the model finds likeliest right after the prompt.
    """
    device = model.get_output_embeddings().weight.device
    ids = torch.tensor([list(prompt)], device=device)
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk]
        last = _read(decoder, piece, cache)[:, -1:]
    cache.batch_repeat_interleave(len(candidates))
    lengths = torch.tensor([len(c) for c in candidates], device=device)
    padded = [[*c, *[0] * (int(lengths.max()) - len(c))] for c in candidates]
    labels_AL = torch.tensor(padded, device=device)
    first = last.expand(len(candidates), -1, -1)
    rest = _read(decoder, labels_AL[:, :-1], cache) if labels_AL.shape[1] > 1 else first[:, :0]
    logits_ALV = head(torch.cat((first, rest), dim=1)).double()
    each = logits_ALV.log_softmax(-1).gather(2, labels_AL[..., None]).squeeze(2)
    real = torch.arange(labels_AL.shape[1], device=device) < lengths[:, None]
    return (each * real).sum(1), int(logits_ALV[0, 0].argmax())


def _read(decoder: Any, ids: Tensor, cache: DynamicCache) -> Tensor:
    hidden: Tensor = decoder(input_ids=ids, cache=cache, use_cache=True).last_hidden_state
    return hidden


def _hidden(
    model: PreTrainedModel,
    rows: Sequence[Sequence[int]],
    trunk: Trunk | None,
    device: torch.device,
) -> Tensor:
    """Return the decoder's output for right-padded rows: causal attention sees no padding."""
    if trunk is not None:
        return trunk.hidden(rows)
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return hidden

# SPDX-License-Identifier: Apache-2.0
"""What a language model says right after a prompt: one distribution a prompt, none elsewhere.

Letter-only training and multiple-choice scoring need the logits of a single position, so the
output matrix (a fifth of a small LLM's work) is applied there alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from fedloom.models.trunk import Trunk


@dataclass(frozen=True)
class Prompts:
    """A batch of prompts, right-padded."""

    ids_BT: Tensor
    last_B: Tensor
    """Index of each prompt's last token."""
    tokens: int
    """Real tokens in the batch."""
    rows: tuple[tuple[int, ...], ...]
    """The prompts as they came."""

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], device: torch.device) -> Prompts:
        """Pad ``prompts`` on the right; none may be empty."""
        if not prompts or not all(prompts):
            raise ValueError(
                "a batch needs at least one prompt, and each prompt at least one token"
            )
        lengths = [len(prompt) for prompt in prompts]
        rows = [[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts]
        ids = torch.tensor(rows, device=device)
        last = torch.tensor(lengths, device=device) - 1
        return cls(ids, last, sum(lengths), tuple(map(tuple, prompts)))


def answer_logits(model: PreTrainedModel, prompts: Prompts, trunk: Trunk | None = None) -> Tensor:
    """Return the next-token logits after each prompt, [B, vocabulary] in float32 at least.

    No attention mask is passed: padding stands after the last real token, where causal attention
    and the memory cannot see it, and without a mask attention takes its fast causal path.
    """
    if trunk is not None:
        hidden = trunk.hidden(prompts.rows)
    else:
        hidden = model.get_decoder()(input_ids=prompts.ids_BT, use_cache=False).last_hidden_state
    rows = torch.arange(len(prompts.last_B), device=hidden.device)
    logits: Tensor = model.get_output_embeddings()(hidden[rows, prompts.last_B])
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def answer_loss(
    model: PreTrainedModel, prompts: Prompts, answers: Tensor, trunk: Trunk | None = None
) -> Tensor:
    """Return the mean cross-entropy of the answer token [B] over the whole vocabulary, in nats."""
    return F.cross_entropy(answer_logits(model, prompts, trunk), answers)

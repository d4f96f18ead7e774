# SPDX-License-Identifier: Apache-2.0
"""How good an adapter is on rows that it never trained on: sums that add up over clients.

Scores leave a node as sums (count, correct, cross-entropy and its square), never row by row, so
that intervals can be drawn at the other end and nobody learns which row was hard.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fedloom.models.answers import Prompts, answer_logits


class ChoiceExample(Protocol):
    """A prompt whose answer is one of a few tokens."""

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Tokens before the answer."""

    @property
    def letter_ids(self) -> Sequence[int]:
        """The token of each choice, in the order of the choices."""

    @property
    def gold(self) -> int:
        """Index of the right choice."""


@dataclass(frozen=True)
class ChoiceScores:
    """Sums over test rows; cross-entropies in nats."""

    examples: int = 0
    correct: int = 0
    """Rows whose largest logit among the letters is the gold letter's."""
    first_token_correct: int = 0
    """Rows whose largest logit over the whole vocabulary is the gold letter's."""
    gold_ce_sum: float = 0.0
    """Of the gold letter over the whole vocabulary: what training minimises."""
    gold_ce_sq_sum: float = 0.0
    letter_ce_sum: float = 0.0
    """Of the gold letter among the letters alone; ln(choices) is chance."""
    letter_ce_sq_sum: float = 0.0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: ChoiceScores) -> ChoiceScores:
        mine, theirs = asdict(self), asdict(other)
        return ChoiceScores(**{key: mine[key] + theirs[key] for key in mine})


def score_choices(
    model: PreTrainedModel, examples: Sequence[ChoiceExample], *, batch_size: int
) -> ChoiceScores:
    """Score every example zero-shot; no gradient, no parameter moves."""
    was_training = model.training
    model.eval()
    total = ChoiceScores()
    ordered = sorted(examples, key=lambda example: len(example.prompt_ids))
    with torch.inference_mode():
        for start in range(0, len(ordered), batch_size):
            total += _score(model, ordered[start : start + batch_size])
    model.train(was_training)
    return total


def _score(model: PreTrainedModel, batch: Sequence[ChoiceExample]) -> ChoiceScores:
    started = time.perf_counter()
    device = model.get_output_embeddings().weight.device
    prompts = Prompts.of([example.prompt_ids for example in batch], device)
    logits = answer_logits(model, prompts).double()
    letters = torch.tensor([list(example.letter_ids) for example in batch], device=device)
    gold = torch.tensor([example.gold for example in batch], device=device)
    gold_token = letters.gather(1, gold[:, None])
    among = logits.gather(1, letters)
    gold_ce = -logits.log_softmax(1).gather(1, gold_token).squeeze(1)
    letter_ce = -among.log_softmax(1).gather(1, gold[:, None]).squeeze(1)
    return ChoiceScores(
        examples=len(batch),
        correct=_count(among.argmax(1) == gold),
        first_token_correct=_count(logits.argmax(1) == gold_token.squeeze(1)),
        gold_ce_sum=float(gold_ce.sum()),
        gold_ce_sq_sum=float(gold_ce.square().sum()),
        letter_ce_sum=float(letter_ce.sum()),
        letter_ce_sq_sum=float(letter_ce.square().sum()),
        tokens=prompts.tokens,
        seconds=time.perf_counter() - started,
    )


def _count(hits: Tensor) -> int:
    return int(hits.sum())

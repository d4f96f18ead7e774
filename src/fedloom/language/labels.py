# SPDX-License-Identifier: Apache-2.0
"""Classes by prompt: ``Review: {text}`` and ``Sentiment: {label}``, the label's logit decides.

FAAST's text classification (arXiv 2605.04651; prompt, word limit and label logits of its released
code), with an output memory compiled from labelled prompts.  Where the code sets alpha by hand for
each number of shots and repeats its 872 test rows to 5000, here alpha and r come from validation
rows, and each row counts once.
"""

# Shapes: N row, C class, D width of the residual stream.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.adapters.fast_sums import Passage, residuals
from fedloom.adapters.fast_weights import decoder_of, mix
from fedloom.data.labelled import Labelled
from fedloom.errors import Refusal
from fedloom.evaluation import RowScore, score_rows
from fedloom.language.choosing import MATCHED, SHARES
from fedloom.models.base import Base
from fedloom.models.tokenizer import Tokenizer
from fedloom.rules.solving import Factorisation
from fedloom.rules.statistics import Gram

WORDS = 100
"""The paper cuts SST-2 at 100 words, IMDB at 300."""


@dataclass(frozen=True)
class Asked:
    """A prompt whose answer is one of the classes' tokens (``evaluation.ChoiceExample``)."""

    prompt_ids: tuple[int, ...]
    letter_ids: tuple[int, ...]
    gold: int


@dataclass(frozen=True)
class Form:
    """How rows become prompts."""

    before: str = "Review: "
    after: str = "\nSentiment:"
    words: int = WORDS

    def prompt(self, text: str) -> str:
        """Return the prompt up to where the label stands."""
        return f"{self.before}{' '.join(text.split()[: self.words])}{self.after}"


def questions(
    data: Labelled, rows: Sequence[int], tokenizer: Tokenizer, form: Form | None = None
) -> list[Asked]:
    """Ask for each row's class.

    Labels that begin with the same tokens share them as the end of the prompt, and are told apart
    by the next.

    Raises
    ------
    Refusal
        If the next does not tell all classes apart, or the rows are no texts.
    """
    how = form or Form()
    stem, letters = _labels(data.classes, tokenizer)
    return [
        Asked(
            (*tokenizer.encode(how.prompt(_text(data, row))), *stem), letters, int(data.labels[row])
        )
        for row in rows
    ]


def lessons(
    data: Labelled,
    rows: Sequence[int],
    tokenizer: Tokenizer,
    form: Form | None = None,
    *,
    answers_only: bool = False,
) -> list[Passage]:
    """Turn labelled rows into support: each prompt with its label and a line's end.

    Parameters
    ----------
    answers_only : bool
        Learn the label's tokens alone, and not those of the text; the paper learns all.
    """
    how, made = form or Form(), []
    for row in rows:
        prompt = tokenizer.encode(how.prompt(_text(data, row)))
        answer = _encoded(f" {data.classes[int(data.labels[row])]}\n", tokenizer)
        made.append(Passage((*prompt, *answer), len(prompt) if answers_only else 1))
    return made


def classify(base: Base, asked: Sequence[Asked], *, batch_size: int = 8) -> list[RowScore]:
    """Answer with whatever hangs on the model; right is the largest logit among the labels."""
    return score_rows(base.model, asked, batch_size=batch_size)


@dataclass(frozen=True)
class LabelPoint:
    """How one setting does on the validation rows."""

    alpha: float
    r: float
    accuracy: float
    cross_entropy: float
    """Mean, of the right label among the labels."""


def choose_for_labels(
    base: Base,
    gram: Gram,
    asked: Sequence[Asked],
    *,
    alphas: Sequence[float] = (0.4, 0.6, 0.8, 1.0),
    match_scale: bool = False,
) -> tuple[LabelPoint, list[LabelPoint]]:
    """Return the best of all alphas and shares on validation rows, and all of them.

    The best has the smallest cross-entropy: accuracy moves in steps of a row.  ``r = 0`` is among
    them.  Each row is read once, however many settings are tried.

    Parameters
    ----------
    asked : sequence of Asked
        Validation rows; not those of the support, and not those that are reported.
    """
    states_ND = _last_states(base, asked)
    factorised, points = Factorisation.of(gram), []
    gold_N = np.array([each.gold for each in asked])
    for alpha in alphas:
        weights = torch.from_numpy(factorised.solve(alpha=alpha).weights).float()
        for r in (0.0, *(MATCHED if match_scale else SHARES)):
            logits_NC = _label_logits(base, asked, states_ND, weights, r, match_scale)
            points.append(_point(alpha, r, logits_NC, gold_N))
    return min(points, key=lambda point: point.cross_entropy), points


def _point(alpha: float, r: float, logits_NC: Tensor, gold_N: NDArray[np.int64]) -> LabelPoint:
    log_NC = logits_NC.double().log_softmax(1).numpy(force=True)
    right = float((log_NC.argmax(1) == gold_N).mean())
    return LabelPoint(alpha, r, right, float(-log_NC[np.arange(len(gold_N)), gold_N].mean()))


@torch.inference_mode()
def _last_states(base: Base, asked: Sequence[Asked]) -> Tensor:
    last = len(decoder_of(base.model).layers)
    made = []
    for each in asked:
        ids = torch.tensor([each.prompt_ids], device=base.model.device)
        made.append(residuals(base.model, ids, [last])[last][0, -1])
    return torch.stack(made)


@torch.inference_mode()
def _label_logits(
    base: Base, asked: Sequence[Asked], states_ND: Tensor, w: Tensor, r: float, match_scale: bool
) -> Tensor:
    mixed = mix(states_ND, w.to(states_ND.device), r, match_scale=match_scale) if r else states_ND
    logits = base.model.get_output_embeddings()(decoder_of(base.model).norm(mixed))
    letters = torch.tensor([each.letter_ids for each in asked], device=logits.device)
    among: Tensor = logits.gather(1, letters)
    return among


def _labels(classes: Sequence[str], tokenizer: Tokenizer) -> tuple[list[int], tuple[int, ...]]:
    """Return the tokens that all labels begin with, and the next of each."""
    told = [_encoded(f" {name}", tokenizer) for name in classes]
    together = takewhile(lambda ids: len(set(ids)) == 1, zip(*told, strict=False))
    shared = sum(1 for _ in together)
    following = [ids[shared] if len(ids) > shared else -1 for ids in told]
    if len(set(following)) < len(classes) or -1 in following:
        raise Refusal(
            f"labels {', '.join(classes)}: after the tokens that all share, the next does not tell"
            " them apart; expected names that differ in their first token"
        )
    return told[0][:shared], tuple(following)


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _text(data: Labelled, row: int) -> str:
    item = data.items[row]
    if not isinstance(item, str):
        raise Refusal("the data set's items are no texts: expected texts with labels")
    return item

# SPDX-License-Identifier: Apache-2.0
"""T2T and the vote: what fused caches have to beat.

T2T is Cache-to-Cache's (arXiv 2510.03215): the sender gets the question without its options and is
asked for the most useful background; what it writes is put before the receiver's prompt.  A vote
costs a letter a model.  Both are easy to cripple: the budget and the wording are arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedloom.data.questions import Question
from fedloom.models.base import Base
from fedloom.refining.writing import decoded, instructed, write, write_many

ASK = (
    "In one clear sentence, give the most useful background knowledge for answering this question."
    " Do not answer it.\n\nQuestion: {question}\n\nBackground:"
)
HEADING = "Context from another model: {text}"


@dataclass(frozen=True)
class Written:
    """A sender's message.

    Attributes
    ----------
    tokens : int
        That the sender wrote, at most its budget.
    nbytes : int
        Of the text in UTF-8: what travels.
    """

    sender: str
    text: str
    tokens: int
    nbytes: int
    seconds: float


def background(
    sender: Base, question: str, budget: int, *, ask: str = ASK, seconds: float = math.inf
) -> Written:
    """Let a sender write what it knows of a question, greedily, in at most ``budget`` tokens.

    A smaller budget gives the beginning of a larger one's message.
    """
    began = time.perf_counter()
    ids, stop = instructed(sender, ask.format(question=question))
    made = write(sender, ids, budget, stop=stop, seconds=seconds) if budget else []
    return _written(sender, made, time.perf_counter() - began)


def backgrounds(
    sender: Base, questions: Sequence[str], budget: int, *, ask: str = ASK, batch: int = 16
) -> list[Written]:
    """Let a sender write on many questions, ``batch`` at a time; for studies."""
    asked = [instructed(sender, ask.format(question=question)) for question in questions]
    found: list[Written] = []
    for start in range(0, len(asked), batch):
        group, began = asked[start : start + batch], time.perf_counter()
        made = write_many(sender, [ids for ids, _ in group], budget, stop=group[0][1])
        seconds = (time.perf_counter() - began) / len(group)
        found += [_written(sender, ids, seconds) for ids in made]
    return found


def shortened(sender: Base, message: Written, budget: int) -> Written:
    """Return what the same sender would have written with a smaller budget.

    For sweeps: its tokens are those of the text, encoded anew.
    """
    ids = sender.tokenizer.encode(message.text, add_special_tokens=False)[:budget]
    share = len(ids) / max(1, message.tokens)
    return _written(sender, ids, message.seconds * min(1.0, share))


def _written(sender: Base, ids: Sequence[int], seconds: float) -> Written:
    text = decoded(sender, ids)
    return Written(sender.base_hash, text, len(ids), len(text.encode()), seconds)


def in_context(prompt: str, messages: Sequence[Written]) -> str:
    """Put messages before a prompt, by sender; empty ones leave it as it was."""
    said = [m for m in sorted(messages, key=lambda m: m.sender) if m.text]
    lines = [HEADING.format(text=" ".join(m.text.split())) for m in said]
    return "\n".join([*lines, prompt])


def with_context(question: Question, messages: Sequence[Written]) -> Question:
    """Put messages before a question."""
    return replace(question, question=in_context(question.question, messages))


def vote(choices: Sequence[int]) -> int:
    """Return what most models chose; of equals, what the first of them in the order given chose.

    Put the receiver first: a draw then leaves its own answer.

    >>> vote([2, 1, 1]), vote([2, 1]), vote([0, 1, 1, 2, 2])
    (1, 2, 1)
    """
    if not choices:
        raise ValueError("a vote of nobody")
    return max(choices, key=choices.count)


def best_single(correct: Mapping[str, Sequence[bool]]) -> str:
    """Return the model that is right most often on rows kept for choosing; of equals, by name.

    Choose on rows that are not tested: the best of several on the test is not a baseline.
    """
    return min(correct, key=lambda name: (-sum(correct[name]) / max(1, len(correct[name])), name))

# SPDX-License-Identifier: Apache-2.0
"""What a FedRefine node asks: its questions as it reads them, and as others are shown them.

With ``refine.rephrase`` others read the receiver's own rewording, and a question for which none
passes stays at home: it is in no letter, so places in a letter are not numbers of questions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fedloom.config import RunConfig
from fedloom.data.partition import client_rows
from fedloom.data.prompts import letter_tokens, prompt
from fedloom.data.questions import Question
from fedloom.holdings import holdings
from fedloom.models.base import Base
from fedloom.refining import Reworded, reworded
from fedloom.refining.private import Reword

Facts = dict[str, Any]


@dataclass(frozen=True)
class Asking:
    """What goes into letters.

    Attributes
    ----------
    texts : list of str
        What senders read.
    bare : list of str
        What writers of messages are asked: questions without their options.
    facts : list of dict, optional
        Of every question, asked or not: what was done to it before; none without rephrasing.
    """

    texts: list[str]
    bare: list[str]
    facts: list[Facts] | None = None


def questions_of(config: RunConfig, partition: int) -> list[Question]:
    """Return a node's held-out questions, as many as the run asks."""
    examples, dealt = holdings(config)
    rows = cast("Sequence[Question]", examples)  # the recipe's task is mmlu
    _, test = client_rows(dealt, rows, partition)
    return list(test)[: config.refine.questions]


def asking(config: RunConfig, partition: int, base: Base, reword: Reword) -> Asking:
    """Write a node's questions down for others."""
    given = config.refine
    if given.question:
        texts = [given.question] if given.mutual or given.receiver == partition else []
        return Asking(texts, texts)
    cue = letter_tokens(base.tokenizer).cue
    questions = questions_of(config, partition)
    if not given.rephrase:
        return Asking([prompt(q, cue) for q in questions], [q.question for q in questions])
    tries, seed = given.rephrase_tries, config.seed
    made: list[Reworded] = [
        reworded(base, q, seed=seed, tries=tries, reword=reword) for q in questions
    ]
    shown = [each.question for each in made if each.question is not None]
    texts, bare = [prompt(q, cue) for q in shown], [q.question for q in shown]
    return Asking(texts, bare, [each.facts() for each in made])


def places_of(facts: Sequence[Facts] | None, count: int) -> list[int | None]:
    """Return each question's place in the letters; none for one that stayed at home.

    >>> places_of([{"rephrased": True}, {"rephrased": False}, {"rephrased": True}], 3)
    [0, None, 1]
    >>> places_of(None, 2)
    [0, 1]
    """
    if facts is None:
        return list(range(count))
    found: list[int | None] = []
    for each in facts:
        passed = sum(place is not None for place in found)
        found.append(passed if each["rephrased"] else None)
    return found


def kept(state: Mapping[str, Any], exchange: str) -> list[Facts] | None:
    """Return the facts that were kept of an exchange; none if nothing was rephrased."""
    told = state.get(f"rephrased-{exchange}")
    found: list[Facts] | None = json.loads(told) if told else None
    return found

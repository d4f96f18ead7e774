# SPDX-License-Identifier: Apache-2.0
"""A question as FedNL asks it: the text, a lettered line a choice, then a cue for one letter.

Loss and score look at the letters' tokens right after the cue, nowhere else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

from fedloom.data.questions import LETTERS, Question
from fedloom.errors import Refusal

CUE = "Answer:"


class Encodes(Protocol):
    """A tokenizer, as far as prompts need one."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Turn a text into token ids."""

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class Letters:
    """How a tokenizer goes on after the cue."""

    cue: str
    """``Answer:``, with the space if the tokenizer does not put it into the letter."""
    ids: tuple[int, ...]
    """One for each of ``LETTERS``."""
    opening: tuple[int, ...]
    """Special tokens before a text, such as bos."""


@dataclass(frozen=True)
class Encoded:
    """A question as tokens."""

    prompt_ids: tuple[int, ...]
    letter_ids: tuple[int, ...]
    """As many as the question has choices."""
    gold: int
    """Index into ``letter_ids``."""


def prompt(question: Question, cue: str = CUE) -> str:
    """Write a question down.

    >>> prompt(Question("global_facts", "1 + 1 =", ("1", "2", "3", "4"), 1)).splitlines()
    ['1 + 1 =', 'A. 1', 'B. 2', 'C. 3', 'D. 4', 'Answer:']
    """
    lettered = zip(LETTERS, question.choices, strict=False)  # fewer choices than letters
    lines = [f"{letter}. {text}" for letter, text in lettered]
    return "\n".join([question.question, *lines, cue])


@functools.lru_cache(maxsize=8)
def letter_tokens(tokenizer: Encodes) -> Letters:
    """Find the tokens that stand for the answers, decided once a tokenizer.

    They are such that cue and letter, encoded as one text, give the cue's tokens and then the
    letter's one token: what the model saw in pretraining.

    Raises
    ------
    Refusal
        If the letters are not one token each.
    """
    for cue, space in ((CUE, " "), (CUE + " ", "")):
        head = tokenizer.encode("\n" + cue, add_special_tokens=False)
        whole = [
            tokenizer.encode(f"\n{cue}{space}{letter}", add_special_tokens=False)
            for letter in LETTERS
        ]
        tails = [tuple(ids[len(head) :]) for ids in whole if ids[: len(head)] == head]
        if len(set(tails)) == len(LETTERS) and all(len(tail) == 1 for tail in tails):
            return Letters(cue, tuple(token for (token,) in tails), _opening(tokenizer))
    raise Refusal(
        'this tokenizer writes "Answer: A" with a letter that is not one token of its own:'
        " expected one token for each of A to E; choose another model"
    )


def encode_question(question: Question, tokenizer: Encodes, max_tokens: int = 0) -> Encoded:
    """Encode a prompt; if it is longer than ``max_tokens`` (0: no limit) it loses its beginning."""
    letters = letter_tokens(tokenizer)
    ids = tokenizer.encode(prompt(question, letters.cue), add_special_tokens=False)
    opening = letters.opening
    if max_tokens and len(opening) + len(ids) > max_tokens:
        opening = opening if len(opening) < max_tokens else ()  # bos stays: models lean on it
        ids = ids[-(max_tokens - len(opening)) :]
    return Encoded((*opening, *ids), letters.ids[: len(question.choices)], question.gold)


def _opening(tokenizer: Encodes) -> tuple[int, ...]:
    plain = tokenizer.encode(CUE, add_special_tokens=False)
    full = tokenizer.encode(CUE)
    starts = range(len(full) - len(plain) + 1)
    return next((tuple(full[:i]) for i in starts if full[i : i + len(plain)] == plain), ())

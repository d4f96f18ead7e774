# SPDX-License-Identifier: Apache-2.0
"""How a haystack is put to the model: the context, the question, four lettered values, a cue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedloom.data.prompts import Encoded, Encodes, letter_tokens
from fedloom.data.questions import LETTERS
from fedloom.errors import Refusal


class Asks(Protocol):
    """What a prompt is written from."""

    @property
    def context(self) -> str:
        """Filler with events in it."""

    @property
    def question(self) -> str:
        """One line."""

    @property
    def options(self) -> tuple[str, str, str, str]:
        """Values to choose from."""

    @property
    def gold(self) -> int:
        """Index of the right one."""


@dataclass(frozen=True)
class EncodedNeedle(Encoded):
    """A haystack as tokens, for the letter and for the value itself.

    ``prompt_ids`` end with the cue after the four options: a letter comes next.  ``open_ids`` end
    with the cue after the question, without options: the value comes next, from memory alone.
    """

    open_ids: tuple[int, ...]
    value_ids: tuple[int, ...]
    """The value's tokens as they follow either cue."""
    context_tokens: int
    """Tokens up to the end of the context, in both prompts."""


def asking(question: str, options: Sequence[str], cue: str) -> str:
    """Write down the question and what may answer it; no options leave an open question.

    >>> asking("What is it?", ("1", "2", "3", "4"), "Answer:").splitlines()
    ['Question: What is it?', 'A) 1', 'B) 2', 'C) 3', 'D) 4', 'Answer:']
    """
    lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([f"Question: {question}", *lines, cue])


def prompt(example: Asks, cue: str, *, with_options: bool = True) -> str:
    """Write down a whole prompt."""
    options = example.options if with_options else ()
    return f"{example.context}\n\n{asking(example.question, options, cue)}"


def encode_needle(example: Asks, tokenizer: Encodes) -> EncodedNeedle:
    """Encode a haystack; nothing is cut off, as its budget was kept when it was made.

    Raises
    ------
    Refusal
        If the tokenizer has no token of its own for a letter, or joins the cue with a value.
    """
    letters = letter_tokens(tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return (*letters.opening, *tokenizer.encode(text, add_special_tokens=False))

    before = tokenizer.encode("\n" + letters.cue, add_special_tokens=False)
    space = "" if letters.cue.endswith(" ") else " "
    value = example.options[example.gold]
    both = tokenizer.encode(f"\n{letters.cue}{space}{value}", add_special_tokens=False)
    if both[: len(before)] != before:
        raise Refusal(
            f'this tokenizer joins "Answer:" with the value of {len(value)} characters behind it:'
            " expected the cue's tokens, then the value's; choose another model"
        )
    return EncodedNeedle(
        prompt_ids=ids(prompt(example, letters.cue)),
        letter_ids=letters.ids,
        gold=example.gold,
        open_ids=ids(prompt(example, letters.cue, with_options=False)),
        value_ids=tuple(both[len(before) :]),
        context_tokens=len(ids(example.context)),
    )


def prompt_tokens(example: Asks, tokenizer: Encodes) -> int:
    """Count the tokens of the prompt with options, those that open a text included."""
    letters = letter_tokens(tokenizer)
    text = prompt(example, letters.cue)
    return len(letters.opening) + len(tokenizer.encode(text, add_special_tokens=False))

# SPDX-License-Identifier: Apache-2.0
"""How a haystack is put to the model: the context, the question, four lettered values, a cue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedloom.data.prompts import Encoded, Encodes, letter_tokens
from fedloom.data.questions import LETTERS
from fedloom.errors import Refusal


class Shown(Protocol):
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


class Asks(Shown, Protocol):
    """And what answers are."""

    @property
    def stem(self) -> str:
        """How an answer begins."""

    @property
    def asks(self) -> tuple[tuple[str, str, str], ...]:
        """Question, stem and value of each event."""


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
    stem_ids: tuple[int, ...]
    """How every answer begins after the cue: the words that stood before the value."""
    answer_ids: tuple[tuple[int, ...], ...]
    """Each option's value as it follows the stem."""

    def name(self) -> str:
        """Identify the row by its tokens: 16 hex digits of a SHA-256."""
        parts = [self.prompt_ids, self.answer_ids, self.gold]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class EncodedLesson:
    """A haystack and answers to learn: each event's value, then the question with its options."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    """Positions of the answers' tokens."""
    telling: tuple[int, ...] = ()
    """Those among them where an answer first differs from the other values of its haystack."""


def answer(option: str, letter: str) -> str:
    """Write an answer's end: the value, which must come from the context, and where it is listed.

    >>> answer("7256005", "D")
    '7256005, option D'
    """
    return f"{option}, option {letter}"


def asking(question: str, options: Sequence[str], cue: str) -> str:
    """Write down the question and what may answer it; no options leave an open question.

    >>> asking("What is it?", ("1", "2", "3", "4"), "Answer:").splitlines()
    ['Question: What is it?', 'A) 1', 'B) 2', 'C) 3', 'D) 4', 'Answer:']
    """
    lines = [f"{letter}) {option}" for letter, option in zip(LETTERS, options, strict=False)]
    return "\n".join([f"Question: {question}", *lines, cue])


def prompt(example: Shown, cue: str, *, with_options: bool = True) -> str:
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
    stem = _after_cue(example.stem, tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return (*letters.opening, *tokenizer.encode(text, add_special_tokens=False))

    return EncodedNeedle(
        prompt_ids=ids(prompt(example, letters.cue)),
        letter_ids=letters.ids[: len(example.options)],
        gold=example.gold,
        open_ids=ids(prompt(example, letters.cue, with_options=False)),
        value_ids=_after_cue(example.options[example.gold], tokenizer),
        context_tokens=len(ids(example.context)),
        stem_ids=stem,
        answer_ids=tuple(
            _after_stem(example.stem, option, tokenizer) for option in example.options
        ),
    )


def encode_lesson(example: Asks, tokenizer: Encodes, *, options: bool = True) -> EncodedLesson:
    """Encode a haystack followed by all that can be asked of it, each with its answer.

    The context is the dear part of a row: after it, one question costs little, and each answer's
    loss teaches the memory to write and to find.

    Parameters
    ----------
    options
        Whether to ask the one question with its options, or every event's without any.
    """
    letters = letter_tokens(tokenizer)
    ids = [*letters.opening, *tokenizer.encode(example.context, add_special_tokens=False)]
    listing = options or not example.asks
    asked = [(asking(q, (), letters.cue), stem, value) for q, stem, value in example.asks]
    if listing:  # and alone: the others' answers would leave one option that was not just said
        asked = []
        gold = answer(example.options[example.gold], LETTERS[example.gold])
        listed = asking(example.question, example.options, letters.cue)
        asked.append((listed, example.stem, gold))
    said = _Said(ids, example, tokenizer)
    for question, stem, value in asked:
        said.ask(question, stem, value)
    return said.lesson()


def encode_retelling(
    example: Asks, tokenizer: Encodes, order: Sequence[int], *, question: bool = True
) -> EncodedLesson:
    """Encode a haystack, its question with the answer, and all other events told again.

    Sentences cost fewer tokens than questions. The question comes first: after them, the right
    value would be the one that was not just said.

    Parameters
    ----------
    order
        Indices of the events with a question of their own, as they are to be told again.
    question
        Whether to ask; without, all events are told again, the asked one in its turn. A counter's
        answer is in none of them, so it is always asked for.
    """
    letters = letter_tokens(tokenizer)
    ids = [*letters.opening, *tokenizer.encode(example.context, add_special_tokens=False)]
    said = _Said(ids, example, tokenizer)
    asked = ""
    if question or not order:
        asked = example.options[example.gold]
        said.ask(asking(example.question, (), letters.cue), example.stem, asked)
    end = tokenizer.encode(".", add_special_tokens=False)
    for _, stem, value in (example.asks[index] for index in order):
        if value != asked:
            said.ids += [*(end if said.begun else ()), *_after_cue(stem, tokenizer)]
            said.answer(stem, value)
    return said.lesson()


class _Said:
    """A lesson as it is written, token by token."""

    def __init__(self, ids: list[int], example: Asks, tokenizer: Encodes) -> None:
        self.ids, self._tokenizer = ids, tokenizer
        self._values = {*example.options, *(value for _, _, value in example.asks)}
        self._labels: list[int] = []
        self._telling: list[int] = []

    @property
    def begun(self) -> bool:
        """Whether a value has been told already."""
        return bool(self._labels)

    def ask(self, question: str, stem: str, value: str) -> None:
        """Add a question and its answer, of which what comes after the stem is to be learnt."""
        self.ids += self._tokenizer.encode(f"\n\n{question}", add_special_tokens=False)
        self.ids += _after_cue(stem, self._tokenizer)
        self.answer(stem, value)

    def answer(self, stem: str, value: str) -> None:
        """Add a value to be learnt."""
        answered = _after_stem(stem, value, self._tokenizer)
        others = [_after_stem(stem, other, self._tokenizer) for other in self._values]
        start = len(self.ids)
        self._telling.append(start + _first_telling(answered, others))
        self._labels += range(start, start + len(answered))
        self.ids += answered

    def lesson(self) -> EncodedLesson:
        """Return what was written."""
        return EncodedLesson(tuple(self.ids), tuple(self._labels), tuple(self._telling))


def _first_telling(answered: Sequence[int], others: Sequence[Sequence[int]]) -> int:
    """Count the tokens that an answer shares with all others.

    >>> _first_telling([216, 4, 8], [[216, 4, 8], [216, 5, 8], [216, 4, 9]])
    1
    """
    for at, token in enumerate(answered):
        if any(at >= len(other) or other[at] != token for other in others):
            return at
    return 0  # nothing tells it apart


def _after_cue(text: str, tokenizer: Encodes) -> tuple[int, ...]:
    """Return a text's tokens as they follow the cue.

    Raises
    ------
    Refusal
        If the tokenizer joins the two.
    """
    cue = letter_tokens(tokenizer).cue
    before = tokenizer.encode("\n" + cue, add_special_tokens=False)
    space = "" if cue.endswith(" ") else " "
    both = tokenizer.encode(f"\n{cue}{space}{text}", add_special_tokens=False)
    if both[: len(before)] != before:
        raise Refusal(
            f'this tokenizer joins "Answer:" with the value of {len(text)} characters behind it:'
            " expected the cue's tokens, then the value's; choose another model"
        )
    return tuple(both[len(before) :])


def prompt_tokens(example: Shown, tokenizer: Encodes) -> int:
    """Count the tokens of the prompt with options, those that open a text included."""
    letters = letter_tokens(tokenizer)
    text = prompt(example, letters.cue)
    return len(letters.opening) + len(tokenizer.encode(text, add_special_tokens=False))


def _after_stem(stem: str, text: str, tokenizer: Encodes) -> tuple[int, ...]:
    """Return a text's tokens as they follow a stem.

    Raises
    ------
    Refusal
        If the tokenizer joins the two.
    """
    begun, whole = (_after_cue(said, tokenizer) for said in (stem, f"{stem} {text}"))
    if whole[: len(begun)] != begun:
        raise Refusal(
            f"this tokenizer joins a stem with the value of {len(text)} characters behind it:"
            " expected the stem's tokens, then the value's; choose another model"
        )
    return whole[len(begun) :]

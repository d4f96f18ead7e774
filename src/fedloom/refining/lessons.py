# SPDX-License-Identifier: Apache-2.0
"""Lessons for fusers: what the sender reads, what the receiver reads, what it is to say.

Cache-to-Cache (arXiv 2510.03215) and FedRefine (arXiv 2603.28772) let both read the same question.
There a second model adds what it knows, and a gain may as well come from the fuser's own parameters
or from more of the receiver's depth; ``context`` withholds from the receiver what the sender reads,
so that whatever it gets right beyond a guess came through the cache.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom import seeds
from fedloom.data import files
from fedloom.data.prompts import CUE, letter_tokens, prompt
from fedloom.data.questions import LETTERS, Question, distinct, load_questions
from fedloom.errors import Refusal, nearest
from fedloom.models.offsets import token_ends
from fedloom.models.tokenizer import Tokenizer

SETTINGS = ("same", "context")
_OPEN = {"question", "answer"}
"""Columns of a row without choices; ``context`` may be a third."""


@dataclass(frozen=True)
class Lesson:
    """One question, as each of the two models is to read it.

    Attributes
    ----------
    shown, prompt, answer : str
        The sender's text, the receiver's, and how the receiver is to go on.
    options : tuple of str
        Answers to choose from, the right one among them; none for an open question.
    group : str
        Rows of one group belong on one side of a split.
    """

    shown: str
    prompt: str
    answer: str
    options: tuple[str, ...] = ()
    group: str = ""

    def row(self) -> str:
        """Identify the lesson by its content: 16 hex digits of a SHA-256."""
        parts = [self.shown, self.prompt, self.answer, *self.options]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Encoded:
    """A lesson in the tokens of both models.

    Attributes
    ----------
    shown_ends, prompt_ends : tuple of int
        Where each token ends in the text, in characters; empty unless asked for.
    option_ids : tuple
        Each option's tokens as they follow the prompt.
    gold : int
        Index of the right option, -1 if there are none.
    """

    shown_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    option_ids: tuple[tuple[int, ...], ...]
    gold: int
    row: str
    shown_ends: tuple[int, ...] = ()
    prompt_ends: tuple[int, ...] = ()


def load_lessons(source: str, setting: str = "same") -> list[Lesson]:
    """Load lessons of a question source, or of a table with question, answer and maybe context.

    Raises
    ------
    Refusal
        If the source or the setting does not exist, or a row cannot be a lesson.
    """
    if setting not in SETTINGS:
        hint = nearest(setting, SETTINGS)
        raise Refusal(f'setting "{setting}"{hint}: expected one of {", ".join(SETTINGS)}')
    kind, _, name = source.partition(":")
    if kind == "path" and (rows := _open_rows(Path(name).expanduser())):
        return [open_lesson(row, where, setting) for where, row in rows]
    return [question_lesson(q, setting) for q in distinct(load_questions(source))]


def question_lesson(question: Question, setting: str = "same") -> Lesson:
    """Ask for the letter of a question; in ``context`` the receiver sees the options alone.

    >>> told = Question("s", "1 + 1 =", ("1", "2"), 1)
    >>> question_lesson(told, "context").prompt.splitlines()
    ['A. 1', 'B. 2', 'Answer:']
    """
    shown = prompt(question)
    asked = shown if setting == "same" else shown.removeprefix(question.question).lstrip("\n")
    letters = tuple(LETTERS[: len(question.choices)])
    return Lesson(shown, asked, letters[question.gold], letters, question.stem())


def open_lesson(row: Mapping[str, Any], where: str, setting: str = "same") -> Lesson:
    """Ask an open question; in ``context`` the sender alone reads the row's context."""
    if _OPEN - row.keys() or (setting == "context" and not row.get("context")):
        wanted = "question, answer" + (", context" if setting == "context" else "")
        raise Refusal(f"{where} has the columns {', '.join(map(str, row))}: expected {wanted}")
    names = ("question", "answer", "context")
    question, answer, context = (str(row.get(name) or "").strip() for name in names)
    if not question or not answer:
        raise Refusal(f"{where}: an empty question or answer teaches nothing")
    asked = f"Question: {question}\n{CUE}"
    shown = f"{context}\n{asked}" if context else asked
    group = " ".join(f"{context} {question}".split()).casefold()
    return Lesson(shown, shown if setting == "same" else asked, answer, (), group)


def _open_rows(path: Path) -> list[files.Row]:
    """Return the rows of a table without choices; nothing for one that has them."""
    found = list(files.rows(path))
    return found if found and not {"choices", "A"} & found[0][1].keys() else []


def split_lessons(
    lessons: Sequence[Lesson], held_out: float, *, seed: int, most: int = 0
) -> tuple[list[Lesson], list[Lesson]]:
    """Part lessons into those to learn from and those held out; a group is on one side.

    Parameters
    ----------
    held_out
        Share of the groups that are held out, at least one.
    most
        At most so many lessons to learn from; 0 for all.
    """
    groups: dict[str, list[Lesson]] = {}
    for lesson in sorted(lessons, key=Lesson.row):
        groups.setdefault(lesson.group or lesson.row(), []).append(lesson)
    if len(groups) < 2:
        raise Refusal(
            f"{len(groups)} lessons: expected two or more, some to learn from, some to test"
        )
    names = sorted(groups)
    order = [names[i] for i in seeds.generator(seed, "lessons").permutation(len(names))]
    cut = min(max(round(held_out * len(order)), 1), len(order) - 1)
    held, learnt = ([x for g in part for x in groups[g]] for part in (order[:cut], order[cut:]))
    return learnt[: most or None], held


def encode_lessons(
    lessons: Iterable[Lesson],
    sender: Tokenizer,
    receiver: Tokenizer,
    *,
    longest: int = 0,
    ends: bool = False,
) -> list[Encoded]:
    """Turn lessons into tokens; those with a text of more than ``longest`` tokens are left out.

    Parameters
    ----------
    ends
        Note where tokens end: residual fusion aligns by it, and some tokenizers cannot tell.

    Raises
    ------
    Refusal
        If none is left.
    """
    made = [_encoded(lesson, sender, receiver, ends) for lesson in lessons]
    size = [max(len(x.shown_ids), len(x.prompt_ids)) for x in made]
    kept = [x for x, n in zip(made, size, strict=True) if not longest or n <= longest]
    if not kept:
        raise Refusal(
            f"none of {len(made)} lessons has {longest} tokens or less: allow longer ones, or give"
            " other rows"
        )
    return kept


def _encoded(lesson: Lesson, sender: Tokenizer, receiver: Tokenizer, ends: bool) -> Encoded:
    made = Encoded(
        shown_ids=tuple(sender.encode(lesson.shown)),
        prompt_ids=tuple(receiver.encode(lesson.prompt)),
        answer_ids=continuation(lesson.answer, receiver, closed=not lesson.options),
        option_ids=tuple(continuation(option, receiver) for option in lesson.options),
        gold=lesson.options.index(lesson.answer) if lesson.options else -1,
        row=lesson.row(),
    )
    if not ends:
        return made
    shown, shown_ends = token_ends(sender, lesson.shown)
    asked, prompt_ends = token_ends(receiver, lesson.prompt)
    return replace(
        made,
        shown_ids=tuple(shown),
        shown_ends=tuple(shown_ends),
        prompt_ids=tuple(asked),
        prompt_ends=tuple(prompt_ends),
    )


def continuation(text: str, tokenizer: Tokenizer, *, closed: bool = False) -> tuple[int, ...]:
    """Return the tokens of an answer as they follow the cue, and the end token if it is closed."""
    if text in LETTERS:
        letters = letter_tokens(tokenizer)
        if not letters.cue.endswith(" "):
            return (letters.ids[LETTERS.index(text)],)
    head = tokenizer.encode("\n" + CUE, add_special_tokens=False)
    whole = tokenizer.encode(f"\n{CUE} {text}", add_special_tokens=False)
    joined = whole[: len(head)] != head  # a tokenizer that joins the cue with what follows
    ids = tokenizer.encode(" " + text, add_special_tokens=False) if joined else whole[len(head) :]
    return (*ids, tokenizer.eos_token_id) if closed else tuple(ids)


def digest(lessons: Iterable[Encoded]) -> str:
    """Name a set of lessons, whatever their order: 16 hex digits."""
    rows = ",".join(sorted(lesson.row for lesson in lessons))
    return hashlib.sha256(rows.encode()).hexdigest()[:16]

# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs as support: a prompt in one language, and the other's sentence to be learnt."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fedloom.adapters.fast_sums import Passage
from fedloom.errors import Refusal
from fedloom.models.tokenizer import Tokenizer

LANGUAGES = ("English", "German")


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """Read a file of two columns with a tab between; empty lines are left out.

    Raises
    ------
    Refusal
        If the file cannot be read or a line has not two columns.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"{path} cannot be read as UTF-8 text: {error}") from error
    made = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            columns = line.split("\t")
            if len(columns) != 2 or not all(c.strip() for c in columns):
                raise Refusal(
                    f"{path} line {number} has {len(columns)} columns: expected a sentence, a tab"
                    " and its translation"
                )
            made.append((columns[0].strip(), columns[1].strip()))
    return made


def prompt(sentence: str, languages: tuple[str, str] = LANGUAGES) -> str:
    """Ask for a translation, as the paper's code does without its chat template.

    >>> prompt("Good day.").splitlines()
    ['English: Good day.', 'German:']
    """
    return f"{languages[0]}: {sentence}\n{languages[1]}:"


def lessons(
    pairs: Iterable[tuple[str, str]],
    tokenizer: Tokenizer,
    languages: tuple[str, str] = LANGUAGES,
    *,
    answers_only: bool = False,
) -> list[Passage]:
    """Turn pairs into support.

    Parameters
    ----------
    answers_only : bool
        Learn the translation's tokens alone; the paper learns all.
    """
    made = []
    for sentence, translation in pairs:
        asked = tokenizer.encode(prompt(sentence, languages))
        answer = tokenizer.encode(f" {translation}\n", add_special_tokens=False)
        made.append(Passage((*asked, *answer), len(asked) if answers_only else 1))
    return made

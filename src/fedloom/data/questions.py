# SPDX-License-Identifier: Apache-2.0
"""Multiple-choice questions from wherever they lie, as plain rows that know their own hash."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom import archives
from fedloom.data import bigbench, files
from fedloom.data.files import extra
from fedloom.errors import Refusal, nearest

LETTERS = "ABCDE"
PACKAGED = "mmlu-dev"
SOURCES = (
    f"packaged:{PACKAGED}",
    f"packaged:{bigbench.NAME}",
    "hub:cais/mmlu",
    "path:FILE-OR-DIR",
)
_LETTERED = LETTERS[:4]  # columns that every table with a column a choice has


@dataclass(frozen=True)
class Question:
    """A question with two to five choices; MMLU's have four."""

    subject: str
    """In MMLU's spelling: lower case, underscores."""
    question: str
    choices: tuple[str, ...]
    gold: int
    """Index of the right choice."""

    def __post_init__(self) -> None:
        if not 2 <= len(self.choices) <= len(LETTERS) or not 0 <= self.gold < len(self.choices):
            raise ValueError(
                f"choice {self.gold} of {len(self.choices)} is right: expected one of 2 to 5"
            )

    def row(self) -> str:
        """Identify the row by its content: 16 hex digits of a SHA-256."""
        parts = [self.subject, self.question, *self.choices, self.gold]
        text = json.dumps(parts, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def stem(self) -> str:
        """Return the question's words without case and spacing: rows of one stem belong together.

        Case counts for nothing here and for all in ``distinct``: keeping two rows on one side
        costs nothing, whereas dropping "a set A" for "a set a" would lose a question.
        """
        return _spaced(self.question).casefold()


def distinct(questions: Iterable[Question]) -> list[Question]:
    """Sort by row hash and drop repetitions of a question with the same choices.

    The order, and which repetition stays, do not depend on the order that came.
    """
    kept: dict[tuple[str, ...], Question] = {}
    for question in sorted(questions, key=Question.row):
        kept.setdefault((_spaced(question.question), *map(_spaced, question.choices)), question)
    return list(kept.values())


def load_questions(source: str) -> list[Question]:
    """Load all questions of a ``data.source``, as ``SOURCES`` lists them.

    Raises
    ------
    Refusal
        If there is no such source, or a row that is no question with two to five choices.
    """
    kind, _, name = source.partition(":")
    if kind == "packaged" and name == PACKAGED:
        return list(_packaged())
    rows: Iterator[files.Row]
    if kind == "packaged" and name == bigbench.NAME:
        rows = bigbench.rows()
    elif kind == "hub" and name:
        rows = _hub(name)
    elif kind == "path" and name:
        rows = files.rows(Path(name).expanduser())
    else:
        hint = nearest(source, SOURCES)
        raise Refusal(f'data.source = "{source}"{hint}: expected {", ".join(SOURCES)}')
    questions = [_question(row, where) for where, row in rows]
    if not questions:
        raise Refusal(f"{source} holds no rows: expected questions with two to five choices")
    return questions


def _spaced(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).split())


def _question(row: Mapping[str, Any], where: str) -> Question:
    columns = {"subject", "question", "answer"}
    lettered = columns | set(_LETTERED)
    if not (columns | {"choices"}) <= row.keys() and not lettered <= row.keys():
        raise Refusal(
            f"{where} has the columns {', '.join(map(str, row))}: expected subject, question,"
            " choices, answer, or subject, question, A, B, C, D, answer"
        )
    choices = _choices(row, where)
    subject = re.sub(r"[\s-]+", "_", str(row["subject"]).strip().lower())
    gold = _gold(row["answer"], len(choices), where)
    return Question(subject, str(row["question"]).strip(), choices, gold)


def _choices(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    came = row.get("choices", [row.get(letter) for letter in _LETTERED])
    if "choices" not in row and row.get(LETTERS[4]):
        came.append(row[LETTERS[4]])
    if isinstance(came, str):  # a CSV cell
        try:
            came = json.loads(came)
        except ValueError as error:
            raise Refusal(f"{where}: choices are text that is no JSON list of texts") from error
    listed = isinstance(came, (list, tuple))
    if not listed or not 2 <= len(came) <= len(LETTERS) or None in came:
        # The row's text stays here: a refusal may travel to the coordinator.
        kind = f"{len(came)} entries" if listed else type(came).__name__
        raise Refusal(f"{where}: choices are {kind}, expected a list of 2 to 5 texts")
    return tuple(str(choice).strip() for choice in came)


def _gold(answer: object, count: int, where: str) -> int:
    text = str(answer).strip().upper()
    for index, letter in enumerate(LETTERS[:count]):
        if text in (str(index), letter):
            return index
    kind = f"{type(answer).__name__} of {len(text)} characters"
    last = LETTERS[count - 1]
    raise Refusal(f"{where}: answer is {kind}, expected 0 to {count - 1} or A to {last}")


def _hub(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    datasets = extra("datasets")
    try:
        table = datasets.load_dataset(name, "all", split="test")
    except Exception as error:  # datasets and the hub raise by way of httpx, OSError, ValueError
        raise Refusal(
            f"cannot get hub:{name}, configuration all, split test ({type(error).__name__});"
            f" expected a data set like cais/mmlu that this machine can reach: use {SOURCES[0]}"
            " or path:FILE"
        ) from error
    for index, row in enumerate(table):
        yield f"hub:{name} row {index}", row


def _packaged() -> Iterator[Question]:
    """Read MMLU's few-shot questions (its dev split) out of the evaluation harness's wheel."""
    prefix = "lm_eval/tasks/mmlu/flan_cot_fewshot/mmlu_"
    with zipfile.ZipFile(archives.fetch(archives.LM_EVAL)) as wheel:
        for name in sorted(wheel.namelist()):
            if name.startswith(prefix) and name.endswith(".yaml"):
                subject = name.removeprefix(prefix).removesuffix(".yaml")
                yield from _few_shots(subject, wheel.read(name))


def _few_shots(subject: str, text: bytes) -> Iterator[Question]:
    yaml = extra("yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times quicker where it was built
    samples = yaml.load(text, loader)["fewshot_config"]["samples"]
    marks = r"(.*?)\s*\(A\)\s*(.*?)\s*\(B\)\s*(.*?)\s*\(C\)\s*(.*?)\s*\(D\)\s*(.*)"
    for sample in samples:
        parts = re.fullmatch(marks, sample["question"].strip(), re.DOTALL)
        answers = re.findall(r"answer is \(?([ABCD])\)?", sample["target"])
        if parts and answers:  # one of the 282 rows lacks a choice
            question, a, b, c, d = (part.strip() for part in parts.groups())
            yield Question(subject, question, (a, b, c, d), LETTERS.index(answers[-1]))

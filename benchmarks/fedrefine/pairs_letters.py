# SPDX-License-Identifier: Apache-2.0
"""Which letters a model says, and what it knows beyond saying them: a prior that is subtracted.

A small model may find one letter likeliest whatever is asked; its accuracy is then that letter's
share of the rows, and anything that moves it off the letter looks like knowledge.  So each
condition's letters are counted, and each is scored again after the mean log-probability of every
letter is subtracted (no label is used; cf. arXiv 2102.09690, 2309.17249).  The mean is over the
held-out rows themselves, which is transductive, or over training rows where a run has scored them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

Row = Mapping[str, Any]
LETTERS = "ABCDEFGHIJ"


def gold_of(row: Row) -> int:
    """Return the right option of an outcome: as told, or the one whose log-probability the loss is.

    Raises
    ------
    ValueError
        If there is none, as where options have several tokens.
    """
    if "gold" in row:
        return int(row["gold"])
    gaps = [abs(option + row["nats"]) for option in row["options"]]
    best = min(range(len(gaps)), key=gaps.__getitem__)
    if gaps[best] > 1e-5:
        raise ValueError(f"row {row['row']}: its loss is no option's log-probability")
    return best


def said(row: Row) -> int:
    """Return the likeliest option."""
    options = row["options"]
    return max(range(len(options)), key=options.__getitem__)


def letters(rows: Sequence[Row]) -> dict[str, int]:
    """Count the letters that were said.

    >>> letters([{"options": [-1, -2]}, {"options": [-3, -2]}, {"options": [-1, -4]}])
    {'A': 2, 'B': 1}
    """
    found = Counter(LETTERS[said(row)] for row in rows)
    return {letter: found[letter] for letter in sorted(found)}


def prior_of(rows: Sequence[Row]) -> list[float]:
    """Return each letter's mean log-probability; a letter that few rows have, over those."""
    most = max(len(row["options"]) for row in rows)
    held = [[row["options"][j] for row in rows if len(row["options"]) > j] for j in range(most)]
    return [mean(column) for column in held]


def calibrated(rows: Sequence[Row], prior: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """Return the same rows, right or wrong once a prior is subtracted; by default their own."""
    prior = prior_of(rows) if prior is None else prior
    made = []
    for row in rows:
        gold = gold_of(row)
        moved = [x - p for x, p in zip(row["options"], prior, strict=False)]
        best = max(range(len(moved)), key=moved.__getitem__)
        made.append({"row": row["row"], "correct": best == gold})
    return made


def can_be_calibrated(rows: Sequence[Row]) -> bool:
    """Whether the rows have options of one token each."""
    try:
        return bool(rows) and all(len(r["options"]) > 1 and gold_of(r) >= 0 for r in rows)
    except ValueError:
        return False

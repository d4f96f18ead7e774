# SPDX-License-Identifier: Apache-2.0
"""Scores of one adapter on one client's rows, read from the sums that its node sent."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.intervals import Interval, macro, mean_interval, wilson

Row = Mapping[str, Any]

FOUR = {"accuracy": 1 / 4, "letter-ce": math.log(4)}
"""What guessing among four letters gives: for runs that did not count their options."""
MEASURES = ("gold-ce", "letter-ce", "accuracy", "first-token")


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The rows of one prompt length."""

    examples: int
    accuracy: Interval
    letter_ce: Interval
    chance: float
    """Share that guessing gets right."""
    distance: float
    """Mean number of tokens from what is asked for to the end of the prompt."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One adapter on one client's test rows."""

    round: int
    examples: int
    correct: int | None
    measured: dict[str, Interval]
    """Of ``MEASURES``: cross-entropies in nats a row, accuracies as shares."""
    chance: dict[str, float]
    """``accuracy`` and ``letter-ce`` of guessing, for the options that these rows had."""
    depths: dict[int, Depth]
    """Prompt length in tokens -> the rows of that length, if the client told them apart."""


@dataclass(frozen=True, kw_only=True)
class Drop:
    """What averaging cost a client: positive means that its own adapter was the better one."""

    round: int
    examples: int
    questions: int | None
    """Answered by the local adapter less answered by the federated one."""
    points: float | None
    gold_ce: float | None
    """Federated less local, in nats."""
    letter_ce: float | None


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """In how many clients the federated adapter's CE is lower than the frozen one's, or a bound."""

    compared: int
    lower: int
    apart: int
    """Of these, clients whose 95 % interval does not touch the other one, or the bound."""


def read_score(round_: int, row: Row) -> Score | None:
    """Read one row of metrics; nothing if no example was scored."""
    n = int(row.get("num-examples", 0))
    if n < 1:
        return None
    measured: dict[str, Interval] = {}
    for measure, key in (("accuracy", "correct"), ("first-token", "first-token-correct")):
        if key in row:
            measured[measure] = wilson(int(row[key]), n)
    for measure in ("gold-ce", "letter-ce"):
        if f"{measure}-sum" in row:
            squares = float(row.get(f"{measure}-sq-sum", math.nan))
            measured[measure] = mean_interval(float(row[f"{measure}-sum"]), squares, n)
    correct = int(row["correct"]) if "correct" in row else None
    chance = {
        "accuracy": float(row["chance-sum"]) / n if "chance-sum" in row else FOUR["accuracy"],
        "letter-ce": float(row["chance-ce-sum"]) / n
        if "chance-ce-sum" in row
        else FOUR["letter-ce"],
    }
    return Score(
        round=round_,
        examples=n,
        correct=correct,
        measured=measured,
        chance=chance,
        depths=_depths(row),
    )


def _depths(row: Row) -> dict[int, Depth]:
    """Read the sums that ``evaluation.depth_sums`` made: ``depth-1024-correct`` and so on."""
    told: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for key, value in row.items():
        if key.startswith("depth-"):
            _, depth, name = key.split("-", 2)
            told[int(depth)][name] = value
    return {depth: _depth(sums) for depth, sums in sorted(told.items()) if sums["examples"]}


def _depth(sums: Mapping[str, float]) -> Depth:
    n = int(sums["examples"])
    return Depth(
        examples=n,
        accuracy=wilson(int(sums["correct"]), n),
        letter_ce=mean_interval(sums["letter-ce-sum"], sums["letter-ce-sq-sum"], n),
        chance=sums["chance-sum"] / n,
        distance=sums["distance-sum"] / n,
    )


def compare(
    local: Mapping[int, Score], federated: Mapping[int, Score], failed: set[int]
) -> Drop | None:
    """Compare the local adapter with the mean that it went into, on the same rows or not at all."""
    last = max(local, default=0)
    if last not in federated or last in failed or local[last].examples != federated[last].examples:
        return None
    mine, ours = local[last], federated[last]
    known = mine.correct is not None and ours.correct is not None
    questions = (mine.correct or 0) - (ours.correct or 0) if known else None
    costs = {
        measure: ours.measured[measure].value - mine.measured[measure].value
        for measure in ("gold-ce", "letter-ce")
        if measure in ours.measured and measure in mine.measured
    }
    return Drop(
        round=last,
        examples=mine.examples,
        questions=questions,
        points=None if questions is None else 100 * questions / mine.examples,
        gold_ce=costs.get("gold-ce"),
        letter_ce=costs.get("letter-ce"),
    )


def macros(scores: Sequence[Score]) -> dict[str, Interval]:
    """Average the measures that every score has."""
    shared = [m for m in MEASURES if scores and all(m in score.measured for score in scores)]
    return {measure: macro([score.measured[measure] for score in scores]) for measure in shared}


def lowered(clients: Sequence[Mapping[str, Score]], measure: str) -> Lowered:
    """Compare each client's frozen and federated scores, as far as it has both."""
    pairs = [
        tuple(scores[how].measured[measure] for how in ("frozen", "federated"))
        for scores in clients
        if all(how in scores and measure in scores[how].measured for how in ("frozen", "federated"))
    ]
    return Lowered(
        compared=len(pairs),
        lower=sum(ours.value < base.value for base, ours in pairs),
        apart=sum(ours.high < base.low for base, ours in pairs),
    )

# SPDX-License-Identifier: Apache-2.0
"""Who is left out for a while because it kept failing, and who is asked instead.

Both follow from the recipe and the journal's events alone: a run that is taken up again, or run
again with the same failures, asks the same clients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedloom import seeds
from fedloom.config import RunConfig
from fedloom.strategies.roster import Roster


def resting(
    events: Iterable[Mapping[str, Any]], after: int, rounds: int, server_round: int
) -> set[int]:
    """Return the partitions that rest in a round.

    Who fails ``after`` times in a row, in rounds in which it was asked to train, rests for the
    ``rounds`` that follow; then it starts anew.

    >>> lost = [{"event": "client-failed", "phase": "train", "round": r, "partition": 4}
    ...         for r in (1, 2)]
    >>> [resting(lost, after=2, rounds=2, server_round=r) for r in (2, 3, 4, 5)]
    [set(), {4}, {4}, set()]
    """
    if not after:
        return set()
    failed: dict[int, dict[int, bool]] = {}
    for row in events:
        if row.get("phase") != "train" or row["event"] not in ("reply", "client-failed"):
            continue
        when, who = int(row["round"]), int(row["partition"])
        if when < server_round and who >= 0:
            by_round = failed.setdefault(who, {})
            by_round[when] = by_round.get(when, False) or row["event"] == "client-failed"
    return {who for who, found in failed.items() if server_round <= _until(found, after, rounds)}


def _until(failed: Mapping[int, bool], after: int, rounds: int) -> int:
    """Return the last round of the last rest, 0 if there was none."""
    row = until = 0
    for when in sorted(failed):
        row = row + 1 if failed[when] else 0
        if row == after:
            row, until = 0, when + rounds
    return until


def drawn(
    config: RunConfig, roster: Roster, server_round: int, events: Iterable[Mapping[str, Any]]
) -> tuple[list[int], list[int]]:
    """Return the partitions of a round, and those that would have been among them but rest.

    Others stand in, drawn from (seed, round) as well.  Where there are too few for
    ``sampling.min-nodes``, the resting are asked all the same: a round is worth a try.
    """
    sampling = config.sampling
    chosen = roster.sample(config.seed, server_round, sampling.fraction)
    away = resting(events, sampling.rest_after, sampling.rest_rounds, server_round)
    left_out = [p for p in chosen if p in away]
    if not left_out:
        return chosen, []
    spare = [p for p in roster.partitions if p not in away and p not in chosen]
    random = seeds.generator(config.seed, server_round, "standing-in")
    others = [spare[i] for i in random.permutation(len(spare))[: len(left_out)]]
    asked = [p for p in chosen if p not in away] + others
    short = max(0, sampling.min_nodes - len(asked))
    back, left_out = left_out[:short], left_out[short:]
    return sorted([*asked, *back]), left_out

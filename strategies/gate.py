# SPDX-License-Identifier: Apache-2.0
"""``Gate``: what an adapter's training reply must satisfy beside its manifest, to be folded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.rules.bounds import MOVE, NORM, NormBound, change_norms
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster
from fedloom.wire import Arrays, Update

HELD = 5
"""Updates that the first round holds back, to be judged together: memory stays bounded."""
_WHAT = {NORM: "its change", MOVE: "its control's move"}


class Gate:
    """Hold weights against the roll call, and changes against bounds.

    Nothing is remembered here: medians come of the journal's metrics, so that a run that is taken
    up again judges as it would have.
    """

    def __init__(self, config: RunConfig, roster: Roster, journal: Journal) -> None:
        self._config, self._roster, self._journal = config, roster, journal
        self._bound = NormBound(config.gate.norm, config.gate.norm_factor)

    def check_weight(self, partition: int, examples: float) -> None:
        """Refuse a weight that is no count of rows which the client said it has."""
        rows = self._rows(partition)
        if not float(examples).is_integer() or not 1 <= examples <= rows:
            raise Refusal(
                f"num-examples = {examples}: expected a whole number from 1 to {rows}, the rows"
                " that were told at the roll call"
            )

    def _rows(self, partition: int) -> int:
        pooled = self._config.local.method == "pooled"  # one client has everybody's rows
        whose = self._roster.partitions if pooled else [partition]
        told = [self._roster.properties.get(p, {}).get("train") for p in whose]
        known = [int(rows) for rows in told if rows is not None]
        return sum(known) if len(known) == len(told) else 2**31

    def check_change(self, server_round: int, update: Update, sent: Arrays) -> dict[str, float]:
        """Refuse a change over a bound; return its norms, which the journal must keep."""
        norms, rows = change_norms(update, sent), self._journal.of_phase("train")
        for key, norm in norms.items():
            median = self._bound.median(rows, server_round, key)
            # Controls are gradients and have a scale of their own: only the relative bound fits.
            bound = self._bound if key == NORM else NormBound(0.0, self._bound.factor)
            bound.check(norm, median, _WHAT[key])
        return norms

    def sift(
        self,
        server_round: int,
        updates: Iterator[Update],
        norms: dict[int, dict[str, float]],
        drop: Callable[[int, str], None],
    ) -> Iterator[Update]:
        """Judge the first round's updates by one another: there is no earlier median.

        The first ``HELD`` are held back until they have come; those after them are held against
        their median.  ``norms`` fills as updates come; ``drop`` is told whom not to fold.
        """
        rows = self._journal.of_phase("train")
        known = self._bound.median(rows, server_round) is not None
        held = list(islice(updates, 1))
        if known or not self._bound.factor or not all(norms.get(u.origin) for u in held):
            yield from _all(held, updates)
            return
        held += islice(updates, HELD - 1)
        medians = {
            key: self._bound.median_of(
                [n[key] for u in held if key in (n := norms.get(u.origin, {}))]
            )
            for key in _WHAT
        }
        for update in _all(held, updates):
            try:
                for key, norm in norms.get(update.origin, {}).items():
                    NormBound(0.0, self._bound.factor).check(norm, medians[key], _WHAT[key])
            except Refusal as refusal:
                drop(update.origin, str(refusal))
                continue
            yield update
            del update  # it may be the size of an adapter


def _all(held: list[Any], rest: Iterable[Any]) -> Iterator[Any]:
    """Yield both, letting go of each on its way."""
    while held:
        yield held.pop(0)
    yield from rest

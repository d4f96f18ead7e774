# SPDX-License-Identifier: Apache-2.0
"""``Gate``: what an adapter's training reply must satisfy beside its manifest, to be folded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.rules import rolora_side
from fedloom.rules.bounds import (
    LEAST,
    MOVE,
    NORM,
    Move,
    NormBound,
    change_norms,
    recent,
    typical_of,
)
from fedloom.rules.workload import reach, round_steps
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster
from fedloom.wire import Arrays, Update

HELD = 5
"""Updates that are held back at once, to be judged by their own round: memory stays bounded."""
_WHAT = {NORM: "its change", MOVE: "its control's move"}
Norms = dict[str, float]
Known = dict[str, list[Move]]


class Gate:
    """Hold weights against the roll call, and changes against bounds.

    Nothing is remembered here: medians come of the journal's metrics, so that a run that is taken
    up again judges as it would have.
    """

    def __init__(self, config: RunConfig, roster: Roster, journal: Journal) -> None:
        self._config, self._roster, self._journal = config, roster, journal
        self.bound = NormBound(config.gate.norm, config.gate.norm_factor)

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

    def check_change(self, update: Update, sent: Arrays) -> Norms:
        """Refuse a change over the absolute bound; return its norms, which the journal must keep.

        Controls are gradients and have a scale of their own: only the relative bound fits them.
        """
        norms = change_norms(update, sent)
        self.bound.check(norms[NORM], _WHAT[NORM])
        return norms

    def sift(
        self,
        server_round: int,
        updates: Iterator[Update],
        norms: dict[int, Norms],
        drop: Callable[[int, str], None],
    ) -> Iterator[Update]:
        """Let through what is within the relative bound; tell ``drop`` whom not to fold, and why.

        The measure is what was accepted in earlier rounds.  Who is over it waits for the round's
        other replies and may go as far as those did: where all go further than before, nobody is
        odd.  Where there were no earlier rounds, all wait.  Fewer than ``HELD`` wait at once: then
        who has most to do is judged by those that have come.  ``norms`` fills as updates come.
        """
        if not self.has_others():
            yield from updates
            return
        known = {key: self.earlier(server_round, key) for key in _WHAT}
        waiting: list[Update] = []
        for update in updates:
            if self._passes(server_round, update.origin, norms, known):
                yield update
            else:
                waiting.append(update)
            del update  # it may be the size of an adapter
            if len(waiting) == HELD:  # of who has most to do, the others have already told enough
                first = max(waiting, key=lambda u: self.move(server_round, u.origin, NORM, 0).reach)
                waiting = [update for update in waiting if update is not first]
                yield from self._judged(server_round, [first], norms, known, drop)
                del first
        yield from self._judged(server_round, waiting, norms, known, drop)

    def has_others(self) -> bool:
        """Whether there is a relative bound, and anybody whom a client could be held against."""
        alone = self._config.local.method == "pooled" or len(self._roster.partitions) < 2
        return bool(self.bound.factor) and not alone

    def earlier(self, server_round: int, key: str) -> list[Move]:
        """Return what was accepted in rounds before this one that trained the same arrays."""
        rows, side = self._journal.of_phase("train"), self._side(server_round)
        moves = []
        for row in recent(rows, server_round, key, lambda other: self._side(other) == side):
            partition, when = int(row["partition"]), int(row["round"])
            if self._counts(when, partition):
                pace = self._rate(server_round) / self._rate(when) if key == NORM else 1.0
                moves.append(self.move(when, partition, key, float(row[key]) * pace))
        return moves if len(moves) >= LEAST else []

    def present(self, server_round: int, key: str, norms: Mapping[int, Norms]) -> list[Move]:
        """Return what has come in this round."""
        return [
            self.move(server_round, partition, key, found[key])
            for partition, found in norms.items()
            if key in found and self._counts(server_round, partition)
        ]

    def medians(
        self, key: str, move: Move, earlier: Sequence[Move], present: Sequence[Move]
    ) -> list[float]:
        """Return what a move is held against, given earlier rounds' and this one's; kindest counts.

        Two of a round are enough where earlier ones tell that both are further than usual.  A
        client's first control moves from zero, in whatever round: as far as all did in the first.
        """
        found = [typical_of(earlier, move.reach)]
        found.append(typical_of(present, move.reach, 2 if earlier else LEAST))
        if key == MOVE and earlier:
            rows = [row for row in self._journal.of_phase("train") if key in row]
            begun = [row[key] for row in rows if row["round"] == rows[0]["round"]]
            found.append(typical_of([Move(norm, move.reach) for norm in begun], move.reach))
        return [median for median in found if median is not None]

    def move(self, server_round: int, partition: int, key: str, norm: float) -> Move:
        """Return a norm with the reach of its client's work, if that is known.

        A control is a mean over steps: it gets no longer with more of them.
        """
        told = self._roster.properties.get(partition, {}).get("train")
        if key != NORM or told is None:
            return Move(norm, 0.0 if key == NORM else 1.0)
        return Move(norm, reach(self._config, partition, int(told), server_round))

    def _passes(
        self, server_round: int, partition: int, norms: Mapping[int, Norms], known: Known
    ) -> bool:
        for key, norm in norms.get(partition, {}).items():
            move = self.move(server_round, partition, key, norm)
            median = typical_of(known[key], move.reach)
            if median is None or not self.bound.admits(move, [median]):
                return False
        return True

    def _judged(
        self,
        server_round: int,
        waiting: list[Update],
        norms: Mapping[int, Norms],
        known: Known,
        drop: Callable[[int, str], None],
    ) -> Iterator[Update]:
        """Yield those of the waiting that went no further than their round allows."""
        present = {key: self.present(server_round, key, norms) for key in _WHAT}
        while waiting:
            update = waiting.pop(0)
            reason = ""
            for key, norm in norms.get(update.origin, {}).items():
                move = self.move(server_round, update.origin, key, norm)
                medians = self.medians(key, move, known[key], present[key])
                if not self.bound.admits(move, medians):
                    reason = reason or self.bound.reason(move, medians, _WHAT[key])
            if reason:
                drop(update.origin, reason)
            else:
                yield update
            del update

    def _side(self, server_round: int) -> str:
        """Name what only some rounds train: rounds of other arrays are no measure."""
        return rolora_side(server_round) if self._config.server.rule == "rolora" else ""

    def _rate(self, server_round: int) -> float:
        return self._config.train.in_round(server_round, self._config.rounds).learning_rate

    def _counts(self, server_round: int, partition: int) -> bool:
        """Whether a norm may stand in a median.

        Under ``fedsa`` B starts at zero on each client, and A, which alone is sent, has no gradient
        in a client's first step: one that takes no second has not moved yet.
        """
        if self._config.server.rule != "fedsa":
            return True
        for row in self._journal.rows["metrics"]:
            if row["round"] >= server_round:
                break
            if (row["phase"], row["partition"]) == ("train", partition):
                return True
        told = int(self._roster.properties.get(partition, {}).get("train", 2**31))
        return round_steps(self._config, told, server_round) > 1

# SPDX-License-Identifier: Apache-2.0
"""``Riding``: scores of one round's adapter that come with the next round's training replies.

Whoever trains next is sent the adapter anyway.  With ``evaluation.with-training`` it scores that
before it trains, and no message asks for scores alone but the last round's.  Their rows and their
round's event are those that messages of their own would have made, told a round later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import RecordDict

from fedloom import border
from fedloom.errors import Refusal
from fedloom.strategies.checkpoint import State
from fedloom.strategies.journal import Journal
from fedloom.strategies.tallies import announce, keep_rows

SCORES = ("gold-ce-sum", "correct")
"""Metrics that every client's scores must have, besides their number of examples."""

_EVALUATE, _FROZEN = "evaluate", "frozen"


@dataclass(frozen=True)
class _Waiting:
    """A round that is over but for its scores."""

    round: int
    phase: str
    told: dict[str, Any] = field(default_factory=dict)
    """What its event says besides."""


class Riding:
    """Know which scores are still to come, ask for them, and keep them.

    A checkpoint is written when a round is over but for its scores: what is waited for is a part of
    it, so that a run that goes on asks for them again.

    Parameters
    ----------
    on : bool
        Whether scores ride along; if not, there is never anything to wait for.
    row : callable
        Makes a row of metrics of (round, phase, partition, metrics).
    """

    def __init__(
        self,
        on: bool,
        journal: Journal,
        row: Callable[[int, str, int, dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.on, self._journal, self._row = on, journal, row
        self._waiting: _Waiting | None = None
        self._rows: list[dict[str, Any]] = []
        self._began = time.monotonic()

    def state(self) -> State:
        """Return what is waited for."""
        return State(tree=asdict(self._waiting) if self._waiting else {})

    def restore(self, state: State) -> None:
        """Wait for it again."""
        self._waiting = _Waiting(**state.tree) if state.tree else None

    def frozen(self, everybody: list[int], drawn: Callable[[int], Iterable[int]]) -> list[int]:
        """Let the first round's clients score the frozen model, too; return who is asked apart."""
        if not self.on:
            return everybody
        first = set(drawn(1))
        self._waiting, self._rows = _Waiting(0, _FROZEN), []
        return [partition for partition in everybody if partition not in first]

    def wait(self, server_round: int, told: Mapping[str, Any]) -> None:
        """Let the next round's clients score this round's adapter; ``told`` is for its event."""
        self.land()  # a strategy of somebody's own may not have
        self._waiting = _Waiting(server_round, _EVALUATE, {**told, **self._seconds()})
        self._rows = []

    def ask(
        self, told: Mapping[str, Any], scoring: Callable[[int], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return what training messages must say besides, so that scores come with the replies.

        Parameters
        ----------
        told
            What they say already; what scoring is told alike need not be said twice.
        scoring
            Round -> what a message that asks for scores alone would say.
        """
        self._began = time.monotonic()
        if (waiting := self._waiting) is None:
            return {}
        words: Mapping[str, Any] = {"round": 0, "frozen": True}
        if waiting.phase == _EVALUATE:
            words = scoring(waiting.round)
        return {border.BEFORE + k: v for k, v in words.items() if k not in told or told[k] != v}

    def take(self, partition: int, records: RecordDict) -> RecordDict:
        """Take the scores of a training reply; return the reply as it would be without.

        They are of what the client was sent: what becomes of its update does not touch them.
        """
        if (waiting := self._waiting) is None:
            return records
        rest, came = border.without_before(records)
        try:
            if not came:
                raise Refusal("its reply brought no scores; why stands in the node's log")
            metrics = border.checked_numbers(came, SCORES)
        except Refusal as refusal:
            where = {"round": waiting.round, "phase": waiting.phase, "partition": partition}
            self._journal.event("client-failed", **where, reason=str(refusal), traceback="")
        else:
            self._rows.append(self._row(waiting.round, waiting.phase, partition, metrics))
        return rest

    def land(self) -> None:
        """Keep what has come, and tell of the round that is whole now."""
        if (waiting := self._waiting) is None:
            return
        rows, self._waiting, self._rows = self._rows, None, []
        keep_rows(self._journal, rows)
        if waiting.phase == _EVALUATE:
            announce(self._journal, waiting.round, rows, waiting.told)

    def told(self, server_round: int, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the event of a round says whose scores were asked for by messages after all.

        That is the last round's; of one that a budget made the last too late, it was noted before.
        """
        if not self.on:
            return told
        waiting = self._waiting
        if waiting is None or waiting.round != server_round:
            self.land()
            return {**told, **self._seconds()}
        self._waiting = None
        return waiting.told

    def _seconds(self) -> dict[str, float]:
        """Say how long the round took: its event may come a round later."""
        return {"seconds": time.monotonic() - self._began}

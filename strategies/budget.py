# SPDX-License-Identifier: Apache-2.0
"""``Budget``: bytes are known before they are sent, so a run can end before it overspends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fedloom.errors import Refusal
from fedloom.rounding import code_bytes, scale_bytes
from fedloom.strategies.journal import Journal
from fedloom.wire import Arrays, Manifest

FRAMING = 4096
"""Bytes a message may take beside its arrays' values, unless one took more before."""
_PHASES = ("train", "evaluate", "validation", "frozen")


def coded_bytes(manifest: Manifest, code: str) -> int:
    """Count the bytes of a reply's values, written in ``code``."""
    if code == "float32":
        return manifest.nbytes()
    total = 0
    for shape, dtype in manifest.arrays.values():
        count = math.prod(shape)
        coded = dtype == "float32"
        plain = count * np.dtype(dtype).itemsize
        total += code_bytes(code, count) + scale_bytes(code, count) if coded else plain
    return total


class Budget:
    """Which round is the last, as far as bytes decide it.

    A round's bytes are bounded from above before it begins: the values by their shapes, all else by
    a margin for each message.  Scoring is always counted, so the last adapter can be scored.

    Parameters
    ----------
    limit : int
        Bytes, both ways; 0 is none.
    rounds : int
        What the recipe wants.
    grows : bool
        Whether what goes down grows from round to round, as a side adapter does.
    """

    def __init__(self, limit: int, rounds: int, journal: Journal, grows: bool = False) -> None:
        self.limit, self.rounds, self.journal, self.grows = limit, rounds, journal, grows
        self.final = rounds
        """The last round; lower than the recipe's once the budget has said so."""
        self.reason = ""
        """Why the run ended before its last round."""

    def spent(self) -> int:
        """Return the bytes of all messages so far."""
        return sum(int(row["bytes"]) for row in self.journal.rows["ledger"])

    def margin(self) -> int:
        """Return what a message takes beside values, at most, by what has been seen."""
        framing: dict[tuple[object, ...], int] = {}
        for row in self.journal.rows["ledger"]:
            if row["dtype"] == "framing" and row["phase"] in _PHASES:
                key = tuple(row[k] for k in ("round", "phase", "direction", "partition"))
                framing[key] = framing.get(key, 0) + int(row["bytes"])
        return max(FRAMING, max(framing.values(), default=0) * 9 // 8)

    def most(self, down: Mapping[int, Arrays], up: Mapping[int, Manifest], code: str) -> int:
        """Bound the bytes of a round that asks for ``up``, and of all clients' scores after it.

        Parameters
        ----------
        down
            What each partition is sent.
        up
            What each that trains is held against.
        """
        sent = {p: sum(array.nbytes for array in arrays.values()) for p, arrays in down.items()}
        came = [coded_bytes(manifest, code) for manifest in up.values()]
        # A side adapter may take in all that came, and what averaging leaves over as well.
        grown = sum(came) + max(came, default=0) if self.grows else 0
        values = sum(sent[p] for p in up) + sum(came) + sum(sent.values()) + grown * len(sent)
        return values + (2 * len(up) + 2 * len(sent)) * self.margin()

    def is_over(self, server_round: int, cost: Callable[[int], int]) -> bool:
        """Whether a round must not begin; decides, too, whether it is the last.

        Parameters
        ----------
        cost
            Round -> most bytes of it.

        Raises
        ------
        Refusal
            If not even one round can be paid for.
        """
        if server_round <= self.final and self.limit:
            spent, now = self.spent(), cost(server_round)
            if spent + now > self.limit:
                self._check_any(spent, now)
                self.final = server_round - 1
            elif server_round < self.final:
                following = spent + now + cost(server_round + 1)
                self.final = server_round if following > self.limit else self.final
        over = server_round > self.final
        if over and not self.reason:
            spent = self.spent()
            self.reason = (
                f"byte budget: round {self.final + 1} of {self.rounds} could take more than is left"
                f" of wire.budget-bytes = {self.limit} ({spent} B are spent)"
            )
            self.journal.event("stopped", round=self.final, reason=self.reason, spent=spent)
        return over

    def _check_any(self, spent: int, now: int) -> None:
        if not self.journal.of_phase("train"):
            raise Refusal(
                f"wire.budget-bytes = {self.limit}: one round takes up to {now} B and {spent} B are"
                ' spent on the start; raise it, ask fewer clients, or set share = "memory" or'
                ' wire.dtype = "int8"'
            )

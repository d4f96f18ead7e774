# SPDX-License-Identifier: Apache-2.0
"""What a run of FAAST told about its one solution, read from its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.config import RunConfig

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class FastFacts:
    """The widths, the solution that was taken, and what it was chosen from."""

    keys: int | None
    """d."""
    classes: int | None
    """p: values are one-hot, or mapped by whoever has the label embeddings."""
    sums_bytes: int | None
    """Arrays of one reply, whatever its rows."""
    solved: Row
    """``alpha``, ``rank``, ``explained``, ``condition``, ``rows`` and the like, as last told."""
    solutions: tuple[Row, ...]
    """Each alpha and prior with its scores on validation rows; empty if nothing was chosen."""
    validation_rows: int | None
    shares: Row
    """What the server saw, of whom, and at what price of privacy; empty if nothing was solved."""

    def to_tree(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        kept = ("alpha", "prior", "memory-share", "rank", "tolerance", "explained", "condition")
        more = ("rows", "summed-clients", "floored", "solve-seconds")
        told = {key: self.solved.get(key) for key in (*kept, *more)}
        head = {"keys": self.keys, "classes": self.classes, "sums-bytes": self.sums_bytes}
        chosen = {"validation-rows": self.validation_rows, "solutions": list(self.solutions)}
        told_apart = ("event", "time", "round", "reply-bytes")
        shares = {key: value for key, value in self.shares.items() if key not in told_apart}
        return {**head, **told, **chosen, "shares": shares}


def fast_facts(config: RunConfig | None, events: Sequence[Row]) -> FastFacts | None:
    """Read a run's events; nothing if its method was another."""
    if config is None or config.method != "faast":
        return None

    def last(name: str, key: str) -> Row:
        return next((e for e in reversed(events) if e.get("event") == name and key in e), {})

    widths, choice = last("adapter", "keys"), last("choice", "solutions")
    shares = last("shares", "mode")
    return FastFacts(
        keys=widths.get("keys"),
        classes=widths.get("classes"),
        sums_bytes=shares.get("reply-bytes", widths.get("bytes")),
        solved=last("round", "rank"),
        solutions=tuple(choice.get("solutions", ())),
        validation_rows=int(choice["rows"]) if "rows" in choice else None,
        shares=shares,
    )

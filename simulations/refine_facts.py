# SPDX-License-Identifier: Apache-2.0
"""What a run of FedRefine told of its pairs and its fusers, read from its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from fedloom.config import RunConfig

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RefinedFacts:
    """Who heard whom, with what gain, by which fusers."""

    pairs: tuple[Row, ...]
    """Receiver, sender, rows, accuracy refined and alone, rows gained and spoilt, bytes."""
    fusers: tuple[Row, ...]
    """Those that the server had of these models."""
    answers: tuple[Row, ...]
    """Receipts of single questions."""
    selections: tuple[Row, ...] = ()
    """Whom each receiver chose to ask, and by what."""

    def to_tree(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        apart = ("event", "time", "sealed", "public")
        kept = [{k: v for k, v in row.items() if k not in apart} for row in self.pairs]
        told = [{**row, "mcnemar-p": mcnemar(row)} for row in kept]
        found: dict[str, Any] = {"pairs": told, "fusers": list(self.fusers)}
        found["receipts"] = [row["receipt"] for row in self.answers]
        found["selections"] = [
            {"partition": row["partition"], **row["selection"]} for row in self.selections
        ]
        return found


def refined_facts(config: RunConfig | None, events: Sequence[Row]) -> RefinedFacts | None:
    """Read a run's events; nothing if its method was another, or it made a fuser."""
    if config is None or config.method != "fedrefine" or config.refine.solve:
        return None
    fusers = next((e["fusers"] for e in events if e.get("event") == "registry"), ())
    return RefinedFacts(
        pairs=tuple(e for e in events if e.get("event") == "pair"),
        fusers=tuple(fusers),
        answers=tuple(e for e in events if e.get("event") == "answer"),
        selections=tuple(e for e in events if e.get("event") == "selection"),
    )


def mcnemar(row: Row) -> float:
    """Return the exact two-sided p-value that gains and losses are a fair coin's (McNemar, 1947).

    >>> mcnemar({"gained": 1, "spoilt": 0}), mcnemar({"gained": 6, "spoilt": 0})
    (1.0, 0.03125)
    """
    gained, spoilt = int(row["gained"]), int(row["spoilt"])
    n, fewer = gained + spoilt, min(gained, spoilt)
    return float(min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / 2**n)) if n else 1.0

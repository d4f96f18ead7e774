# SPDX-License-Identifier: Apache-2.0
"""What a round comes to, and how it is kept: means in which every client counts the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from fedloom import border
from fedloom.strategies.journal import Journal

_APART = ("local-", "personal-")


def prefixed(row: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the metrics whose names begin so, without that beginning."""
    return {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}


def macro(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Average over clients, each client counting the same."""
    means = _means(rows)
    personal = [scores for row in rows if (scores := prefixed(row, "personal-"))]
    if len(personal) == len(rows):
        means |= {f"personal-{key}": value for key, value in _means(personal).items()}
    return means


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    ce = [row["gold-ce-sum"] / row[border.WEIGHT] for row in rows]
    accuracy = [row["correct"] / row[border.WEIGHT] for row in rows]
    return {"gold-ce": float(np.mean(ce)), "accuracy": float(np.mean(accuracy))}


def keep_rows(journal: Journal, rows: list[dict[str, Any]]) -> None:
    """Write metrics in partition order; what another adapter than the global scored goes apart.

    ``local-``: the adapter that is averaged next; ``personal-``: the client's own.
    """
    for row in sorted(rows, key=lambda r: cast(int, r["partition"])):
        head = {key: row[key] for key in ("round", "partition", "name")}
        journal.metric(**{k: v for k, v in row.items() if not k.startswith(_APART)})
        for prefix in _APART:
            if scores := prefixed(row, prefix):
                journal.metric(**head, phase=prefix.removesuffix("-"), **scores)


def announce(
    journal: Journal, server_round: int, rows: list[dict[str, Any]], told: Mapping[str, Any]
) -> None:
    """Say that a round is over, what it cost, who failed in it and what its rows come to."""
    events = [e["event"] for e in journal.rows["events"] if e.get("round") == server_round]
    journal.event(
        "round",
        round=server_round,
        bytes_down=journal.bytes_of(server_round, "down"),
        bytes_up=journal.bytes_of(server_round, "up"),
        failed=events.count("client-failed"),
        late=events.count("late-reply"),
        **told,
        **(macro(rows) if rows else {}),
    )

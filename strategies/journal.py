# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: events, metrics and the byte ledger, one JSON object a line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import RecordDict

from fedloom import border

Row = dict[str, Any]


class Journal:
    """Append rows to ``events.jsonl``, ``metrics.jsonl`` and ``ledger.jsonl``, flushed at once.

    Rows are kept in memory too, so that a strategy can be used without a folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.rows: dict[str, list[Row]] = {"events": [], "metrics": [], "ledger": []}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def event(self, name: str, **values: Any) -> None:
        """Say that something happened, now."""
        self._append("events", {"event": name, "time": datetime.now(UTC).isoformat(), **values})

    def metric(self, **values: Any) -> None:
        """Keep one client's numbers of one phase of one round."""
        self._append("metrics", values)

    def weigh(
        self, records: RecordDict, *, server_round: int, phase: str, direction: str, partition: int
    ) -> int:
        """Enter a message's serialised bytes by dtype and return their sum."""
        counts = border.wire_bytes(records)
        for dtype, count in sorted(counts.items()):
            entry = {"round": server_round, "phase": phase, "direction": direction}
            self._append(
                "ledger", {**entry, "partition": partition, "dtype": dtype, "bytes": count}
            )
        return sum(counts.values())

    def of_phase(self, phase: str) -> list[Row]:
        """Return the metric rows of a phase so far."""
        return [row for row in self.rows["metrics"] if row["phase"] == phase]

    def bytes_of(self, server_round: int, direction: str) -> int:
        """Return the bytes of a round in one direction, ``up`` or ``down``."""
        rows = self.rows["ledger"]
        kept = (r for r in rows if (r["round"], r["direction"]) == (server_round, direction))
        return sum(row["bytes"] for row in kept)

    def _append(self, kind: str, row: Row) -> None:
        row = {key.replace("_", "-"): value for key, value in row.items()}
        self.rows[kind].append(row)
        if self.folder is not None:
            with (self.folder / f"{kind}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

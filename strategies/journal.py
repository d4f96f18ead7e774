# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind: events, metrics and the byte ledger, one JSON object a line."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import Message, RecordDict

from fedloom import border
from fedloom.border import FRAMING
from fedloom.disk import flush_folder

Row = dict[str, Any]

ERROR, LATE = "error", "late"
"""Phases of the ledger: replies that say what went wrong, and those that came after their time."""


class Journal:
    """Append rows to ``events.jsonl``, ``metrics.jsonl`` and ``ledger.jsonl``, flushed at once.

    Rows are kept in memory too, so that a strategy can be used without a folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.rows: dict[str, list[Row]] = {"events": [], "metrics": [], "ledger": []}
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        """Flush all files to the disk and return how many bytes they hold."""
        found = {}
        for kind, path in self._files():
            with path.open("a", encoding="utf-8") as file:
                os.fsync(file.fileno())
            found[kind] = path.stat().st_size
        return found

    def sync(self) -> None:
        """Make what was appended last: it is there after a power cut, too."""
        self.sizes()
        if self.folder is not None:
            flush_folder(self.folder)

    def behind(self, sizes: Mapping[str, int]) -> dict[str, list[Row]]:
        """Return the whole rows that were written after ``sizes`` was called."""
        return {
            kind: _whole_rows(path.read_bytes()[sizes.get(kind, 0) :]) if path.exists() else []
            for kind, path in self._files()
        }

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Go back to where ``sizes`` was called; what stays is read into memory."""
        for kind, path in self._files():
            if not path.exists():
                continue
            with path.open("r+b") as file:
                file.truncate(sizes.get(kind, 0))
                os.fsync(file.fileno())
                self.rows[kind] = _whole_rows(file.read())

    def _files(self) -> Iterator[tuple[str, Path]]:
        if self.folder is not None:
            yield from ((kind, self.folder / f"{kind}.jsonl") for kind in self.rows)

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

    def weigh_error(self, reply: Message, *, server_round: int, partition: int) -> None:
        """Enter an error reply's bytes, in a phase of its own: it travelled like any other."""
        entry = {"round": server_round, "phase": ERROR, "direction": "up", "partition": partition}
        self._append("ledger", {**entry, "dtype": FRAMING, "bytes": border.error_bytes(reply)})

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
            _append_line(self.folder / f"{kind}.jsonl", json.dumps(row))


def append_lasting(path: Path, row: Row) -> None:
    """Append a row that is there, whole, when this returns, also after a power cut.

    A line before it that a crash has torn stays alone; if the disk is full nothing is appended.
    """
    before = path.read_bytes() if path.exists() else b"\n"
    fresh = "" if before.endswith(b"\n") or not before else "\n"
    _append_line(path, f"{fresh}{json.dumps(row)}")
    with path.open("ab") as file:
        os.fsync(file.fileno())
    flush_folder(path.parent)


def _whole_rows(data: bytes) -> list[Row]:
    """Read lines of JSON; one that is torn is not there."""
    rows = []
    for line in data.split(b"\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except ValueError:  # a power cut can leave a hole before a later line
            continue
    return rows


def _append_line(path: Path, text: str) -> None:
    """Append a line, or nothing of it if the disk is full."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            data = f"{text}\n".encode()
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError:
            file.truncate(before)
            raise

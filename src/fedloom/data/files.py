# SPDX-License-Identifier: Apache-2.0
"""Rows of local tables: Parquet, CSV and JSONL, each with the place it came from."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedloom.errors import Refusal

Row = tuple[str, Mapping[str, Any]]
ENDINGS = (".parquet", ".csv", ".jsonl")


def extra(module: str) -> Any:
    """Import a module that a coordinator does without.

    Raises
    ------
    Refusal
        If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Refusal(
            f"{module} is not installed and this source needs it: pip install 'fedloom[node]'"
        ) from error


def rows(path: Path) -> Iterator[Row]:
    """Yield (place, row) of a table, or of all tables below a folder in sorted order.

    Raises
    ------
    Refusal
        If there is no table or one cannot be read.
    """
    found = sorted(p for p in path.rglob("*") if p.suffix in ENDINGS) if path.is_dir() else [path]
    if not found or not path.exists() or found[0].suffix not in ENDINGS:
        came = "does not exist" if not path.exists() else "is no table"
        raise Refusal(f"path:{path} {came}: expected a file or folder of {', '.join(ENDINGS)}")
    readers = {".parquet": _parquet, ".csv": _csv, ".jsonl": _jsonl}
    for table in found:
        try:
            yield from readers[table.suffix](table)
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise Refusal(f"{table} cannot be read: {error}") from error


def _parquet(path: Path) -> Iterator[Row]:
    pyarrow, parquet = extra("pyarrow"), extra("pyarrow.parquet")
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise Refusal(f"{path} is no Parquet file: {error}") from error
    for index, row in enumerate(table.to_pylist()):
        yield f"{path.name} row {index}", row


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, start=1):
            try:
                row = json.loads(line) if line.strip() else None
            except ValueError as error:
                raise Refusal(f"{path.name} line {number} is no JSON object") from error
            if row is not None and not isinstance(row, dict):
                raise Refusal(f"{path.name} line {number}: expected a JSON object")
            if row is not None:
                yield f"{path.name} line {number}", row


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as handle:
        lines = csv.reader(handle)
        header = next(lines, [])
        if _is_bare(header):
            names = ["question", "A", "B", "C", "D", "answer"]
            for number, line in enumerate([header, *lines], start=1):
                row = dict(zip(names, line, strict=False))
                yield f"{path.name} row {number}", {"subject": _subject(path), **row}
            return
        for line in lines:
            yield (
                f"{path.name} before line {lines.line_num + 1}",
                dict(zip(header, line, strict=False)),
            )


def _is_bare(header: list[str]) -> bool:
    """Tell MMLU's first release: no header, the subject only in the file's name."""
    return len(header) == 6 and header[-1] in ("A", "B", "C", "D")


def _subject(path: Path) -> str:
    stem = path.stem
    for split in ("_test", "_dev", "_val"):
        stem = stem.removesuffix(split)
    return stem

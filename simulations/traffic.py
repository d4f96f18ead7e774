# SPDX-License-Identifier: Apache-2.0
"""What the byte ledger of a run adds up to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the ledger counted in serialised messages, in bytes."""

    kinds: dict[tuple[str, str, str], int]
    """(phase, direction, dtype) -> bytes."""
    per_round: dict[int, dict[str, tuple[int, int]]]
    """Round -> direction -> (arrays, framing)."""
    payloads: tuple[int, ...]
    """Every size that the arrays of one training message had."""

    def share(self, direction: str = "", *, framing: bool = False) -> int:
        """Sum the bytes of one direction (or both), or just their framing."""
        return sum(
            count
            for (_, way, dtype), count in self.kinds.items()
            if direction in ("", way) and not (framing and _is_array(dtype))
        )


def read_traffic(ledger: Iterable[Mapping[str, Any]]) -> Traffic:
    """Add up the ledger's rows."""
    kinds: dict[tuple[str, str, str], int] = defaultdict(int)
    rounds: dict[int, dict[str, tuple[int, int]]] = defaultdict(dict)
    messages: dict[tuple[Any, ...], int] = defaultdict(int)
    for row in ledger:
        if "bytes" not in row:
            continue
        way, dtype, count = str(row["direction"]), str(row["dtype"]), int(row["bytes"])
        kinds[str(row["phase"]), way, dtype] += count
        arrays, framing = rounds[int(row["round"])].get(way, (0, 0))
        mine = (count, 0) if _is_array(dtype) else (0, count)
        rounds[int(row["round"])][way] = (arrays + mine[0], framing + mine[1])
        if row["phase"] == "train" and _is_array(dtype):
            messages[row["round"], way, row.get("partition")] += count
    per_round = dict(sorted(rounds.items()))
    payloads = tuple(sorted(set(messages.values())))
    return Traffic(kinds=dict(sorted(kinds.items())), per_round=per_round, payloads=payloads)


def _is_array(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "int", "uint", "bool"))

# SPDX-License-Identifier: Apache-2.0
"""What a round's rows come to: means in which every client counts the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom import border


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

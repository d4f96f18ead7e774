# SPDX-License-Identifier: Apache-2.0
"""The figures of ``latency.py``: medians, ratios within a question, and slower links."""

from __future__ import annotations

import argparse
import os
import platform
from statistics import median
from typing import Any

import torch
import transformers

from fedloom.slices.geometry import Geometry

LINKS = (1, 10, 50, 100, 1000)
PARTS = (
    "rephrase",
    "sender prefill",
    "sender decode",
    "serialise",
    "network",
    "verify",
    "fuse",
    "receiver prefill",
    "decode",
)


BOTH = ("seconds", "busy")


def summary(
    args: argparse.Namespace,
    sender: Geometry,
    fuser_share: float,
    rows: list[dict[str, Any]],
    sizes: dict[tuple[str, float], int],
) -> dict[str, Any]:
    def spent(row: dict[str, Any], way: str, what: str, extra: bool = False) -> float:
        """Add an answer up, as it passed or of both processors, maybe with a rephrasing."""
        clocks = [row[way], *([row["rephrase"]] if extra else [])]
        return sum(sum(getattr(clock, what).values()) for clock in clocks)

    def ratio(what: str, t2t: bool = False, refine: bool = False) -> float:
        return median(spent(r, "t2t", what, t2t) / spent(r, "refine", what, refine) for r in rows)

    raw = [2 * sender.layers * sender.width * row["tokens"] * 2 for row in rows]
    whole = sizes["bf16", 1.0]
    found = {
        "speedup": ratio("seconds"),
        "speedup_of_processors": ratio("busy"),
        "speedup_both_rephrase": ratio("busy", True, True),
        "speedup_only_refine_rephrases": ratio("busy", False, True),
        "refine_seconds": median(spent(r, "refine", "seconds") for r in rows),
        "t2t_seconds": median(spent(r, "t2t", "seconds") for r in rows),
        "refine_cpu_seconds": median(spent(r, "refine", "busy") for r in rows),
        "t2t_cpu_seconds": median(spent(r, "t2t", "busy") for r in rows),
        "rephrase_cpu_seconds": median(r["rephrase"].busy["rephrase"] for r in rows),
        "wire_overhead": max(r["kv_bytes"] / n for r, n in zip(rows, raw, strict=True)),
        "kv_bytes": median(r["kv_bytes"] for r in rows),
        "text_bytes": median(r["text_bytes"] for r in rows),
        "tokens": median(r["tokens"] for r in rows),
    }
    found |= {f"{s}_{share:g}_ratio": n / whole for (s, share), n in sizes.items() if n != whole}
    found = {name: round(x, 4) for name, x in found.items()}
    split = {
        way: {
            part: [round(median(getattr(r[way], w)[part] for r in rows), 4) for w in BOTH]
            for part in PARTS[1:]
        }
        for way in ("refine", "t2t")
    }
    links, crossings = on_links(found, sizes)
    return found | {
        "crossover_mbit": crossings,
        "seconds_on_links": links,
        "split": split,
        "fuser_parameter_share": round(fuser_share, 4),
        "written": args.written,
        "answer_tokens": args.answer,
        "repeats": len(rows),
        "sender": args.sender,
        "receiver": args.receiver,
        "threads": args.threads,
        "load_average": round(os.getloadavg()[0], 2),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def on_links(
    found: dict[str, float], sizes: dict[tuple[str, float], int]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Add the time of the bytes on slower links; say where text begins to be quicker.

    Compute is the processors' time: what an idle core would take.  All ways are given that of the
    16-bit one, as quantising costs milliseconds.
    """
    kv, text = found["refine_cpu_seconds"], found["t2t_cpu_seconds"]
    scale = found["kv_bytes"] / sizes["bf16", 1.0]  # sizes are of one question
    names = {f"{s} x {share:g}": n * scale for (s, share), n in sizes.items()}
    links = {
        f"{mbit}": {name: round(kv + n * 8e-6 / mbit, 3) for name, n in names.items()}
        | {"text": round(text + found["text_bytes"] * 8e-6 / mbit, 3)}
        for mbit in LINKS
    }
    saved = text - kv
    crossings = {
        name: round((n - found["text_bytes"]) * 8e-6 / saved, 4) if saved > 0 else float("nan")
        for name, n in names.items()
    }
    return links, crossings


def tables(found: dict[str, Any]) -> str:
    head = ("part", "refine, s", "of a core", "T2T, s", "of a core")
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    split = found["split"]
    for part in PARTS[1:]:
        cells = [f"{x:.3f}" for way in ("refine", "t2t") for x in split[way][part]]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    names = ("refine_seconds", "refine_cpu_seconds", "t2t_seconds", "t2t_cpu_seconds")
    lines.append("| all | " + " | ".join(f"{found[n]:.3f}" for n in names) + " |")
    lines.append(f"\none rephrasing takes a core {found['rephrase_cpu_seconds']:.2f} s")
    names = list(next(iter(found["seconds_on_links"].values())))
    lines += ["", "| Mbit/s | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for mbit, row in found["seconds_on_links"].items():
        lines.append(f"| {mbit} | " + " | ".join(f"{row[n]:.2f}" for n in names) + " |")
    crossing = found["crossover_mbit"]
    cells = [f"{crossing[n]:.3f}" if n in crossing else "" for n in names]
    lines.append("| text is quicker below | " + " | ".join(cells) + " |")
    return "\n".join(lines)

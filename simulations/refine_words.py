# SPDX-License-Identifier: Apache-2.0
"""How the command line words a receipt: who was heard, at what price, and who fell away."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.simulations.amounts import duration, size


def selection_lines(log: Mapping[str, Any]) -> list[str]:
    """Word a choice: who is asked and how, then a line for each that was left."""
    budget = log["budget"]
    asked = ", ".join(f"{name} by {way}" for name, way in log["chosen"].items()) or "nobody"
    facts = f"task {log['task']}, {budget['tokens']} tokens, deadline {budget['deadline']:g} s"
    lines = [f"selected: {asked} ({facts}, privacy level {budget['privacy']})"]
    for row in log["candidates"]:
        if not row["taken"] and row["sender"] != "none":
            how = "" if row["way"] == "any" else f" by {row['way']}"
            lines.append(f"{row['sender']}{how}: left, {row['why']}")
    return lines


def receipt_lines(receipt: dict[str, Any]) -> list[str]:
    """Word a receipt, a line a sender."""
    lines = selection_lines(receipt["selection"]) if receipt.get("selection") else []
    if words := receipt.get("rephrasing"):
        passed = f"senders read other words, {words['retries']} attempts were turned down"
        kept = f"the question stayed at home: {words['retries']} attempts were turned down"
        lines.append(passed if words["rephrased"] else kept)
    for source in receipt["sources"]:
        who = f"{source['name'] or source['model'][:12]}:"
        if source["status"] == "used":
            heard = f"used, {source['gates_open']} of {source['gates']} gates open"
            facts = [heard] if source["gates"] else ["used, its own cache"]
            if source["way"] == "text":
                facts = ["used, its message in words"]
            facts += [f"{source['tokens']} tokens, {size(source['bytes'])}"]
            lines.append(f"{who} {', '.join(facts)}, {duration(source['seconds'])}")
        elif source["status"] == "shut":
            lines.append(f"{who} not asked, all gates are shut")
        else:
            lines.append(f"{who} FALLBACK ({source['cause']}): {source['reason']}")
    if receipt["fallback"]:
        kinds = {"fewer": "fewer senders", "t2t": "a sender's words", "standalone": "none: alone"}
        lines.append(f"fallback: {kinds[receipt['fallback']]}")
    spent = receipt["seconds"]
    parts = [f"{k} {duration(v)}" for k, v in spent.items() if k != "total" and v >= 0.05]
    split = f" ({', '.join(parts)})" if parts else ""
    total = duration(spent.get("total", 0.0))
    lines.append(f"{receipt['mode']}, {size(receipt['bytes'])} on the wire, {total}{split}")
    return lines

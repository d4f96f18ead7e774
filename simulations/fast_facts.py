# SPDX-License-Identifier: Apache-2.0
"""What a run of FAAST told about its one solution, read from its events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    groups: tuple[GroupFacts, ...] = ()
    """Nodes by encoder, if they had several: then each group was solved by itself."""
    row_accuracy: float | None = None
    """With groups: right answers over all test rows."""

    def to_tree(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        kept = ("alpha", "prior", "memory-share", "rank", "tolerance", "explained", "condition")
        more = ("rows", "summed-clients", "floored", "solve-seconds")
        told = {key: self.solved.get(key) for key in (*kept, *more)}
        head = {"keys": self.keys, "classes": self.classes, "sums-bytes": self.sums_bytes}
        chosen = {"validation-rows": self.validation_rows, "solutions": list(self.solutions)}
        told_apart = ("event", "time", "round", "reply-bytes", "group")
        shares = {key: value for key, value in self.shares.items() if key not in told_apart}
        if self.groups:
            groups = [group.to_tree() for group in self.groups]
            return {"row-accuracy": self.row_accuracy, "shares": shares, "groups": groups}
        return {**head, **told, **chosen, "shares": shares}


@dataclass(frozen=True, kw_only=True)
class GroupFacts:
    """One encoder's nodes and their solution."""

    name: str
    """Of its folder under ``groups/``."""
    encoder: str
    manifest: str
    partitions: tuple[int, ...]
    fast: FastFacts

    def to_tree(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        about = {"group": self.name, "encoder": self.encoder, "manifest": self.manifest}
        scores = {key: self.fast.solved.get(key) for key in ("accuracy", "row-accuracy")}
        return {**about, "partitions": list(self.partitions), **scores, **self.fast.to_tree()}


def fast_facts(config: RunConfig | None, events: Sequence[Row]) -> FastFacts | None:
    """Read a run's events; nothing if its method was another."""
    if config is None or config.method != "faast":
        return None
    roll = next((e["groups"] for e in events if e.get("event") == "groups"), ())
    if not roll:
        return _facts(events)
    scored = next((e for e in reversed(events) if e.get("event") == "round"), {})
    told = {g["group"]: g for g in scored.get("groups", ())}
    groups = tuple(_group(one, told.get(one["group"], {}), events) for one in roll)
    seen = next((g.fast.shares for g in groups if g.fast.shares), {})
    return FastFacts(
        keys=None,
        classes=groups[0].fast.classes,
        sums_bytes=None,
        solved={"summed-clients": sum(g.fast.solved.get("summed-clients", 0) for g in groups)},
        solutions=(),
        validation_rows=None,
        shares={key: seen[key] for key in ("mode", "seen") if key in seen},
        groups=groups,
        row_accuracy=scored.get("row-accuracy"),
    )


def _group(roll: Row, told: Row, events: Sequence[Row]) -> GroupFacts:
    """Read one group's events, whose rounds are called ``group-round``."""
    mine = [e for e in events if e.get("group") == roll["group"]]
    mine = [{**e, "event": "round"} if e.get("event") == "group-round" else e for e in mine]
    fast = _facts(mine)
    return GroupFacts(
        name=str(roll["group"]),
        encoder=str(roll["encoder"]),
        manifest=str(roll["manifest"]),
        partitions=tuple(int(p) for p in roll["partitions"]),
        fast=replace(fast, solved={**told, **fast.solved} if fast.solved else {}),
    )


def _facts(events: Sequence[Row]) -> FastFacts:
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

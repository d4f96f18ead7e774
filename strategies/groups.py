# SPDX-License-Identifier: Apache-2.0
"""Which nodes may add their sums: those of one manifest, hence of one encoder, are a group.

A group sees of a run what a run of its own would show it: a part of the roster, a part of the
journal, and a stream of replies.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.strategies.journal import Journal, Row
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.wire import Manifest

FOLDER = "groups"
SHOWN = 120
"""Letters of an encoder's name: it is a node's to say."""
_ROUND = "group-round"
"""Event of a group's round: ``round`` is the whole run's."""


@dataclass(frozen=True)
class Group:
    """Nodes whose sums may be added."""

    name: str
    """The beginning of its manifest's digest; its folder is called so."""
    manifest: str
    """The digest."""
    encoder: str
    """As its first node calls it."""
    roster: Roster

    def told(self) -> dict[str, Any]:
        """Describe it in an event or a checkpoint."""
        about = {"group": self.name, "manifest": self.manifest, "encoder": self.encoder}
        return {**about, "partitions": self.roster.partitions}


def groups_of(config: RunConfig, roster: Roster) -> list[Group]:
    """Divide a roster by what its nodes said at the roll call, in the order of partitions.

    Returns
    -------
    list of Group
        Empty if the recipe is for one encoder or all nodes have the same: nothing is divided then.

    Raises
    ------
    Refusal
        Naming the nodes of an encoder that too few have, or a node that tells no manifest.
    """
    if config.method != "faast" or not config.faast.mixed:
        return []
    found: dict[str, list[int]] = defaultdict(list)
    for partition in roster.partitions:
        found[manifest_of(roster, partition)].append(partition)
    if len(found) < 2:
        return []
    length = next(n for n in (8, 16, 64) if len({digest[:n] for digest in found}) == len(found))
    groups = [_group(digest[:length], digest, of, roster) for digest, of in found.items()]
    for group in groups:
        _check_enough(config, group)
    return groups


def manifest_of(roster: Roster, partition: int) -> str:
    """Return the digest that a node told; a folder will be called by it."""
    digest = str(roster.properties[partition].get("manifest", ""))
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise Refusal(
            f"partition {partition} ({roster.name(partition)}) told {digest[:16]!r} as its"
            " manifest: expected a SHA-256; use the same fedloom version on every node"
        )
    return digest


def _group(name: str, digest: str, partitions: Iterable[int], roster: Roster) -> Group:
    nodes = {p: roster.nodes[p] for p in partitions}
    told = {p: roster.properties[p] for p in nodes}
    encoder = " ".join(str(told[min(nodes)].get("encoder", "")).split())[:SHOWN]
    return Group(name, digest, encoder, Roster(nodes, told))


def _check_enough(config: RunConfig, group: Group) -> None:
    """Refuse a group that could not be summed, before any item is encoded for it."""
    least, count = config.sampling.min_nodes, len(group.roster.nodes)
    why = f"sampling.min-nodes = {least} holds for each group"
    if config.faast.masked and least < 2:
        least, why = 2, f'faast.shares = "{config.faast.shares}" hides nobody in a sum of one'
    if count < least:
        who = ", ".join(f"{p} ({group.roster.name(p)})" for p in group.roster.partitions)
        raise Refusal(
            f"encoder {group.encoder} (group {group.name}) is on {count} of the {least} nodes that"
            f" it takes, partition {who}: {why}; start more nodes with it, or these with another"
        )


def check_same(before: Mapping[str, Mapping[str, Any]], roster: Roster) -> None:
    """Refuse nodes that come back to a run with another encoder.

    Parameters
    ----------
    before
        What each partition's node said when the run began.

    Raises
    ------
    Refusal
        Naming the first of them.
    """
    for name, told in before.items():
        now = roster.properties.get(int(name), told)
        if "encoder" in told and now.get("manifest") != told.get("manifest"):
            raise Refusal(
                f"partition {name} ({roster.name(int(name))}) comes back with encoder"
                f" {now.get('encoder')}, the run began with {told['encoder']} there: go on with the"
                " encoder that it had"
            )


def merged(manifests: Mapping[str, Manifest]) -> Manifest:
    """Describe all groups' arrays at once, each under ``group/name``; there is no one base."""
    listed = {f"{g}/{n}": entry for g, m in manifests.items() for n, entry in m.arrays.items()}
    first = next(iter(manifests.values()))
    return replace(first, arrays=listed, base="", values="")


class GroupJournal(Journal):
    """A group's part of a journal: what it writes is marked there, what it reads is its own.

    Parameters
    ----------
    whole : Journal
        The run's.
    group : str
        The group's name.
    """

    def __init__(self, whole: Journal, group: str) -> None:
        folder: Path | None = whole.folder and whole.folder / FOLDER / group
        super().__init__(folder)
        self._whole, self._group = whole, group
        self.rows = {
            kind: [_own(row) for row in rows if row.get("group") == group]
            for kind, rows in whole.rows.items()
        }

    def sync(self) -> None:
        """Make what was appended last: it lies in the run's files."""
        self._whole.sync()

    def _append(self, kind: str, row: Row) -> None:
        row = {key.replace("_", "-"): value for key, value in row.items()}
        self.rows[kind].append(row)
        named = {**row, "event": _ROUND} if row.get("event") == "round" else row
        self._whole._append(kind, {**named, "group": self._group})


def _own(row: Row) -> Row:
    """Return a row as the group wrote it."""
    own = {key: value for key, value in row.items() if key != "group"}
    return {**own, "event": "round"} if row.get("event") == _ROUND else own


class Outbox(ReplyStream):
    """A group's stream, whose messages may be sent before its turn to be heard has come.

    So all groups' nodes work at once, while the server reads one group's replies after another's.
    """

    def __init__(self, grid: ReplyStream, default_timeout: float) -> None:
        self._posted = _Posted(grid, default_timeout)
        super().__init__(self._posted, default_timeout)

    def post(self, messages: list[Message]) -> list[Message]:
        """Send messages now; ``send_and_receive`` of the same ones will not send them again."""
        self._posted.post(messages)
        return messages


class _Posted(ReplyStream):
    """Knows which messages are on their way."""

    def __init__(self, grid: ReplyStream, default_timeout: float) -> None:
        super().__init__(grid, default_timeout)
        self._names: set[str] = set()

    def post(self, messages: list[Message]) -> None:
        self._names = {n for n in self._grid.push_messages(messages) if n} if messages else set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send what is not on its way."""
        listed = list(messages)
        there = [m.metadata.message_id for m in listed if m.metadata.message_id in self._names]
        return there or self._grid.push_messages(listed)

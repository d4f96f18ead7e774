# SPDX-License-Identifier: Apache-2.0
"""The server's part in Co-C2C: it carries sealed caches between nodes that all answer.

The messages are those of any exchange: letters up, caches down and up, answers up.  A turn takes
each node's caches for the others and brings it theirs of the turn before, so that everyone reads
what was there before the turn and nobody's place in line counts (FedRefine, arXiv 2603.28772).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from fedloom import border
from fedloom.errors import Refusal
from fedloom.secure.channel import ANSWER, ASK, EXPORT

Replies = tuple[dict[int, RecordDict], dict[int, str]]
Ask = Callable[[str, Mapping[int, RecordDict], float | None], Replies]
"""Asks nodes at once; returns what came and, of the others, why nothing did."""
Doubt = Callable[[str, int, str], None]
"""Names a node whose reply to an action cannot be read, and why."""
_ENDED = ("gone", "deadline")


class Meeting:
    """One exchange in which every node is receiver and sender.

    Who is gone or late is not asked again; who failed a turn is missing from it and may still
    answer.

    Parameters
    ----------
    peers
        Partition -> how a node is named to others.
    fusers
        Partition -> digests of the fusers that it hears others by.
    rounds
        Turns.
    seconds
        How long a turn is waited for.
    """

    def __init__(
        self,
        ask: Ask,
        doubt: Doubt,
        peers: Mapping[int, Mapping[str, Any]],
        fusers: Mapping[int, str],
        *,
        rounds: int,
        seconds: float,
    ) -> None:
        self._ask, self._doubt = ask, doubt
        self._peers, self._fusers = peers, fusers
        self._rounds, self._seconds = rounds, seconds
        self._exchange = uuid.uuid4().hex
        self._there = set(peers)
        self._ended: dict[int, str] = {}
        self._letters: dict[int, dict[int, NDArray[Any]]] = {}
        self._lost: dict[int, dict[int, str]] = {p: {} for p in peers}

    def answers(self) -> dict[int, RecordDict]:
        """Carry all turns and return the answers that came, by partition."""
        self._collect_letters()
        brought: dict[int, dict[str, NDArray[Any]]] = {}
        failed: dict[int, str] = {}
        for number in range(self._rounds):
            brought, failed = self._turn(number, brought, failed)
        asked = {
            p: border.content(brought.get(p, {}), self._told(p, failed))
            for p in sorted(self._there)
        }
        return self._ask(ANSWER, asked, None)[0]

    def _told(self, partition: int, failed: Mapping[int, str]) -> dict[str, Any]:
        """Say to a node who is there, and why of some nothing came in the turn before."""
        others = [self._peers[p] for p in sorted(self._peers) if p != partition]
        lost = {**self._lost[partition], **failed, **self._ended}
        return {
            "exchange": self._exchange,
            "fusers": self._fusers[partition],
            "senders": json.dumps(others),
            "lost": json.dumps({str(p): cause for p, cause in lost.items()}),
        }

    def _collect_letters(self) -> None:
        """Let each node seal what it asks of the others; who does not even ask is out."""
        asked = {p: border.content({}, self._told(p, {})) for p in sorted(self._there)}
        found, failed = self._ask(ASK, asked, None)
        for partition, records in found.items():
            try:
                letters = {int(p): x for p, x in border.arrays_of(records).items()}
                skipped = json.loads(str(border.config_of(records)["skipped"]))
                self._lost[partition] = {int(p): str(cause) for p, cause in skipped.items()}
                self._letters[partition] = letters
            except (KeyError, ValueError, TypeError, AttributeError) as error:
                self._doubt(ASK, partition, f"a reply that cannot be read: {error!r}")
                failed[partition] = "failed"
        self._leave(failed)

    def _leave(self, causes: Mapping[int, str]) -> None:
        self._there -= causes.keys()
        self._ended |= causes

    def _turn(
        self,
        number: int,
        brought: Mapping[int, Mapping[str, NDArray[Any]]],
        failed: Mapping[int, str],
    ) -> tuple[dict[int, dict[str, NDArray[Any]]], dict[int, str]]:
        """Bring what came of the turn before, take each one's caches for the others."""
        asked = {}
        for partition in sorted(self._there):
            letters = {
                f"letter-{asker}": own[partition]
                for asker, own in sorted(self._letters.items())
                if asker in self._there and partition in own
            }
            if letters:
                told = {**self._told(partition, failed), "turn": number}
                arrays = {**letters, **brought.get(partition, {})}
                asked[partition] = border.content(arrays, told)
        replies, causes = self._ask(EXPORT, asked, self._seconds)
        come: dict[int, dict[str, NDArray[Any]]] = {}
        for sender, records in sorted(replies.items()):
            try:
                for asker, sealed in _caches(records).items():
                    come.setdefault(asker, {})[f"{sender}-{number:04d}"] = sealed
            except Refusal as error:
                self._doubt(EXPORT, sender, str(error))
                causes[sender] = "integrity"
        self._leave({p: cause for p, cause in causes.items() if cause in _ENDED})
        return come, causes


def _caches(records: RecordDict) -> dict[int, NDArray[Any]]:
    """Read whom sealed caches are for; what they hold nobody here can see."""
    found = {}
    for name, array in border.arrays_of(records).items():
        if not (len(name) < 8 and name.isdigit()) or array.dtype != np.uint8 or array.ndim != 1:
            raise Refusal(f"array {name[:20]}: expected sealed caches by partition, as bytes")
        found[int(name)] = array
    return found

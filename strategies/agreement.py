# SPDX-License-Identifier: Apache-2.0
"""What nodes say at the roll call: each reply by itself, and what most of them agree on.

A reply is foreign data.  One that cannot be read leaves its node out; what all must have in common
(model, tokenizer, data, classes) is what most have, and whoever has another is named and left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom import __version__
from fedloom.config import RunConfig
from fedloom.data.partition import Partition
from fedloom.errors import Refusal
from fedloom.strategies.groups import manifest_of
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Dropped, Roster

_PHASE = "properties"


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """Those who take part, and what they have in common."""

    roster: Roster
    common: dict[str, str]
    """Key of the properties -> what all of them said."""


def agree(
    config: RunConfig, roster: Roster, dropped: Sequence[Dropped], journal: Journal
) -> Agreed:
    """Keep the nodes that mean this run and have what most have; name the others.

    fedloom's version and the recipe are the coordinator's own to know; for all else nodes are
    counted, each by all that it said together.

    Parameters
    ----------
    dropped
        Who was left out at the roll call already.  Who refused counts against a majority, since
        the recipe may be to blame; a reply that cannot be read does not.

    Raises
    ------
    Refusal
        If no more than half of the nodes are left, or fewer than ``sampling.min-nodes``.
    """
    common, odd = _held_by_most(config, roster)
    left = Roster(
        {p: node for p, node in roster.nodes.items() if p not in odd},
        {p: said for p, said in roster.properties.items() if p not in odd},
    )
    others = [Dropped(p, roster.nodes[p], reason, True) for p, reason in odd.items()]
    blamed = [d for d in (*dropped, *others) if d.counts]
    few = len(left.nodes) < config.sampling.min_nodes
    if blamed and (len(left.nodes) <= len(blamed) or few):
        raise Refusal(blamed[0].reason)
    for gone in (*dropped, *others):
        where = {"round": 0, "phase": _PHASE, "partition": gone.partition, "node": gone.node}
        journal.event("client-failed", **where, reason=gone.reason, traceback="")
    return Agreed(roster=left, common=common)


def _held_by_most(config: RunConfig, roster: Roster) -> tuple[dict[str, str], dict[int, str]]:
    """Return what most have in common, and of each that has not, why: partition -> sentence."""
    shared = _in_common(config)
    known = {"version": __version__, "recipe": config.digest()}
    every = {p: _shared(said, shared) for p, said in sorted(roster.properties.items())}
    ours = [told for p, told in every.items() if not _differs(roster.properties[p], known)]
    votes = Counter(ours or list(every.values())).most_common(1)  # of a tie, the lowest partition's
    expected = {**known, **dict(votes[0][0] if votes else ())}
    return expected, differing(config, roster, expected)


def differing(config: RunConfig, roster: Roster, expected: Mapping[str, str]) -> dict[int, str]:
    """Return of each node that has not what was agreed on, why: partition -> sentence."""
    odd = {}
    for partition in roster.partitions:
        try:
            _check(roster, partition, expected, ("version", "recipe", *_in_common(config)))
            if _mixed(config):
                manifest_of(roster, partition)
        except Refusal as refusal:
            odd[partition] = str(refusal)
    return odd


def _mixed(config: RunConfig) -> bool:
    return config.method == "faast" and config.faast.mixed


def _in_common(config: RunConfig) -> tuple[str, ...]:
    return ("classes", "data") if _mixed(config) else ("base", "tokenizer", "values", "data")


def _shared(said: Mapping[str, Any], keys: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple((key, str(said[key])) for key in keys if key in said)


def _differs(said: Mapping[str, Any], expected: Mapping[str, str]) -> bool:
    return any(said.get(key, "") != wanted for key, wanted in expected.items())


def _check(
    roster: Roster, partition: int, expected: Mapping[str, str], keys: Sequence[str]
) -> None:
    for key in keys:
        came, wanted = str(roster.properties[partition].get(key, "")), expected.get(key, "")
        if came != wanted:
            shown = f"{came[:16] or 'nothing'} came, {wanted[:16] or 'nothing'} was expected"
            raise Refusal(
                f"partition {partition} ({roster.name(partition)}) differs in {key}:"
                f" {shown}; use the same model, data, recipe and fedloom version on every node"
            )


def partition_told(roster: Roster, common: Mapping[str, str]) -> str:
    """Return who holds which rows, by the first node that tells what all agree on; or nothing."""
    texts = (str(roster.properties[p].get("partition-json", "")) for p in roster.partitions)
    return next((text for text in texts if text and _is_of(text, common.get("data", ""))), "")


def _is_of(text: str, digest: str) -> bool:
    try:
        return Partition.from_json(text).digest() == digest
    except (Refusal, RecursionError):
        return False


_TEXTS = ("name", "device")
_COUNTS = ("partition", "test")
_MORE_TEXTS = (
    "version", "recipe", "base", "tokenizer", "values", "data", "classes", "manifest", "encoder",
    "held", "visible-gpus",
)  # fmt: skip
_MORE_COUNTS = ("train", "validation", "revision", "pid")
_LETTERS, _MOST = 1000, 2**53
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def check_properties(said: Mapping[str, Any]) -> int:
    """Look at a roll-call reply key by key, and return its partition.

    Raises
    ------
    Refusal
        Naming the first key that is missing or of another type.
    """
    if missing := [key for key in (*_COUNTS, *_TEXTS) if key not in said]:
        raise Refusal(f"the roll-call reply has no {missing[0]}: expected {', '.join(_COUNTS)} ...")
    for key in (*_TEXTS, *_MORE_TEXTS):
        text = said.get(key, "")
        if not isinstance(text, str) or len(text) > _LETTERS or _CONTROL.search(text):
            raise Refusal(f"the roll-call reply's {key} = {text!r:.60}: expected a line of text")
    for key in (*_COUNTS, *_MORE_COUNTS):
        count = said.get(key, 0)
        if type(count) is not int or not 0 <= count < _MOST:
            raise Refusal(f"the roll-call reply's {key} = {count!r:.60}: expected a whole number")
    if not isinstance(said.get("partition-json", ""), str):
        raise Refusal("the roll-call reply's partition-json is no text")
    return int(said["partition"])

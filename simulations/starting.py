# SPDX-License-Identifier: Apache-2.0
"""The start of the global adapter: one node makes it, and its word is held against what is known.

Every node makes the same start from the recipe's seed, so the first that answers well is enough.
What the server can know without torch is looked at here.  The values are another matter: each node
holds what the first training message brings against a start of its own, which costs it no
message and no model more (``fedloom.wire.check_own_start``), and where no majority has the same
the run ends and names who sent it (``fedloom.strategies.inbox``).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from flwr.app import Message, RecordDict
from numpy.typing import NDArray

from fedloom import __version__, border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.wire import START_PHASE, Arrays, Manifest

Start = tuple[dict[str, NDArray[Any]], Manifest, str]
"""Arrays, what they are called, and peft's own config as JSON."""

_ALIKE = 3
"""Nodes that fail in the same words; then it is the recipe, and no other is asked."""


def initial_adapter(
    config: RunConfig,
    grid: ReplyStream,
    roster: Roster,
    journal: Journal,
    common: Mapping[str, str],
    manifest: str = "",
) -> Start:
    """Take the start from the first node whose answer is good; name the others.

    Parameters
    ----------
    common
        What all nodes agree on (``fedloom.strategies.agreement``).
    manifest
        The digest that these nodes told at the roll call, if they told one.

    Raises
    ------
    Refusal
        If no node gave a good one and one of them said why.
    """
    reasons: Counter[str] = Counter()
    for partition in roster.partitions:
        lost: dict[str, Any] = {"round": 0, "phase": START_PHASE, "partition": partition}
        try:
            reply = _ask(grid, roster.nodes[partition], partition, journal)
            if reply is None:
                reason, trace, refused = "no reply in time", "", False
            elif reply.has_error():
                reason, trace, refused = border.failure_reason(reply)
            else:
                return read_start(config, reply.content, common, manifest)
        except Refusal as refusal:
            who = f"partition {partition} ({roster.name(partition)})"
            reason, trace, refused = border.one_line(f"{who}: {refusal}"), "", True
        except Exception as error:  # a reply is foreign data: no fault in it is the run's
            reason, trace, refused = border.one_line(f"bad reply: {error!r}"), "", False
        if refused:
            reasons[reason] += 1
        if reasons[reason] >= _ALIKE:
            break
        journal.event("client-failed", **lost, reason=reason, traceback=trace)
    if reasons:
        raise Refusal(reasons.most_common(1)[0][0])
    raise RuntimeError("no node could make the initial adapter")


def _ask(grid: ReplyStream, node: int, partition: int, journal: Journal) -> Message | None:
    where: dict[str, Any] = {"server_round": 0, "phase": START_PHASE, "partition": partition}
    request = Message(border.content(), node, "query.initial_adapter")
    journal.weigh(request.content, direction="down", **where)
    for reply in grid.send_and_receive([request]):
        if reply.has_error():
            journal.weigh_error(reply, server_round=0, partition=partition)
        else:
            journal.weigh(reply.content, direction="up", **where)
        return reply
    return None


def read_start(
    config: RunConfig, records: RecordDict, common: Mapping[str, str], digest: str = ""
) -> Start:
    """Read a node's answer and hold it against what all nodes agree on.

    Raises
    ------
    Refusal
        Naming what differs or is missing.
    """
    said = border.config_of(records)
    for key in ("manifest", "peft"):
        if not isinstance(said.get(key), str):
            raise Refusal(f"the start of the adapter came without {key}")
    manifest, arrays = Manifest.from_json(said["manifest"]), border.arrays_of(records)
    known = {"method": config.method, "version": __version__, **common}
    for key in ("method", "version", "base", "tokenizer", "values"):
        came, wanted = str(getattr(manifest, key)), known.get(key, getattr(manifest, key))
        if came != wanted:
            raise Refusal(
                f"the start of the adapter is of {key} {came[:16]}, and {wanted[:16]} was agreed on"
            )
    if digest and manifest.digest() != digest:
        raise Refusal(f"manifest {manifest.digest()[:16]} came and {digest[:16]} was told before")
    manifest.check_start(arrays)
    _check_values(config, arrays)
    if said["peft"] and not _is_tree(said["peft"]):
        raise Refusal("the start of the adapter came with a peft config that is none")
    return arrays, manifest, said["peft"]


def _check_values(config: RunConfig, arrays: Arrays) -> None:
    """Refuse FAAST weights that remember something: this start the server knows."""
    if config.method == "faast" and (odd := [n for n, a in arrays.items() if a.any()]):
        raise Refusal(f"the start of {odd[0]:.60} is not zero: FAAST remembers nothing at first")


def _is_tree(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

# SPDX-License-Identifier: Apache-2.0
"""The roll call of a later round: who has come, who went, whose rows are of a later revision.

Sums outlive the round that brought them, so a run that adds sums can take in a client at any time.
Before each round but the first all nodes are asked anew who they are, which takes no forward pass.
A node is held against what the first roll call agreed on; there is no new majority.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from flwr.app import Message

from fedloom import border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.strategies.agreement import check_properties, differing
from fedloom.strategies.groups import SHOWN, check_same
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster, roll_call

RollCall = Callable[[int, Roster, Collection[str]], Roster]
"""Round, who is known, and the manifests of the run -> who answered and may take part."""


def later_calls(
    config: RunConfig, grid: ReplyStream, agreed: Mapping[str, str], journal: Journal
) -> RollCall:
    """Return what asks in a later round who is there.

    Parameters
    ----------
    agreed
        What the nodes of the run have in common; whoever has it not is named and left out.
    """

    def ask(node: int) -> Message:
        return Message(border.content(config={"partition": False}), node, "query.properties")

    def call(server_round: int, known: Roster, manifests: Collection[str]) -> Roster:
        time.sleep(config.faast.pause_seconds)
        nodes = sorted(grid.get_node_ids())
        found, dropped = roll_call(grid, nodes, ask, check_properties, journal, server_round)
        odd = differing(config, found, agreed)
        if config.faast.mixed:
            odd = {**_elsewhere(found, known, manifests), **odd}
        named = [(gone.partition, gone.node, gone.reason) for gone in dropped]
        named += [(p, found.nodes[p], reason) for p, reason in odd.items()]
        for partition, node, reason in named:
            where = {"round": server_round, "phase": "properties", "partition": partition}
            journal.event("client-failed", **where, node=node, reason=reason, traceback="")
        return part_of(found, [p for p in found.partitions if p not in odd])

    return call


def _elsewhere(found: Roster, known: Roster, manifests: Collection[str]) -> dict[int, str]:
    """Return whose encoder is not the one it had, or none that the run has sums of."""
    odd = {}
    for partition in found.partitions:
        told = found.properties[partition]
        try:
            if partition in known.properties:
                check_same({str(partition): known.properties[partition]}, found)
            if told.get("manifest") not in manifests:
                raise Refusal(
                    f"partition {partition} ({found.name(partition)}) came with encoder"
                    f" {str(told.get('encoder', ''))[:SHOWN]}, and no group of this run has it:"
                    " start the node with one that the run began with, or begin a new run"
                )
        except Refusal as refusal:
            odd[partition] = str(refusal)
    return odd


def part_of(roster: Roster, partitions: Collection[int]) -> Roster:
    """Return some of a roster's nodes."""
    kept = [p for p in roster.partitions if p in partitions]
    return Roster({p: roster.nodes[p] for p in kept}, {p: roster.properties[p] for p in kept})


def joined(known: Roster, found: Roster) -> Roster:
    """Return all who are known, as far as they answered with what they say now.

    Who did not answer keeps its place, as in a run that goes on: its sums stand, and it is named
    where it is asked for anything.
    """
    told: dict[int, dict[str, Any]] = dict(known.properties)
    for partition, said in found.properties.items():
        held = known.properties.get(partition, {})
        # Who holds which rows was told once; it is long, and all have agreed on it.
        kept = {k: held[k] for k in ("partition-json",) if k in held}
        told[partition] = {**said, **kept}
    return Roster({**known.nodes, **found.nodes}, told)

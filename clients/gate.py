# SPDX-License-Identifier: Apache-2.0
"""What a node refuses before any model works, and what it never sends.

A node is asked by a coordinator that it need not trust to be right: of another version, replaying
an old message, or with an adapter that has gone to pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context

from fedloom import __version__, border
from fedloom.errors import Refusal
from fedloom.wire import Arrays, ticket

_STATE = "fedloom-gate"


def admit(config: Mapping[str, Any], arrays: Arrays, context: Context) -> None:
    """Refuse a message of another version, of a round long past, or with a value not finite.

    The newest round of the run lies in Flower's ``Context.state``, which a run that goes on after a
    stop does not find again: to Flower it is another run.  One round back is let in: a coordinator
    that was killed takes up the round that it had begun, or the one before.
    """
    if "run" in config:
        version = str(config.get("version", ""))
        if version != __version__:
            raise Refusal(
                f"fedloom {version[:20] or 'of no version'} asked, {__version__} is this node's;"
                " install the same version on every node"
            )
        _check_round(str(config["run"]), config.get("round"), context)
    if name := _not_finite(arrays):
        raise Refusal(f"array {name} came with a value that is not finite; nothing was done")


def check_sent(arrays: Arrays, context: Context) -> None:
    """Refuse to send a value that is not finite."""
    if name := _not_finite(arrays):
        who = context.node_config.get("partition-id", "?")
        raise Refusal(
            f"client {who}: array {name} came out with a value that is not finite, and nothing was"
            " sent; look at this node's rows, or lower the learning rate"
        )


def ticket_for(config: Mapping[str, Any], kind: str, context: Context) -> dict[str, int]:
    """Return the metric that says which message a reply answers; none if none was told."""
    if "run" not in config:
        return {}
    run, manifest = str(config["run"]), str(config["manifest"])
    partition = int(context.node_config["partition-id"])
    return {border.TICKET: ticket(run, int(config["round"]), manifest, kind, partition)}


def _check_round(run: str, server_round: Any, context: Context) -> None:
    if type(server_round) is not int or server_round < 1:
        raise Refusal(f"round {server_round!r:.20} came, expected a whole number from 1 up")
    held = context.state.config_records.get(_STATE, ConfigRecord())
    newest = int(str(held["round"])) if held.get("run") == run else 0
    if server_round < newest - 1:
        raise Refusal(
            f"round {server_round} came after round {newest} of the same run: an old message was"
            " sent again, and nothing was done"
        )
    context.state[_STATE] = ConfigRecord({"run": run, "round": max(newest, server_round)})


def _not_finite(arrays: Arrays) -> str:
    bad = (n for n, a in arrays.items() if a.dtype.kind in "fc" and not np.isfinite(a).all())
    return next(bad, "")

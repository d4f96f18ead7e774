# SPDX-License-Identifier: Apache-2.0
"""Roll calls in words: that of a run of groups, and those of later rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHOWN = 12


def group_lines(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say which encoders there are and who has which.

    >>> group_lines([{"group": "2052d691", "encoder": "pixels", "partitions": [0, 2]},
    ...              {"group": "dcf65390", "encoder": "relu:9:pixels", "partitions": [1]}])[:2]
    ['2 groups: 2 nodes with pixels, 1 with relu:9:pixels', 'group 2052d691: pixels, clients 0, 2']
    """
    first, *others = groups
    nodes = "1 node" if len(first["partitions"]) == 1 else f"{len(first['partitions'])} nodes"
    counts = [f"{nodes} with {first['encoder']}"]
    counts += [f"{len(g['partitions'])} with {g['encoder']}" for g in others]
    lines = [f"{len(groups)} groups: {', '.join(counts)}"]
    for group in groups:
        who = group["partitions"]
        more = f" and {len(who) - SHOWN} more" if len(who) > SHOWN else ""
        named = ", ".join(map(str, who[:SHOWN]))
        alone = " (its sums are seen alone)" if len(who) == 1 else ""
        lines += [f"group {group['group']}: {group['encoder']}, clients {named}{more}{alone}"]
    return lines


def call_line(event: Mapping[str, Any], name: Callable[[object], str]) -> str:
    """Say who answered a later round's roll call, and what is new.

    >>> event = {"answered": 3, "joined": [2], "revised": {"1": 2}, "absent": [0]}
    >>> call_line(event, lambda partition: f"client {partition}")
    'roll call, 3 nodes: client 2 is new, client 1 has revision 2, client 0 did not answer'
    """
    told = [f"{name(p)} is new" for p in event.get("joined", [])]
    told += [f"{name(int(p))} has revision {r}" for p, r in event.get("revised", {}).items()]
    told += [
        f"{name(int(p))} stays as it was ({why})" for p, why in event.get("held-back", {}).items()
    ]
    news = len(told)
    told += [f"{name(p)} did not answer" for p in event.get("absent", [])]
    more = [f"and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
    told = [*told[:SHOWN], *more] if news else ["nothing new", *told[:SHOWN], *more]
    return f"roll call, {event.get('answered')} nodes: {', '.join(told)}"

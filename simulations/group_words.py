# SPDX-License-Identifier: Apache-2.0
"""The roll call of a run of groups, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

# SPDX-License-Identifier: Apache-2.0
"""Sizes and durations in words, and what a run's adapter comes to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def adapter_line(event: Mapping[str, Any]) -> str:
    """Say what travels, by method.

    >>> adapter_line({"lora": 1024, "memory": 16, "bytes": 4160})
    'trainable: 1,024 of LoRA, 16 of memory; 4.2 kB up at most'
    """
    bytes_up = size(int(event.get("bytes", 0)))
    if "keys" in event:
        widths = f"{event['keys']} x {event.get('classes')} fast weights"
        widths = f"group {event['group']}: {widths}" if "group" in event else widths
        return f"{widths}; {bytes_up} of sums from each client"
    if "fuser" in event:
        return f"a fuser of {event['fuser']:,} numbers; sums go up, it comes down solved"
    counts = f"{event.get('lora', 0):,} of LoRA, {event.get('memory', 0):,} of memory"
    return f"trainable: {counts}; {bytes_up} up at most"


def size(count: float) -> str:
    """Say a number of bytes.

    >>> size(123), size(4_600_000)
    ('123 B', '4.6 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Say a time.

    >>> duration(9.94), duration(75), duration(7300)
    ('9.9 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"

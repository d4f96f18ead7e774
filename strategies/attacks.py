# SPDX-License-Identifier: Apache-2.0
"""``Attacks``: what senders could read back from their own frames, in counts, by pair.

The share of tokens recovered stands beside the accuracy that the same caches brought, so that
nobody reads the one without the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("attack-frames", "attack-tokens", "attack-right")


class Attacks:
    """Counts of a run."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], tuple[int, int, int]] = {}

    def keep(self, receiver: int, sender: int, told: Mapping[str, Any]) -> None:
        """Take a sender's counts; what are no counts is foreign data and is left out."""
        counts = tuple(told.get(name) for name in _NAMES)
        if all(type(n) is int for n in counts):
            frames, tokens, right = (int(n) for n in counts if n is not None)
            if frames > 0 and 0 <= right <= tokens:
                self._of[receiver, sender] = (frames, tokens, right)

    def of(self, receiver: int, sender: int) -> dict[str, int | float]:
        """Return how many caches were attacked and what came of it; nothing if none was."""
        if (receiver, sender) not in self._of:
            return {}
        frames, tokens, right = self._of[receiver, sender]
        told: dict[str, int | float] = {"attacked": frames, "attacked_tokens": tokens}
        return told | ({"recovered": right / tokens} if tokens else {})

    def all(self) -> dict[str, float]:
        """Return the share over all pairs; nothing if no token was attacked."""
        tokens = sum(n for _, n, _ in self._of.values())
        right = sum(n for _, _, n in self._of.values())
        return {"recovered": right / tokens} if tokens else {}

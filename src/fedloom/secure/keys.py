# SPDX-License-Identifier: Apache-2.0
"""Whose keys, for which summation: every derived secret is bound to run, round and both ids."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from fedloom import ciphers
from fedloom.errors import Refusal

_PROTOCOL = "fedloom secure sum 1"


class Keys(NamedTuple):
    """A client's two public keys of one round."""

    mask: bytes
    """With another client's it makes the mask that cancels between the two."""
    seal: bytes
    """With another client's it makes the key under which they write to each other."""


class Secrets(NamedTuple):
    """The private halves of ``Keys``; drawn for one round."""

    mask: bytes
    seal: bytes

    @classmethod
    def draw(cls, source: ciphers.Source) -> Secrets:
        """Draw both."""
        return cls(source(ciphers.KEY_BYTES), source(ciphers.KEY_BYTES))

    def public(self) -> Keys:
        """Return what others may know."""
        return Keys(ciphers.public_key(self.mask), ciphers.public_key(self.seal))


@dataclass(frozen=True)
class Summation:
    """One sum: the run's token, and a number that grows from sum to sum within the run."""

    run: str
    round: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", self.run) or self.round < 0:
            raise Refusal(
                f'summation {self.round} of run "{self.run[:80]}": expected a number from zero and'
                " a token of 8 to 64 hexadecimal digits; the server draws it"
            )

    def mask_seed(self, secret: bytes, mine: int, theirs: int, keys: Keys, other: Keys) -> bytes:
        """Return the seed of the mask between two clients, the same from either side."""
        (low, first), (high, second) = sorted([(mine, keys.mask), (theirs, other.mask)])
        context = self._about("mask", low, high) + first + second
        return ciphers.agree(secret, other.mask, context)

    def seal_key(
        self, secret: bytes, sender: int, receiver: int, own: Keys, other: Keys, *, sends: bool
    ) -> bytes:
        """Return the key of the letter from one client to another; the answer has another key."""
        pair = own.seal + other.seal if sends else other.seal + own.seal
        return ciphers.agree(secret, other.seal, self._about("seal", sender, receiver) + pair)

    def letter(self, sender: int, receiver: int) -> bytes:
        """Return what a letter is about, which its seal holds too."""
        return self._about("letter", sender, receiver)

    def _about(self, purpose: str, first: int, second: int) -> bytes:
        words = [_PROTOCOL, purpose, self.run, self.round, first, second]
        return json.dumps(words, separators=(",", ":")).encode()


def threshold_for(parties: int, share: float = 2 / 3) -> int:
    """Return how many of ``parties`` must stay to the end, if more than ``share`` of them must.

    Two thirds is what Bonawitz et al. need against a server that lies to some clients about who is
    there while up to a third of the clients help it; above a half none can be told both stories.

    >>> [threshold_for(n) for n in (2, 3, 4, 10, 100)]
    [2, 3, 3, 7, 67]
    """
    if not 0.5 <= share < 1:
        raise Refusal(f"a threshold of {share} of the clients: expected 0.5 to below 1")
    # 1e-9: 2 / 3 of 99 is 66.00000000000001 or 65.99999999999999 by chance of rounding.
    return max(least_threshold(parties), min(parties, int(share * parties + 1e-9) + 1))


def least_threshold(parties: int) -> int:
    """Return the smallest threshold that a client accepts: more than half, and never one."""
    return max(2, parties // 2 + 1)

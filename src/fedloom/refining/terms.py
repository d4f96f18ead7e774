# SPDX-License-Identifier: Apache-2.0
"""``Terms``: on what conditions a receiver asks, waits for and believes senders."""

from __future__ import annotations

from dataclasses import dataclass

from fedloom.errors import Refusal
from fedloom.slices.quantise import check_scheme
from fedloom.slices.slice import CHOICES


@dataclass(frozen=True, kw_only=True)
class Terms:
    """On what terms senders are asked and heard."""

    scheme: str = "bf16"
    """How a cache travels: ``bf16``, ``int8`` or ``int4``."""
    share: float = 1.0
    """Of a sender's tokens, the share that it hands out."""
    by: str = "last"
    """Which: ``last`` or ``value-norm``."""
    part: float = 0.0
    """Of a context's plain 16-bit bytes, what its slice may take on the wire, hence fewer tokens; 0
    does not look."""
    deadline: float = 60.0
    """Seconds that the answer waits for senders."""
    max_tokens: int = 4096
    max_bytes: int = 1 << 28
    """Of one sender's slice on the wire."""
    max_norm: float = 0.0
    """A sender whose cache is larger (``guards.norm_of``) is left out; 0 lets all in."""
    max_kl: float = 0.0
    """Senders are left out until the next token's distribution is so near to the receiver's own, in
    nats; 0 does not look."""
    vote: bool = False
    """Leave out a sender who decides the next token against all others."""

    def __post_init__(self) -> None:
        check_scheme(self.scheme)
        if self.by not in CHOICES:
            raise Refusal(f'tokens by "{self.by}": expected one of {", ".join(CHOICES)}')
        if not 0 <= self.part <= 1:
            raise Refusal(f"part of the bytes {self.part:g}: expected from 0 to 1; 0 does not look")
        if not 0 < self.share <= 1 or not self.deadline > 0 or self.max_tokens < 1:
            raise Refusal(
                f"share of tokens {self.share:g}, deadline {self.deadline:g} s, at most"
                f" {self.max_tokens} tokens: expected a share above 0 and at most 1, and both"
                " others above 0"
            )

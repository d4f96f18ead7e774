# SPDX-License-Identifier: Apache-2.0
"""A secret in pieces: any ``threshold`` of them give it back, fewer say nothing (Shamir, 1979).

The secret is the value at zero of a polynomial of degree ``threshold - 1`` with random coefficients
modulo a prime, a share its value at the owner's place.  Python's whole numbers make it exact.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fedloom.ciphers import KEY_BYTES, Source, system
from fedloom.errors import Refusal

PRIME = 2**256 + 297
"""The first prime above every secret of 32 bytes."""
SHARE_BYTES = 33
_DRAWN_BYTES = 48  # modulo PRIME: uniform to one in 2 ** 127


def split(
    secret: bytes, owners: Collection[int], threshold: int, source: Source = system
) -> dict[int, bytes]:
    """Return each owner's share of 32 secret bytes.

    Parameters
    ----------
    owners
        Numbers from zero, all different; owner ``i`` holds the value at ``i + 1``.
    threshold
        How many shares give the secret back.
    """
    if len(secret) != KEY_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes: expected {KEY_BYTES}")
    if len(set(owners)) != len(owners) or min(owners, default=-1) < 0:
        raise Refusal(f"owners {sorted(owners)[:8]}: expected different numbers from zero")
    if not 1 <= threshold <= len(owners):
        raise Refusal(
            f"a threshold of {threshold}: expected 1 to {len(owners)}, the owners' number"
        )
    drawn = [int.from_bytes(source(_DRAWN_BYTES), "big") % PRIME for _ in range(threshold - 1)]
    coefficients = [*drawn, int.from_bytes(secret, "big")]  # highest power first
    return {owner: _value(coefficients, owner + 1) for owner in owners}


def _value(coefficients: list[int], place: int) -> bytes:
    value = 0
    for coefficient in coefficients:
        value = (value * place + coefficient) % PRIME
    return value.to_bytes(SHARE_BYTES, "big")


def weights(owners: Collection[int]) -> dict[int, int]:
    """Return what each owner's share counts at zero: Lagrange's weights, for many secrets."""
    found = {}
    for mine in owners:
        above, below = 1, 1
        for other in owners:
            if other != mine:
                above = above * (other + 1) % PRIME
                below = below * (other - mine) % PRIME
        found[mine] = above * pow(below, -1, PRIME) % PRIME
    return found


def join(shares: Mapping[int, bytes], weighed: Mapping[int, int] | None = None) -> bytes:
    """Return the secret of ``threshold`` shares or more, by owner.

    Fewer shares, or a false one, give another number: whoever joins has to hold the result against
    something (a public key, a digest).

    Parameters
    ----------
    weighed
        ``weights`` of just these owners, where they were found already.

    Raises
    ------
    Refusal
        If the number that comes out is no secret of 32 bytes, or a share is none.
    """
    known = weights(shares) if weighed is None else weighed
    total = 0
    for owner, share in shares.items():
        value = int.from_bytes(share, "big")
        if len(share) != SHARE_BYTES or value >= PRIME:
            raise Refusal(f"client {owner}: {len(share)} bytes came that are no share of a secret")
        total = (total + known[owner] * value) % PRIME
    if total >> (8 * KEY_BYTES):
        raise Refusal("shares that give no secret of 32 bytes: too few of them, or one is false")
    return total.to_bytes(KEY_BYTES, "big")

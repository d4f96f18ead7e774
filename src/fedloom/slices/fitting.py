# SPDX-License-Identifier: Apache-2.0
"""How many tokens fit in a share of the 16-bit bytes, with all that travels beside the numbers.

Eight bits of half the tokens are a quarter in codes, and more with scales, heads and hashes.  Who
wants a quarter on the wire says so, and the tokens are what then fits: a little less than half.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Sequence

from fedloom.errors import Refusal
from fedloom.slices.frames import HEAD, MAC, header_of, preamble
from fedloom.slices.geometry import Geometry
from fedloom.slices.quantise import parts_of

_END = 32  # bytes of the end's payload


def stream_bytes(
    geometry: Geometry,
    layers: Collection[int],
    places: Sequence[int],
    scheme: str,
    ends: Sequence[int] = (),
) -> int:
    """Count all bytes of a slice's frames before there is one of them."""
    parts = parts_of(scheme, geometry.heads, len(places), geometry.dim)
    layer = len(preamble(parts)) + sum(part.nbytes for part in parts)
    header = len(header_of(geometry, sorted(layers), places, scheme, ends))
    return header + len(layers) * layer + _END + (len(layers) + 2) * (HEAD.size + MAC)


def plain_bytes(geometry: Geometry, layers: Collection[int], tokens: int) -> int:
    """Count the numbers of a context in 16 bits, ``2 L H D T`` of them and nothing else."""
    return 2 * 2 * len(layers) * geometry.width * tokens


def fitting(
    geometry: Geometry,
    layers: Collection[int],
    tokens: int,
    scheme: str,
    part: float,
    ends: Sequence[int] = (),
) -> int:
    """Return how many of a context's tokens fit in a part of its plain 16-bit bytes, at most all.

    Whichever tokens are then chosen, the stream is no longer: places are counted as the last ones,
    which have the most digits.

    Parameters
    ----------
    tokens
        Of the whole context.
    part
        Of ``plain_bytes`` of all of them.
    ends
        Of all of them, if they travel.

    Raises
    ------
    Refusal
        If not even two tokens fit, the sink and one more.
    """
    if not 0 < part <= 1:
        raise Refusal(f"part of the bytes {part:g}: expected above 0 and at most 1")
    limit = math.floor(part * plain_bytes(geometry, layers, tokens))

    def size(count: int) -> int:
        places = range(tokens - count, tokens)
        return stream_bytes(geometry, layers, places, scheme, ends[-count:] if ends else ())

    found = bisect.bisect_right(range(1, tokens + 1), limit, key=size)
    if found < min(2, tokens):
        raise Refusal(
            f"{limit} bytes, {part:g} of the 16-bit ones, hold no two tokens of {tokens} by"
            f" {scheme} (two take {size(min(2, tokens))}): give a larger part, or fewer bits"
        )
    return found

# SPDX-License-Identifier: Apache-2.0
"""Which sender layer feeds which receiver layer, and which sender token goes with which of ours."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from fedloom.errors import Refusal, nearest

LAYER_MAPS = ("depth", "terminal", "bottom_up")


def layer_map(receiver_layers: int, sender_layers: int, kind: str = "depth") -> list[int | None]:
    """Return the sender's layer for each of the receiver's, or none.

    ``depth`` compares relative depths, ``terminal`` pairs the last with the last (C2C, arXiv
    2510.03215) and ``bottom_up`` the first with the first (FedRefine, arXiv 2603.28772, as it is
    reported); the last two leave the rest of a deeper receiver without a source.

    >>> [layer_map(6, 4, kind) for kind in LAYER_MAPS]
    [[0, 1, 1, 2, 2, 3], [None, None, 0, 1, 2, 3], [0, 1, 2, 3, None, None]]
    """
    if kind == "depth":
        last = max(receiver_layers - 1, 1)
        return [round(n * (sender_layers - 1) / last) for n in range(receiver_layers)]
    if kind == "terminal":
        lower = receiver_layers - sender_layers
        return [n - lower if n >= lower else None for n in range(receiver_layers)]
    if kind == "bottom_up":
        return [n if n < sender_layers else None for n in range(receiver_layers)]
    hint = nearest(kind, LAYER_MAPS)
    raise Refusal(f'layer map "{kind}"{hint}: expected one of {", ".join(LAYER_MAPS)}')


def taps(layer: int, layers: int, count: int) -> list[int]:
    """Return ``count`` neighbouring layers around one, moved inwards at the ends.

    >>> taps(0, 5, 3), taps(2, 5, 3), taps(4, 5, 3), taps(0, 2, 3)
    ([0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 1])
    """
    width = min(count, layers)
    first = min(max(layer - width // 2, 0), layers - width)
    return list(range(first, first + width))


def align(
    receiver_ends: Sequence[int], sender_ends: Sequence[int], places: Sequence[int] = ()
) -> list[int]:
    """Return, for each of the receiver's tokens, the sender's last that holds its last character.

    Both read the same text, each in its own tokens; what is compared is where in the text they end.
    -1 where no token of the sender is known to hold the character.

    Parameters
    ----------
    receiver_ends, sender_ends
        End of each token in characters, ascending; 0 for a token before the text.
    places
        Of the sender's tokens in its own context, when some were left out of the slice: where a
        token began is known only if the one before it is there.

    >>> align([0, 1, 3, 6], [2, 3, 6])  # bos, then "a|bc|def" by "ab|c|def"
    [-1, 0, 1, 2]
    """
    starts = []
    for i, end in enumerate(sender_ends):
        here = places[i] if places else i
        if here == 0 or (i and (places[i - 1] if places else i - 1) == here - 1):
            starts.append(sender_ends[i - 1] if i else 0)
        else:
            starts.append(end - 1)
    found = []
    for end in receiver_ends:
        first = bisect_left(sender_ends, end)
        last = bisect_right(sender_ends, sender_ends[first]) - 1 if first < len(sender_ends) else -1
        holds = last >= 0 and (sender_ends[last] == end or starts[first] < end)
        before_text = last >= 0 and end == 0 and sender_ends[last] > 0
        found.append(last if holds and not before_text else -1)
    return found

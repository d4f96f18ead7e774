# SPDX-License-Identifier: Apache-2.0
"""A sender that attacks its own frames: how much of a text can be read back from what it sends.

The frames are those of the run, in its precision and with its tokens, as somebody on the line would
have them if nothing were sealed: without their key, with the public model.  What is recovered is
compared with the text here, on the node that read it; counts leave the node and no word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedloom.models.base import Base
from fedloom.refining import leakage, measured
from fedloom.slices.slice import CacheSlice

DEEP_TOKENS, SHORTLIST = 8, 1024
"""Where layer 0 is not sent: tokens that are read from the lowest layer that is, and how many of
the model's likeliest candidates are tried for each."""


def read_back(base: Base, tapped: Sequence[tuple[str, bytes]]) -> dict[str, Any]:
    """Attack streams of frames; return how many, of how many tokens, and how many were right.

    Parameters
    ----------
    tapped
        Texts with the frames that were made of them; none at all returns nothing.
    """
    if not tapped:
        return {}
    table, tokens, right = None, 0, 0
    for text, stream in tapped:
        piece = leakage.overheard(stream, measured(base))
        if table is None and 0 in piece.layers:
            table = leakage.value_table(base.model, measured(base))
        found, truth = _attack(base, piece, base.tokenizer.encode(text), table)
        tokens += len(truth)
        right += sum(a == b for a, b in zip(found, truth, strict=True))
    return {"attack-frames": len(tapped), "attack-tokens": tokens, "attack-right": right}


def _attack(
    base: Base, piece: CacheSlice, ids: Sequence[int], table_VW: Tensor | None
) -> tuple[list[int], list[int]]:
    """Return what was recovered and what it should be: every token by layer 0, or the first few.

    A deeper layer depends on all tokens before, so only tokens without a gap can be read from it;
    the first one is given.
    """
    if table_VW is not None and 0 in piece.layers:
        return leakage.lookup(piece, table_VW), [ids[place] for place in piece.places]
    whole = sum(place == number for number, place in enumerate(piece.places))
    end, layer = min(whole, 1 + DEEP_TOKENS), piece.layers[0]
    if end < 2:
        return [], []
    read = leakage.of_layers(layer)
    seen = leakage.captured(piece, read)[1:end]
    how: dict[str, Any] = {"known": ids[:1], "shortlist": SHORTLIST}
    model, geometry = base.model, measured(base)
    return leakage.collide(model, geometry, seen, read, [layer], **how), list(ids[1:end])

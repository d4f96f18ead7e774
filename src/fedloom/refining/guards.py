# SPDX-License-Identifier: Apache-2.0
"""Guards against a sender that says too much: by the size of its cache, and by what it changes.

They are coarse.  A slice within the range of what the fuser has seen can still move the answer, and
a true fact moves it too; whoever may be asked is the first question, not these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from fedloom.adapters.fuser import CacheFuser
from fedloom.slices.slice import CacheSlice

Kept = TypeVar("Kept")


@torch.no_grad()
def norm_of(fuser: CacheFuser | None, piece: CacheSlice) -> float | None:
    """Return how far a slice is from what the fuser was calibrated on; about 1 is as expected.

    Root mean square over tokens and channels of keys or of values, in the fuser's standard
    deviations, of the layer where it is largest.  The first token is left out: attention rests on
    it, and its keys are long in every context.
    """
    if fuser is None:
        return None
    mean, scale = (cast(Tensor, getattr(fuser, f"sender_{what}")) for what in ("mean", "scale"))
    found = []
    for layer in piece.layers:
        for part, half in ((piece.keys, 0), (piece.values, 1)):
            flat = part[layer].transpose(0, 1).flatten(1)  # [T, H D]
            body = flat[1:] if piece.places[0] == 0 and len(flat) > 1 else flat
            centre, width = (x[layer].chunk(2)[half].to(body) for x in (mean, scale))
            found.append(float(((body - centre) / width).square().mean().sqrt()))
    return max(found)


def divergence(refined: Tensor, alone: Tensor) -> float:
    """Return KL(refined | alone) of the next token, in nats; logits [V]."""
    p, q = (x.double().log_softmax(-1) for x in (refined, alone))
    return float((p.exp() * (p - q)).sum().clamp_min(0))


def calmed(
    kept: Sequence[Kept], alone: Tensor, read: Callable[[Sequence[Kept]], Tensor], limit: float
) -> tuple[list[Kept], float]:
    """Leave senders out, each time the one without whom the answer is nearest, until it is near.

    Parameters
    ----------
    read
        The next-token logits with some of ``kept``.
    limit
        The largest divergence from ``alone``, in nats.

    Returns
    -------
    kept, divergence
        Those who may stay, and how far the answer is with them.
    """
    left, now = list(kept), 0.0
    while left and (now := divergence(read(left), alone)) > limit:
        if len(left) == 1:
            return [], 0.0
        without = [divergence(read([x for x in left if x is not out]), alone) for out in left]
        del left[without.index(min(without))]
    return left, now if left else 0.0


def voted_out(kept: Sequence[Kept], read: Callable[[Sequence[Kept]], Tensor]) -> Kept | None:
    """Return the one sender who decides the next token against all others, if there is one.

    With three or more: leaving out each in turn, just one omission changes the likeliest token.
    It may be a liar or the only one who knows; hence nobody is voted out unless it is asked for.
    """
    if len(kept) < 3:
        return None
    whole = int(read(kept).argmax())
    deciding = [
        out for out in kept if int(read([x for x in kept if x is not out]).argmax()) != whole
    ]
    return deciding[0] if len(deciding) == 1 else None

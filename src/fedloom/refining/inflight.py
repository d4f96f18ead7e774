# SPDX-License-Identifier: Apache-2.0
"""``InFlight``: a fuser at work on the layers of a slice that are here, while others are coming.

A receiver's layer is projected as soon as the last of the sender's layers that it looks at has come
and was believed: each frame has its own keyed hash.  What is made is used only once the stream has
come to its end and all of it was believed, so a receiver never reads half a sender.  The
arithmetic is that of the whole slice, layer by layer, and so are the bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedloom.adapters.fuser import CacheFuser, Pair
from fedloom.slices.reading import LayerSlice
from fedloom.slices.slice import SliceBatch


class InFlight:
    """What a fuser has made of one stream so far.

    Parameters
    ----------
    fuser : CacheFuser or None
        A residual one waits: it needs the receiver's own cache, too.  Without one there is nothing
        to be done.

    Attributes
    ----------
    made : dict
        Receiver layer -> keys and values [1, H, T, D]: ``done`` of the fuser's forward pass.
    early : int
        Layers that were made before the end of the stream had come.
    """

    def __init__(self, fuser: CacheFuser | None) -> None:
        self._fuser = fuser if fuser is not None and fuser.config.mode == "prefix" else None
        self._came: dict[int, LayerSlice] = {}
        sources = {} if self._fuser is None else self._fuser.sources
        shown = () if self._fuser is None else self._fuser.open_layers()
        self._waiting = {n: frozenset(sources[n]) for n in shown}
        self.made: dict[int, Pair] = {}
        self.early = 0

    @torch.no_grad()
    def take(self, layers: Sequence[LayerSlice], *, ended: bool = False) -> None:
        """Take layers that have come; project what can be.

        Parameters
        ----------
        ended
            Whether the end of the stream came with them: then nothing of it is early.
        """
        if self._fuser is None:
            return
        for layer in layers:
            self._came[layer.layer] = layer
        ready = [n for n, needed in self._waiting.items() if needed <= self._came.keys()]
        for n in ready:
            self.made[n] = self._fuser.project(n, self._batch(self._waiting.pop(n)))
            self.early += not ended

    def _batch(self, layers: frozenset[int]) -> SliceBatch:
        """Put a few layers as a fuser reads them; which tokens are real is for the whole slice."""
        assert self._fuser is not None
        parts = {n: self._came[n] for n in sorted(layers)}
        keys = {n: part.keys[None] for n, part in parts.items()}
        values = {n: part.values[None] for n, part in parts.items()}
        some = next(iter(keys.values()))
        real = torch.ones(1, some.shape[2], dtype=torch.bool, device=some.device)
        return SliceBatch(self._fuser.sender, keys, values, real)

# SPDX-License-Identifier: Apache-2.0
"""A receiver's context with guests in it: their slots before its own tokens, or added to them.

Prefixes stand at positions ``0 .. P - 1`` in the order of their senders' hashes, the receiver's own
tokens after them, all turned with the receiver's frequencies (FedRefine, arXiv 2603.28772, joins
``C(F_1j, M_1) o ... o C(M_j)``).  Only differences of positions reach attention, so what matters is
who is near, not where zero is.
"""

# Shapes: B row, H KV head, D head dim, P foreign slot, N own token, T token of one sender.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fedloom.adapters.columns import Columns, showing, teach
from fedloom.adapters.fuser import Guests
from fedloom.ops.rotary import rotate, unrotate
from fedloom.slices.geometry import FULL, Geometry, layer_kinds, rotaries_of
from fedloom.slices.slice import SliceBatch


def pass_through(own: SliceBatch) -> Guests:
    """Seat a model's own cache unchanged: what a longer prompt would have been.

    The sanity check of everything here, and KVComm (arXiv 2510.03346) between equal models.
    """
    full = own.geometry.full
    keys, values = ({n: part[n] for n in full} for part in (own.keys, own.values))
    return Guests(own.geometry.model, keys, values, own.real_BT)


@dataclass(frozen=True)
class _Seats:
    """Where one sender's tokens go."""

    guests: Guests
    position_BT: Tensor


class FusedContext:
    """One batch of contexts on a frozen receiver, with or without prefixes; gradients pass.

    Parameters
    ----------
    prefixes : sequence of Guests
        Seated in the order given; ``refining`` sorts them.
    start : int
        Position of the first slot.

    Attributes
    ----------
    slots : int
        Foreign slots in the layer that has most.
    """

    def __init__(
        self, model: PreTrainedModel, prefixes: Sequence[Guests] = (), *, start: int = 0
    ) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self.columns: Columns | None = None
        self._next_B: Tensor | None = None
        self._used_BN: Tensor | None = None
        heard = [guests for guests in prefixes if guests.keys]
        self.slots = sum(guests.real_BT.shape[1] for guests in heard)
        if heard:
            teach(model)
            self._seat(heard, start)
        elif start:
            self._next_B = torch.full((1,), start, device=model.device)

    def _seat(self, heard: Sequence[Guests], start: int) -> None:
        kinds, rotaries = layer_kinds(self.model), rotaries_of(self.model)
        device = self.model.device
        next_B = torch.full((len(heard[0].real_BT),), start, device=device)
        seats = []
        for guests in heard:
            real = guests.real_BT.to(device)
            place = next_B[:, None] + (real.long().cumsum(1) - 1).clamp_min(0)
            seats.append(_Seats(guests, place))
            next_B = next_B + real.long().sum(1)
        real_of, bias_of = {}, {}
        for n in range(len(kinds)):
            here = [seat for seat in seats if n in seat.guests.keys]
            if not here:
                continue
            if kinds[n] != FULL:
                raise ValueError(f"layer {n} slides a window: a prefix would not stay in it")
            dtype = self.model.dtype
            keys = [
                rotate(s.guests.keys[n].to(device, dtype), s.position_BT, rotaries[n]) for s in here
            ]
            values = [s.guests.values[n].to(device, dtype) for s in here]
            self.cache.update(torch.cat(keys, 2), torch.cat(values, 2), n)
            real_of[n] = torch.cat([s.guests.real_BT.to(device) for s in here], 1)
            biases = [_bias(s.guests, n) for s in here]
            if any(b is not None for b in biases):
                shown = zip(here, biases, strict=True)
                bias_of[n] = torch.cat(
                    [_spread(b, s.guests.real_BT.to(device)) for s, b in shown], 1
                )
        first = real_of.get(kinds.index(FULL))
        self.columns = Columns(0 if first is None else first.shape[1], real_of, bias_of)
        self._next_B = next_B

    def read(self, ids_BN: Tensor, used_BN: Tensor | None = None, keep: int = 0) -> Tensor:
        """Read more of the receiver's own tokens and return their logits, [B, N, V].

        Parameters
        ----------
        used_BN
            False for padding, on either side.
        keep
            Of so many last tokens alone; 0 for all.
        """
        told = {}
        if self._next_B is not None:
            used = torch.ones_like(ids_BN) if used_BN is None else used_BN.long()
            told["position_ids"] = self._next_B[:, None] + (used.cumsum(1) - 1).clamp_min(0)
            self._next_B = self._next_B + used.sum(1)
        mask = self._mask(ids_BN, used_BN)
        with showing(self.columns):
            out = self.model(
                input_ids=ids_BN,
                attention_mask=mask,
                cache=self.cache,
                use_cache=True,
                logits_to_keep=keep,
                **told,
            )
        return out.logits  # type: ignore[no-any-return]

    def _mask(self, ids_BN: Tensor, used_BN: Tensor | None) -> Tensor | None:
        """Return the mask over the receiver's own tokens so far, or nothing if all are real."""
        before = self._used_BN
        now = torch.ones_like(ids_BN, dtype=torch.bool) if used_BN is None else used_BN.bool()
        self._used_BN = now if before is None else torch.cat((before, now), dim=1)
        return None if bool(self._used_BN.all()) else self._used_BN

    def own(self, geometry: Geometry) -> SliceBatch:
        """Return the receiver's own tokens as a residual fuser reads them: keys before RoPE."""
        assert self._used_BN is not None
        tokens = self._used_BN.shape[1]
        place = torch.arange(tokens, device=self.model.device).expand(len(self._used_BN), -1)
        if self._next_B is not None:  # behind a prefix
            place = place + self._next_B[:, None] - tokens
        keys, values = {}, {}
        for n, rotary in enumerate(rotaries_of(self.model)):
            if n in geometry.full:
                held, narrow = self.cache.layers[n], self.cache.layers[n].keys.dtype
                wide = torch.promote_types(narrow, torch.float32)
                keys[n] = unrotate(held.keys[:, :, -tokens:].to(wide), place, rotary, narrow)
                values[n] = held.values[:, :, -tokens:].to(wide)
        return SliceBatch(geometry, keys, values, self._used_BN)

    def add(self, residuals: Sequence[Guests]) -> None:
        """Add what guests make of the tokens read so far; all of them saw the clean cache."""
        for n, rotary in enumerate(rotaries_of(self.model)):
            here = [guests for guests in residuals if n in guests.keys]
            for guests in here:  # out of place: the sum of many is one graph
                layer = self.cache.layers[n]
                real = guests.real_BT.to(layer.keys.device)[:, None, :, None]
                keys, values = (
                    (part[n].to(real.device) * real).to(layer.keys)
                    for part in (guests.keys, guests.values)
                )
                place = torch.arange(real.shape[2], device=keys.device).expand(len(real), -1)
                layer.keys = layer.keys + rotate(keys, place, rotary)
                layer.values = layer.values + values


def _bias(guests: Guests, layer: int) -> Tensor | None:
    """Return what is added to one sender's scores, [B] or a number, or nothing."""
    gate, bias = guests.log_gate.get(layer), guests.bias
    if bias is None or (gate is None and not torch.is_grad_enabled() and not bool(bias)):
        return gate
    return bias if gate is None else gate + bias


def _spread(bias: Tensor | None, real_BT: Tensor) -> Tensor:
    if bias is None:
        return torch.zeros_like(real_BT, dtype=torch.float32)
    here = bias.to(real_BT.device)  # a fuser may lie elsewhere than the receiver
    return (here[:, None] if here.dim() else here).expand(real_BT.shape)

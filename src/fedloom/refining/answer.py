# SPDX-License-Identifier: Apache-2.0
"""``prefixed``: one answer of a receiver that has slices of other models' caches.

The senders' order is that of their model hashes, whoever answered first.  A sender whose gates are
all shut is not there at all, and with none left the receiver answers as it would alone, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedloom.adapters.alignment import align
from fedloom.adapters.fused import FusedContext, pass_through
from fedloom.adapters.fuser import CacheFuser, FuserConfig, Guests, Pair
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.refining.hearing import alone, seated
from fedloom.slices.geometry import Geometry
from fedloom.slices.slice import CacheSlice, SliceBatch, batch_of, export_cache

Source = tuple[CacheFuser | None, CacheSlice]
"""A slice with the fuser of its pair; no fuser for a slice of the receiver's own model."""


class Refinement:
    """A receiver that has read its prompt among guests, ready to go on.

    Attributes
    ----------
    logits : Tensor
        Of the prompt's tokens that saw the guests, [N, V]: all, with ``tail`` the last ones, in
        residual mode the last one alone.
    senders : tuple of str
        Model hashes of those that were heard, in their order.
    """

    def __init__(self, context: FusedContext, logits: Tensor, senders: Sequence[str]) -> None:
        self._context, self.logits, self.senders = context, logits, tuple(senders)
        self._last = logits[-1]

    @torch.no_grad()
    def generate(self, max_new_tokens: int, stop: Collection[int] = ()) -> list[int]:
        """Return the likeliest tokens, one after the other, the one that stops it included.

        A second call goes on where the first one ended.
        """
        found: list[int] = []
        last = self._last
        while len(found) < max_new_tokens:
            found.append(int(last.argmax()))
            if found[-1] in stop:
                break
            row = torch.tensor([[found[-1]]], device=last.device)
            last = self._context.read(row, keep=1)[0, -1]
        self._last = last
        return found

    def own_slice(self, geometry: Geometry) -> CacheSlice:
        """Return what all tokens read so far are to this model among its guests, keys before RoPE.

        Layers that slide a window are left out: the receiver's cache has forgotten part of them.
        """
        batch = self._context.own(geometry)
        keys, values = ({n: x[0] for n, x in p.items()} for p in (batch.keys, batch.values))
        return CacheSlice(geometry, keys, values, tuple(range(batch.real_BT.shape[1])))


@torch.no_grad()
def prefixed(
    receiver: Base,
    geometry: Geometry,
    prompt: Sequence[int],
    sources: Sequence[Source],
    *,
    start: int = 0,
    ends: Sequence[int] = (),
) -> Refinement:
    """Read a prompt with what senders gave.

    Slices are not changed: every request makes its own cache.

    Parameters
    ----------
    sources
        Slices with the fusers of their pairs, all of one mode.
    start
        Position of the first slot.
    ends
        End of each prompt token in the text, in characters, for residual fusion.

    Raises
    ------
    Refusal
        If a fuser is for another receiver, modes are mixed or the prompt is empty.
    """
    if not prompt:
        raise Refusal("an empty prompt has no next token: give the receiver at least one")
    ordered = sorted(sources, key=lambda source: (source[1].geometry.model, source[1].places))
    modes = {fuser.config.mode if fuser else "prefix" for fuser, _ in ordered}
    for fuser, piece in ordered:
        _check_receiver(fuser, piece, geometry)
    if len(modes) > 1:
        raise Refusal("prefix and residual fusers in one request: use one kind")
    if modes == {"residual"}:
        return _residual(receiver, geometry, prompt, ordered, ends)
    made = [guests_of(fuser, piece) for fuser, piece in ordered]
    how = reading([fuser.config for fuser, _ in ordered if fuser is not None])
    return among(receiver, geometry, prompt, made, how, start=start)


@torch.no_grad()
def among(
    receiver: Base,
    geometry: Geometry,
    prompt: Sequence[int],
    guests: Sequence[Guests],
    how: FuserConfig | None = None,
    *,
    start: int = 0,
) -> Refinement:
    """Read a prompt behind guests that are made already, in the order given.

    Parameters
    ----------
    how
        ``tail`` and ``sink`` that their fusers were taught with; see ``reading``.
    """
    how = how or FuserConfig()
    heard = [each for each in guests if each.keys]
    own, before = None, 0
    if heard and (before := alone(how, len(prompt))):
        own = batch_of([export_cache(receiver.model, geometry, prompt[:before])])
    context = FusedContext(receiver.model, seated(how, heard, own), start=start)
    logits = context.read(torch.tensor([list(prompt[before:])], device=receiver.model.device))[0]
    return Refinement(context, logits, [guests.sender for guests in heard])


@torch.no_grad()
def guests_of(
    fuser: CacheFuser | None, piece: CacheSlice, done: Mapping[int, Pair] | None = None
) -> Guests:
    """Let a fuser project what is not ``done`` of a slice; without one it is the receiver's own."""
    batch = batch_of([piece], sink=fuser is None or fuser.config.sink == "sender")
    made: Guests = pass_through(batch) if fuser is None else fuser(batch, done=done)
    return made


def reading(configs: Sequence[FuserConfig]) -> FuserConfig:
    """Return how a prompt is to be read: all fusers must have been taught to be read so.

    Raises
    ------
    Refusal
        If they were taught with different ``tail`` or ``sink``.
    """
    found = [*configs] or [FuserConfig()]
    if len({(config.tail, config.sink) for config in found}) > 1:
        raise Refusal(
            "fusers taught with different tail or sink in one request: use those of one kind"
        )
    return found[0]


def _check_receiver(fuser: CacheFuser | None, piece: CacheSlice, geometry: Geometry) -> None:
    meant = piece.geometry if fuser is None else fuser.receiver
    if meant != geometry:
        raise Refusal(
            f"a fuser for receiver {meant.model[:12]} on {geometry.model[:12]}: fetch the fuser of"
            " this pair"
        )


def _residual(
    receiver: Base,
    geometry: Geometry,
    prompt: Sequence[int],
    sources: Sequence[Source],
    ends: Sequence[int],
) -> Refinement:
    """Add to every token but the last (Cache-to-Cache), which then reads what was added."""
    opened = [(f, piece) for f, piece in sources if f is not None and f.open_layers()]
    context = FusedContext(receiver.model)
    row = torch.tensor([list(prompt)], device=receiver.model.device)
    if not opened or len(prompt) == 1:
        return Refinement(context, context.read(row)[0], ())
    if len(ends) != len(prompt):
        raise Refusal(
            f"residual fusion of {len(prompt)} tokens with {len(ends)} ends: give where each token"
            " ends in the text (models.offsets.token_ends)"
        )
    context.read(row[:, :-1], keep=1)
    own = context.own(geometry)
    context.add([f(_aligned(piece, ends[:-1]), own) for f, piece in opened])
    logits = context.read(row[:, -1:])[0]
    return Refinement(context, logits, [piece.geometry.model for _, piece in opened])


def _aligned(piece: CacheSlice, ends: Sequence[int]) -> SliceBatch:
    """Put the sender's tokens beside the receiver's, one for each of them or none."""
    if not piece.ends:
        raise Refusal("residual fusion of a slice without its tokens' ends: ask for them")
    device = next(iter(piece.keys.values())).device
    found = torch.tensor(align(ends, piece.ends, piece.places), device=device)
    at = found.clamp_min(0)
    keys = {n: x[None, :, at] for n, x in piece.keys.items()}
    values = {n: x[None, :, at] for n, x in piece.values.items()}
    return SliceBatch(piece.geometry, keys, values, (found >= 0)[None])

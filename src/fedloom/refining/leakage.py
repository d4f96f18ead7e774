# SPDX-License-Identifier: Apache-2.0
"""The attack: a cache read back into its text by anyone who has the public model.

Two readings of what travels (after Luo et al., arXiv 2508.09442).  ``lookup``: keys before RoPE and
values of layer 0 depend on their token alone, so one pass over the vocabulary makes a table and the
nearest row names the token.  ``collide``: a deeper layer depends on all tokens before too, which
the attacker has by then: each token of the vocabulary is read on top of what was recovered, and the
nearest is kept.  With the public fuser the same works on what it makes of a cache.

A lookup costs one token's layer 0 for each word of the vocabulary, once a model.  A collision
costs the layers up to the one looked at, for each candidate and each token: with a vocabulary of
50,000 and a 135M model some minutes a token on one core.  With a shortlist of the model's own
likeliest candidates it is a second a token, at the risk of missing one, after which the rest is
read on a wrong prefix.
"""

# Shapes: B candidate, T token of the slice, V vocabulary, H KV head, D head dim, W feature.

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fedloom.adapters.fuser import CacheFuser, Guests
from fedloom.errors import Refusal
from fedloom.ops.rotary import unrotate
from fedloom.slices.frames import HEAD, HEADER, LAYER, MAC, preamble, read_parts
from fedloom.slices.geometry import Geometry, rotaries_of
from fedloom.slices.quantise import parts_of, restore
from fedloom.slices.slice import CacheSlice, SliceBatch, batch_of

Reading = Callable[[SliceBatch], Tensor]
"""What the attacker sees of a batch of contexts, [B, T, W]: some layers, or a fuser's output."""


_ROWS = 64  # distances to a vocabulary at a time


class _Enough(Exception):
    """The layers that are wanted have been computed."""


@contextmanager
def _only(model: PreTrainedModel, last: int) -> Iterator[None]:
    """Let passes in the block end after layer ``last``; the layers after it cost nothing."""
    layers = cast(Any, model.get_decoder()).layers
    if last + 1 == len(layers):
        yield
        return

    def stop(*_: Any) -> None:
        raise _Enough

    handle = layers[last + 1].register_forward_pre_hook(stop)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _read(model: PreTrainedModel, ids_BT: Tensor, cache: DynamicCache, last: int) -> None:
    """Read tokens into a cache, as far as a layer."""
    start = cache.get_seq_length()
    position = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)[None]
    try:
        with _only(model, last):
            model.get_decoder()(
                input_ids=ids_BT,
                position_ids=position.expand(len(ids_BT), -1),
                cache=cache,
                use_cache=True,
            )
    except _Enough:
        pass


def _slots(
    model: PreTrainedModel, geometry: Geometry, cache: DynamicCache, layers: Sequence[int], at: int
) -> SliceBatch:
    """Return what a cache holds from place ``at`` on, keys turned back."""
    rotaries, keys, values = rotaries_of(model), {}, {}
    for n in layers:
        held = cache.layers[n]
        narrow = held.keys.dtype
        wide = torch.promote_types(narrow, torch.float32)
        place = torch.arange(at, held.keys.shape[2], device=held.keys.device)[None]
        keys[n] = unrotate(held.keys[:, :, at:].to(wide), place, rotaries[n], narrow)
        values[n] = held.values[:, :, at:].to(wide)
    some = keys[layers[0]]
    real = torch.ones(some.shape[0], some.shape[2], dtype=torch.bool, device=some.device)
    return SliceBatch(geometry, keys, values, real)


def value_table(model: PreTrainedModel, geometry: Geometry, *, batch: int = 4096) -> Tensor:
    """Return layer 0's values of every token, [V, W]: one pass over the vocabulary, one layer deep.

    Token by token they do not depend on position or context, so one table serves every capture.
    """
    rows = []
    for ids in torch.arange(model.config.vocab_size, device=model.device).split(batch):
        cache = DynamicCache()
        _read(model, ids[:, None], cache, 0)
        rows.append(_flat(_slots(model, geometry, cache, [0], 0).values[0])[:, 0])
    return torch.cat(rows)


def _flat(x_BHTD: Tensor) -> Tensor:
    return x_BHTD.transpose(1, 2).flatten(2)


def lookup(piece: CacheSlice, table_VW: Tensor) -> list[int]:
    """Name the token of each slot by its values in layer 0.

    Raises
    ------
    Refusal
        If the slice has no layer 0: then ``collide``.
    """
    if 0 not in piece.values:
        raise Refusal(f"a slice of layers {list(piece.layers)}: lookup needs layer 0; collide")
    seen = piece.values[0].transpose(0, 1).flatten(1).to(table_VW)
    nearest = [torch.cdist(rows, table_VW).argmin(1) for rows in seen.split(_ROWS)]
    return [int(token) for token in torch.cat(nearest)]


def of_layers(*layers: int) -> Reading:
    """See keys and values of some of the sender's layers."""

    def read(batch: SliceBatch) -> Tensor:
        return torch.cat([_flat(p[n]) for n in layers for p in (batch.keys, batch.values)], -1)

    return read


def of_fuser(fuser: CacheFuser) -> Reading:
    """See what a public fuser makes of the sender's cache: the receiver's keys and values."""

    def read(batch: SliceBatch) -> Tensor:
        return guest_features(fuser(batch))

    return read


def guest_features(guests: Guests) -> Tensor:
    """Return all that guests show, [B, T, W]."""
    parts = [_flat(p[n]) for n in sorted(guests.keys) for p in (guests.keys, guests.values)]
    return torch.cat(parts, -1)


@torch.no_grad()
def collide(
    model: PreTrainedModel,
    geometry: Geometry,
    seen_TW: Tensor,
    read: Reading,
    layers: Sequence[int],
    *,
    shortlist: int = 0,
    known: Sequence[int] = (),
    batch: int = 512,
) -> list[int]:
    """Recover tokens from left to right by reading candidates on top of what was recovered.

    Parameters
    ----------
    seen_TW
        What was captured, as ``read`` shows it; the tokens after ``known`` without a gap.
    layers
        The sender's layers that ``read`` looks at.
    shortlist
        Try only so many tokens, those that the model itself finds likeliest; 0 for all.
    known
        Tokens before the captured ones, such as the sender's public template.

    Returns
    -------
    list of int
        A token for each row of ``seen_TW``.
    """
    last, found = max(layers), list[int]()
    prefix = DynamicCache()
    if known:
        _read(model, torch.tensor([list(known)], device=model.device), prefix, last)
    for seen in seen_TW:
        tried = _candidates(model, [*known, *found], shortlist)
        best, nearest = -1, float("inf")
        for ids in tried.split(batch):
            cache = _copies(prefix, len(ids), last)
            at = cache.get_seq_length()
            _read(model, ids[:, None], cache, last)
            shown = read(_slots(model, geometry, cache, layers, at))[:, -1]
            distance = (shown - seen.to(shown)).square().mean(-1)
            if float(distance.min()) < nearest:
                nearest, best = float(distance.min()), int(ids[distance.argmin()])
        found.append(best)
        _read(model, torch.tensor([[best]], device=model.device), prefix, last)
    return found


def _copies(prefix: DynamicCache, count: int, last: int) -> DynamicCache:
    """Return the recovered prefix's cache once for each candidate."""
    cache = DynamicCache()
    for n, held in enumerate(prefix.layers[: last + 1]):
        cache.update(*(x.expand(count, -1, -1, -1) for x in (held.keys, held.values)), n)
    return cache


def _candidates(model: PreTrainedModel, before: Sequence[int], shortlist: int) -> Tensor:
    if not shortlist or not before:
        return torch.arange(model.config.vocab_size, device=model.device)
    row = torch.tensor([list(before)], device=model.device)
    logits = model(row, logits_to_keep=1).logits[0, -1]
    return cast(Tensor, logits.topk(min(shortlist, len(logits))).indices)


def captured(piece: CacheSlice, read: Reading) -> Tensor:
    """Return what a reading shows of a slice that was captured, [T, W]."""
    return read(batch_of([piece]))[0]


def overheard(stream: bytes, geometry: Geometry) -> CacheSlice:
    """Read a stream of frames without its key, as somebody on the line would.

    A frame's hash keeps it from being changed unnoticed.  It hides nothing: that is for TLS.
    """
    at, header, keys, values = 0, dict[str, Any](), {}, {}
    while at < len(stream):
        _, _, kind, layer, _, _, length = HEAD.unpack_from(stream, at)
        payload = stream[at + HEAD.size : at + HEAD.size + length]
        at += HEAD.size + length + MAC
        if kind == HEADER:
            header = json.loads(payload)
        elif kind == LAYER:
            shape = (geometry.heads, len(header["places"]), geometry.dim)
            expected = parts_of(header["scheme"], *shape)
            parts = read_parts(bytearray(payload), expected, preamble(expected))
            if parts is None:
                raise Refusal(f"layer {layer} is not of this geometry: give the sender's own")
            keys[layer], values[layer] = restore(parts, header["scheme"], shape)
    return CacheSlice(geometry, keys, values, tuple(header["places"]), tuple(header["ends"]))


def recovery_rate(found: Sequence[int], truth: Sequence[int]) -> float:
    """Return the share of tokens that were named right, place by place."""
    if len(found) != len(truth) or not truth:
        raise ValueError(f"{len(found)} tokens found, {len(truth)} were read: expected as many")
    return sum(a == b for a, b in zip(found, truth, strict=True)) / len(truth)

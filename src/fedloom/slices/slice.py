# SPDX-License-Identifier: Apache-2.0
"""``CacheSlice``: what a sender gives of its cache, keys turned back to before RoPE.

A KV cache can be read back into its text (Luo et al., arXiv 2508.09442): it is as private as the
text it was made from, in any precision and any layer.  What a slice leaves out is left out for
bytes, and the sender's own template because it is the sender's.
"""

# Shapes: B row, H KV head, T token, D head dim.

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from fedloom.errors import Refusal
from fedloom.ops.rotary import unrotate
from fedloom.slices.geometry import Geometry, rotaries_of

CHOICES = ("last", "value-norm")


@dataclass(frozen=True)
class CacheSlice:
    """Some layers and tokens of one context.

    Attributes
    ----------
    keys, values : mapping
        Layer -> [H, T, D], in float32 at least; keys before the rotary embedding.
    places : tuple of int
        Index of each token in the sender's context, ascending.
    ends : tuple of int
        End of each token in the text, in characters; empty if the text is nobody's business.
    """

    geometry: Geometry
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    places: tuple[int, ...]
    ends: tuple[int, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that are in it, ascending."""
        return tuple(sorted(self.keys))

    @property
    def tokens(self) -> int:
        """How many tokens are in it."""
        return len(self.places)


@dataclass(frozen=True)
class SliceBatch:
    """Slices of several contexts side by side: what a fuser reads.

    Attributes
    ----------
    keys, values : mapping
        Layer -> [B, H, T, D].
    real_BT : Tensor
        False for padding, on either side.
    """

    geometry: Geometry
    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]
    real_BT: Tensor

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that are in it, ascending."""
        return tuple(sorted(self.keys))


def batch_of(slices: Sequence[CacheSlice], *, sink: bool = True) -> SliceBatch:
    """Put slices of one model and the same layers side by side, padded on the left.

    Without ``sink``, each context's first token counts as padding.

    >>> one = {0: torch.ones(1, 2, 4)}, {0: torch.ones(1, 2, 4)}, (0, 1)
    >>> two = {0: torch.ones(1, 1, 4)}, {0: torch.ones(1, 1, 4)}, (0,)
    >>> batch_of([CacheSlice(None, *one), CacheSlice(None, *two)]).real_BT.int().tolist()
    [[1, 1], [0, 1]]
    """
    first = slices[0]
    if any((s.geometry, s.layers) != (first.geometry, first.layers) for s in slices):
        raise ValueError("slices of different models or layers do not make one batch")
    longest = max(s.tokens for s in slices)

    def stacked(part: str, layer: int) -> Tensor:
        found = [getattr(s, part)[layer] for s in slices]
        return torch.stack([F.pad(x, (0, 0, longest - x.shape[1], 0)) for x in found])

    begins = [longest - s.tokens + (not sink and 0 in s.places[:1]) for s in slices]
    real = [[t >= begin for t in range(longest)] for begin in begins]
    return SliceBatch(
        first.geometry,
        {n: stacked("keys", n) for n in first.layers},
        {n: stacked("values", n) for n in first.layers},
        torch.tensor(real, device=first.keys[first.layers[0]].device),
    )


def export_cache(
    model: PreTrainedModel,
    geometry: Geometry,
    ids: Sequence[int],
    *,
    layers: Collection[int] | None = None,
    own: Collection[int] = (),
    sink: bool = True,
    keep: int | None = None,
    by: str = "last",
    ends: Sequence[int] = (),
) -> CacheSlice:
    """Read a context once and return a slice of the cache that came of it.

    Parameters
    ----------
    ids
        The whole context, the sender's template and system tokens included: the message is read
        as the sender always reads.
    layers
        All by default.
    own
        Places of template and system tokens: they are not handed out.
    sink
        Keep the first token though it is the sender's own: attention rests on it (arXiv
        2309.17453), and it is the same in every context.
    keep
        At most so many tokens, the sink counted; all by default.
    by
        ``last`` keeps the last ones, ``value-norm`` those with the longest values.
    ends
        End of each of ``ids`` in the text, in characters, for alignment in residual fusion.
    """
    chosen = _chosen_layers(geometry, layers)
    if not ids:
        raise Refusal("an empty context has no cache: give the sender at least one token")
    if ends and len(ends) != len(ids):
        raise ValueError(f"{len(ends)} ends for {len(ids)} tokens")
    row = torch.tensor([list(ids)], device=model.device)
    keys, values = ({n: x[0] for n, x in p.items()} for p in _prefill(model, row, chosen))
    places = _chosen_places(values, len(ids), set(own), sink, keep, by)
    return CacheSlice(
        geometry,
        {n: k[:, places].clone() for n, k in keys.items()},
        {n: v[:, places].clone() for n, v in values.items()},
        tuple(places),
        tuple(ends[p] for p in places) if ends else (),
    )


def _chosen_layers(geometry: Geometry, layers: Collection[int] | None) -> list[int]:
    chosen = sorted(set(range(geometry.layers) if layers is None else layers))
    if not chosen or chosen[0] < 0 or chosen[-1] >= geometry.layers:
        raise Refusal(f"layers {chosen}: expected some of 0 to {geometry.layers - 1}")
    return chosen


@torch.no_grad()
def _prefill(
    model: PreTrainedModel, row_BT: Tensor, layers: Sequence[int]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return keys before RoPE and values, layer -> [B, H, T, D]."""
    # Without the config: a cache that knows of sliding layers would drop all but their window.
    cache = model.get_decoder()(input_ids=row_BT, cache=DynamicCache(), use_cache=True).cache
    rotaries = rotaries_of(model)
    position = torch.arange(row_BT.shape[1], device=row_BT.device)[None]
    keys, values = {}, {}
    for n in layers:
        held, narrow = cache.layers[n], cache.layers[n].keys.dtype
        wide = torch.promote_types(narrow, torch.float32)
        keys[n] = unrotate(held.keys.to(wide), position, rotaries[n], narrow)
        values[n] = held.values.to(wide)
    return keys, values


def export_batch(
    model: PreTrainedModel,
    geometry: Geometry,
    rows: Sequence[Sequence[int]],
    *,
    layers: Collection[int] | None = None,
) -> SliceBatch:
    """Read several contexts at once and return all tokens of each: what training needs.

    Padding is on the right, where no real token can see it.
    """
    if not rows or not all(rows):
        raise Refusal("an empty context has no cache: give the sender at least one token")
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=model.device)
    keys, values = _prefill(model, ids, _chosen_layers(geometry, layers))
    lengths = torch.tensor([len(row) for row in rows], device=model.device)
    real = torch.arange(longest, device=model.device) < lengths[:, None]
    return SliceBatch(geometry, keys, values, real)


def _chosen_places(
    values: Mapping[int, Tensor],
    tokens: int,
    own: set[int],
    sink: bool,
    keep: int | None,
    by: str,
) -> list[int]:
    if by not in CHOICES:
        raise Refusal(f'tokens by "{by}": expected one of {", ".join(CHOICES)}')
    first = [0] if sink else []
    rest = [place for place in range(tokens) if place not in own and place not in first]
    room = tokens if keep is None else keep - len(first)
    if room < 0 or not (rest or first):
        raise Refusal(
            f"a slice of {keep} tokens out of {tokens} ({len(own)} of them the template's):"
            " nothing would be left to send; keep more"
        )
    if by == "value-norm" and len(rest) > room:
        norm = torch.stack([v.norm(dim=-1).mean(0) for v in values.values()])
        score = (norm / norm.mean(1, keepdim=True)).mean(0)  # deep layers have longer values
        rest = sorted(sorted(rest, key=lambda place: (-float(score[place]), place))[:room])
    return [*first, *rest[max(0, len(rest) - room) :]]

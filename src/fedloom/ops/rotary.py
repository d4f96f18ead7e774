# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding in cache space: turn keys, turn them back, move them along.

A cache holds keys after RoPE (arXiv 2104.09864, eq. 15): pair ``i`` of a key at position ``p`` was
turned by the angle ``p * frequency_i``.  Only the difference of two positions reaches attention, so
keys that are turned back can be placed anywhere, in another model's frequencies too (FedRefine,
arXiv 2603.28772, joins caches along the sequence and says nothing of positions).
"""

# Shapes: B row, H KV head, T token, D head dim, F frequency (half of what is turned).

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedloom.errors import Refusal

_CHANGING = ("dynamic", "longrope")  # their frequencies depend on how long the context is


@dataclass(frozen=True, eq=False)
class Rotary:
    """The frequencies of one kind of layer of one model.

    Attributes
    ----------
    frequencies_F : Tensor
        Angle a position, float32 as transformers holds it.
    scaling : float
        Factor on sine and cosine (yarn, longrope): it makes keys longer, so a shift divides it out.
    limit : int or None
        First position at which the model would change its frequencies.
    """

    frequencies_F: Tensor
    scaling: float = 1.0
    limit: int | None = None

    @classmethod
    def of(cls, embedding: nn.Module, layer_type: str | None = None) -> Rotary:
        """Read the frequencies of a model's own ``rotary_emb``.

        Parameters
        ----------
        layer_type
            For models whose kinds of layer turn differently (Gemma3).
        """
        prefix = f"{layer_type}_" if hasattr(embedding, f"{layer_type}_inv_freq") else ""
        kind: Any = getattr(embedding, "rope_type", "default")
        kind = kind[layer_type] if isinstance(kind, dict) else kind
        changing = kind in _CHANGING
        # The original ones: a long pass before this one may have changed the others in place.
        name = f"{prefix}{'original_' if changing else ''}inv_freq"
        config = cast(Any, embedding).config
        return cls(
            getattr(embedding, name).detach().float(),
            float(getattr(embedding, f"{prefix}attention_scaling", 1.0)),
            _limit(config, layer_type if prefix else None) if changing else None,
        )

    def waves(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, [..., 2 F], of positions of any shape; negative ones too.

        Angles are computed in float32 and rounded to ``dtype`` as transformers does: a key turned
        here has the bits of one that the model turned.
        """
        if self.limit is not None and int(position.max()) >= self.limit:
            raise Refusal(
                f"position {int(position.max())}: this model's rotary frequencies change at"
                f" {self.limit}; keep prefix and prompt shorter"
            )
        at = self.frequencies_F.to(position.device)
        angle = (position[..., None].float() * at).repeat(*[1] * position.dim(), 2)
        cos, sin = angle.cos() * self.scaling, angle.sin() * self.scaling
        return cos.to(dtype), sin.to(dtype)


def _limit(config: Any, layer_type: str | None) -> int:
    told = config.rope_parameters
    told = told[layer_type] if layer_type else told
    return int(told.get("original_max_position_embeddings") or config.max_position_embeddings)


def rotate(keys_BHTD: Tensor, position_BT: Tensor, rotary: Rotary) -> Tensor:
    """Turn keys to their positions, with the model's scaling.

    >>> keys = torch.tensor([[[[1.0, 0.0]]]])
    >>> quarter = Rotary(torch.tensor([torch.pi / 2]))
    >>> rotate(keys, torch.tensor([[1]]), quarter).round(decimals=3).tolist()
    [[[[-0.0, 1.0]]]]
    """
    cos, sin = (w[:, None] for w in rotary.waves(position_BT, keys_BHTD.dtype))
    turned, rest = _parts(keys_BHTD, cos)
    return torch.cat((turned * cos + _quarter_turn(turned) * sin, rest), dim=-1)


def unrotate(
    keys_BHTD: Tensor, position_BT: Tensor, rotary: Rotary, wave_dtype: torch.dtype | None = None
) -> Tensor:
    """Turn keys back to where they were before ``rotate``, scaling divided out.

    Parameters
    ----------
    wave_dtype
        What the model rounded sine and cosine to; by default the keys' dtype.  A half-precision
        model's keys may come here widened: the sum of the rounded squares is then not 1.
    """
    narrow = wave_dtype or keys_BHTD.dtype
    waves = rotary.waves(position_BT, narrow)
    cos, sin = (w[:, None].to(keys_BHTD.dtype) for w in waves)
    turned, rest = _parts(keys_BHTD, cos)
    back = (turned * cos - _quarter_turn(turned) * sin) / (cos * cos + sin * sin)
    return torch.cat((back, rest), dim=-1)


def shift(keys_BHTD: Tensor, by_BT: Tensor, rotary: Rotary) -> Tensor:
    """Move keys that are already turned, forwards or (negative) backwards, by so many places."""
    unit = Rotary(rotary.frequencies_F)  # a shift must not scale again
    return rotate(keys_BHTD, by_BT, unit)


def _parts(keys: Tensor, cos: Tensor) -> tuple[Tensor, Tensor]:
    """Split off the dimensions that a partial rotary embedding leaves alone."""
    return keys[..., : cos.shape[-1]], keys[..., cos.shape[-1] :]


def _quarter_turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def naive_rotate(keys_BHTD: Tensor, position_BT: Tensor, rotary: Rotary) -> Tensor:
    """Turn one pair of one key at a time: what ``rotate`` must equal."""
    out = keys_BHTD.clone()
    pairs = len(rotary.frequencies_F)
    for b, t in torch.cartesian_prod(*map(torch.arange, position_BT.shape)).tolist():
        for i in range(pairs):
            angle = position_BT[b, t].float() * rotary.frequencies_F[i]
            c, s = (rotary.scaling * wave(angle).double() for wave in (torch.cos, torch.sin))
            x, y = keys_BHTD[b, :, t, i].double(), keys_BHTD[b, :, t, i + pairs].double()
            out[b, :, t, i] = (c * x - s * y).to(out.dtype)
            out[b, :, t, i + pairs] = (s * x + c * y).to(out.dtype)
    return out

# SPDX-License-Identifier: Apache-2.0
"""Keys and values in 16, 8 or 4 bits, and the exact bytes that they take.

Keys have channels that are large for every token, values do not: keys share a scale down a channel
(over ``GROUP`` tokens), values along a token (KIVI, arXiv 2402.02750, section 3; before RoPE it
holds best, KVQuant, arXiv 2401.18079).  Eight bits have levels to spare, so their scales are
coarser: longer groups, and one scale for a token's values in all heads of a layer.  Rounding is
half to even, so the same cache gives the same bytes on any machine.
"""

# Shapes: H KV head, T token, D head dim, G group of tokens.

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedloom.errors import Refusal, nearest

GROUP = {"int8": 128, "int4": 64}
"""Tokens of a channel that share a scale."""
SCHEMES = ("bf16", "int8", "int4")
_LEVELS = {"int8": 127, "int4": 15}

Parts = dict[str, Tensor]
"""Tensors of one layer by name, as they travel."""


@dataclass(frozen=True)
class Part:
    """One tensor of a layer on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * self.dtype.itemsize


def check_scheme(scheme: str) -> None:
    """Refuse a scheme that does not exist."""
    if scheme not in SCHEMES:
        hint = nearest(scheme, SCHEMES)
        raise Refusal(f'scheme "{scheme}"{hint}: expected one of {", ".join(SCHEMES)}')


def parts_of(scheme: str, heads: int, tokens: int, dim: int) -> list[Part]:
    """List what one layer consists of: known before any of it has come."""
    check_scheme(scheme)
    if scheme == "bf16":
        return [Part(name, torch.bfloat16, (heads, tokens, dim)) for name in ("k", "v")]
    groups, found = math.ceil(tokens / GROUP[scheme]), []
    by_token = (tokens,) if scheme == "int8" else (heads, tokens)
    for name, scales in (("k", (heads, groups, dim)), ("v", by_token)):
        if scheme == "int8":
            found.append(Part(name, torch.int8, (heads, tokens, dim)))
        else:
            found.append(Part(name, torch.uint8, (math.ceil(heads * tokens * dim / 2),)))
            found.append(Part(f"{name}.low", torch.bfloat16, scales))
        found.append(Part(f"{name}.scale", torch.bfloat16, scales))
    return found


def layer_bytes(scheme: str, heads: int, tokens: int, dim: int) -> int:
    """Count the bytes of one layer's keys and values."""
    return sum(part.nbytes for part in parts_of(scheme, heads, tokens, dim))


def quantise(keys_HTD: Tensor, values_HTD: Tensor, scheme: str) -> Parts:
    """Write one layer in a scheme; half the step is the most that a number moves.

    ``int8`` is symmetric, ``int4`` has a lowest value beside the step.
    """
    check_scheme(scheme)
    if scheme == "bf16":
        return {"k": keys_HTD.bfloat16(), "v": values_HTD.bfloat16()}
    found: Parts = {}
    for name, x in (("k", keys_HTD.float()), ("v", values_HTD.float())):
        low, scale = _range(*_peers(x, name, scheme), scheme)
        step, floor = (_spread(s, name, scheme, x.shape[1]) for s in (scale, low))
        codes = torch.where(step > 0, (x - floor) / torch.where(step > 0, step, 1.0), 0.0).round()
        if scheme == "int8":
            found[name] = codes.clamp(-127, 127).to(torch.int8)
        else:
            found[name] = _pack(codes.clamp(0, 15).to(torch.uint8))
            found[f"{name}.low"] = low.bfloat16()
        found[f"{name}.scale"] = scale.bfloat16()
    return found


def restore(parts: Parts, scheme: str, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Read keys and values [H, T, D] in float32."""
    found = []
    for name in ("k", "v"):
        if scheme == "bf16":
            found.append(parts[name].float())
            continue
        codes = parts[name] if scheme == "int8" else _unpack(parts[name], shape)
        x = codes.float() * _spread(parts[f"{name}.scale"].float(), name, scheme, shape[1])
        if scheme == "int4":
            x = x + _spread(parts[f"{name}.low"].float(), name, scheme, shape[1])
        found.append(x)
    return found[0], found[1]


def _peers(x_HTD: Tensor, name: str, scheme: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return the numbers with the dimensions along which they share a scale."""
    if name == "k":
        return _groups(x_HTD, GROUP[scheme]), (-2,)
    return x_HTD, ((0, 2) if scheme == "int8" else (2,))


def _range(x: Tensor, dim: tuple[int, ...], scheme: str) -> tuple[Tensor, Tensor]:
    """Return the lowest value and the step along ``dim``, in numbers that bfloat16 holds.

    They are rounded outwards: the largest value must not fall off the last level.
    """
    if scheme == "int8":
        step = x.abs().amax(dim) / _LEVELS[scheme]
        return torch.zeros_like(step), _up(step)
    low = -_up(-x.amin(dim))
    return low, _up((x.amax(dim) - low) / _LEVELS[scheme])


def _up(x: Tensor) -> Tensor:
    """Round float32 up to the next number that bfloat16 holds."""
    bits = x.contiguous().view(torch.int32)
    cut = bits & -0x10000  # towards zero
    more = (x > 0) & (cut != bits)
    found: Tensor = (cut + more.int() * 0x10000).view(torch.float32)
    return found


def _groups(x_HTD: Tensor, size: int) -> Tensor:
    """Cut the tokens into groups, [H, G, size, D]; the last token fills up the last group."""
    missing = -x_HTD.shape[1] % size
    filled = F.pad(x_HTD[None], (0, 0, 0, missing), mode="replicate")[0] if missing else x_HTD
    return cast(Tensor, filled.unflatten(1, (-1, size)))


def _spread(scale: Tensor, name: str, scheme: str, tokens: int) -> Tensor:
    """Give each number its group's scale, [H, T, D] or what broadcasts to it."""
    if name == "v":
        return scale[..., None]
    return scale.repeat_interleave(GROUP[scheme], dim=1)[:, :tokens]


def _pack(codes: Tensor) -> Tensor:
    flat = F.pad(codes.flatten(), (0, codes.numel() % 2))
    return flat[0::2] | (flat[1::2] << 4)


def _unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    flat = torch.stack((packed & 15, packed >> 4), dim=1).flatten()
    return flat[: math.prod(shape)].view(shape)


def naive_quantise(x_HTD: NDArray[np.float32], name: str, scheme: str) -> NDArray[np.float32]:
    """Quantise and restore one number at a time: what ``restore(quantise(x))`` must equal."""
    H, T, D = x_HTD.shape
    out, f32 = np.zeros_like(x_HTD), np.float32
    for h, t, d in np.ndindex(H, T, D):
        first = t - t % GROUP[scheme]
        by_token = x_HTD[:, t] if scheme == "int8" else x_HTD[h, t]
        peers = x_HTD[h, first : first + GROUP[scheme], d] if name == "k" else by_token
        if scheme == "int8":
            low = f32(0)
            step = _naive_up(f32(np.abs(peers).max()) / f32(127))
        else:
            low = f32(-_naive_up(f32(-peers.min())))
            step = _naive_up((f32(peers.max()) - low) / f32(15))
        if step > 0:
            out[h, t, d] = np.rint((x_HTD[h, t, d] - low) / step) * step + low
        else:
            out[h, t, d] = low
    return out


def _naive_up(x: np.float32) -> np.float32:
    """Try every 16-bit pattern nearby until one is not smaller."""
    bits = int(np.float32(x).view(np.uint32)) & 0xFFFF0000
    made = np.uint32(bits).view(np.float32)
    if made < x:
        made = np.uint32(bits + 0x10000).view(np.float32)
    return np.float32(made)

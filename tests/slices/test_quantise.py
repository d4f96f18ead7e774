"""Codes are those of the naive twin, errors stay under half a step, sizes are known beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.errors import Refusal
from fedloom.slices.quantise import GROUP, SCHEMES, layer_bytes, naive_quantise, quantise, restore

SHAPES = [(2, 5, 4), (1, GROUP["int4"], 8), (3, GROUP["int8"] + 7, 2), (1, 1, 3)]


def layer(shape, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(2, *shape, generator=random) * torch.rand(2, *shape, generator=random) * 9
    x[0, ..., 0] += 40.0  # a channel that is large for every token
    return x[0], x[1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_equal_to_the_naive_twin_bit_for_bit(scheme, shape):
    keys, values = layer(shape)
    got = restore(quantise(keys, values, scheme), scheme, shape)
    for name, x, y in zip("kv", (keys, values), got, strict=True):
        assert np.array_equal(y.numpy(), naive_quantise(x.numpy(), name, scheme))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_error_stays_under_half_a_step(scheme, shape):
    keys, values = layer(shape, seed=1)
    got = restore(quantise(keys, values, scheme), scheme, shape)
    for name, x, y in zip("kv", (keys, values), got, strict=True):
        if scheme == "bf16":
            assert ((x - y).abs() <= x.abs() * 2**-8).all()
            continue
        groups, dim = x.split(GROUP[scheme], dim=1), 1
        if name == "v":
            groups, dim = (x,), (0, 2) if scheme == "int8" else 2
        top = torch.cat([p.amax(dim, keepdim=True).expand_as(p) for p in groups], 1)
        low = torch.cat([p.amin(dim, keepdim=True).expand_as(p) for p in groups], 1)
        if scheme == "int8":
            step = torch.maximum(top.abs(), low.abs()) / 127
        else:  # the lowest value is rounded too, outwards: the range may grow by its last place
            step = (top - low + low.abs() * 2**-7) / 15
        assert ((x - y).abs() <= step * (1 + 2**-6) / 2 + 1e-6).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sizes_are_those_announced(scheme):
    shape = (3, 130, 64)
    keys, values = layer(shape)
    parts = quantise(keys, values, scheme)
    nbytes = sum(x.numel() * x.element_size() for x in parts.values())
    assert nbytes == layer_bytes(scheme, *shape)
    bits = 8 * nbytes / (2 * keys.numel())
    assert bits == pytest.approx({"bf16": 16, "int8": 8.16, "int4": 4.5}[scheme], abs=0.15)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_constants_and_zeros_survive(scheme):
    """A step of zero divides nothing."""
    for value in (0.0, 2.5, -3.0):  # bfloat16 holds these
        x = torch.full((1, 3, 4), value)
        keys, values = restore(quantise(x, x, scheme), scheme, (1, 3, 4))
        torch.testing.assert_close(keys, x, rtol=1e-2, atol=0)
        torch.testing.assert_close(values, x, rtol=1e-2, atol=0)
        assert value or not keys.any()


def test_halves_go_to_the_even_code():
    x = torch.tensor([[[127.0], [0.5], [1.5], [-2.5]]])
    parts = quantise(x, x.transpose(1, 2), "int8")
    assert parts["k"].flatten().tolist() == [127, 0, 2, -2]


def test_keys_by_channel_beat_keys_by_token():
    """What KIVI is about: an outlier channel must not cost the others their levels."""
    keys = torch.randn(2, GROUP["int4"], 8, generator=torch.Generator().manual_seed(0))
    keys[..., 0] += 40.0
    by_channel, by_token = restore(quantise(keys, keys, "int4"), "int4", (2, GROUP["int4"], 8))
    assert (by_channel - keys).abs().mean() < 0.6 * (by_token - keys).abs().mean()


def test_unknown_scheme_is_refused():
    with pytest.raises(Refusal, match="did you mean int8"):
        layer_bytes("int-8", 1, 1, 1)


def test_a_quarter_of_the_bytes_is_eight_bits_of_half_the_tokens_and_their_scales():
    """Qwen2.5-0.5B's shape; the codes alone are a quarter, what is above it are scales."""
    heads, dim = 2, 64
    for tokens, most in ((128, 0.257), (256, 0.2545), (1024, 0.2545)):
        ratio = layer_bytes("int8", heads, tokens // 2, dim) / layer_bytes(
            "bf16", heads, tokens, dim
        )
        assert 0.25 < ratio <= most


def test_eight_bits_lose_little_though_heads_share_a_scale():
    """Heads whose values are ten times shorter than the longest head's still have 12 levels."""
    keys, values = layer((3, 130, 64), seed=2)
    values = values * torch.tensor([1.0, 0.3, 0.1])[:, None, None]
    _, got = restore(quantise(keys, values, "int8"), "int8", (3, 130, 64))
    error = (got - values).square().mean((1, 2)).sqrt() / values.square().mean((1, 2)).sqrt()
    assert error.tolist() == sorted(error.tolist())
    assert error[0] < 0.01
    assert error[2] < 0.1

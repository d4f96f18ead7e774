"""Keys turned by us are keys turned by the model; turned back they know no position."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.ops.rotary import Rotary, naive_rotate, rotate, shift, unrotate

from grafts import FAMILIES

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}


def scaled(rope: str):
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters=ROPES[rope],
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config).double().eval()


def keys_and_places(rows=2, tokens=7, dim=16):
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(rows, 3, tokens, dim, generator=random, dtype=torch.float64)
    return keys, torch.randint(-500, 500, (rows, tokens), generator=random)


@pytest.mark.parametrize("scaling", [1.0, 1.25])
def test_equal_to_the_naive_twin(scaling):
    keys, places = keys_and_places()
    rotary = Rotary(1e4 ** -torch.linspace(0, 1, 8), scaling)
    # Sines are float32 in both, as in transformers; the products after them are float64.
    assert (rotate(keys, places, rotary) - naive_rotate(keys, places, rotary)).abs().max() < 1e-6


@pytest.mark.parametrize("rope", ROPES)
def test_back_and_forth_is_nothing(rope):
    keys, places = keys_and_places(dim=8)
    rotary = Rotary.of(scaled(rope).model.rotary_emb)
    places = places % 200
    back = unrotate(rotate(keys, places, rotary), places, rotary)
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_the_models_own_keys_come_back(rope):
    """In layer 0 a token's key before RoPE is its own: the same wherever the token stands."""
    model = scaled(rope)
    ids = torch.full((1, 40), 7)
    cache = model(ids, use_cache=True).cache
    rotary = Rotary.of(model.model.rotary_emb)
    raw = unrotate(cache.layers[0].keys, torch.arange(40)[None], rotary)
    # To the rounding of transformers' own float32 normalisation.
    assert (raw - raw[:, :, :1]).abs().max() < 1e-6
    assert (cache.layers[0].keys - raw).abs().max() > 0.1


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("by", [60, -5])
@torch.no_grad()
def test_a_shifted_cache_is_one_computed_there(rope, by):
    """Scaling is divided out, and every layer follows: attention sees differences alone."""
    model = scaled(rope)
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    start = torch.arange(20, 29)[None]
    rotary = Rotary.of(model.model.rotary_emb)
    here = model(ids, position_ids=start, cache=DynamicCache()).cache
    there = model(ids, position_ids=start + by, cache=DynamicCache()).cache
    for a, b in zip(here.layers, there.layers, strict=True):
        moved = shift(a.keys, torch.full((2, 9), by), rotary)
        # Angles at other places round differently in float32.
        torch.testing.assert_close(moved, b.keys, rtol=0, atol=5e-5)
        torch.testing.assert_close(a.values, b.values, rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_same_bits_as_the_model(family):
    """Keys turned back, then turned again, in the dtype of a real model."""
    model = tiny.build(family).eval()
    decoder = model.get_decoder()
    ids = torch.randint(0, 256, (1, 11), generator=torch.Generator().manual_seed(0))
    places = torch.arange(11)[None]
    caught = {}

    def keep(name):
        return lambda _module, _inputs, output: caught.__setitem__(name, output)

    for i, layer in enumerate(decoder.layers):
        has_norm = hasattr(layer.self_attn, "k_norm")
        part = layer.self_attn.k_norm if has_norm else layer.self_attn.k_proj
        part.register_forward_hook(keep(i))
    cache = model(ids, cache=DynamicCache(), use_cache=True).cache
    kinds = getattr(model.config, "layer_types", [None] * 2)
    for i, layer in enumerate(cache.layers):
        rotary = Rotary.of(decoder.rotary_emb, kinds[i])
        raw = caught[i] if caught[i].dim() == 4 else caught[i].unflatten(-1, (2, 16))
        raw = raw.transpose(1, 2) if raw.shape[1] == 11 else raw  # Gemma3 norms heads first
        assert torch.equal(rotate(raw, places, rotary), layer.keys)
        torch.testing.assert_close(unrotate(layer.keys, places, rotary), raw, rtol=0, atol=1e-5)


def test_half_precision_keys_are_turned_back_with_the_waves_that_turned_them():
    keys, places = keys_and_places(dim=8)
    rotary = Rotary(1e4 ** -torch.linspace(0, 1, 4))
    turned = rotate(keys.bfloat16(), places, rotary)
    right = unrotate(turned.double(), places, rotary, torch.bfloat16)
    wrong = unrotate(turned.double(), places, rotary)
    original = keys.bfloat16().double()
    assert (right - original).abs().mean() < (wrong - original).abs().mean()


def test_dimensions_that_a_partial_embedding_leaves_alone():
    keys, places = keys_and_places(dim=16)
    rotary = Rotary(1e4 ** -torch.linspace(0, 1, 4))
    turned = rotate(keys, places, rotary)
    assert torch.equal(turned[..., 8:], keys[..., 8:])
    assert not torch.equal(turned[..., :8], keys[..., :8])


def test_frequencies_that_would_change_are_refused():
    rotary = Rotary.of(scaled("dynamic").model.rotary_emb)
    with pytest.raises(Refusal, match="change at 256; keep prefix and prompt shorter"):
        rotary.waves(torch.tensor([256]), torch.float32)

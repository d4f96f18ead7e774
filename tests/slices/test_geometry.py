"""Layers that slide a window are known as such, named or not."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig, Qwen2Config

from fedloom.adapters.fuser import CacheFuser
from fedloom.errors import Refusal
from fedloom.slices.geometry import geometry_of
from fedloom.slices.slice import export_cache

from rooms import room

SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def built(config):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.eval().requires_grad_(False)
    return model, geometry_of(model, "m" * 64, "t" * 64)


def test_mistral_slides_in_every_layer_though_it_lists_none():
    model, geometry = built(MistralConfig(**SIZES, sliding_window=8))
    assert (geometry.windows, geometry.full) == ((8, 8), ())
    with pytest.raises(Refusal, match="slides a window, in which a prefix would not stay"):
        CacheFuser(room("llama")[1], geometry)
    # As a sender it hands over all tokens, the last ones as its own cache has them.
    ids = list(b"a text that is longer than its window")
    piece = export_cache(model, geometry, ids)
    assert piece.tokens == len(ids)
    own = DynamicCache(config=model.config)
    model(torch.tensor([ids]), cache=own, use_cache=True)
    kept = own.layers[1].values[0]
    assert kept.shape[1] == 7
    torch.testing.assert_close(piece.values[1][:, -7:], kept, rtol=0, atol=1e-5)


def test_mistral_without_a_window_can_receive():
    _, geometry = built(MistralConfig(**SIZES, sliding_window=None))
    assert (geometry.windows, geometry.full) == ((0, 0), (0, 1))
    assert CacheFuser(room("llama")[1], geometry).layers == (0, 1)


@pytest.mark.parametrize(("used", "windows"), [(False, (0, 0)), (True, (0, 8))])
def test_qwen2_slides_above_max_window_layers_where_it_uses_windows(used, windows):
    told = {"use_sliding_window": used, "sliding_window": 8, "max_window_layers": 1}
    assert built(Qwen2Config(**SIZES, **told))[1].windows == windows

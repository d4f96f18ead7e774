"""A recipe's window over a model that slides one of its own: the shorter holds, in each layer."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import MemoryCache
from fedloom.models import tiny

from grafts import HEARD, logits

WINDOWS = [(4, 0), (4, 2), (8, 3), (tiny.WINDOW, 0), (30, 0), (30, 5)]


@pytest.fixture
def gemma():
    return tiny.build("gemma3").double().eval().requires_grad_(False)


def seen(tokens: int, window: int, sinks: int = 0) -> torch.Tensor:
    """Which key each query sees, written again from the text: [1, 1, T, T]."""
    rows = [
        [k <= q and (q - k < window or k < sinks) for k in range(tokens)] for q in range(tokens)
    ]
    return torch.tensor(rows)[None, None]


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_each_layer_of_gemma_takes_the_shorter_window(gemma, ids, window, sinks):
    """The plain model with masks made by hand; the sliding layer cannot see past its own window."""
    narrow = seen(45, window, sinks)
    by_hand = {"full_attention": narrow, "sliding_attention": narrow & seen(45, tiny.WINDOW)}
    with torch.no_grad():
        expected = gemma(ids, attention_mask=by_hand, use_cache=False).logits
    untouched = logits(gemma, ids)
    attach(gemma, HEARD.replaced(memory__gate="shut", memory__window=window, memory__sinks=sinks))
    torch.testing.assert_close(logits(gemma, ids), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, untouched, atol=1e-6)


@pytest.mark.parametrize(("window", "sinks"), WINDOWS)
def test_decoding_through_gemmas_sliding_cache_equals_prefill(gemma, ids, window, sinks):
    attach(gemma, HEARD.replaced(memory__window=window, memory__sinks=sinks))
    whole = logits(gemma, ids)
    for cuts in ([1] * 45, [17, 28], [3, 11, 1, 30]):
        cache, parts = MemoryCache(gemma.config), []
        with torch.no_grad():
            for part in ids.split(cuts, dim=1):
                parts.append(gemma(part, cache=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("window", "sinks"), [(4, 2), (30, 5)])
def test_left_padded_rows_decode_as_each_does_alone(gemma, ids, window, sinks):
    attach(gemma, HEARD.replaced(memory__window=window, memory__sinks=sinks))
    lengths, cache = (30, 7, 19), MemoryCache(gemma.config)
    mask = torch.stack([torch.arange(30) >= 30 - n for n in lengths]).long()
    batch = torch.stack([ids[row].roll(30 - n)[:30] for row, n in enumerate(lengths)]) * mask
    position = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        gemma(batch, attention_mask=mask, position_ids=position, cache=cache, use_cache=True)
        for more in range(3):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            at = torch.tensor(lengths)[:, None] + more
            step = ids.gather(1, at)
            got = gemma(step, attention_mask=mask, position_ids=at, cache=cache).logits
    for row, n in enumerate(lengths):
        alone = logits(gemma, ids[row : row + 1, : n + 3])[0, -1]
        torch.testing.assert_close(got[row, 0], alone, rtol=0, atol=1e-12)


def test_the_cache_keeps_what_each_layer_needs(gemma, ids):
    cache = MemoryCache(gemma.config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, DynamicLayer]
    attach(gemma, HEARD)
    with torch.no_grad():
        for part in ids.split(9, dim=1):
            gemma(part, cache=cache, use_cache=True)
    assert [layer.keys.shape[2] for layer in cache.layers] == [tiny.WINDOW - 1, 45]
    assert sorted(cache.memory) == [0, 1]


@pytest.mark.parametrize("window", [4, 20])
def test_qwen_that_slides_a_window_takes_the_shorter_too(ids, window):
    def build(own: int) -> Qwen2ForCausalLM:
        config = Qwen2Config(
            vocab_size=259,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_sliding_window=True,
            sliding_window=own,
            max_window_layers=0,
            initializer_range=0.3,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Qwen2ForCausalLM(config).double().eval().requires_grad_(False)

    expected = logits(build(min(window, 8)), ids)
    model = build(8)
    attach(model, HEARD.replaced(memory__gate="shut", memory__window=window))
    torch.testing.assert_close(logits(model, ids), expected, rtol=0, atol=1e-12)
    assert not torch.allclose(expected, logits(build(45), ids), atol=1e-6)

"""A cache that holds sinks and the last window gives what one pass over everything gives."""

from __future__ import annotations

import pytest
import torch

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import MemoryCache
from fedloom.models import tiny

from grafts import HEARD, logits

CUTS = ([1] * 45, [17, 28], [3, 30, 1, 1, 10])


def windowed(window=8, sinks=0, **changes):
    return HEARD.replaced(memory__window=window, memory__sinks=sinks, **changes)


def in_parts(model, ids, cuts, cache=None, mask=None, position=None):
    """Logits of one pass a part."""
    cache, parts, at = cache or MemoryCache(model.config), [], 0
    with torch.no_grad():
        for part in ids.split(cuts, dim=1):
            told = {}
            if mask is not None:
                told["attention_mask"] = mask[:, : at + part.shape[1]]
            if position is not None:
                told["position_ids"] = position[:, at : at + part.shape[1]]
            parts.append(model(part, cache=cache, use_cache=True, **told).logits)
            at += part.shape[1]
    return torch.cat(parts, 1), cache


def held_keys(cache) -> list[int]:
    """Keys that each layer holds, sinks and all."""
    counts = []
    for layer in cache.layers:
        sinks = layer.sink_keys.shape[2] if hasattr(layer, "sink_keys") else 0
        counts.append(layer.keys.shape[2] + sinks)
    return counts


def expected_keys(model, keys: int) -> list[int]:
    """A layer that slides a window of its own (Gemma3) keeps transformers' cache for it."""
    layers = model.get_decoder().layers
    slides = [getattr(layer.self_attn, "sliding_window", None) for layer in layers]
    return [own - 1 if own else keys for own in slides]


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 8, 64])
def test_any_split_equals_one_pass_and_holds_a_window(model, ids, window, sinks):
    attach(model, windowed(window, sinks))
    whole = logits(model, ids)
    for cuts in CUTS:
        parts, cache = in_parts(model, ids, cuts)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)
        assert held_keys(cache) == expected_keys(model, sinks + min(45, window - 1))
        assert cache.get_seq_length() == 45


def test_the_window_and_the_sinks_do_matter(model, ids):
    """The laws here would hold for a mask that nothing reads."""
    seen = []
    for window, sinks in ((0, 0), (8, 0), (8, 4)):
        adapter = attach(model, windowed(window, sinks))
        seen.append(logits(model, ids))
        adapter.detach()
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (seen[i] - seen[j]).abs().max() > 1e-3


def test_attention_without_a_memory_is_the_window_by_hand(ids):
    """Full attention under a mask written out here, against the cache with the gate shut."""
    model = tiny.build("llama").double().eval().requires_grad_(False)
    row = ids[:1]
    query, key = torch.arange(45)[:, None], torch.arange(45)[None]
    mask = (key <= query) & ((query - key < 8) | (key < 2))
    wanted = logits(model, row, attention_mask=mask[None, None])
    attach(model, windowed(8, 2, memory__gate="shut"))
    got, _ = in_parts(model, row, [10, 1, 34])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("cuts", "sinks"), list(zip(CUTS, (4, 0, 1), strict=True)), ids=str)
def test_left_padded_rows_decode_as_each_does_alone(model, ids, cuts, sinks):
    """Rows reach their sinks in different columns, some after several parts."""
    attach(model, windowed(6, sinks))
    lengths = (45, 30, 2)
    mask = torch.stack([torch.arange(45) >= 45 - n for n in lengths]).long()
    batch = torch.stack([ids[row].roll(45 - n) for row, n in enumerate(lengths)]) * mask
    position = (mask.cumsum(1) - 1).clamp_min(0)
    got, cache = in_parts(model, batch, cuts, mask=mask, position=position)
    assert torch.isfinite(got).all()
    assert held_keys(cache) == expected_keys(model, sinks + 5)
    for row, n in enumerate(lengths):
        alone = logits(model, ids[row : row + 1, :n])[0]
        torch.testing.assert_close(got[row, 45 - n :], alone, rtol=0, atol=1e-10)


def without_own_windows(model) -> None:
    if model.config.model_type == "gemma3_text":
        pytest.skip("the cache of Gemma3's sliding layers is transformers', which counts padding")


def test_right_padded_prompts_go_on_decoding(model, ids):
    without_own_windows(model)
    attach(model, windowed(4, 2))
    lengths = (9, 1, 5)
    mask = torch.stack([torch.arange(9) < n for n in lengths]).long()
    position = (mask.cumsum(1) - 1).clamp_min(0)
    _, cache = in_parts(model, ids[:, :9] * mask, [9], mask=mask, position=position)
    with torch.no_grad():
        for step in range(6):
            mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
            new = torch.stack([ids[row, n + step] for row, n in enumerate(lengths)])[:, None]
            at = torch.tensor(lengths)[:, None] + step
            told = {"attention_mask": mask, "position_ids": at, "cache": cache}
            got = model(new, use_cache=True, **told).logits[:, 0]
    for row, n in enumerate(lengths):
        alone = logits(model, ids[row : row + 1, : n + 6])[0, -1]
        torch.testing.assert_close(got[row], alone, rtol=0, atol=1e-10)


def test_rows_can_be_reordered_repeated_and_selected(model, ids):
    attach(model, windowed(8, 2))
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, :7] = 0
    position = (mask.cumsum(1) - 1).clamp_min(0)
    head = {"mask": mask, "position": position}
    _, cache = in_parts(model, ids[:, :20] * mask, [9, 11], **head)
    order = torch.tensor([1, 1, 0, 2, 2, 0])
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([2, 3, 0, 4, 5, 1]))
    rows = torch.tensor([5, 0, 3])
    cache.batch_select_indices(rows)
    came_from = order[rows]
    more = torch.cat([mask[came_from], torch.ones(3, 5, dtype=torch.long)], 1)
    step = {"attention_mask": more, "position_ids": position[came_from, -1:] + torch.arange(1, 6)}
    new = ids[:, 20:25]
    with torch.no_grad():
        got = model(new, cache=cache, use_cache=True, **step).logits
    for row, source in enumerate(came_from.tolist()):
        real = ids[source : source + 1, :20][:, mask[source].bool()]
        alone = logits(model, torch.cat([real, new[row : row + 1]], 1))[0, -5:]
        torch.testing.assert_close(got[row], alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("prefill", [None, 5])
@pytest.mark.parametrize("beams", [1, 3])
def test_generate_finds_what_it_finds_without_a_cache(model, ids, beams, prefill):
    """Left padding and beams, through transformers' own loop."""
    attach(model, windowed(6, 2))
    model.generation_config.eos_token_id = None
    prompt, mask = ids[:2, :14].clone(), torch.ones(2, 14, dtype=torch.long)
    mask[1, :4], prompt[1, :4] = 0, 0
    made = []
    for cache in (MemoryCache(model.config), None):
        chosen = {"cache": cache, "prefill_chunk_size": prefill} if cache else {}
        made.append(
            model.generate(
                prompt,
                attention_mask=mask,
                use_cache=cache is not None,
                max_new_tokens=12,
                num_beams=beams,
                do_sample=False,
                pad_token_id=0,
                **chosen,
            )
        )
    assert torch.equal(*made)


def test_eager_attention_takes_the_same_mask(ids):
    model = tiny.build("llama").double().eval().requires_grad_(False)
    attach(model, windowed(8, 2))
    whole = logits(model, ids)
    model.set_attn_implementation("eager")
    got, _ = in_parts(model, ids, [20, 1, 24])
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-4)  # its softmax is float32


def test_layers_without_a_memory_keep_to_the_window_too(model, ids):
    """Else they would tell those above what the window hides."""
    attach(model, windowed(8, 1, last_layers=1))
    whole = logits(model, ids)
    parts, cache = in_parts(model, ids, [20, 1, 24])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-10)
    assert held_keys(cache) == expected_keys(model, 8)


def test_a_long_chunk_does_not_stay_alive_behind_a_view(model, ids):
    without_own_windows(model)
    attach(model, windowed(4))
    _, cache = in_parts(model, ids, [45])
    storage = cache.layers[0].keys.untyped_storage().nbytes()
    assert storage == cache.layers[0].keys.nbytes


def test_a_cache_can_be_emptied_and_used_again(model, ids):
    attach(model, windowed(8, 2))
    first, cache = in_parts(model, ids, [20, 25])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(in_parts(model, ids, [20, 25], cache)[0], first)


def test_a_cache_of_another_window_or_of_the_untouched_model_is_refused(model, ids):
    adapter = attach(model, windowed(8))
    _, cache = in_parts(model, ids, [45])
    with adapter.off(), pytest.raises(ValueError, match="needs all keys"):
        model(ids[:, :1], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="2 rows came, the cache holds 3"):
        model(ids[:2, :1], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)
    adapter.detach()
    attach(model, windowed(9))
    with pytest.raises(ValueError, match="a cache of window 8 and 0 sinks"):
        model(ids[:, :1], cache=cache, use_cache=True)


def test_a_pass_that_broke_off_is_noticed(model, ids):
    attach(model, windowed(8))
    _, cache = in_parts(model, ids, [20, 25])

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, :1], cache=cache, use_cache=True)
    hook.remove()
    with pytest.raises(ValueError, match="an earlier pass broke off"):
        model(ids[:, :1], cache=cache, use_cache=True)

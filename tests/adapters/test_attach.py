"""The graft: the LLM is untouched beside it, and the memory is the recurrence it claims to be."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import MemoryCache

from grafts import HEARD, logits


def test_off_and_detached_is_the_untouched_model(model, ids):
    before, weights = logits(model, ids), {n: p.clone() for n, p in model.named_parameters()}
    adapter = attach(model, HEARD)
    assert not torch.allclose(logits(model, ids), before)
    with adapter.off():
        assert torch.equal(logits(model, ids), before)
    assert adapter.detach() is model
    assert torch.equal(logits(model, ids), before)
    after = dict(model.named_parameters())
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)


@pytest.mark.parametrize("how", ["shut", "vector at zero"])
def test_alpha_zero_is_the_untouched_model_to_the_bit(model, ids, how):
    before = logits(model, ids)
    adapter = attach(model, HEARD.replaced(memory__gate="shut" if how == "shut" else "vector"))
    for name, parameter in adapter.parameters().items():
        if name.endswith("gate.logit"):
            parameter.data.fill_(-math.inf)
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("window", [0, 8])
def test_token_by_token_equals_prefill_and_any_split(model, ids, window):
    attach(model, HEARD.replaced(memory__window=window))
    whole = logits(model, ids)
    for cuts in ([1] * 45, [17, 28], [44, 1], [1, 2, 42]):
        cache, parts = MemoryCache(model.config), []
        with torch.no_grad():
            for part in ids.split(cuts, dim=1):
                parts.append(model(part, cache=cache, use_cache=True).logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


def test_generate_with_a_memory_cache_equals_recomputing(model, ids):
    attach(model, HEARD)
    model.generation_config.eos_token_id = None
    prompt = ids[:, :20]
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=MemoryCache(model.config),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
    )
    for _ in range(6):
        prompt = torch.cat([prompt, logits(model, prompt)[:, -1:].argmax(-1)], 1)
    assert torch.equal(made, prompt)


def test_beam_search_reorders_the_memory_with_the_rows(model, ids):
    """Beams through the cache find what beams without any cache find."""
    attach(model, HEARD)
    model.generation_config.eos_token_id = None
    prompt = ids[:2, :12]
    made = []
    for cache in (MemoryCache(model.config), None):
        made.append(
            model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                use_cache=cache is not None,
                max_new_tokens=8,
                num_beams=3,
                do_sample=False,
                pad_token_id=0,
                **({"cache": cache} if cache else {}),
            )
        )
    assert torch.equal(*made)
    with pytest.raises(ValueError, match="cannot be cropped"):
        MemoryCache(model.config).crop(1)


def test_continuing_without_the_memory_is_refused(model, ids):
    attach(model, HEARD)
    with torch.no_grad():
        plain = model(ids[:, :5], use_cache=True).cache
        with pytest.raises(ValueError, match="MemoryCache"):
            model(ids[:, 5:6], cache=plain)


@pytest.mark.parametrize("window", [0, 8])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, ids, side, window):
    """Rows of unlike length, padded on either side, score as each does alone."""
    attach(model, HEARD.replaced(memory__window=window))
    lengths = (45, 30, 2)
    batch, mask, position = (torch.zeros(3, 50, dtype=torch.long) for _ in range(3))
    for row, n in enumerate(lengths):
        at = slice(50 - n, 50) if side == "left" else slice(0, n)
        batch[row, at], mask[row, at], position[row, at] = ids[row, :n], 1, torch.arange(n)
    padded = logits(model, batch, attention_mask=mask, position_ids=position)
    for row, n in enumerate(lengths):
        alone = logits(model, ids[row : row + 1, :n])[0]
        torch.testing.assert_close(padded[row][mask[row] == 1], alone, rtol=0, atol=1e-12)


def test_left_padding_then_decoding_equals_each_row_alone(model, ids):
    attach(model, HEARD)
    cache = MemoryCache(model.config)
    lengths = (9, 1, 4)
    mask = torch.stack([torch.arange(9) >= 9 - n for n in lengths]).long()
    batch = torch.stack([ids[row].roll(9 - n)[:9] for row, n in enumerate(lengths)]) * mask
    position = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        model(batch, attention_mask=mask, position_ids=position, cache=cache, use_cache=True)
        more = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        step = torch.stack([ids[row, n : n + 1] for row, n in enumerate(lengths)])
        at = torch.tensor(lengths)[:, None]
        got = model(step, attention_mask=more, position_ids=at, cache=cache, use_cache=True).logits
    for row, n in enumerate(lengths):
        alone = logits(model, ids[row : row + 1, : n + 1])[0, -1]
        torch.testing.assert_close(got[row, 0], alone, rtol=0, atol=1e-12)


def test_packed_documents_do_not_leak(model, ids):
    attach(model, HEARD)
    lengths = (20, 1, 24)
    row = torch.cat([ids[i, :n] for i, n in enumerate(lengths)])[None]
    position = torch.cat([torch.arange(n) for n in lengths])[None]
    twice = torch.cat([row, row.flip(1)])  # position ids of one row serve all, as in transformers
    both = logits(model, twice, position_ids=position)
    alone = logits(model, twice[1:], position_ids=position)
    torch.testing.assert_close(both[1:], alone, rtol=0, atol=1e-12)
    packed = both[0].split(lengths)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(
            packed[i], logits(model, ids[i : i + 1, :n])[0], rtol=0, atol=1e-12
        )


def test_a_packed_row_cannot_be_carried_on(model, ids):
    attach(model, HEARD)
    position = torch.cat([torch.arange(10), torch.arange(5)])[None]
    with torch.no_grad(), pytest.raises(ValueError, match="several documents"):
        model(ids[:1, :15], position_ids=position, cache=MemoryCache(model.config))


def test_chunked_prefill_may_meet_rows_that_have_not_begun(model, ids):
    """Left padding longer than a prefill chunk: the row's sequence is empty so far."""
    attach(model, HEARD)
    mask = torch.stack([torch.arange(24) >= n for n in (0, 17, 9)]).long()
    position = (mask.cumsum(1) - 1).clamp_min(0)
    batch = ids[:, :24] * mask
    whole = logits(model, batch, attention_mask=mask, position_ids=position)
    cache, parts = MemoryCache(model.config), []
    with torch.no_grad():
        for start in (0, 8, 16):
            part = slice(start, start + 8)
            told = {"attention_mask": mask[:, : start + 8], "position_ids": position[:, part]}
            parts.append(model(batch[:, part], cache=cache, use_cache=True, **told).logits)
    used = mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[used], whole[used], rtol=0, atol=1e-12)


def test_changing_a_token_changes_nothing_before_it_and_no_other_row(model, ids):
    attach(model, HEARD)
    before = logits(model, ids)
    changed = ids.clone()
    changed[1, 30] = (changed[1, 30] + 1) % 256
    after = logits(model, changed)
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1, :30], before[1, :30], rtol=0, atol=1e-13)
    assert (after[1, 30:] != before[1, 30:]).any(-1).all()


def test_every_forward_starts_from_an_empty_memory(model, ids):
    attach(model, HEARD)
    first = logits(model, ids)
    logits(model, ids.flip(1))
    assert torch.equal(logits(model, ids), first)


def independent_memory(q, k, v):
    """FedNL's linear path for one sequence, written again from the text: [T, H, G, D] etc."""
    T, H, G, D = q.shape
    out, S = torch.zeros_like(q), torch.zeros(H, D, D, dtype=q.dtype)
    for t in range(T):
        for h in range(H):
            third = torch.tensor(1 / 3).item()  # taps are float32 parameters
            pooled = sum(k[max(t - back, 0), h] * third for back in range(3))
            beta = torch.sigmoid(pooled.mean())
            key = F.silu(k[t, h])
            key = key / key.norm()
            value = v[t, h] / math.sqrt(D)
            S[h] = S[h] + beta * torch.outer(key, value - key @ S[h])
            for g in range(G):
                query = F.silu(q[t, h, g])
                out[t, h, g] = query / query.norm() @ S[h]
    return out


def test_layer_output_is_the_recurrence_of_the_text(model, ids):
    """Rebuild the first layer's output from its own projections with the loop above."""
    adapter = attach(model, HEARD)
    attention, seen = model.model.layers[0].self_attn, {}
    attention.register_forward_hook(
        lambda m, a, kw, out: seen.update(x=kw["hidden_states"], y=out[0]), with_kwargs=True
    )
    mixed = logits(model, ids[:1]) is not None and seen["y"][0]
    with adapter.off():
        logits(model, ids[:1])
    softmax, x = seen["y"][0], seen["x"]
    with torch.no_grad():
        q, k, v = (getattr(attention, f"{n}_proj")(x)[0] for n in "qkv")
        heard = independent_memory(q.view(45, 2, 2, 16), k.view(45, 2, 16), v.view(45, 2, 16))
        heard = heard.flatten(1)
        heard = heard / (heard.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        heard = attention.o_proj(heard)
        heard = heard / (heard.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        heard = heard * softmax.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close(mixed, 0.5 * softmax + 0.5 * heard, rtol=0, atol=1e-10)

"""The graft: the LLM is untouched beside it, and the memory is the recurrence it claims to be."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from fedloom.adapters.attach import attach, is_memory_array
from fedloom.adapters.memory import DeltaMemory, MemoryCache
from fedloom.config import MemoryConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.models import tiny

FAMILIES = ("llama", "qwen2", "qwen3")
HEARD = RunConfig().replaced(memory__gate_init=0.0, memory__chunk=16)  # the gate half open


@pytest.fixture(params=FAMILIES)
def model(request):
    """A fresh float64 model: the laws below are then tight."""
    return tiny.build(request.param).double().eval().requires_grad_(False)


@pytest.fixture
def ids():
    return torch.randint(0, 256, (3, 45), generator=torch.Generator().manual_seed(0))


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, use_cache=False, **kwargs).logits


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


def test_keys_have_norm_one_inside_the_model():
    memory = DeltaMemory(MemoryConfig(), heads=2, groups=3, dim=16)
    keys = memory._features(torch.randn(4, 7, 2, 16))
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones(4, 7, 2))


@pytest.mark.parametrize("truncate", [0, 1])
def test_a_late_loss_reaches_the_first_writes_unless_detached(ids, truncate):
    """BPTT: "store this for later" can only be learnt through S."""
    model = tiny.build("llama").double().eval().requires_grad_(False)
    window = {"memory__window": 4, "train__truncate_chunks": truncate, "last_layers": 1}
    attach(model, HEARD.replaced(**window, memory__chunk=8))
    embedded = model.get_input_embeddings()(ids[:1]).requires_grad_()
    # The layer below has full attention: only what the last layer's memory carries may count.
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    F.cross_entropy(
        model(inputs_embeds=embedded, use_cache=False).logits[0, -1:], ids[0, :1]
    ).backward()
    early = embedded.grad[0, :8].abs().amax(-1)
    assert (early == 0).all() if truncate else (early > 0).all()


@pytest.mark.parametrize("gate", ["vector", "scalar", "dynamic"])
def test_every_gate_learns_from_its_default_start(ids, gate):
    model = tiny.build("llama").double().requires_grad_(False)
    adapter = attach(model, RunConfig().replaced(memory__gate=gate))
    F.cross_entropy(model(ids, use_cache=False).logits[:, -1], ids[:, 0]).backward()
    gates = {n: p.grad for n, p in adapter.parameters().items() if ".gate." in n}
    assert gates
    assert all(grad.abs().max() > 0 for grad in gates.values())


def test_lora_gradient_goes_through_the_memory(ids):
    """The same loss, detached, gives another gradient: theta does hear S."""
    grads = []
    for truncate in (0, 1):
        model = tiny.build("llama").double().eval().requires_grad_(False)
        adapter = attach(model, HEARD.replaced(train__truncate_chunks=truncate, memory__chunk=8))
        for name, parameter in adapter.parameters().items():
            if "lora_B" in name:
                parameter.data.fill_(0.01)
        F.cross_entropy(model(ids, use_cache=False).logits[:, -1], ids[:, 0]).backward()
        grads.append({n: p.grad for n, p in adapter.parameters().items()})
    key = next(name for name in grads[0] if "layers.0" in name and "k_proj.lora_A" in name)
    assert (grads[0][key] - grads[1][key]).abs().max() > 1e-6


def test_checkpointed_layers_give_the_same_gradients(ids):
    grads = []
    for checkpoint in (False, True):
        model = tiny.build("qwen3").double().requires_grad_(False).train()
        adapter = attach(model, HEARD.replaced(train__checkpoint_layers=checkpoint))
        F.cross_entropy(model(ids, use_cache=False).logits[:, -1], ids[:, 0]).backward()
        grads.append([p.grad for p in adapter.parameters().values()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "change",
    [
        {"memory__rule": "proximal"},
        {"memory__rule": "hebbian"},
        {"memory__read_before_write": True},
        {"memory__feature_map": "l2"},
        {"memory__scale_values": False, "memory__match_rms": False},
        {"memory__beta": "fixed"},
        {"memory__negative_eigenvalues": True},
        {"memory__gate": "scalar"},
        {"memory__gate": "dynamic"},
        {"memory__gate": "open"},
        {"memory__gate": "fixed", "memory__gate_init": -1.0},
        {"memory__window": 8},
    ],
    ids=lambda change: "-".join(f"{k.split('__')[1]}={v}" for k, v in change.items()),
)
def test_each_choice_changes_the_output_and_still_decodes(ids, change):
    model = tiny.build("llama").double().eval().requires_grad_(False)
    adapter = attach(model, HEARD)
    default = logits(model, ids)
    adapter.detach()
    changed = attach(model, HEARD.replaced(**change))
    for name, parameter in changed.parameters().items():
        if change.get("memory__gate") and ".gate." in name:  # at the start all forms are equal
            parameter.data += 0.3
    whole = logits(model, ids)
    assert torch.isfinite(whole).all()
    assert not torch.allclose(whole, default, atol=1e-6)
    cache = MemoryCache(model.config)
    with torch.no_grad():
        parts = [model(part, cache=cache).logits for part in ids.split([30, 15], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


def test_a_checkpointed_layer_meets_the_pass_it_belonged_to(ids):
    """Two forward passes of unlike padding, one backward pass."""
    grads = []
    for checkpoint in (False, True):
        model = tiny.build("llama").double().requires_grad_(False).train()
        adapter = attach(model, HEARD.replaced(train__checkpoint_layers=checkpoint))
        mask = torch.ones_like(ids)
        mask[0, :7] = 0
        losses = [
            F.cross_entropy(model(ids, attention_mask=m, use_cache=False).logits[:, -1], ids[:, 0])
            for m in (mask, mask.flip(0), None)
        ]
        sum(losses).backward()
        grads.append([p.grad for p in adapter.parameters().values()])
        adapter.detach()
        assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_same_seed_same_start_whatever_torch_drew_before():
    arrays = []
    for noise in (0, 5):
        torch.randn(noise)
        adapter = attach(tiny.build("llama"), RunConfig())
        arrays.append(adapter.arrays())
    assert all((arrays[0][name] == arrays[1][name]).all() for name in arrays[0])
    other = attach(tiny.build("llama"), RunConfig().replaced(seed=1)).arrays()
    assert any((arrays[0][name] != other[name]).any() for name in other)


def test_load_reset_and_refusals():
    adapter = attach(tiny.build("llama"), RunConfig())
    start = adapter.arrays()
    adapter.load({name: array + 1 for name, array in start.items()})
    assert all((array == start[name] + 1).all() for name, array in adapter.arrays().items())
    adapter.reset()
    assert all((array == start[name]).all() for name, array in adapter.arrays().items())
    name = next(iter(start))
    with pytest.raises(Refusal, match="no trainable parameter"):
        adapter.load({"x": start[name]})
    with pytest.raises(Refusal, match="expected"):
        adapter.load({name: start[name][:1]})
    with pytest.raises(Refusal, match="the model has 2 layers"):
        attach(tiny.build("llama"), RunConfig().replaced(last_layers=3))


def test_last_layers_adapts_those_next_to_the_output():
    names = attach(tiny.build("llama"), RunConfig().replaced(last_layers=1)).arrays()
    assert all(".layers.1." in name for name in names)


@pytest.mark.parametrize(
    ("targets", "lora"), [("q,k,v", 2_359_296), ("q,k,v,o", 3_407_872), ("all-linear", 11_272_192)]
)
def test_counts_on_the_shapes_of_llama_3_2_1b(targets, lora):
    """32,768 memory parameters; LoRA of rank 16 as the paper counts it."""
    with torch.device("meta"):
        shapes = LlamaConfig(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
        )
        model = LlamaForCausalLM(shapes).requires_grad_(False)
    config = RunConfig().replaced(lora__rank=16, lora__targets=targets)
    named = attach(model, config).parameters()
    memory = sum(p.numel() for n, p in named.items() if is_memory_array(n))
    assert (memory, sum(p.numel() for p in named.values()) - memory) == (32_768, lora)


def test_trainable_taps_are_the_other_32768(ids):
    model = tiny.build("llama").double().requires_grad_(False)
    config = HEARD.replaced(memory__beta_trainable=True, memory__gate="shut")
    adapter = attach(model, config.replaced(memory__gate="scalar"))
    taps = {n: p for n, p in adapter.parameters().items() if "delta" in n}
    assert (
        sum(p.numel() for p in taps.values()) == 2 * (3 + 1) * 2 * 16
    )  # layers, taps + bias, H, D
    F.cross_entropy(model(ids, use_cache=False).logits[:, -1], ids[:, 0]).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in taps.values())

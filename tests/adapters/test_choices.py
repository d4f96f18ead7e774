"""What the recipe may choose of the memory: each choice does something, learns, and is counted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import DeltaMemory, MemoryCache
from fedloom.config import MemoryConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.rules import is_memory_array

from grafts import HEARD, logits


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

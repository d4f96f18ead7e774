"""LoRA on Mamba, FedNL's Fed-Mamba row: no attention, so no memory, and all else as elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import load_file

from fedloom.adapters.attach import attach
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.models.answers import Prompts, answer_logits
from fedloom.simulations.inprocess import run_in_process

from grafts import logits
from runs import rows

LORA = RunConfig().replaced(baseline="fed-mamba", model__source="tiny:mamba")


@pytest.fixture
def mamba():
    return tiny.build("mamba").eval().requires_grad_(False)


def test_the_baseline_is_its_keys():
    config = RunConfig.from_flat({"baseline": "fed-mamba"})
    assert config.model.source == "hub:state-spaces/mamba-1.4b-hf"
    assert (config.memory.enabled, config.lora.targets) == (False, "in,x,out")
    assert LORA.model.source == "tiny:mamba"


def test_off_and_detached_is_the_untouched_model(mamba, ids):
    before, weights = logits(mamba, ids), {n: p.clone() for n, p in mamba.named_parameters()}
    adapter = attach(mamba, LORA)
    assert mamba.config.model_type == "mamba"
    assert torch.equal(logits(mamba, ids), before)  # B = 0
    for name, parameter in adapter.parameters().items():
        parameter.data += 0.05 * ("lora_B" in name)
    assert not torch.allclose(logits(mamba, ids), before)
    with adapter.off():
        assert torch.equal(logits(mamba, ids), before)
    assert adapter.detach() is mamba
    assert torch.equal(logits(mamba, ids), before)
    assert all(torch.equal(p, weights[n]) for n, p in mamba.named_parameters())
    assert not any(module._forward_pre_hooks for module in mamba.modules())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_every_projection_is_heard_in_training_as_in_evaluation(mamba, ids, checkpoint):
    """peft warns of a fused kernel that reads past LoRA; the mixers must not reach for it."""
    adapter = attach(mamba, LORA.replaced(train__checkpoint_layers=checkpoint))
    assert {name.split(".")[-3] for name in adapter.parameters()} == {
        "in_proj",
        "x_proj",
        "out_proj",
    }
    for name, parameter in adapter.parameters().items():
        parameter.data += 0.05 * ("lora_B" in name)
    evaluated = logits(mamba, ids)
    adapter.model.train()
    trained = mamba(ids, use_cache=False).logits
    assert not any(layer.mixer.training for layer in mamba.backbone.layers)
    torch.testing.assert_close(trained, evaluated, rtol=0, atol=1e-5)  # float32, same order of sums
    F.cross_entropy(trained[:, -1], ids[:, 0]).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapter.parameters().values())


def test_padding_on_the_right_is_not_heard(mamba, ids):
    """``answer_logits`` passes no mask: what is causal cannot hear what stands after."""
    attach(mamba, LORA)
    prompts = [ids[row, :n].tolist() for row, n in enumerate((45, 30, 2))]
    with torch.no_grad():
        batch = answer_logits(mamba, Prompts.of(prompts, torch.device("cpu")))
        for row, prompt in enumerate(prompts):
            alone = mamba(torch.tensor([prompt]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(batch[row], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mamba", {"lora__targets": "x"}, "no attention to put a memory beside"),
        ("mamba", {"memory__enabled": False}, "a mamba model has no q; expected some of in, x"),
        ("llama", {"lora__targets": "in,x"}, "a llama model has no in; expected some of q, k, v"),
    ],
)
def test_wrong_combinations_are_refused_before_anything_hangs(family, changes, said):
    model = tiny.build(family)
    with pytest.raises(Refusal, match=said) as caught:
        attach(model, RunConfig().replaced(**changes))
    assert "\n" not in str(caught.value)
    assert not any("lora" in name for name, _ in model.named_modules())


def test_all_linear_on_mamba_is_its_three_projections(mamba):
    every = attach(mamba, LORA.replaced(lora__targets="all-linear")).arrays()
    named = attach(tiny.build("mamba").requires_grad_(False), LORA).arrays()
    assert every.keys() == named.keys()


def test_a_federated_run_learns_and_ships_lora_alone(recipe):
    config = recipe(baseline="fed-mamba", model__source="tiny:mamba", train__learning_rate=5e-3)
    run_in_process(config)
    folder = Path(config.output) / config.name
    arrays = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[-3] for name in arrays} == {"in_proj", "x_proj", "out_proj"}
    assert max(abs(array).max() for name, array in arrays.items() if "lora_B" in name) > 0
    trained = [row for row in rows(folder, "metrics") if row["phase"] == "train"]
    assert len(trained) == 2 * config.clients.count
    first, last = ([r["loss"] for r in trained if r["round"] == number] for number in (1, 2))
    assert sum(last) < sum(first)
    assert not any("gate-mean" in row for row in trained)

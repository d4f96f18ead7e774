"""The side adapter, a smaller rank on wide tensors, and what a run's folder gives back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from fedloom import border
from fedloom.adapters.attach import attach
from fedloom.adapters.lora import narrow, redraw
from fedloom.adapters.side import load_side, saved_arrays
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.workbench import workbench
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.rules.exchange import SIDE_A, SIDE_B

from grafts import logits
from runs import recorded


@pytest.fixture
def tokens():
    return torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))


def last_client(grid) -> FedNLClient:
    """Return the first client as the last evaluation left it."""
    sent = [m for m in grid.sent if m.metadata.message_type == "evaluate.fednl"][-1]
    client = FedNLClient(grid._contexts[sent.metadata.dst_node_id])
    arrays = border.arrays_of(sent.content)
    client.array_names = list(arrays)
    client._receive(list(arrays.values()), border.config_of(sent.content), scoring=True)
    return client


@pytest.mark.parametrize("rule", ["svd", "flora", "fedex", "ffa", "rolora"])
def test_a_runs_folder_gives_back_the_global_model(recipe, tokens, rule):
    config = recipe(clients__count=2, server__rule=rule, train__learning_rate=1e-2)
    grid = recorded(config)
    last_client(grid)
    served = logits(workbench(config).base.model, tokens)
    folder = Path(config.output) / config.name
    model = tiny.build("llama").eval()
    untouched = logits(model, tokens)
    adapter = attach(model, RunConfig.from_toml(folder / "config.toml"))
    adapter.load(saved_arrays(folder / "adapter"))
    assert torch.equal(logits(model, tokens), served)
    assert float((served - untouched).abs().max()) > 1e-3
    with adapter.off():
        assert torch.equal(logits(model, tokens), untouched)
    assert torch.equal(logits(adapter.detach(), tokens), untouched)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21's own
@pytest.mark.parametrize("rule", ["flora", "fedex", "ffa"])
def test_plain_peft_and_the_side_are_the_global_model(recipe, tokens, rule):
    config = recipe(
        clients__count=2, server__rule=rule, memory__enabled=False, train__learning_rate=1e-2
    )
    grid = recorded(config)
    last_client(grid)
    served = logits(workbench(config).base.model, tokens)
    folder = Path(config.output) / config.name / "adapter"
    plain = peft.PeftModel.from_pretrained(tiny.build("llama").eval(), folder)
    alone = logits(plain, tokens)
    load_side(plain, folder)
    assert torch.equal(logits(plain, tokens), served)
    assert torch.equal(alone, served) == (rule == "ffa")


def module_of(adapter) -> str:
    return next(n for n in adapter.arrays() if n.endswith(".lora_A.weight"))[: -len(SIDE_A)]


def test_a_pair_that_fits_no_projection_is_refused():
    adapter = attach(tiny.build("llama"), RunConfig())
    module = module_of(adapter)
    layer = adapter.model.get_submodule(module)
    a = np.zeros((3, layer.in_features), np.float32)
    b = np.zeros((layer.out_features, 3), np.float32)
    adapter.load({module + SIDE_A: a, module + SIDE_B: b})
    for bad in (
        {module + SIDE_A: a, module + SIDE_B: b[:, :2]},
        {module + SIDE_A: a[:, :1], module + SIDE_B: b},
        {module + SIDE_A: a},
        {"elsewhere" + SIDE_A: a, "elsewhere" + SIDE_B: b},
    ):
        with pytest.raises(Refusal, match="expected"):
            adapter.load(bad)


def test_a_new_side_takes_the_old_ones_place_and_reset_takes_it_off(tokens):
    model = tiny.build("llama").eval()
    adapter = attach(model, RunConfig())
    plain = logits(model, tokens)
    module = module_of(adapter)
    layer = adapter.model.get_submodule(module)
    random = np.random.default_rng(0)
    side = {
        module + SIDE_A: random.normal(size=(2, layer.in_features)).astype(np.float32),
        module + SIDE_B: random.normal(size=(layer.out_features, 2)).astype(np.float32),
    }
    adapter.load(side)
    once = logits(model, tokens)
    adapter.load(side)
    assert torch.equal(logits(model, tokens), once)
    assert not torch.equal(once, plain)
    adapter.reset()
    assert torch.equal(logits(model, tokens), plain)


def trained(model, adapter, tokens) -> dict[str, np.ndarray]:
    named = adapter.parameters()
    optimiser = torch.optim.AdamW(list(named.values()), lr=1e-2, weight_decay=0.1)
    for _ in range(4):
        loss = model(tokens, use_cache=False).logits.log_softmax(-1)[..., 5].mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)
        optimiser.step()
    return adapter.arrays()


def test_a_narrowed_adapter_trains_as_one_of_that_rank(tokens):
    wide_model, small_model = (tiny.build("llama").double() for _ in range(2))
    config = RunConfig().replaced(memory__enabled=False, lora__rank=8, lora__alpha=6.0)
    wide = attach(wide_model, config)
    small = attach(small_model, config.replaced(lora__rank=2))
    narrow(wide.model, 2, 6.0 / 2)
    start = wide.arrays()
    small.load({n: x[:2] if "lora_A" in n else x[:, :2] for n, x in start.items()})
    got, alone = trained(wide_model, wide, tokens), trained(small_model, small, tokens)
    for name, array in got.items():
        part, rest = (array[:2], array[2:]) if "lora_A" in name else (array[:, :2], array[:, 2:])
        assert not rest.any()
        np.testing.assert_allclose(part, alone[name], rtol=0, atol=1e-9)
        assert not np.allclose(part, start[name][: len(part), : part.shape[1]])


def test_a_held_factor_gets_no_step_and_no_gradient(tokens):
    model = tiny.build("llama")
    adapter = attach(model, RunConfig().replaced(memory__chunk=16))
    start = adapter.arrays()
    adapter.hold(".lora_A.weight")
    assert not any("lora_A" in name for name in adapter.parameters())
    made = trained(model, adapter, tokens)
    for name, array in made.items():
        assert np.array_equal(array, start[name]) == ("lora_A" in name), name
    adapter.hold("")
    assert adapter.parameters().keys() == start.keys()


def test_a_redrawn_start_is_another_a_and_no_b():
    adapter = attach(tiny.build("llama"), RunConfig())
    first = adapter.arrays()
    redraw(adapter.parameters(), 1)
    again = adapter.arrays()
    redraw(adapter.parameters(), 1)
    for name, array in adapter.arrays().items():
        assert np.array_equal(array, again[name])
        if "lora_A" in name:
            assert not np.array_equal(array, first[name])
        elif "lora_B" in name:
            assert not array.any()

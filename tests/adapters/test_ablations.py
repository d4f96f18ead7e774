"""Ablations that are one key: S forgotten, S never written, LoRA left out of training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import DeltaMemory
from fedloom.config import MemoryConfig, RunConfig
from fedloom.models import tiny
from fedloom.simulations.inprocess import run_in_process

from grafts import HEARD, logits

HEADS, GROUPS, DIM, TOKENS = 2, 2, 4, 23


def memory(**changes) -> DeltaMemory:
    config = MemoryConfig(**{"chunk": 4, **changes})
    return DeltaMemory(config, heads=HEADS, groups=GROUPS, dim=DIM).double()


@pytest.fixture
def projections():
    generator = torch.Generator().manual_seed(4)

    def draw(width):
        return torch.randn(2, TOKENS, width, generator=generator, dtype=torch.float64)

    return draw(HEADS * GROUPS * DIM), draw(HEADS * DIM), draw(HEADS * DIM)


def token_by_token(projections, every: int, seen: int = 0):
    """The plain rule, a token at a time, with S set to zero by hand where its turn comes."""
    plain, state, outs = memory(), None, []
    for t in range(projections[0].shape[1]):
        if state is not None and (seen + t) % every == 0:
            state = dataclasses.replace(state, S_BHDD=torch.zeros_like(state.S_BHDD))
        out, state = plain(*(x[:, t : t + 1] for x in projections), state)
        outs.append(out)
    return torch.cat(outs, 1), state


@pytest.mark.parametrize("every", [1, 5, 8, 100])
def test_forgetting_is_setting_s_to_zero_by_hand(projections, every):
    out, state = memory(reset_every=every)(*projections)
    wanted, last = token_by_token(projections, every)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(state.S_BHDD, last.S_BHDD, rtol=1e-10, atol=1e-12)
    whole, _ = memory()(*projections)
    assert torch.allclose(out, whole) == (every == 100)


def test_forgetting_keeps_count_over_stretches_and_ragged_rows(projections):
    """Row 0 brings 9 tokens and 12 more, row 1 brings 6 and 12: each as if it were alone."""
    model, first, held = memory(reset_every=5), 9, (9, 6)
    real = torch.arange(first)[None] < torch.tensor(held)[:, None]
    begin, state = model(*(x[:, :first] for x in projections), None, real)
    end, state = model(*(x[:, first : first + 12] for x in projections), state)
    for row, count in enumerate(held):
        alone = [
            torch.cat((x[row : row + 1, :count], x[row : row + 1, first : first + 12]), 1)
            for x in projections
        ]
        wanted, last = token_by_token(alone, 5)
        got = torch.cat((begin[row : row + 1, :count], end[row : row + 1]), 1)
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(state.S_BHDD[row], last.S_BHDD[0], rtol=1e-10, atol=1e-12)
    assert state.seen_B.tolist() == [21, 18]


def test_a_memory_that_is_never_written_reads_zero(projections):
    out, state = memory(rule="none")(*projections)
    assert not out.any()
    assert not state.S_BHDD.any()


def test_ablations_change_what_the_model_says():
    ids = torch.randint(1, 250, (2, 40), generator=torch.Generator().manual_seed(1))
    base = tiny.build("llama").requires_grad_(False)
    said = {}
    for name, changes in {
        "whole": {},
        "reset": {"memory__reset_every": 8},
        "unwritten": {"memory__rule": "none"},
    }.items():
        adapter = attach(base, HEARD.replaced(**changes))
        said[name] = logits(base, ids)
        adapter.detach()
    assert torch.allclose(said["whole"][:, :8], said["reset"][:, :8], atol=1e-5)  # float32
    assert not torch.allclose(said["whole"][:, 20:], said["reset"][:, 20:], atol=1e-3)
    assert not torch.allclose(said["whole"], said["unwritten"], atol=1e-3)


def test_frozen_lora_is_neither_trained_nor_sent(recipe):
    adapter = attach(tiny.build("llama").requires_grad_(False), RunConfig())
    frozen = attach(
        tiny.build("llama").requires_grad_(False), RunConfig().replaced(lora__frozen=True)
    )
    every, own = adapter.arrays(), frozen.arrays()
    assert own.keys() == {n for n in every if ".memory." in n}
    config = recipe(lora__frozen=True, rounds=1, clients__count=1)
    run_in_process(config)
    folder = Path(config.output) / config.name / "adapter"
    assert not (folder / "adapter_model.safetensors").exists()
    trained = load_file(folder / "memory.safetensors")
    assert any(np.abs(trained[n] - own[n]).max() > 1e-5 for n in own)

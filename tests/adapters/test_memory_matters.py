# SPDX-License-Identifier: Apache-2.0
"""The memory carries what the window cannot; task, model and training are the benchmark's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.adapters.attach import Adapter
from fedloom.adapters.memory import MemoryCache

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fednl" / "mechanism.py"


@pytest.fixture(scope="module")
def study() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mechanism", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mechanism"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(study: ModuleType) -> Adapter:
    torch.set_num_threads(1)
    return study.learn(seed=0)


@pytest.fixture(scope="module")
def held_out(study: ModuleType) -> Any:
    return study.draw(1024, torch.Generator().manual_seed(10_000))


def test_attention_alone_cannot_reach_the_writes(study):
    layers = max(layers for layers, _ in study.VARIANTS.values())
    after_last_value = study.GAP + 2 * study.MENTIONS + study.PAUSE
    assert layers * (study.WINDOW - 1) < after_last_value
    assert study.PAUSE >= study.WINDOW  # no question sees beyond the early cut


def test_the_right_answer_is_the_last_value_that_a_key_was_given(study, held_out):
    keys, values = (x.tolist() for x in study.parts(held_out)[:2])
    asked = held_out.questions_BT[:, ::2].tolist()
    answers, overwritten = held_out.answer_BA.tolist(), held_out.overwritten_BA.tolist()
    for row in range(len(keys)):
        last = dict(zip(keys[row], values[row], strict=True))
        assert answers[row] == [last[key] for key in asked[row]]
        assert overwritten[row] == [keys[row].count(key) > 1 for key in asked[row]]
        assert sorted(map(keys[row].count, last)) == sorted(study.WRITES)


def test_a_gap_stands_before_every_write_and_at_the_start(study, held_out):
    blank = held_out.context_BT == study.BLANK
    slots = blank[:, : sum(study.WRITES) * (study.GAP + 2)].unflatten(1, (-1, study.GAP + 2))
    assert slots[..., : study.GAP].all()
    assert not slots[..., study.GAP :].any()
    rest = blank[:, slots[0].numel() :]
    assert rest[:, : study.GAP].all()
    assert not rest[:, study.GAP : -study.PAUSE].any()
    assert rest[:, -study.PAUSE :].all()


def test_neither_key_nor_value_tells_how_late_a_write_is(study):
    """The order of the writes is uniform: no place favours a key, no rank of a value comes last."""
    rows = study.draw(12_000, torch.Generator().manual_seed(1))
    keys, values = (x[::2] for x in study.parts(rows)[:2])  # twins share their order
    times = (keys[:, :, None] == keys[:, None, :]).sum(2)
    once = (times == 1).float().mean(0)  # 6000 rows: 5 standard errors are 0.023
    torch.testing.assert_close(once, torch.full_like(once, 1 / keys.shape[1]), atol=0.023, rtol=0)
    mine = keys[:, None, :] == rows.questions_BT[::2, ::2, None]  # row, question, write
    larger = (mine & (values[:, None, :] > rows.answer_BA[::2, :, None])).sum(2)
    rank = torch.bincount(larger[rows.overwritten_BA[::2]]).float()
    rank /= rank.sum()
    torch.testing.assert_close(rank, torch.full_like(rank, study.ORDER_BLIND), atol=0.022, rtol=0)


def final_state(adapter: Adapter, context_BT: Tensor) -> Tensor:
    cache = MemoryCache(adapter.model.get_base_model().config)
    with torch.no_grad():
        adapter.model(context_BT, cache=cache, use_cache=True)
    (state,) = cache.memory.values()
    return state.S_BHDD


def parted(study: ModuleType, rows: Any, variant: str, gap: int) -> float:
    """Return how far S is from what it would be, had the writes come in reverse."""
    adapter = study.learn(0, variant, steps=20)
    keys, values, mentions = study.parts(rows)
    forth = final_state(adapter, study.lay(keys, values, mentions, gap))
    back = final_state(adapter, study.lay(keys.flip(1), values.flip(1), mentions, gap))
    return ((forth - back).norm() / forth.norm()).item()


def test_hebbs_rule_cannot_tell_the_order_of_the_writes(study, held_out):
    assert parted(study, held_out, "hebbian", study.GAP) < 1e-5  # float32 sums in another order


def test_the_delta_rule_can(study, held_out):
    assert parted(study, held_out, "delta", study.GAP) > 1e-2


def test_with_a_shorter_gap_hebbs_writes_would_depend_on_others(study, held_out):
    assert parted(study, held_out, "hebbian", study.GAP - 1) > 1e-4


def test_the_memory_recalls_what_left_the_window(study, trained, held_out):
    hit = study.said(trained, held_out).argmax(-1) == held_out.answer_BA
    assert study.share(hit) >= 0.9


def test_an_overwritten_key_answers_with_its_last_value(study, trained, held_out):
    hit = study.said(trained, held_out).argmax(-1) == held_out.answer_BA
    assert study.share(hit[held_out.overwritten_BA]) >= 0.9


def test_a_writer_blind_to_the_order_would_fail_at_that(study, trained, held_out):
    """The bound bites: with its writes in reverse, the trained model hardly keeps an answer."""
    forth = study.said(trained, held_out).argmax(-1)
    back = study.said(trained, study.backwards(held_out)).argmax(-1)
    same = (forth == back)[held_out.overwritten_BA]
    assert study.share(same) <= 0.1


@pytest.mark.parametrize("early", [True, False])
def test_without_the_state_nothing_is_recalled(study, trained, held_out, early):
    logits = study.said(trained, held_out, study.zeroed, study.WINDOW if early else 0)
    assert study.share(logits.argmax(-1) == held_out.answer_BA) <= study.CHANCE + 0.1
    if early:  # S was the only carrier: rows that differ in their values are now alike
        torch.testing.assert_close(logits[0::2], logits[1::2])


@pytest.mark.parametrize("early", [True, False])
def test_the_answers_follow_a_swapped_state(study, trained, held_out, early):
    after = study.WINDOW if early else 0
    answers = study.said(trained, held_out, study.swapped, after).argmax(-1)
    assert study.share(answers == study.swap(held_out.answer_BA)) >= 0.8
    assert study.share(answers == held_out.answer_BA) <= study.CHANCE + 0.1

# SPDX-License-Identifier: Apache-2.0
"""The memory carries what the window cannot; task, model and training are the benchmark's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fednl" / "mechanism.py"


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("mechanism", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["mechanism"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trained(study):
    torch.set_num_threads(1)
    return study.learn(seed=0)


@pytest.fixture(scope="module")
def held_out(study):
    return study.draw(1024, torch.Generator().manual_seed(10_000))


def test_attention_alone_cannot_reach_the_pairs(study):
    assert study.LAYERS * (study.WINDOW - 1) < study.FILLER - 1


def test_the_memory_recalls_what_left_the_window(study, trained, held_out):
    hit = study.said(trained, held_out).argmax(-1) == held_out.answer_BA
    assert study.share(hit) >= 0.9


def test_an_overwritten_key_answers_with_its_new_value(study, trained, held_out):
    hit = study.said(trained, held_out).argmax(-1) == held_out.answer_BA
    assert study.share(hit[held_out.overwritten_BA]) >= 0.9


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

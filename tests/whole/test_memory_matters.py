# SPDX-License-Identifier: Apache-2.0
"""The memory carries what the window cannot; task, model and training are the benchmark's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

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
    return study.draw(1024, torch.Generator().manual_seed(10_000), again=5)


def test_attention_alone_cannot_reach_the_pairs(study):
    assert study.LAYERS * (study.WINDOW - 1) < study.FILLER - 1


@pytest.mark.parametrize("again", [0, 1, 5, 8])
def test_no_writer_can_tell_which_write_is_the_last(study, again):
    """What it sees of the past holds no earlier write of its key, and is never cut short."""
    rows = study.draw(64, torch.Generator().manual_seed(0), again=again)
    pairs = rows.context_BT[:, : -study.FILLER].unflatten(1, (-1, 2))
    keys, decoys = pairs[..., 0], study.DECOYS
    for slot in range(decoys, pairs.shape[1] - decoys):
        token = 2 * slot + 1  # of the value; the step size also pools the two tokens before
        assert token - 2 - (study.WINDOW - 1) >= 0
        first_seen = (token - (study.WINDOW - 1) + 1) // 2  # pair of which the key is in sight
        assert (keys[:, first_seen:slot] != keys[:, slot, None]).all()
    assert 2 * decoys > study.WINDOW - 1  # a filler is always late: it sees decoys alone
    aside = torch.cat((keys[:, :decoys], keys[:, -decoys:]), dim=1)
    assert not (rows.questions_BT[:, ::2, None] == aside[:, None]).any()
    assert not (keys[:, decoys:-decoys, None] == aside[:, None]).any()


def test_an_answer_is_the_last_value_of_its_key_and_twins_share_all_but_values(study):
    rows = study.draw(64, torch.Generator().manual_seed(0), again=7)
    for row in range(64):
        written = rows.context_BT[row, : -study.FILLER].view(-1, 2).tolist()
        for question in range(study.PAIRS):
            key = rows.questions_BT[row, 2 * question].item()
            values = [value for name, value in written if name == key]
            assert values[-1] == rows.answer_BA[row, question]
            assert len(set(values)) == len(values) == rows.writes_BA[row, question]
    assert torch.equal(rows.questions_BT[0::2], rows.questions_BT[1::2])
    assert not torch.equal(rows.answer_BA[0::2], rows.answer_BA[1::2])


@pytest.mark.slow
def test_the_memory_recalls_what_left_the_window(study, trained, held_out):
    hit = study.said(trained, held_out).argmax(-1) == held_out.answer_BA
    assert study.share(hit) >= 0.9


@pytest.mark.slow
def test_an_overwritten_key_answers_with_its_new_value(study, trained, held_out):
    hit = study.said(trained, held_out).argmax(-1) == held_out.answer_BA
    assert study.share(hit[held_out.writes_BA > 1]) >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_without_the_state_nothing_is_recalled(study, trained, held_out, early):
    logits = study.said(trained, held_out, study.zeroed, study.WINDOW if early else 0)
    assert study.share(logits.argmax(-1) == held_out.answer_BA) <= study.CHANCE + 0.1
    if early:  # S was the only carrier: rows that differ in their values are now alike
        torch.testing.assert_close(logits[0::2], logits[1::2])


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
def test_the_answers_follow_a_swapped_state(study, trained, held_out, early):
    after = study.WINDOW if early else 0
    answers = study.said(trained, held_out, study.swapped, after).argmax(-1)
    assert study.share(answers == study.swap(held_out.answer_BA)) >= 0.8
    assert study.share(answers == held_out.answer_BA) <= study.CHANCE + 0.1

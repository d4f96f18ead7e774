from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import MemoryCache
from fedloom.models import tiny
from fedloom.models.spans import Labelled, candidate_scores, span_loss
from fedloom.models.trunk import Trunk

from grafts import CUTTABLE, HEARD

BATCH = [
    Labelled(tuple(range(40, 60)), (1, 7, 8, 19)),
    Labelled(tuple(range(100, 109)), (8,)),
]


@pytest.fixture(params=CUTTABLE)
def model(request):
    made = tiny.build(request.param).double().eval().requires_grad_(False)
    attach(made, HEARD.replaced(last_layers=1, memory__window=8))
    return made


def alone(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


def test_span_loss_is_the_mean_over_labelled_tokens(model):
    each = [-alone(model, row.ids)[at - 1, row.ids[at]] for row in BATCH for at in row.labels]
    expected = torch.stack(each).mean()
    with torch.no_grad():
        torch.testing.assert_close(span_loss(model, BATCH), expected, atol=1e-12, rtol=0)
        cut = Trunk(model, 1, budget=1 << 20)
        torch.testing.assert_close(span_loss(model, BATCH, cut), expected, atol=1e-12, rtol=0)


def test_weights_say_how_much_each_label_counts(model):
    weighed = [replace(BATCH[0], weights=(1.0, 4.0, 0.5, 2.0)), BATCH[1]]
    each = [-alone(model, row.ids)[at - 1, row.ids[at]] for row in BATCH for at in row.labels]
    weights = torch.tensor([1.0, 4.0, 0.5, 2.0, 1.0], dtype=torch.float64)
    expected = (torch.stack(each) * weights).sum() / 8.5
    with torch.no_grad():
        torch.testing.assert_close(span_loss(model, weighed), expected, atol=1e-12, rtol=0)
        even = [replace(row, weights=(3.0,) * len(row.labels)) for row in BATCH]
        torch.testing.assert_close(span_loss(model, even), span_loss(model, BATCH))


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 0.0)])
def test_weights_are_one_a_label_and_positive(weights):
    with pytest.raises(ValueError, match="weights"):
        Labelled((1, 2, 3), (1, 2), weights)


@pytest.mark.parametrize("chunk", [3, 256])
def test_candidates_score_as_if_each_were_written_out(model, chunk):
    prompt, candidates = list(range(30, 51)), [(5, 6, 7), (5,), (9, 8, 7, 6), (5, 6, 8)]
    cache = MemoryCache(model.config)
    with torch.no_grad():
        found, top = candidate_scores(model, prompt, candidates, cache, chunk=chunk)
    assert top == alone(model, prompt)[-1].argmax()
    for score, candidate in zip(found, candidates, strict=True):
        said = alone(model, [*prompt, *candidate])[len(prompt) - 1 : -1]
        expected = F.nll_loss(said, torch.tensor(candidate), reduction="sum")
        torch.testing.assert_close(-score, expected, atol=1e-10, rtol=0)


def test_single_token_candidates_need_no_second_pass(model):
    prompt = list(range(30, 41))
    with torch.no_grad():
        found, _ = candidate_scores(model, prompt, [(65,), (66,)], MemoryCache(model.config))
    torch.testing.assert_close(found, alone(model, prompt)[-1, [65, 66]], atol=1e-10, rtol=0)


@pytest.mark.parametrize("labels", [(), (0,), (3,)])
def test_labels_outside_the_row_are_no_row(labels):
    with pytest.raises(ValueError, match="labels"):
        Labelled((1, 2, 3), labels)

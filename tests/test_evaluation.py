"""Scores row by row, by depth and along a stream, against plain forward passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from fedloom.adapters.attach import attach
from fedloom.adapters.memory import MemoryCache
from fedloom.config import RunConfig
from fedloom.data.prompts import Encoded
from fedloom.evaluation import (
    ChoiceScores,
    Place,
    StreamCurve,
    depth_sums,
    score_choices,
    score_rows,
    stream_cross_entropy,
)
from fedloom.models import tiny


def ragged(count: int) -> list[Encoded]:
    """Rows with two to five letters."""
    random = np.random.default_rng(5)
    made = []
    for i in range(count):
        prompt = tuple(map(int, random.integers(1, 250, random.integers(3, 30))))
        letters = tuple(range(65, 67 + i % 4))
        made.append(Encoded(prompt, letters, int(random.integers(len(letters)))))
    return made


@pytest.fixture(scope="module")
def model():
    return tiny.build("llama").eval().requires_grad_(False)


def test_rows_are_scored_each_among_its_own_letters_and_come_in_order(model):
    examples = ragged(9)
    scored = score_rows(model, examples, batch_size=4)
    for example, row in zip(examples, scored, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([example.prompt_ids])).logits[0, -1].double()
        among = logits[list(example.letter_ids)]
        token = torch.tensor(example.letter_ids[example.gold])
        assert row.choices == len(example.letter_ids)
        assert row.correct == (int(among.argmax()) == example.gold)
        assert row.first_token_correct == (int(logits.argmax()) == token)
        # float32 forward, padded or alone
        assert row.letter_ce == pytest.approx(
            float(F.cross_entropy(among, torch.tensor(example.gold))), rel=1e-5
        )
        assert row.gold_ce == pytest.approx(float(F.cross_entropy(logits, token)), rel=1e-5)
        assert row.tokens == len(example.prompt_ids)


def test_a_row_keeps_its_name_whatever_the_batch_and_rows_differ_in_it(model):
    examples = ragged(6)
    names = [row.row for row in score_rows(model, examples, batch_size=2)]
    again = [row.row for row in score_rows(model, examples[::-1], batch_size=6)]
    assert names == again[::-1]
    assert len(set(names)) == 6
    assert {len(name) for name in names} == {16}


def test_sums_are_those_of_the_rows_and_chance_is_counted(model):
    examples = ragged(8)
    rows = score_rows(model, examples, batch_size=3)
    total = score_choices(model, examples, batch_size=3)
    assert total == ChoiceScores.of(rows, seconds=total.seconds)
    assert total.seconds > 0
    sizes = [len(example.letter_ids) for example in examples]
    assert total.chance_sum == pytest.approx(sum(1 / k for k in sizes))
    assert total.chance_ce_sum == pytest.approx(sum(map(math.log, sizes)))
    assert total.letter_ce_sum == pytest.approx(sum(row.letter_ce for row in rows))
    assert ChoiceScores.of([]) == ChoiceScores()


def test_depths_add_up_to_the_whole(model):
    examples = ragged(8)
    places = [Place(depth=(16, 32)[i % 2], distance=i, nearest=0) for i in range(8)]
    rows = score_rows(model, examples, batch_size=3, places=places)
    told = depth_sums(rows)
    assert all(type(value) in (int, float) for value in told.values())  # what a message takes
    whole = ChoiceScores.of(rows)
    for name, total in (("examples", 8), ("correct", whole.correct), ("distance-sum", 28)):
        assert told[f"depth-16-{name}"] + told[f"depth-32-{name}"] == total
    for name, total in (
        ("letter-ce-sum", whole.letter_ce_sum),
        ("letter-ce-sq-sum", whole.letter_ce_sq_sum),
        ("chance-sum", whole.chance_sum),
    ):
        assert told[f"depth-16-{name}"] + told[f"depth-32-{name}"] == pytest.approx(total)
    assert told["depth-32-distance-sum"] == 1 + 3 + 5 + 7
    assert depth_sums(score_rows(model, examples, batch_size=8)) == {}
    with pytest.raises(ValueError, match="2 places for 8 examples"):
        score_rows(model, examples, batch_size=3, places=places[:2])


def text(length: int) -> list[int]:
    return list(map(int, np.random.default_rng(8).integers(1, 250, length)))


@pytest.mark.parametrize("chunk", [1, 7, 49, 200])
def test_a_stream_is_one_long_forward_pass_however_it_is_cut(model, chunk):
    ids = text(50)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    whole = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()
    curve = stream_cross_entropy(model, ids, chunk=chunk, bin_tokens=20)
    assert curve.counts == (20, 20, 9)
    # float32, other shapes
    assert curve.nats == pytest.approx([float(b.mean()) for b in whole.split(20)], rel=1e-5)
    assert curve.relative == pytest.approx([nats / curve.nats[0] for nats in curve.nats])
    assert curve.relative[0] == 1


@pytest.mark.parametrize("chunk", [3, 64])
def test_a_stream_carries_the_memory_along(chunk):
    model = tiny.build("llama").eval().requires_grad_(False)
    config = RunConfig().replaced(memory__gate="open", memory__chunk=8)
    attach(model, config)
    ids = text(60)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    whole = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").double()
    curve = stream_cross_entropy(
        model, ids, chunk=chunk, cache=MemoryCache(model.config), bin_tokens=30
    )
    # float32 sums in another order, through the recurrence
    assert curve.nats == pytest.approx([float(b.mean()) for b in whole.split(30)], rel=1e-4)
    if chunk == 3:  # a plain cache has no place for the memory, and says so
        with pytest.raises(ValueError, match="MemoryCache"):
            stream_cross_entropy(model, ids, chunk=3, cache=DynamicCache(config=model.config))


def test_a_mamba_is_not_read_in_pieces_that_it_would_forget():
    model = tiny.build("mamba").eval().requires_grad_(False)
    with pytest.raises(ValueError, match="all 39 at once"):
        stream_cross_entropy(model, text(40), chunk=8)
    ids = text(40)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    whole = F.cross_entropy(logits, torch.tensor(ids[1:]))
    assert stream_cross_entropy(model, ids, chunk=39).nats == pytest.approx(
        [float(whole)], rel=1e-5
    )


def test_curves_of_texts_of_any_length_add_up():
    total = StreamCurve(10, (20.0, 6.0), (10, 4)) + StreamCurve(10, (10.0,), (10,))
    assert total == StreamCurve(10, (30.0, 6.0), (20, 4))
    assert total.nats == [1.5, 1.5]
    with pytest.raises(ValueError, match="do not add"):
        total + StreamCurve(5, (1.0,), (1,))


@pytest.mark.parametrize(("ids", "chunk", "width"), [([1], 4, 4), ([1, 2], 0, 4), ([1, 2], 4, 0)])
def test_streams_of_nothing_are_refused(model, ids, chunk, width):
    with pytest.raises(ValueError, match="at least two"):
        stream_cross_entropy(model, ids, chunk=chunk, bin_tokens=width)

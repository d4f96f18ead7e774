"""A solved fuser is the ridge solution over all clients' tokens, however they were dealt."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.errors import Refusal
from fedloom.refining import prefixed
from fedloom.refining.classroom import Classroom
from fedloom.refining.closed_form import (
    FuserSums,
    directions,
    fuser_sums,
    solvable,
    solve_fuser,
)
from fedloom.refining.hearing import Party, Shelf
from fedloom.refining.lessons import Lesson, encode_lessons
from fedloom.slices.slice import batch_of

from rooms import room

TEXTS = [f"line {i}: {'abcdefgh'[i % 8] * (i % 5 + 1)} of Zoe, {i * 37 % 101}" for i in range(40)]
CONFIG = solvable(FuserConfig(width=64, taps=2))


@pytest.fixture(scope="module")
def shelves():
    return [Shelf(Party(*room(f)), dtype=torch.float64) for f in ("llama", "qwen3")]


@pytest.fixture(scope="module")
def lessons():
    tokenizer = room("llama")[0].tokenizer
    made = [Lesson(text, text, "x") for text in TEXTS]
    return encode_lessons(made, tokenizer, tokenizer, ends=True)


@pytest.fixture(scope="module")
def pooled(shelves, lessons):
    return fuser_sums(*shelves, lessons, CONFIG)


def solved(sums, shelves, **told) -> CacheFuser:
    pair = (shelves[0].party.geometry, shelves[1].party.geometry)
    made, facts = solve_fuser(sums, *pair, told.pop("config", CONFIG), **told)
    assert 0 < facts["explained"] <= 1
    return made.double()


def said(fuser, shelves, lesson, layer):
    """What a fuser makes of a text, [T, K and V], its first token apart."""
    guests = fuser(batch_of([shelves[0].slice(lesson.shown_ids)], sink=False))
    parts = [x[layer][0].transpose(0, 1).flatten(1) for x in (guests.keys, guests.values)]
    return torch.cat(parts, -1)[1:]


@pytest.mark.parametrize("cuts", [[1], [20], [3, 4, 39], list(range(1, 40))], ids=len)
def test_any_split_equals_pooled(shelves, lessons, pooled, cuts):
    edges = [0, *cuts, len(lessons)]
    hands = [lessons[a:b] for a, b in itertools.pairwise(edges)]
    total = fuser_sums(*shelves, hands[0], CONFIG)
    for hand in reversed(hands[1:]):  # in another order too, through what travels
        sums = fuser_sums(*shelves, hand, CONFIG)
        total = total + FuserSums.from_arrays(sums.arrays(), sums.tokens)
    assert total.tokens == pooled.tokens == sum(len(x.shown_ids) - 1 for x in lessons)
    for name, x in pooled.arrays().items():
        np.testing.assert_allclose(
            total.arrays()[name], x, rtol=1e-11, atol=1e-11 * np.abs(x).max()
        )
    one, two = (solved(s, shelves) for s in (pooled, total))
    for layer in (0, 1):
        a, b = (said(f, shelves, lessons[5], layer) for f in (one, two))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(a.abs().max()))  # f32 weights


def test_at_full_rank_it_is_ridge_regression_written_out(shelves, lessons, pooled):
    fuser = solved(pooled, shelves, ridge=0.05)
    x, y = [], []
    for lesson in lessons:
        sent, own = (s.slice(lesson.shown_ids) for s in shelves)
        flat = [
            p[n][:, 1:].transpose(0, 1).flatten(1) for p in (sent.keys, sent.values) for n in (0, 1)
        ]
        x.append(torch.cat(flat, -1))
        flat = [p[1][:, 1:].transpose(0, 1).flatten(1) for p in (own.keys, own.values)]
        y.append(torch.cat(flat, -1))
    x, y = torch.cat(x), torch.cat(y)
    z = (x - x.mean(0)) / x.std(0, correction=0)
    square = z.T @ z + 0.05 * len(z) * torch.eye(z.shape[1])
    wanted = z @ torch.linalg.solve(square, z.T @ (y - y.mean(0))) + y.mean(0)
    got = torch.cat([said(fuser, shelves, lesson, 1) for lesson in lessons])
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


def test_a_smaller_rank_explains_less_and_weights_say_where(shelves, lessons, pooled):
    pair = shelves[0].party.geometry, shelves[1].party.geometry
    weights = directions(shelves[1].party, [lesson.prompt_ids for lesson in lessons[:4]])
    errors = {}
    free = solved(pooled, shelves)
    whole = [said(free, shelves, lesson, 1) for lesson in lessons]
    for width in (64, 8):
        for name, told in (("plain", None), ("weighted", weights)):
            config = solvable(FuserConfig(width=width, taps=2))
            made, _ = solve_fuser(pooled, *pair, config, weights=told)
            made = made.double()
            cut = [said(made, shelves, lesson, 1) for lesson in lessons]
            gap = torch.cat(cut) - torch.cat(whole)
            errors[width, name] = float((gap @ torch.from_numpy(weights[1])).norm())
    assert max(errors[64, "plain"], errors[64, "weighted"]) < 1e-3
    assert 0.01 < errors[8, "weighted"] < errors[8, "plain"]


def test_a_solved_fuser_is_an_ordinary_one(shelves, pooled):
    fuser = solved(pooled, shelves)
    assert fuser.config.sink == "receiver"
    assert fuser.open_layers() == (0, 1)
    assert not any(p.requires_grad for p in fuser.parameters())
    for bad in ({"mode": "residual"}, {"size": "c2c"}):
        with pytest.raises(Refusal, match="in closed form"):
            solvable(FuserConfig(**bad))


def test_a_receiver_with_windows_is_solved_for_without_a_sink(lessons):
    """Its own first token cannot be read apart, and the sender's is nothing to regress on."""
    receiver = Shelf(Party(*room("gemma3")), dtype=torch.float64)
    class_ = Classroom(
        Shelf(Party(*room("llama")), dtype=torch.float64), receiver, lessons, lessons
    )
    with pytest.raises(Refusal, match="use tail = 0"):
        replace(class_, learnt=()).solved(FuserConfig(tail=1), ridge=1e-2)  # before any sum
    fuser, about = class_.solved(FuserConfig(width=16, taps=2), ridge=1e-2, weighted=True)
    assert (fuser.config.sink, fuser.layers) == ("none", (1,))  # layer 0 slides
    assert 0 < about["explained"] <= 1
    piece = class_.sender.slice(lessons[0].shown_ids)
    prompt = list(b"what is it?")
    among = prefixed(*room("gemma3"), prompt, [(fuser, piece)])
    assert among.senders == (piece.geometry.model,)
    first = replace(piece, keys={n: x.clone() for n, x in piece.keys.items()})
    for keys in first.keys.values():
        keys[:, 0] *= 100  # nobody hears the sender's first token
    changed = prefixed(*room("gemma3"), prompt, [(fuser, first)])
    assert torch.equal(among.logits, changed.logits)


def test_texts_of_one_token_are_refused(shelves):
    tokenizer = room("llama")[0].tokenizer
    lessons = encode_lessons([Lesson("", "", "x")], tokenizer, tokenizer, ends=True)
    with pytest.raises(Refusal, match="no token of the two models"):
        fuser_sums(*shelves, lessons, CONFIG)

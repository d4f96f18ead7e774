"""Choosing filter and share on validation text, and asking for classes by prompt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedloom.adapters.fast_sums import Passage, compile_sums
from fedloom.adapters.fast_weights import FastMemory, ReadOut, hung_on
from fedloom.config import TrainConfig
from fedloom.data.labelled import Labelled
from fedloom.errors import Refusal
from fedloom.language.choosing import Reading, validate_r
from fedloom.language.compiling import compile_text, nats, solved, windows
from fedloom.language.labels import Form, choose_for_labels, classify, lessons, questions
from fedloom.language.readout import train_readouts
from fedloom.models.base import load_base
from fedloom.rules.solving import solve

LAST = 2
SUPPORT = ["the cat sat on the mat. " * 12, "a dog sat on the cat. " * 12]


@pytest.fixture(params=["llama", "gemma3"])
def base(request):
    return load_base(f"tiny:{request.param}", "float64")


@pytest.fixture
def llama():
    return load_base("tiny:llama", "float64")


def test_one_pass_a_sequence_whatever_is_collected(base):
    passes = []
    hook = base.model.get_decoder().register_forward_pre_hook(lambda *_: passes.append(1))
    sums = compile_text(base, SUPPORT, places=[1, 2], length=50)
    hook.remove()
    rows = [row for text in SUPPORT for row in windows(text, base.tokenizer, 50)]
    assert len(passes) == len(rows)
    assert {gram.count for gram in sums.values()} == {sum(len(row) - 1 for row in rows)}


def test_text_without_a_pair_is_refused(base):
    with pytest.raises(Refusal, match="no two tokens in a row"):
        compile_text(base, [""])


@pytest.mark.parametrize("match_scale", [False, True])
def test_trying_a_setting_is_hanging_it(base, match_scale):
    gram = compile_text(base, SUPPORT)[LAST]
    rows = windows("the dog sat on the mat. " * 5, base.tokenizer, 40)
    reading = Reading.of(base.model, [Passage(row) for row in rows])
    choice = validate_r(gram, reading, alphas=(0.5, 1.0), match_scale=match_scale)
    point = choice.curve[4]
    weights = solved({LAST: gram}, point.alpha)
    memory = FastMemory(base.model, weights, r=point.r, match_scale=match_scale)
    total, tokens = nats(base, rows)
    with memory.off():
        plain, _ = nats(base, rows)
    memory.detach()
    assert point.nats == pytest.approx(total / tokens, rel=1e-6)  # float32 weights
    assert choice.base.nats == pytest.approx(plain / tokens, rel=1e-9)
    assert choice.best.nats == min(p.nats for p in (choice.base, *choice.curve))
    assert len({(p.alpha, p.r) for p in choice.curve}) == len(choice.curve)


@pytest.mark.parametrize("match_scale", [False, True])
def test_all_shares_at_once_are_each_by_itself(base, match_scale):
    gram = compile_text(base, SUPPORT)[LAST]
    memories = [torch.from_numpy(solve(gram, alpha=a).weights) for a in (0.2, 1.0)]
    reading = Reading.of(base.model, [Passage(tuple(base.tokenizer.encode("a cat sat" * 40)))])
    shares = (0.0, 0.3, 0.97, 1.0)
    found = reading.sweep(memories, shares, match_scale=match_scale)
    for weights, row in zip(memories, found, strict=True):
        each = [float(reading.nats(weights, r, match_scale=match_scale).mean()) for r in shares]
        assert row == pytest.approx(each, rel=1e-6)  # transformers' norms work in float32
    assert found[0][1] != pytest.approx(found[1][1], rel=1e-5)


def test_support_that_repeats_is_predicted_better():
    """The point of it all: text of the support's kind becomes likelier without any training.

    Gemma's head is its embedding: where the two are different random tables, as in the tiny Llama,
    a predicted embedding says nothing to the head.
    """
    base = load_base("tiny:gemma3", "float64")
    gram = compile_text(base, SUPPORT)[LAST]
    reading = Reading.of(base.model, [Passage(r) for r in windows(SUPPORT[0], base.tokenizer)])
    choice = validate_r(gram, reading)
    assert choice.best.r > 0
    assert choice.best.nats < 0.9 * choice.base.nats


def test_only_what_is_predicted_counts(llama):
    ids = tuple(llama.tokenizer.encode("abc def"))
    whole = Reading.of(llama.model, [Passage(ids)])
    tail = Reading.of(llama.model, [Passage(ids, 5)])
    assert tail.targets_N.tolist() == list(ids[5:])
    torch.testing.assert_close(tail.nats(None, 0.0), whole.nats(None, 0.0)[4:])


def test_a_hung_output_memory_cannot_be_tried_over(llama):
    memory = FastMemory(llama.model, {LAST: np.zeros((64, 64))})
    with pytest.raises(ValueError, match="detach it"):
        Reading.of(llama.model, [Passage((1, 2, 3))])
    memory.detach()


TINY_REVIEWS = Labelled(
    items=("a good film", "a bad film", "good", "bad", "so good", "so bad"),
    labels=np.array([1, 0, 1, 0, 1, 0]),
    classes=("negative", "positive"),
)


def test_labels_that_begin_alike_are_told_apart_by_the_next_token(llama):
    asked = questions(TINY_REVIEWS, [0], llama.tokenizer)[0]
    prompt = "Review: a good film\nSentiment: "  # the blank is the token that both share
    assert asked.prompt_ids == tuple(llama.tokenizer.encode(prompt))
    assert asked.letter_ids == (ord("n"), ord("p"))
    assert asked.gold == 1


def test_labels_that_stay_alike_are_refused(llama):
    same = Labelled(("x",), np.array([0]), ("pos", "positive"))
    with pytest.raises(Refusal, match="does not tell them apart"):
        questions(same, [0], llama.tokenizer)


def test_prompts_are_cut_by_words(llama):
    assert Form(words=2).prompt("one two three") == "Review: one two\nSentiment:"


def test_answers_only_learns_the_label(llama):
    every, answers = (
        lessons(TINY_REVIEWS, [0], llama.tokenizer, answers_only=only)[0] for only in (False, True)
    )
    assert every.ids == answers.ids
    assert bytes(answers.ids[answers.first :]) == b" positive\n"
    assert every.first == 1


def test_chosen_setting_classifies_as_it_was_tried(base):
    support = lessons(TINY_REVIEWS, [0, 1, 2, 3], base.tokenizer)
    gram = compile_sums(base.model, support, places=[LAST])[LAST]
    asked = questions(TINY_REVIEWS, [4, 5, 0, 1], base.tokenizer)
    best, points = choose_for_labels(base, gram, asked)
    zero = next(p for p in points if p.r == 0)
    assert best.cross_entropy <= zero.cross_entropy
    point = max((p for p in points if p.r), key=lambda p: p.cross_entropy)
    for setting in (best, point):
        weights = {LAST: solve(gram, alpha=setting.alpha).weights}
        memory = FastMemory(base.model, weights, r=setting.r)
        rows = classify(base, asked, batch_size=1)
        memory.detach()
        assert np.mean([row.correct for row in rows]) == setting.accuracy
        found = np.mean([row.letter_ce for row in rows])
        assert found == pytest.approx(setting.cross_entropy, rel=1e-5)


def train(base, **how):
    config = TrainConfig(batch_size=2, learning_rate=1e-2, epochs=4)
    return train_readouts(base, SUPPORT, config, memories=1, seed=0, length=64, **how)


def test_read_outs_learn_and_the_trunk_does_not():
    base = load_base("tiny:llama")
    before = {n: w.clone() for n, w in base.model.state_dict().items()}
    readouts, report = train(base)
    assert list(readouts) == [1]
    assert report.loss_last < report.loss_first
    assert readouts[1].P_DD.abs().max() > 0
    assert readouts[1].gate_2D.abs().max() > 0
    assert not any(p.requires_grad for p in readouts[1].parameters())
    assert hung_on(base.model) is None
    assert all(torch.equal(w, before[n]) for n, w in base.model.state_dict().items())
    again, _ = train(base)
    assert torch.equal(again[1].P_DD, readouts[1].P_DD)


def test_the_memory_of_a_scored_half_is_the_other_half():
    """Text of one half changes the memory that the other half is scored with, and not its own."""
    from fedloom.language import readout as room

    base = load_base("tiny:llama")

    def weights_of(texts):
        lessons = [
            room.Lesson(row, half)
            for half, text in enumerate(texts)
            for row in windows(text, base.tokenizer, 64)
        ]
        held = [room._held(base, [x for x in lessons if x.half == h], [1], 1.0) for h in (0, 1)]
        memory = FastMemory(base.model, {}, readouts={1: ReadOut(64)})
        used = {}
        for half in (0, 1):
            room._loss(memory, held, [x for x in lessons if x.half == half][:1])
            used[half] = memory.weights[1].detach().clone()
        memory.detach()
        return used

    plain = weights_of(SUPPORT)
    changed = weights_of([SUPPORT[0].replace("cat", "cow"), SUPPORT[1]])
    assert torch.equal(plain[0], changed[0])
    assert not torch.equal(plain[1], changed[1])


def test_training_weights_are_those_of_the_solver(llama):
    """K^+ (gated V) of the loop is what solving the sums gives."""
    from fedloom.language import readout as room

    part = [room.Lesson(row, 0) for row in windows(SUPPORT[0], llama.tokenizer, 64)]
    read = ReadOut(64)
    with torch.no_grad():
        read.gate_2D.normal_(std=0.05, generator=torch.Generator().manual_seed(0))
    held = room._held(llama, part, [1], 0.5)[1]
    gram = compile_sums(
        llama.model, [Passage(x.ids) for x in part], places=[1], readouts={1: read.double()}
    )[1]
    wanted = torch.from_numpy(solve(gram, alpha=0.5).weights).float()
    found = held.weights(read.float())
    torch.testing.assert_close(
        found.detach(), wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max())
    )


def test_read_outs_need_two_texts():
    base = load_base("tiny:llama")
    with pytest.raises(Refusal, match="two documents at least"):
        train_readouts(base, SUPPORT[:1], TrainConfig(), memories=1, seed=0)


def test_perplexity_of_a_row_is_its_mean_cross_entropy(llama):
    ids = llama.tokenizer.encode("abc")
    with torch.inference_mode():
        logits = llama.model(torch.tensor([ids])).logits[0, :-1]
    wanted = float(F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
    assert nats(llama, [ids], chunk=2) == (pytest.approx(wanted), 3)

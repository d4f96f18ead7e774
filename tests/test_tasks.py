from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedloom.adapters.attach import attach
from fedloom.clients.workbench import workbench
from fedloom.evaluation import ChoiceScores
from fedloom.holdings import encode
from fedloom.models.base import load_base
from fedloom.models.spans import Labelled
from fedloom.simulations.inprocess import run_in_process
from fedloom.tasks import Task, length, place_of, score_needle

from runs import rows as journal

NEEDLES = {
    "data__task": "niah",
    "niah__kinds": "passkey,counter",
    "niah__train_rows": 6,
    "niah__primer_rows": 3,
    "niah__primer_tokens": 80,
    "niah__train_tokens_min": 600,
    "niah__train_tokens_max": 660,
    "niah__test_rows": 4,
    "niah__test_tokens": "640,800",
    "clients__count": 2,
}


@pytest.fixture
def needles(recipe, filler):
    return recipe(niah__filler=filler, **NEEDLES)


def task_of(config, partition=0):
    return Task(config, load_base(config.model.source), partition)


def text_of(row):
    return load_base("tiny:llama").tokenizer.decode(list(row.ids))


def said(row):
    """Return the labelled stretches of a lesson."""
    decode = load_base("tiny:llama").tokenizer.decode
    spans: list[list[int]] = []
    for at in row.labels:
        if spans and at == spans[-1][-1] + 1:
            spans[-1].append(at)
        else:
            spans.append([at])
    return [decode([row.ids[at] for at in span]).strip() for span in spans]


def written_out(base, prompt, row):
    """Return each option's log-probability after a prompt, with no cache, over the four."""
    likely = []
    for option in row.answer_ids:
        with torch.no_grad():
            logits = base.model(torch.tensor([[*prompt, *option]]), use_cache=False).logits[0]
        said_ids = torch.tensor(option)
        likely.append(-F.cross_entropy(logits[len(prompt) - 1 : -1], said_ids, reduction="sum"))
    return torch.stack(likely).log_softmax(0)


def test_a_lesson_asks_for_every_value_or_lists_options_never_both(needles):
    every = task_of(needles).lessons(1)
    lessons = [row for row in every if "option" in text_of(row) or len(said(row)) == 4]
    assert sorted(len(said(row)) for row in lessons) == [1, 1, 1, 4, 4, 4]
    for row in lessons:
        context, _, asked = text_of(row).partition("\n\nQuestion:")
        values = [answer.split(", option")[0] for answer in said(row)]
        assert len(set(values)) == len(values)
        for value in values:
            assert context.count(value) == 1
            assert asked.count(value) == (2 if len(values) == 1 else 1)  # listed, and answered
        assert ("option" in asked) == (len(values) == 1)


def test_primers_grow_to_their_most_filler(needles):
    flat = task_of(needles)
    grown = task_of(needles.replaced(niah__primer_tokens_max=240))

    def primers(task):
        return {row.index: row.tokens for row in task._train if row.index < 0}

    before, after = primers(flat), primers(grown)
    assert after[-1] == before[-1]
    assert [after[i] - before[i] for i in (-2, -3)] == pytest.approx([80, 160], abs=20)


def test_primers_ask_for_one_fact_and_then_for_more(needles):
    every = task_of(needles).lessons(1)
    primers = [row for row in every if len(said(row)) < 4 and "option" not in text_of(row)]
    assert sorted(len(said(row)) for row in primers) == [1, 2, 3]
    for row in primers:
        assert "option" not in text_of(row)
        context = text_of(row).partition("\n\nQuestion:")[0]
        last = max(context.index(answer) for answer in said(row))
        assert len(context) - last > 60  # filler stands between the facts and what is asked


def test_a_counters_lesson_asks_for_its_final_state_alone(needles):
    for row in task_of(needles, partition=1).lessons(1):
        assert len(said(row)) == 1
        assert "modulo 8, is" in text_of(row)


def test_a_curriculum_shares_the_rows_out_from_short_to_long(needles):
    config = needles.replaced(train__curriculum=True, rounds=3)
    rounds = [task_of(config).lessons(number) for number in (1, 2, 3)]
    flat = [row for rows in rounds for row in rows]
    assert sorted(flat, key=length) == flat
    assert set(flat) == set(task_of(needles).lessons(1))
    assert len(flat) == 9


def test_stages_of_a_curriculum_repeat_their_rows(needles):
    config = needles.replaced(train__curriculum=True, train__curriculum_stages=3, rounds=7)
    rounds = [task_of(config).lessons(number) for number in range(1, 8)]
    assert [rounds.index(rows) for rows in rounds] == [0, 0, 0, 3, 3, 5, 5]
    flat = [row for rows in (rounds[0], rounds[3], rounds[5]) for row in rows]
    assert len(flat) == 9
    assert sorted(flat, key=length) == flat


def test_rounds_share_what_they_made_into_tokens(needles):
    config = needles.replaced(rounds=3, train__curriculum=True)
    base, encoded = load_base(config.model.source), {}
    one, two, last = (Task(config, base, 0, encoded).lessons(n) for n in (1, 1, 4))
    assert all(a is b for a, b in zip(one, two, strict=True))
    assert len(encoded) == len(last) == 9
    assert [*last] == task_of(config).lessons(4)


def test_a_lesson_of_sentences_asks_once_and_tells_the_rest_again(needles):
    task = task_of(needles.replaced(niah__lessons="sentences"))
    orders = set()
    for example, row in zip(task._train, task.lessons(1), strict=True):
        context, _, asked = text_of(row).partition("\n\nQuestion:")
        first, *again = said(row)
        assert first == example.value
        values = {value for _, _, value in example.asks}
        assert {first, *again} == values
        assert len(again) == len(values) - 1
        for _, stem, value in example.asks:
            assert context.count(value) == asked.count(value) == 1
            assert f"{stem} {value}" in asked
        told = [value for _, _, value in example.asks]
        orders.add(tuple(told.index(value) for value in again))
    assert len(orders) > 3  # not always as they stood
    assert task.lessons(1) == task.lessons(1)


def test_primers_may_tell_again_without_asking(needles):
    asked = needles.replaced(niah__lessons="sentences")
    bare = asked.replaced(niah__primer_questions=False)
    for example, old, new in zip(
        task_of(asked)._train, task_of(asked).lessons(1), task_of(bare).lessons(1), strict=True
    ):
        if example.index >= 0:
            assert new == old
            continue
        assert "Question:" not in text_of(new)
        assert sorted(said(new)) == sorted(value for _, _, value in example.asks)
        assert len(new.ids) < len(old.ids)
        assert text_of(new).startswith(example.context)
    counters = (task_of(config, partition=1).lessons(1) for config in (asked, bare))
    assert next(counters) == next(counters)  # a counter's answer is told by no event


def test_sentences_leave_a_counter_its_one_question(needles):
    config = needles.replaced(niah__lessons="sentences")
    for row in task_of(config, partition=1).lessons(1):
        assert len(said(row)) == 1
        assert "modulo 8, is" in text_of(row)


@pytest.mark.parametrize("lessons", ["questions", "sentences"])
def test_the_token_that_tells_values_apart_counts_more(needles, lessons):
    plain = task_of(needles.replaced(niah__lessons=lessons))
    weighed = task_of(needles.replaced(niah__lessons=lessons, niah__telling_weight=4.0))
    for row, other in zip(plain.lessons(1), weighed.lessons(1), strict=True):
        assert row.weights == ()
        assert (row.ids, row.labels) == (other.ids, other.labels)
        telling = [at for at, weight in zip(other.labels, other.weights, strict=True) if weight > 1]
        assert len(telling) == len(said(row))
        assert set(other.weights) == {1.0, 4.0}
        begun = [at for at in row.labels if at - 1 not in row.labels]
        for start, at in zip(begun, telling, strict=True):  # what all values share comes before it
            assert not load_base("tiny:llama").tokenizer.decode(list(row.ids[start:at])).strip()


def test_primers_ask_for_an_event_at_any_place(needles):
    rows = task_of(needles.replaced(niah__primer_rows=36, niah__primer_events=3))._train
    places: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    for row in rows:
        if row.index < 0:
            at = sorted(row.context.index(value) for _, _, value in row.asks)
            places[len(row.asks)].add(at.index(row.context.index(row.value)))
    assert places == {1: {0}, 2: {0, 1}, 3: {0, 1, 2}}


def test_unlisted_values_are_scored_after_the_bare_question(needles):
    config = needles.replaced(niah__listed=False)
    base = load_base(config.model.source)
    task = task_of(config)
    for example, score in zip(task._test, task.score_rows(), strict=True):
        row = encode(example, base.tokenizer)
        assert score.tokens == len(row.open_ids) < len(row.prompt_ids)
        prompt = [*row.open_ids, *row.stem_ids]
        among = written_out(base, prompt, row)
        assert score.letter_ce == pytest.approx(-float(among[row.gold]), abs=1e-3)
    for row in task.lessons(1):
        assert "option" not in text_of(row)


def test_a_needles_score_is_that_of_its_four_values_written_out(needles):
    config = needles.replaced(memory__window=32, memory__gate_init=0.0)
    base = load_base(config.model.source)
    adapter = attach(base.model, config)
    task = task_of(config)
    found = task.score_rows()

    for example, score in zip(task._test, found, strict=True):
        row = encode(example, base.tokenizer)
        prompt = [*row.prompt_ids, *row.stem_ids]
        among = written_out(base, prompt, row)
        assert score.letter_ce == pytest.approx(-float(among[row.gold]), abs=1e-3)
        assert score.place.depth == example.budget
        assert score.choices == 4
    adapter.detach()
    sums = ChoiceScores.of(found)
    assert sums.chance_sum == sums.examples / 4
    assert sums.letter_ce_sum > 0


def test_scores_do_not_depend_on_the_order_of_options(needles):
    base = load_base(needles.model.source)
    task = task_of(needles)

    example = task._test[0]
    turned = example.permuted([1, 2, 3, 0])
    one, other = (
        score_needle(base.model, encode(x, base.tokenizer), place_of(x)) for x in (example, turned)
    )
    assert one.row != other.row
    assert math.isfinite(one.letter_ce)
    assert math.isfinite(other.letter_ce)


def test_a_kept_trunk_changes_time_and_not_the_result(needles):
    settings = {"last_layers": 1, "memory__window": 24, "train__epochs": 2, "train__max_steps": 0}
    runs = [
        needles.replaced(name=n, train__keep_trunk=m, **settings) for n, m in (("a", 0), ("b", 64))
    ]
    losses = []
    for config in runs:
        run_in_process(config)
        folder = Path(config.output) / config.name
        losses.append([r["loss"] for r in journal(folder, "metrics") if r["phase"] == "train"])
        kept = workbench(config).trunk
    assert kept is not None
    assert kept.kept() == 18  # nine training rows of each client; needles are scored without it
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_labelled_rows_are_hashable_and_have_a_length():
    row = Labelled((5, 6, 7), (2,))
    assert length(row) == 3
    assert hash(row) == hash(Labelled((5, 6, 7), (2,)))

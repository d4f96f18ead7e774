import json
import re

import pytest

from fedloom.data.niah.ruler import TASKS, make_task, string_match, task_named
from fedloom.errors import Refusal
from fedloom.models.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
NEEDLE = re.compile(r"One of the special magic (\w+) for ([\w-]+) is: ([\w-]+)\.")


def make(name, filler, tokens=6000, rows=3, seed=0):
    settings = {"tokens": tokens, "rows": rows, "seed": seed}
    return make_task(name, text=filler, tokenizer=BYTES, **settings)


@pytest.mark.parametrize("name", TASKS)
def test_rows_are_ruler_s(name, filler):
    task, rows = TASKS[name], make(name, filler)
    for row in rows:
        assert row.length == len(BYTES.encode(row.input)) + 128 <= 6000
        intro, *lines, question = row.input.split("\n")
        context = "\n".join(lines)
        found = NEEDLE.findall(context)
        assert {kind for kind, _, _ in found} == {task.value}
        if task.haystack == "needle":
            assert len(found) == len(lines) > 20
        else:
            assert len(found) == task.keys * task.values
        asked = re.search(r"for ([\w, -]+?) mentioned", question)[1]
        keys = re.split(r", and |, ", asked)
        assert len(keys) == task.queries
        assert sorted(row.outputs) == sorted(value for _, key, value in found if key in keys)
        assert len(row.outputs) == task.queries * task.values
        form = UUID if task.value == "uuids" else r"\d{7}"
        assert all(re.fullmatch(form, output) for output in row.outputs)
        one = len(row.outputs) == 1
        assert intro.startswith("A special magic" if one else "Some special magic")
        assert question.startswith("What is the" if one else "What are all the")
        assert question.endswith("provided text is" if one else "provided text are")
    noise = sum("The grass is green. The sky is blue." in row.input for row in rows)
    assert noise == (3 if task.haystack == "noise" else 0)


@pytest.mark.parametrize("name", TASKS)
def test_haystacks_are_as_long_as_steps_allow(name, filler):
    (row,) = make(name, filler, rows=1)
    step = {"essay": 500 * 6, "noise": 25 * 91, "needle": 25 * 120}[TASKS[name].haystack]
    assert 6000 - row.length < step + 400


def test_the_same_seed_makes_the_same_bytes(filler):
    lines = [[row.to_json() for row in make("multiquery", filler, seed=s)] for s in (0, 0, 1)]
    assert lines[0] == lines[1] != lines[2]
    assert json.loads(lines[0][2]).keys() == {"index", "input", "outputs", "length"}


def test_lists_of_two_words_are_joined_as_ruler_does(filler):
    question = make("multiquery", filler)[0].input.split("\n")[-1]
    assert re.search(r"for [\w-]+, [\w-]+, [\w-]+, and [\w-]+ mentioned", question)


@pytest.mark.parametrize(
    ("answer", "score"),
    [("It is 123 and BLUE-sky.", 1.0), ("123", 0.5), ("12 3 blue", 0.0), ("", 0.0)],
)
def test_score_is_the_share_that_is_said(answer, score):
    assert string_match(answer, ["123", "blue-Sky"]) == score


def test_what_does_not_fit_is_refused(filler):
    with pytest.raises(Refusal, match="smallest haystack has") as refused:
        make("multikey_2", filler, tokens=400)
    least = int(re.search(r"haystack has (\d+)", str(refused.value))[1])
    assert make("multikey_2", filler, tokens=least + 60, rows=1)
    with pytest.raises(Refusal, match="did you mean multikey_1"):
        task_named("niah_multikey1")
    with pytest.raises(Refusal, match="at least 1"):
        make("single_1", filler, rows=0)
    assert task_named("niah_single_1") == "single_1"

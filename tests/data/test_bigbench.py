"""BIG-bench as five clients: which rows are taken, and how they are dealt out."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter

import pytest

from fedloom import archives
from fedloom.data import bigbench, mmlu
from fedloom.data.bigbench import CLIENTS, LONGEST, MOST, Task, select
from fedloom.data.partition import client_rows, make_partition
from fedloom.data.questions import load_questions

TASK = Task("made/up", "Which?", "a test")
TASKS = [task for _, tasks in CLIENTS for task in tasks]


def example(text, *wrong, right="right"):
    return {"input": text, "target_scores": {right: 1, **dict.fromkeys(wrong, 0)}}


def examples(task, count=40):
    """Rows of 2 to 5 options, in the archive's form."""
    return [
        example(f"{task.path} {i}", *[f"wrong {j}" for j in range(1 + i % 4)], right=f"right {i}")
        for i in range(count)
    ]


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A small archive with every task, where the real one would lie."""
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    path = tmp_path / "archives" / "bigbench-1.0.0.tar.gz"
    path.parent.mkdir()
    with tarfile.open(path, "w:gz") as made:
        for name, rows in [("unwanted", []), *((t.path, examples(t)) for t in TASKS)]:
            text = json.dumps({"examples": rows}).encode()
            member = tarfile.TarInfo(f"bigbench-1.0.0/bigbench/benchmark_tasks/{name}/task.json")
            member.size = len(text)
            made.addfile(member, io.BytesIO(text))
    pin = archives.Archive("bigbench", "1.0.0", path.name, archives.file_sha256(path), 1, "none")
    monkeypatch.setattr(archives, "BIGBENCH", pin)
    return path


def test_clients_are_the_paper_s_kinds_and_subjects_are_not_mmlu_s():
    assert len(CLIENTS) == len(mmlu.CLIENTS)
    subjects = [subject for _, group in bigbench.groups() for subject in group]
    assert len(set(subjects)) == len(subjects)
    assert not {*subjects} & {s for _, group in mmlu.CLIENTS for s in group}
    assert all(subject.startswith(bigbench.PREFIX) for subject in subjects)
    assert all(task.why and task.source for task in TASKS)


@pytest.mark.parametrize(
    "bad",
    [
        example("no wrong option"),
        example("six options", *"abcde"),
        {"input": "two best", "target_scores": {"a": 1, "b": 1, "c": 0}},
        {"input": "no options", "target": "a"},
        example("", "a"),
        example("an empty option", " "),
        example("x" * LONGEST, "a"),
    ],
)
def test_rows_that_are_no_question_are_left_out(bad):
    assert [row["question"] for row in select(TASK, [bad, example("good", "a")])] == [
        "Which?\ngood"
    ]


def test_inputs_that_repeat_count_once_whatever_their_options():
    rows = select(TASK, [example("One  input", "a"), example("one input", "b", "c")])
    assert len(rows) == 1


def test_the_right_option_stands_at_each_letter_equally_often():
    rows = select(TASK, examples(TASK, 500))
    assert len(rows) == MOST
    for size in range(2, 6):
        golds = Counter(row["answer"] for row in rows if len(row["choices"]) == size)
        assert set(golds) == set(range(size))
        assert max(golds.values()) - min(golds.values()) <= 1
    for row in rows:
        number = row["question"].split()[-1]
        assert row["choices"][row["answer"]] == f"right {number}"
        assert len(set(row["choices"])) == len(row["choices"])


def test_the_same_rows_come_from_the_archive_and_from_the_cache(archive):
    first = load_questions("packaged:bigbench")
    archive.unlink()
    assert load_questions("packaged:bigbench") == first
    assert {q.subject for q in first} == {task.subject for task in TASKS}
    assert {len(q.choices) for q in first} == {2, 3, 4, 5}


def check_split(questions, train, test, **settings):
    """Hold a partition to the sizes asked for, to disjoint stems and to balanced letters."""
    partition = make_partition(
        questions, source="packaged:bigbench", seed=0, min_train=8, min_test=4, **settings
    )
    stems = [], []
    assert [client.name for client in partition.clients] == [name for name, _ in CLIENTS]
    for index, client in enumerate(partition.clients):
        assert (len(client.train), len(client.test)) == (train, test)
        sides = client_rows(partition, questions, index)
        for seen, side in zip(stems, sides, strict=True):
            seen.extend(row.stem() for row in side)
    assert not set(stems[0]) & set(stems[1])


def test_a_table_of_the_rows_makes_the_same_clients(archive, tmp_path):
    questions = load_questions("packaged:bigbench")
    table = next((tmp_path / "data").glob("*.jsonl"))
    check_split(questions, 100, 25, max_train=100, max_test=25, test_share=0.2)
    check_split(
        load_questions(f"path:{table}"), 100, 25, max_train=100, max_test=25, test_share=0.2
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not (archives.cache_dir() / "archives" / archives.BIGBENCH.filename).exists(),
    reason="358 MB: 'fedloom partition bigbench' fetches them once, then this reads them",
)
def test_the_real_tasks_give_hundreds_of_rows_a_client():
    """358 MB the first time, then 3 MB of rows from the cache."""
    questions = load_questions("packaged:bigbench")
    check_split(questions, 400, 100, max_train=400, max_test=100, test_share=0.2)
    held = mmlu.by_client(questions, bigbench.groups())
    for own, (_, tasks) in zip(held, CLIENTS, strict=True):
        assert len(own) > 1000
        for size in {len(question.choices) for question in own}:
            golds = Counter(q.gold for q in own if len(q.choices) == size)
            # Within one row a task.
            assert max(golds.values()) - min(golds[i] for i in range(size)) <= len(tasks)

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.data import mmlu
from fedloom.data.partition import Partition, client_rows, make_partition, table
from fedloom.data.questions import Question, distinct
from fedloom.errors import Refusal

PAPER = {
    "seed": 0,
    "source": "made",
    "max_train": 2000,
    "max_test": 200,
    "test_share": 1 / 6,
    "min_train": 8,
    "min_test": 4,
}
ANY = {**PAPER, "min_train": 0, "min_test": 0}


def made(sizes):
    return [
        Question(group[i % len(group)], f"Question {i} of {name}?", ("1", "2", "3", "4"), i % 4)
        for (name, group), size in zip(mmlu.CLIENTS, sizes, strict=True)
        for i in range(size)
    ]


def sides(partition):
    train = {row for client in partition.clients for row in client.train}
    return train, {row for client in partition.clients for row in client.test}


def test_subjects_are_mmlu_s_57():
    subjects = [subject for _, group in mmlu.CLIENTS for subject in group] + [*mmlu.LEFT_OUT]
    assert len(subjects) == len(set(subjects)) == 57
    assert [len(group) for _, group in mmlu.CLIENTS] == [8, 17, 11, 8, 10]


def test_numbers_of_the_paper():
    # Group sizes of MMLU's test split; STEM cannot give the 2000 of Table 3 from its 2055 rows.
    partition = make_partition(made([3393, 4207, 2055, 1098, 2793]), **PAPER)
    assert table(partition) == [
        ("Law/Ethics", 2000, 200, 8),
        ("Humanities", 2000, 200, 17),
        ("STEM", 1855, 200, 11),
        ("Math/CS", 915, 183, 8),
        ("Med/Psych", 2000, 200, 10),
    ]


@pytest.mark.parametrize("n", [6, 12, 1098, 1100, 1194])
def test_share_is_floored_without_a_float_s_error(n):
    for share, parts in ((1 / 6, 6), (0.2, 5), (0.1, 10), (1 / 3, 3)):
        partition = make_partition(made([n] * 5), **{**ANY, "test_share": share, "max_test": n})
        assert {len(client.test) for client in partition.clients} == {n // parts}


def test_order_of_the_file_changes_nothing():
    questions = made([60, 50, 40, 30, 20]) * 2
    shuffled = random.Random(1).sample(questions, len(questions))
    one = make_partition(questions, **ANY)
    assert make_partition(shuffled, **{**ANY, "source": "elsewhere"}).digest() == one.digest()
    assert make_partition(questions, **{**ANY, "seed": 1}).digest() != one.digest()


def test_json_round_trip():
    partition = make_partition(made([60, 50, 40, 30, 20]), **ANY)
    assert Partition.from_json(partition.to_json()) == partition


STEMS = st.sampled_from(["Why?", "why?", "Why ?", "How?", "Which  is true?", "Which is true?"])
QUESTIONS = st.lists(
    st.builds(
        Question,
        st.sampled_from([group[0] for _, group in mmlu.CLIENTS]),
        st.one_of(STEMS, st.text("abc", min_size=1, max_size=2)),
        st.tuples(*[st.sampled_from("12")] * 4),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(QUESTIONS, st.integers(0, 3), st.sampled_from([0.2, 0.5, 1 / 6]), st.integers(1, 20))
def test_no_text_is_both_trained_and_tested_on(questions, seed, share, max_train):
    settings_ = {**ANY, "seed": seed, "test_share": share, "max_train": max_train}
    partition = make_partition(questions, **settings_)
    stems = {question.row(): question.stem() for question in questions}
    train, test = sides(partition)
    assert not {stems[row] for row in train} & {stems[row] for row in test}
    held = mmlu.by_client(distinct(questions))
    for client, own in zip(partition.clients, held, strict=True):
        assert len(client.train) <= max_train
        assert len(client.test) <= len(own) * share
        assert len({*client.train, *client.test}) == len(client.train) + len(client.test)


def test_client_rows_are_the_rows_of_the_partition():
    questions = made([60, 50, 40, 30, 20])
    partition = make_partition(questions, **ANY)
    train, test = client_rows(partition, questions[::-1], 3)
    assert tuple(q.row() for q in train) == partition.clients[3].train
    assert tuple(q.row() for q in test) == partition.clients[3].test
    assert {q.subject for q in [*train, *test]} <= set(mmlu.CLIENTS[3][1])


def test_client_rows_refuse_what_is_not_there():
    questions = made([60, 50, 40, 30, 20])
    partition = make_partition(questions, **ANY)
    with pytest.raises(Refusal, match="Med/Psych lacks 20 of its rows"):
        client_rows(partition, questions[:-20], 4)
    with pytest.raises(Refusal, match="partition id 5: expected 0 to 4"):
        client_rows(partition, questions, 5)


def test_too_few_rows_are_refused_by_name():
    with pytest.raises(Refusal, match=r"STEM has 3 test rows of 20 in all: data\.min-test asks"):
        make_partition(made([60, 60, 20, 60, 60]), **PAPER)
    with pytest.raises(Refusal, match=r"Math/CS has 25 train rows .* data\.min-train asks for 30"):
        make_partition(made([60, 60, 60, 30, 60]), **{**PAPER, "min_train": 30})


def test_an_unknown_subject_is_refused():
    with pytest.raises(Refusal, match="did you mean anatomy"):
        make_partition([Question("anatomi", "?", ("1", "2", "3", "4"), 0)], **ANY)


def test_first_difference_is_named():
    questions = made([60, 50, 40, 30, 20])
    one = make_partition(questions, **ANY)
    one.check_same(make_partition(questions, **{**ANY, "source": "a copy"}))
    with pytest.raises(Refusal, match="differ in seed: 7 came, 0 was expected"):
        one.check_same(make_partition(questions, **{**ANY, "seed": 7}))
    with pytest.raises(Refusal, match="differ in source_hash"):
        one.check_same(make_partition(questions[1:], **ANY))
    with pytest.raises(Refusal, match="Law/Ethics's number of train rows: 9 came, 50"):
        one.check_same(make_partition(questions, **{**ANY, "max_train": 9}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"clients": [{"name": "x"}], "seed": 0}'])
def test_what_is_no_manifest_is_refused(text):
    with pytest.raises(Refusal, match="not a partition manifest"):
        Partition.from_json(text)


def test_a_manifest_that_names_a_row_twice_is_refused():
    tree = json.loads(make_partition(made([60, 50, 40, 30, 20]), **ANY).to_json())
    tree["clients"][1]["test"][0] = tree["clients"][0]["train"][0]
    with pytest.raises(Refusal, match="twice"):
        Partition.from_json(json.dumps(tree))

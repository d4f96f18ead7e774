import csv
import json

import pytest

from fedloom.data.questions import Question, distinct, load_questions
from fedloom.errors import Refusal

ROWS = [
    {"subject": "anatomy", "question": "Which, and\nwhy?", "choices": list("wxyz"), "answer": 2},
    {"subject": "High School Biology", "question": " Où? ", "choices": list("1234"), "answer": 0},
]
WANTED = [
    Question("anatomy", "Which, and\nwhy?", ("w", "x", "y", "z"), 2),
    Question("high_school_biology", "Où?", ("1", "2", "3", "4"), 0),
]


def test_jsonl(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n", encoding="utf-8")
    assert load_questions(f"path:{file}") == WANTED


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    assert load_questions(f"path:{tmp_path}") == WANTED


def test_csv_with_a_list_of_choices(tmp_path):
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, ROWS[0])
        writer.writeheader()
        writer.writerows({**row, "choices": json.dumps(row["choices"])} for row in ROWS)
    assert load_questions(f"path:{file}") == WANTED


def test_csv_with_letters(tmp_path):
    file = tmp_path / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.writer(handle)
        writer.writerow(["question", "subject", *"ABCD", "answer"])
        for row in ROWS:
            letter = "ABCD"[row["answer"]]
            writer.writerow([row["question"], row["subject"], *row["choices"], letter])
    assert load_questions(f"path:{file}") == WANTED


def test_rows_may_have_two_to_five_choices(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(
        "question,subject,A,B,C,D,E,answer\n"
        "Which?,anatomy,1,2,3,4,5,E\nWhich one?,anatomy,1,2,3,4,,3\n"
    )
    five, four = load_questions(f"path:{file}")
    assert (five.choices, five.gold) == (("1", "2", "3", "4", "5"), 4)
    assert (four.choices, four.gold) == (("1", "2", "3", "4"), 3)
    two = {"subject": "s", "question": "?", "choices": ["yes", "no"], "answer": "B"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(two))
    assert load_questions(f"path:{tmp_path / 'rows.jsonl'}")[0].gold == 1


@pytest.mark.parametrize(("count", "gold"), [(1, 0), (6, 0), (3, 3), (3, -1)])
def test_a_question_without_a_right_choice_is_no_question(count, gold):
    with pytest.raises(ValueError, match="2 to 5"):
        Question("anatomy", "?", ("x",) * count, gold)


def test_csv_of_the_first_release_has_no_header(tmp_path):
    (tmp_path / "anatomy_test.csv").write_text('"Which, and\nwhy?",w,x,y,z,C\nWho?,1,2,3,4,D\n')
    (tmp_path / "virology_test.csv").write_text("How?,1,2,3,4,A\n")
    assert load_questions(f"path:{tmp_path}") == [
        WANTED[0],
        Question("anatomy", "Who?", ("1", "2", "3", "4"), 3),
        Question("virology", "How?", ("1", "2", "3", "4"), 0),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"subject": "anatomy", "prompt": "?"}', "columns subject, prompt: expected subject"),
        ('{"subject": "s", "question": "?", "choices": ["a"], "answer": 0}', "list of 2 to 5"),
        (
            '{"subject": "s", "question": "?", "choices": ["a", "b", "c"], "answer": "D"}',
            "expected 0 to 2 or A to C",
        ),
        ('{"subject": "s", "question": "?", "choices": "a b", "answer": 0}', "no JSON list"),
        (
            '{"subject": "s", "question": "?", "choices": [1, 2, 3, 4], "answer": 4}',
            "answer is int of 1",
        ),
        (
            '{"subject": "s", "question": "?", "choices": [1, 2, 3, 4], "answer": true}',
            "answer is bool of 4",
        ),
        ("[1]", "line 1: expected a JSON object"),
        ("not json", "line 1 is no JSON"),
        ("", "holds no rows"),
    ],
)
def test_bad_rows_are_refused(tmp_path, text, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(Refusal, match=said):
        load_questions(f"path:{file}")


def test_a_short_csv_line_is_refused(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("question,subject,A,B,C,D,answer\nWhy?,anatomy,1,2\n")
    with pytest.raises(Refusal, match=r"rows\.csv .*columns question, subject, A, B"):
        load_questions(f"path:{file}")


def test_broken_files_are_refused(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR0")
    with pytest.raises(Refusal, match="no Parquet file"):
        load_questions(f"path:{tmp_path}")
    (tmp_path / "bad.csv").write_bytes(b"question\xff,A\n")
    with pytest.raises(Refusal, match="cannot be read"):
        load_questions(f"path:{tmp_path / 'bad.csv'}")
    (tmp_path / "rows.xlsx").write_text("")
    with pytest.raises(Refusal, match="is no table"):
        load_questions(f"path:{tmp_path / 'rows.xlsx'}")


@pytest.mark.parametrize(
    "source", ["packaged:mmlu", "mmlu", "path:", "hub:", "path:/no/such/rows.csv", ""]
)
def test_unknown_sources_are_refused(source):
    with pytest.raises(Refusal, match="expected"):
        load_questions(source)


def test_repetitions_are_dropped_whatever_their_spacing_and_order():
    one = Question("anatomy", "Which  one?", ("a", "b", "c", "d"), 0)
    again = Question("virology", "Which one?", ("a", "b ", "c", "d"), 0)
    other_choices = Question("anatomy", "Which one?", ("d", "b", "c", "a"), 3)
    big = Question("anatomy", "Which one?", ("A", "b", "c", "d"), 0)
    rows = [one, again, other_choices, big]
    assert len(distinct(rows)) == 3
    assert distinct(rows) == distinct(rows[::-1])
    assert len({row.stem() for row in rows}) == 1

"""The pairs study's table: letters, priors, all pairs, and what the baselines left."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

SCRIPTS = str(Path(__file__).parents[2] / "benchmarks" / "fedrefine")


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import pairs_letters
    import pairs_table

    yield pairs_letters, pairs_table
    for name in ("pairs_letters", "pairs_table", "pairs_study", "question_sets"):
        sys.modules.pop(name, None)


def row(number: int, options, gold: int) -> dict:
    best = max(range(len(options)), key=options.__getitem__)
    told = {"correct": best == gold, "nats": -options[gold], "options": list(options)}
    return {"row": f"r{number}", **told}


def biased(count: int = 12) -> list[dict]:
    """A always likeliest by a mile, though the right letter is always the most above its mean."""
    made = []
    for i in range(count):
        options = [-1.0, -5.0, -6.0, -7.0]
        options[i % 4] += 0.5
        made.append(row(i, options, i % 4))
    return made


def right(count: int, wrong: int) -> list[dict]:
    """Right but for the first few, who take the next letter."""
    found = []
    for i in range(count):
        options = [-4.0, -4.1, -4.2, -4.3]
        options[(i + (i < wrong)) % 4] = -0.1
        found.append(row(i, options, i % 4))
    return found


def test_a_constant_is_seen_and_its_prior_taken_off(scripts):
    letters, _ = scripts
    rows = biased()
    assert letters.letters(rows) == {"A": 12}
    assert sum(r["correct"] for r in rows) == 3
    assert sum(r["correct"] for r in letters.calibrated(rows)) == 12
    assert letters.prior_of(rows) == pytest.approx([-0.875, -4.875, -5.875, -6.875])
    flat = letters.calibrated(rows, [0.0] * 4)
    assert [r["correct"] for r in flat] == [r["correct"] for r in rows]
    several = [{"row": "x", "nats": 9.0, "options": [-1.0, -2.0]}]
    assert not letters.can_be_calibrated(several)  # no option's own: of several tokens


def study(folder: Path, pair: str, wrong: int) -> None:
    rows = biased()
    outcomes = {"refined": right(12, wrong), "standalone": rows, "sender": rows}
    outcomes |= {"shuffled": rows, "zeroed": rows}
    written = [{"row": r["row"], "correct": i < 6, "said": "A"} for i, r in enumerate(rows)]
    outcomes |= {"refined-written": written}
    outcomes["standalone-written"] = [{**r, "correct": False, "said": ""} for r in written]
    about = {"parameter_share": 0.05, "open_layers": 2, "gate_gap_nats": 0.0, "cpu_seconds": 1}
    about |= {"bytes": {"bf16": 100}, "train_cpu_seconds": 1.0, "set": "s"}
    about |= {"priors": {"standalone": [-0.875, -4.875, -5.875, -6.875], "refined": [0.0] * 4}}
    (folder / "scores").mkdir(exist_ok=True)
    made = json.dumps({"outcomes": outcomes, **about})
    (folder / "scores" / f"{pair}-refined-0.json").write_text(made)


def test_all_pairs_are_told_and_the_chosen_one_says_how(scripts, tmp_path, capsys):
    _, table = scripts
    study(tmp_path, "qwen-smol", wrong=0)
    study(tmp_path, "gemma-smol", wrong=4)
    found = table.told(tmp_path, ["qwen-smol", "gemma-smol", "smol-qwen"], [0])
    assert found["best_pair"] == "qwen-smol"
    assert "largest held-out gain over standalone of 2 pairs" in found["best_pair_is"]
    assert set(found["pairs"]) == {"qwen-smol", "gemma-smol"}
    plain = {p: made["mcnemar_p_standalone"][0] for p, made in found["pairs"].items()}
    adjusted = {p: made["holm_p"]["standalone"] for p, made in found["pairs"].items()}
    assert adjusted["qwen-smol"] == pytest.approx(2 * plain["qwen-smol"], rel=0.05)
    assert adjusted["gemma-smol"] >= plain["gemma-smol"]
    best = found["pairs"]["qwen-smol"]
    assert best["letters"]["standalone"] == {"A": 12}
    assert best["accuracy"]["standalone"] == 0.25
    assert best["calibrated_accuracy"]["standalone"] == 1.0
    assert best["refined_minus_standalone"][0] == 0.75
    assert best["refined_minus_standalone_calibrated"][0] == 0.0
    assert found["pairs"]["gemma-smol"]["refined_minus_standalone_calibrated"][0] < 0
    assert best["calibrated_on_training_rows"]["standalone"] == 1.0
    assert best["written"]["standalone"] == {"accuracy": 0.0, "no_letter": 1.0}
    assert best["refined_minus_standalone_written"][0] == 0.5
    said = capsys.readouterr().out
    assert "A12" in said
    assert "smol-qwen: nothing yet" in said


def test_baselines_are_merged_on_the_same_rows(scripts, tmp_path, capsys):
    _, table = scripts
    study(tmp_path, "qwen-smol", wrong=0)
    ways = {
        "standalone": False, "vote": True, "t2t 16": False,
        "single embedded:qwen2.5-coder-0.5b": False,
    }  # fmt: skip
    by_row = {f"r{i}": {**ways, "vote": i < 8} for i in range(10)}  # two rows are not there
    told = {"best_single_is": "single embedded:qwen2.5-coder-0.5b", "rows": by_row}
    table.baselines_file(tmp_path, "qwen-smol").write_text(json.dumps(told))
    found = table.told(tmp_path, ["qwen-smol"], [0])
    assert found["baselines"] == {
        "vote": {"accuracy": 0.8, "rows": 10},
        "t2t_16": {"accuracy": 0.0, "rows": 10},
        "best_single": {"accuracy": 0.0, "rows": 10},
    }
    assert found["refined_minus_vote"][0] == pytest.approx(0.2)
    assert found["refined_minus_t2t_16"][0] == 1.0
    elsewhere = tmp_path / "plain.json"  # as it was written before: rows alone
    elsewhere.write_text(json.dumps(by_row))
    again = table.told(tmp_path, ["qwen-smol"], [0], elsewhere)
    assert set(again["baselines"]) == {"vote", "t2t_16"}
    study(tmp_path, "gemma-smol", wrong=0)  # another sender: not its baselines
    other = table.told(tmp_path, ["gemma-smol"], [0], elsewhere)
    assert "baselines" not in other

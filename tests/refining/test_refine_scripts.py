"""Each of FedRefine's studies runs whole on tiny random models; what it finds is not the point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "fedrefine"
PAIR = "tiny:llama-tiny:qwen3"


def run(name: str, *told: str) -> tuple[str, dict]:
    command = [sys.executable, str(SCRIPTS / name), *map(str, told)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    last = done.stdout.splitlines()[-1]
    return done.stdout, json.loads(last) if last.startswith("{") else {}


def test_pairs_with_every_condition_baselines_and_the_table(tmp_path):
    place = ["--folder", tmp_path]
    conditions = ["refined", "identical", "random", "tuned", "closed", "polished", "context"]
    out, _ = run(
        "pairs.py", "run", "--quick", *place, "--conditions", *conditions, "kept", "several"
    )
    assert "several 0: left out" in out  # no other pair was named
    scores = {p.name for p in (tmp_path / "scores").iterdir()}
    assert scores == {f"{PAIR}-{name}-0.json" for name in (*conditions, "kept")}
    other = "tiny:qwen2-tiny:qwen3"
    more = ["--pairs", PAIR, other, "--together", PAIR, other, "--conditions", "refined", "several"]
    run("pairs.py", "run", "--quick", *place, *more)
    baselines = ["--pair", PAIR, "--set", "made-up", "--train", 24, "--test", 12]
    run("baselines.py", *place, *baselines, "--longest", 400, "--budgets", 0, 4, "--choosing", 4)
    _, found = run("pairs.py", "table", *place, "--pairs", PAIR, other, "--seeds", 0)
    assert set(found["pairs"]) == {PAIR, other}
    made = found["pairs"][PAIR]
    assert made["tested"] == 12
    assert set(made["accuracy"]) > {"refined", "standalone", "int8-half-norm", "tuned", "kept"}
    assert sum(made["letters"]["standalone"].values()) == 12
    both = found["pairs"][other]  # the first pair had no second fuser yet when it was its turn
    assert set(both["several"]["accuracy"]) == {"0", "1", "2"}
    assert both["several"]["accuracy"]["0"] == both["accuracy"]["standalone"]
    assert made["baselines"]["vote"]["rows"] == 12
    assert {"refined_minus_vote", "refined_minus_best_single", "refined_minus_t2t_4"} <= set(made)
    assert 0 < made["holm_p"]["standalone"] <= 1


def test_a_closed_form_is_solved_for_a_receiver_that_slides(tmp_path):
    told = ["--pairs", "tiny:llama-tiny:gemma3", "--conditions", "closed"]
    out, _ = run("pairs.py", "run", "--quick", "--folder", tmp_path, *told)
    assert "left out" not in out
    (made,) = (tmp_path / "scores").iterdir()
    assert len(json.loads(made.read_text())["outcomes"]["refined"]) == 12


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("baselines.py", {"vote", "t2t 80", "best_single"}),
        ("closed_features.py", {"variants"}),
        ("latency.py", {"speedup"}),
        ("order.py", {"by_senders"}),
        ("leakage.py", {"recovered", "shuffled", "deep_recovered"}),
        ("rephrasing.py", {"pass_rate", "reasons", "recall_after_rules"}),
    ],
)
def test_the_other_studies_run(name, keys, tmp_path):
    more = ["--folder", tmp_path] if name in ("baselines.py", "closed_features.py") else []
    _, found = run(name, "--quick", *more)
    assert keys <= found.keys()


def test_an_order_of_senders_given_changes_nothing():
    _, found = run("order.py", "--quick")
    assert all(row["given_gap"] == 0 for row in found["by_senders"].values())

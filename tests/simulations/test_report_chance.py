# SPDX-License-Identifier: Apache-2.0
"""What guessing gives each client, who fares worst, and scores told apart by depth."""

import json
import math

import pytest
from made_run import make_run, metrics, page_of, write_lines

from fedloom.intervals import wilson
from fedloom.simulations.report import report_data


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def test_four_letters_are_assumed_where_nothing_else_was_counted(run):
    data = report_data(run)
    assert data.four_options
    assert data.chance == {"accuracy": 0.25, "letter-ce": math.log(4)}
    assert data.depths == ()
    assert "By depth" not in page_of(run).text


def test_chance_is_each_client_s_own(run):
    """Law has two options a row, the others four: ln 2 is 0.693."""
    rows = metrics()
    for row in rows:
        if row["phase"] != "train":
            k = 2 if row["partition"] == 0 else 4
            row["chance-sum"] = row["num-examples"] / k
            row["chance-ce-sum"] = row["num-examples"] * math.log(k)
    write_lines(run / "metrics.jsonl", rows)
    data = report_data(run)
    assert data.clients[0].chance == pytest.approx({"accuracy": 0.5, "letter-ce": math.log(2)})
    assert data.chance["accuracy"] == pytest.approx((0.5 + 4 * 0.25) / 5)
    assert not data.four_options
    below = data.below_chance  # Law's 1.35 beats ln 4 and not its own line
    assert (below.lower, below.compared) == (3, 5)
    page = page_of(run)
    assert "ln 4" not in page.text
    assert "33.3 [13.8, 60.9]50.0" in page.text.replace("] 50.0", "]50.0")
    assert "chance, by client" in page.text
    assert "30.0" in page.text
    told = json.loads((run / "summary.json").read_text())
    assert told["chance"]["accuracy"] == pytest.approx(0.3)


def test_the_worst_tenth_of_five_clients_is_one(run):
    data = report_data(run)
    assert data.worst("federated", "letter-ce") == (1.41, ("STEM",))
    value, names = data.worst("frozen", "accuracy")
    assert (value, names) == (pytest.approx(2 / 12), ("STEM",))
    write_lines(run / "metrics.jsonl", [])
    assert report_data(run).worst("federated", "accuracy") is None


def test_depths_are_read_where_they_were_counted(run):
    rows = metrics()
    for row in rows:
        if row["partition"] == 1 and row["phase"] in ("frozen", "evaluate"):
            for depth, right in ((1024, 4), (512, 5)):
                sums = {"examples": 6, "correct": right, "chance-sum": 1.5, "distance-sum": 3000}
                sums |= {"letter-ce-sum": 6.0, "letter-ce-sq-sum": 6.5}
                row |= {f"depth-{depth}-{name}": value for name, value in sums.items()}
    write_lines(run / "metrics.jsonl", rows)
    data = report_data(run)
    assert data.depths == (512, 1024)
    known = data.clients[1].at_depth(1024)
    assert known.keys() == {"frozen", "federated"}
    assert known["frozen"].accuracy == wilson(4, 6)
    assert (known["frozen"].chance, known["frozen"].distance) == (0.25, 500)
    page = page_of(run)
    assert "By depth" in page.text
    assert page.text.count("83.3 [43.6, 97.0]") == 2
    told = json.loads((run / "summary.json").read_text())
    assert told["per-client"][1]["frozen"]["depths"]["512"]["examples"] == 6

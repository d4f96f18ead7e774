# SPDX-License-Identifier: Apache-2.0
"""The report on a made-up run folder: numbers worked out by hand, and what the page may hold."""

import json
import math
import re

import pytest
from made_run import (
    GOLD,
    PAYLOAD,
    Page,
    ledger,
    make_run,
    metrics,
    page_of,
    scored,
    write_lines,
)

from fedloom.errors import Refusal
from fedloom.intervals import mean_interval, wilson
from fedloom.simulations.report import report_data, summary, write_report


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """One intact run with its report: drawing takes most of a test's time."""
    folder = make_run(tmp_path_factory.mktemp("written") / "run")
    assert write_report(folder) == folder / "report.html"
    return folder


def test_numbers_of_one_client(run):
    law = report_data(run).clients[0]
    assert (law.name, law.train_rows, law.test_rows) == ("Law/Ethics", 48, 12)
    assert law.scores["federated"].measured["accuracy"] == wilson(4, 12)
    assert law.scores["federated"].round == 3
    row = scored("evaluate", 3, 0, 1.4, 1.35)
    at = law.scores["federated"].measured["gold-ce"]
    assert at == mean_interval(row["gold-ce-sum"], row["gold-ce-sq-sum"], 12)
    # s^2 = 12 * 0.09 / 11; t of 11 degrees is 2.2010
    assert at.high - at.value == pytest.approx(2.2010 * 0.3 / math.sqrt(11), rel=1e-4)
    assert law.curves["gold-ce"] == pytest.approx({0: 2.8, 1: 1.6, 2: 1.5, 3: 1.4})
    assert (law.gate("gate-mean"), law.gate("gate-max")) == pytest.approx((0.05, 0.063))
    assert (law.total("steps"), law.total("tokens")) == (36, 18000)


def test_aggregation_drop_is_local_less_federated(run):
    data = report_data(run)
    law, *_, math_cs, _ = data.clients
    assert (law.drop.round, law.drop.questions, law.drop.examples) == (3, 1, 12)
    assert law.drop.points == pytest.approx(100 / 12)
    assert law.drop.gold_ce == pytest.approx(0.1)
    assert law.drop.letter_ce == pytest.approx(0.05)
    assert math_cs.drop.points == pytest.approx(-100 / 8)
    mean, clients = data.mean_drop("points")
    assert (mean, clients) == (pytest.approx((100 / 12 - 100 / 8 + 100 / 12) / 5), 5)


def test_headline_counts_clients(run):
    lowered = report_data(run).lowered
    gold, letter = lowered["gold-ce"], lowered["letter-ce"]
    # Half-widths are about 0.2 nats, so Math/CS (2.0 -> 1.9) is lower but not apart.
    assert (gold.lower, gold.compared, gold.apart) == (4, 5, 3)
    assert (letter.lower, letter.compared, letter.apart) == (4, 5, 0)
    below = report_data(run).below_chance  # STEM's 1.41 is not below ln 4 = 1.386
    assert (below.lower, below.compared, below.apart) == (4, 5, 0)


def test_macro_means_weigh_clients_equally(run):
    data = report_data(run)
    assert data.macros["frozen"]["gold-ce"].value == pytest.approx(sum(GOLD["frozen"]) / 5)
    share = (4 / 12 + 4 / 12 + 3 / 12 + 3 / 8 + 3 / 12) / 5
    assert data.macros["federated"]["accuracy"].value == pytest.approx(share)
    assert data.macro_clients == {"frozen": 5, "local": 5, "federated": 5}
    assert data.mean_curve("gold-ce")[3] == pytest.approx(sum(GOLD["evaluate"]) / 5)


def test_bytes_and_parameters_are_recounted(run):
    data = report_data(run)
    assert data.parameters == {"LoRA": 9216, "memory": 580}
    assert data.traffic.payloads == (PAYLOAD,) == (data.manifest.nbytes(),)
    assert data.traffic.share("down") == 2 * 15 * (PAYLOAD + 300)
    assert data.traffic.share("up") == 15 * (PAYLOAD + 300)
    assert data.traffic.share(framing=True) == 45 * 300
    assert data.traffic.per_round[2]["up"] == (5 * PAYLOAD, 5 * 300)
    assert data.traffic.kinds["train", "up", "framing"] == 15 * 300
    assert data.aggregation_errors == {1: 0.01, 2: 0.02, 3: 0.03}
    assert data.notes == ()


def test_page_is_whole_and_says_the_headline(written):
    page = page_of(written)
    assert "4 of 5 clients" in page.text
    assert "4 of 5 (0 with the whole interval)" in page.text
    assert "33.3 [13.8, 60.9]" in page.text  # Law/Ethics, federated: 4 of 12
    assert "+8.3" in page.text
    assert "\N{MINUS SIGN}12.5" in page.text
    assert "ln 4 = 1.386 nats" in page.text
    assert "did not complete" not in page.text
    assert "No client failed" in page.text
    # 13 500 of 45 * (39 184 + 300) bytes
    assert "0.8 % is framing" in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_page_needs_nothing_from_outside(written):
    text = (written / "report.html").read_text("utf-8")
    assert set(re.findall(r'([\w:]+)="https?:', text)) == {"xmlns", "xmlns:xlink"}
    assert len(re.findall("https?:", text)) == len(re.findall('xmlns[:a-z]*="http', text))
    attributes = Page(text).attributes
    assert all(value.startswith("#") for name, value in attributes if name.endswith("href"))
    assert not any(name == "src" or name.startswith("on") for name, _ in attributes)
    assert not re.search(r"<script|<link|@import|url\((?!#)", text)
    ids = [value for name, value in attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 100


def test_same_folder_same_bytes(written, run):
    first, again = (
        [(folder / name).read_bytes() for name in ("report.html", "summary.json")]
        for folder in (written, write_report(run).parent)
    )
    assert first == again
    assert not list(run.glob("*.partial"))


def test_summary_is_the_headline_as_strict_json(written):
    told = json.loads((written / "summary.json").read_text("utf-8"))
    assert told == json.loads(json.dumps(summary(report_data(written)), allow_nan=False))
    assert told["lower-than-frozen"]["gold-ce"] == {"compared": 5, "lower": 4, "apart": 3}
    assert told["payload-bytes"] == {"claimed": PAYLOAD, "measured": [PAYLOAD]}
    assert told["macro"]["local"]["clients"] == 5
    mean = (4 * 0.1 + 0.05) / 5
    assert told["aggregation-drop"]["gold-ce"]["mean"] == pytest.approx(mean)
    assert told["per-client"][3]["aggregation-drop"]["questions"] == -1
    assert (told["seed"], told["rounds"], told["rounds-done"]) == (7, 3, 3)


def test_failed_run_says_so_first_and_reports_what_there_is(run):
    failure = {"event": "client-failed", "round": 2, "phase": "train", "partition": 3}
    failure["reason"] = "Traceback:\nout of <memory>"
    end = {"event": "end", "status": "failed", "reason": "1 of 5 replies & 2 were expected"}
    write_lines(run / "events.jsonl", [failure, {**failure, "partition": -1}, end])
    write_lines(run / "metrics.jsonl", [row for row in metrics() if row["round"] < 2])
    page = page_of(run)
    assert "This run did not complete: failed. Reason: 1 of 5 replies & 2 were" in page.text
    assert page.text.index("did not complete") < page.text.index("Status")
    assert "Math/CS2Traceback: out of <memory>" in page.text.replace(" 2 ", "2")
    assert "unknown node" in page.text
    assert "1 trained of 3" in page.text
    assert all(client.drop is None for client in report_data(run).clients)


def test_run_without_an_end_did_not_complete(run):
    (run / "events.jsonl").unlink()
    data = report_data(run)
    assert (data.status, data.reason, data.succeeded) == ("no end recorded", "", False)


def test_local_adapter_that_was_not_averaged_has_no_drop(run):
    failure = {"event": "client-failed", "round": 3, "partition": 1, "reason": "norm bound"}
    end = {"event": "end", "status": "completed"}
    write_lines(run / "events.jsonl", [failure, end])
    data = report_data(run)
    assert data.clients[1].drop is None
    assert data.mean_drop("points")[1] == 4
    assert data.notes == (
        "Humanities: its last local adapter has no federated score of the same round.",
    )


@pytest.mark.parametrize("phase", ["frozen", "local", "evaluate", "train"])
def test_missing_phase_is_not_measured(run, phase):
    write_lines(run / "metrics.jsonl", [row for row in metrics() if row["phase"] != phase])
    data = report_data(run)
    assert data.lowered["gold-ce"].compared == (0 if phase in ("frozen", "evaluate") else 5)
    assert (data.mean_drop("points") is None) == (phase in ("local", "evaluate"))
    assert data.clients[0].gate("gate-max") == (None if phase == "train" else 0.063)


def test_missing_keys_and_files_are_not_measured(run):
    kept = ("round", "phase", "partition", "num-examples", "correct")
    write_lines(run / "metrics.jsonl", [{k: row[k] for k in kept if k in row} for row in metrics()])
    for name in ("config.toml", "partition.json", "manifest.json", "environment.json"):
        (run / name).unlink()
    (run / "ledger.jsonl").unlink()
    page = page_of(run)
    assert "client 3" in page.text
    assert "cross-entropy" in page.text
    assert "cannot be compared: not measured" in page.text
    assert "33.3 [13.8, 60.9]" in page.text
    assert "Bytes on the wire: not measured" in page.text
    assert json.loads((run / "summary.json").read_text())["model"] is None


def test_empty_folder_makes_a_page(tmp_path):
    page = page_of(tmp_path)
    assert "no end recorded" in page.text
    assert "nan" not in page.text.lower().replace("finance", "")


def test_rows_that_differ_are_called_out(run):
    rows = metrics()
    rows[0]["num-examples"] = 11
    write_lines(run / "metrics.jsonl", rows)
    (note,) = report_data(run).notes
    assert note.startswith("Law/Ethics: not the same number of test rows everywhere (frozen 11,")


def test_payload_that_differs_from_the_manifest_is_called_out(run):
    rows = ledger()
    rows[0]["bytes"] += 4
    write_lines(run / "ledger.jsonl", rows)
    (note,) = report_data(run).notes
    assert f"take {PAYLOAD} B, but training messages carried {PAYLOAD}, {PAYLOAD + 4} B" in note


def test_later_row_of_a_resumed_round_stands_and_half_a_line_is_dropped(run):
    again = {**scored("evaluate", 3, 0, 1.4, 1.35), "correct": 9}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + '\n{"round": 3, "pha')
    assert report_data(run).clients[0].scores["federated"].correct == 9


def test_damaged_line_and_missing_folder_are_refused(run):
    (run / "ledger.jsonl").write_text('{"round": 1}\nnonsense\n{}\n')
    with pytest.raises(Refusal, match=r"ledger\.jsonl line 2 is not JSON"):
        report_data(run)
    with pytest.raises(Refusal, match="no run folder"):
        write_report(run / "elsewhere")


def test_values_that_are_not_finite_become_null(run):
    rows = metrics()
    rows[-1]["gold-ce-sum"] = rows[-1]["gold-ce-sq-sum"] = math.nan
    write_lines(run / "metrics.jsonl", rows)
    told = summary(report_data(run))
    assert told["macro"]["federated"]["gold-ce"]["value"] is None
    assert told["lower-than-frozen"]["gold-ce"]["lower"] == 3


def test_names_and_reasons_cannot_bring_markup(run):
    evil = '<script>alert("x")</script> $\\frac{1}{0}$'
    for name in ("metrics.jsonl", "partition.json"):
        told = (run / name).read_text().replace('"Law/Ethics"', json.dumps(evil))
        (run / name).write_text(told)
    end = {"event": "end", "status": "failed", "reason": "<img src=x onerror=y>"}
    write_lines(run / "events.jsonl", [end])
    text = write_report(run).read_text("utf-8")
    assert "<script" not in text
    assert "<img" not in text
    assert evil in Page(text).text

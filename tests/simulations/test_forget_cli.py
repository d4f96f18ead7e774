# SPDX-License-Identifier: Apache-2.0
"""``fedloom faast forget`` and the page of a run of FAAST, on one run of five owners of digits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_run import page_of
from safetensors.numpy import load_file, save_file

from fedloom.config import RunConfig
from fedloom.simulations.cli import main
from fedloom.simulations.findings import report_data
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.report import summary, write_report


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs")
    flat = {"method": "faast", "name": "done", "rounds": 1, "clients.count": 4}
    flat |= {"data.task": "classes", "data.source": "packaged:digits", "data.split": "iid"}
    flat |= {"faast.encoder": "pixels", "faast.keep-sums": True, "output": str(output)}
    run_in_process(RunConfig.from_flat({**flat, "model.device": "cpu"}))
    return output / "done"


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "done"))


def forget(folder: Path, client: int, revision: int) -> int:
    with pytest.raises(SystemExit) as left:
        main(["faast", "forget", str(folder), f"--client={client}", f"--revision={revision}"])
    return int(left.value.code or 0)


def weights(folder: Path) -> np.ndarray:
    return load_file(folder / "adapter/weights.safetensors")["weights"]


def test_forgetting_changes_the_weights_and_certifies_it(run, capsys):
    before = weights(run)
    assert forget(run, 3, 1) == 0
    said = capsys.readouterr().out
    assert float(said.splitlines()[0].rpartition(" ")[2]) <= 1e-12
    assert not (weights(run) == before).all()
    certificate = json.loads((run / "forgotten.jsonl").read_text())
    assert (certificate["client"], certificate["clients-left"]) == (3, 3)
    digest = (run / "adapter/digest.txt").read_text().strip()
    assert certificate["weights-after"] == digest != certificate["weights-before"]
    ledger = json.loads((run / "sums/ledger.json").read_text())
    assert sorted(ledger["clients"]) == ["0", "1", "2"]
    assert not list((run / "sums").glob("client-000003-*"))
    assert forget(run, 3, 1) == 2  # once
    assert forget(run, 0, 1) == 0  # and another


def test_a_wrong_revision_changes_nothing(run, capsys):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert forget(run, 3, 2) == 2
    assert "revision 1 is; nothing was deleted" in capsys.readouterr().err
    assert forget(run, 9, 1) == 2
    assert "expected one of 0, 1, 2, 3" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_sums_that_were_changed_on_disk_are_refused(run, capsys):
    path = next((run / "sums").glob("client-000001-*"))
    arrays = load_file(path)
    arrays["cross"][0, 0] += 1e-9
    save_file(arrays, path)
    assert forget(run, 1, 1) == 2
    assert "not its sums of revision 1" in capsys.readouterr().err
    assert forget(run, 2, 1) == 2  # nor can another's deletion be held against retraining
    assert "not those that were added" in capsys.readouterr().err


def test_without_kept_sums_nothing_can_be_forgotten(run, capsys):
    for path in (run / "sums").glob("client-*"):
        path.unlink()
    assert forget(run, 1, 1) == 2
    assert "set faast.keep-sums = true" in capsys.readouterr().err
    shutil.rmtree(run / "sums")
    assert forget(run, 1, 1) == 2
    assert "method faast" in capsys.readouterr().err


def test_the_page_tells_of_sums_and_not_of_letters(run):
    write_report(run)
    page = page_of(run)
    for words in (
        "sums over frozen keys", "Frozen encoder", "rows summed, N", "directions kept",
        "share of the values' energy explained", "encoder forwards", "iid 3", "by guessing",
        "No client sent sums over fewer than 8 rows",
    ):  # fmt: skip
        assert words in page.text, words
    assert "LoRA" not in page.text
    assert "letter" not in page.text
    assert not any(name in ("src", "href") and str(value).startswith("http")
                   for name, value in page.attributes)  # fmt: skip


def test_the_summary_has_the_solution(run):
    told = summary(report_data(run))
    fast = told["fast-weights"]
    assert (told["method"], told["model"], fast["keys"], fast["classes"]) == (
        "faast", "pixels", 64, 10,
    )  # fmt: skip
    assert fast["sums-bytes"] == 8 * (64 * 65 // 2 + 64 * 10 + 1)
    assert told["payload-bytes"]["measured"] == [fast["sums-bytes"]]
    assert 0 < fast["explained"] < 1 <= fast["rank"] <= 64
    assert len(fast["solutions"]) == 4
    assert told["macro"]["federated"]["accuracy"]["value"] > 0.85
    assert told["macro"]["frozen"]["accuracy"]["value"] < 0.3


def test_a_run_that_broke_off_still_has_a_page(run):
    for name in ("events", "metrics", "ledger"):
        lines = (run / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (run / f"{name}.jsonl").write_text("".join(lines[:3]))
    page = page_of(run)
    assert "did not complete" in page.text

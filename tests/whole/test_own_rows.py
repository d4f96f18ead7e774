"""Two SuperNodes with TLS and keys, each with a file of rows that nobody else has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process

from deployments import change, fedloom, two_nodes
from runs import rows

pytestmark = pytest.mark.slow


def test_nodes_train_on_files_of_their_own_as_the_simulation_does(questions, recipe, tmp_path):
    """Scores ride with the training that follows them, so a round is one message a node."""
    tables = tmp_path / "tables"
    tables.mkdir()
    lines = questions.read_text().splitlines(keepends=True)
    halves = lines[::2], lines[1::2]
    for number, half in enumerate(halves, start=1):
        (tables / f"{number}.jsonl").write_text("".join(half))
    folder = tmp_path / "d"

    def settle(number: int, node: Path) -> None:
        change(node / "node.toml", 'data = ""', 'data = "rows.jsonl"')
        (node / "rows.jsonl").write_bytes((tables / f"{number}.jsonl").read_bytes())

    own = recipe(clients__count=2, data__split="files", evaluation__with_training=True)
    submitted = tmp_path / "recipe.toml"
    submitted.write_text(toml_lines(own.flat()))
    with two_nodes(folder, settle):
        done = fedloom("run", submitted, "--on", folder, "--name", "nodes")
        assert done.returncode == 0, done.stdout + done.stderr
    run_in_process(own.replaced(name="here", data__source=f"path:{tables}"))
    there, here = tmp_path / "nodes", tmp_path / "here"
    assert (there / "adapter/digest.txt").read_text() == (here / "adapter/digest.txt").read_text()
    scores = [
        sorted((r["round"], r["phase"], r["partition"], r["gold-ce-sum"])
               for r in rows(f, "metrics") if r["phase"] in ("frozen", "evaluate"))
        for f in (there, here)
    ]  # fmt: skip
    assert scores[0] == scores[1]
    assert {(r, phase) for r, phase, *_ in scores[0]} == {
        (0, "frozen"), (1, "evaluate"), (2, "evaluate"),
    }  # fmt: skip
    asked = {(r["round"], r["phase"]) for r in rows(there, "ledger")}
    assert asked >= {(1, "train"), (2, "train"), (2, "evaluate")}
    assert (1, "evaluate") not in asked
    text = json.loads(halves[0][0])["question"]
    assert " " in text  # two words that stand nowhere else
    for file in there.rglob("*"):
        assert not file.is_file() or text.encode() not in file.read_bytes(), file

"""Two SuperNodes with TLS and keys, each with a file of rows that nobody else has."""

from __future__ import annotations

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process

from deployments import Up, change, fedloom, free_ports
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
    port, *node_ports = free_ports(3)
    done = fedloom("deploy", "init", folder, "--nodes", "2", "--port", str(port))
    assert done.returncode == 0, done.stderr
    for number, own in enumerate(node_ports, start=1):
        config = folder / f"nodes/{number}/node.toml"
        change(config, f"{9100 + number}", str(own))
        change(config, 'data = ""', 'data = "rows.jsonl"')
        (folder / f"nodes/{number}/rows.jsonl").write_bytes(
            (tables / f"{number}.jsonl").read_bytes()
        )
    own = recipe(clients__count=2, data__split="files", evaluation__with_training=True)
    submitted = tmp_path / "recipe.toml"
    ups = [Up(folder / "coordinator")]
    try:
        ups[0].wait_for("takes nodes at")
        ups += [Up(folder / f"nodes/{number}") for number in (1, 2)]
        for up in ups[1:]:
            up.wait_for("1 node connected")
        submitted.write_text(toml_lines(own.flat()))
        done = fedloom("run", submitted, "--on", folder, "--name", "nodes")
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        for up in reversed(ups):
            up.stop()
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
    text = halves[0][0].split('"')[3][:30]
    for file in there.rglob("*"):
        assert not file.is_file() or text.encode() not in file.read_bytes(), file

"""A SuperNode that joins a run of FAAST after its first round."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process

from deployments import Up, change, fedloom, free_ports
from runs import rows

pytestmark = pytest.mark.slow


def test_a_node_that_joins_later_leaves_the_bits_of_one_that_was_there(digits, tmp_path):
    """And those of the simulation; who is in the sums is not asked for them again."""
    config = digits(
        clients__count=2, data__split="iid", faast__alphas="0.6", faast__keep_sums=True,
        faast__exact_bits=40, sampling__wait_seconds=2.0,
    )  # fmt: skip
    folder, recipe, run = tmp_path / "d", tmp_path / "recipe.toml", tmp_path / "nodes"
    recipe.write_text(toml_lines(config.flat()))
    port, *node_ports = free_ports(3)
    done = fedloom("deploy", "init", folder, "--nodes", "2", "--port", str(port))
    assert done.returncode == 0, done.stderr
    for number, own in enumerate(node_ports, start=1):
        change(folder / f"nodes/{number}/node.toml", f"{9100 + number}", str(own))
    ups = [Up(folder / "coordinator")]
    try:
        ups[0].wait_for("takes nodes at")
        ups.append(Up(folder / "nodes/1"))
        ups[1].wait_for("1 node connected")
        good("run", recipe, "--on", folder, "--name", "nodes")
        ups.append(Up(folder / "nodes/2"))
        ups[2].wait_for("1 node connected")
        said = good("run", "--resume", run, "--on", folder, "--set", "rounds=2")
        assert "roll call, 2 nodes: client 1 iid 1 is new" in said
    finally:
        for up in reversed(ups):
            up.stop()
    asked = [(r["round"], r["partition"]) for r in rows(run, "ledger")
             if (r["phase"], r["direction"], r["dtype"]) == ("train", "up", "float64")]  # fmt: skip
    assert asked == [(1, 0), (2, 1)]
    run_in_process(config.replaced(name="here"))
    here = Path(config.output) / "here"
    assert (run / "adapter/digest.txt").read_text() == (here / "adapter/digest.txt").read_text()


def good(*arguments: str | Path) -> str:
    done = fedloom(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout

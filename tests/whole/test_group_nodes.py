# SPDX-License-Identifier: Apache-2.0
"""Two SuperNodes with TLS and keys, one of which names an encoder of its own in ``node.toml``."""

from __future__ import annotations

import json

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process

from deployments import Up, change, fedloom, free_ports
from runs import rows

pytestmark = pytest.mark.slow


def test_a_nodes_own_encoder_makes_a_group_and_the_simulations_weights(digits, tmp_path):
    folder = tmp_path / "d"
    port, *node_ports = free_ports(3)
    done = fedloom("deploy", "init", folder, "--nodes", "2", "--port", str(port))
    assert done.returncode == 0, done.stderr
    for number, own in enumerate(node_ports, start=1):
        change(folder / f"nodes/{number}/node.toml", f"{9100 + number}", str(own))
    change(folder / "nodes/2/node.toml", 'encoder = ""', 'encoder = "relu:32:pixels"')
    config = digits(clients__count=2, data__dirichlet=1.0, faast__encoders="pixels")
    recipe = tmp_path / "recipe.toml"
    ups = [Up(folder / "coordinator")]
    try:
        ups[0].wait_for("takes nodes at")
        ups += [Up(folder / f"nodes/{number}") for number in (1, 2)]
        for up in ups[1:]:
            up.wait_for("1 node connected")
        recipe.write_text(toml_lines(config.flat()))
        done = fedloom("run", recipe, "--on", folder, "--name", "nodes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 groups: 1 node with pixels, 1 with relu:32:pixels" in done.stdout
        plain = config.replaced(faast__encoders="", faast__encoder="pixels")
        recipe.write_text(toml_lines(plain.flat()))
        refused = fedloom("run", recipe, "--on", folder, "--name", "plain")
        assert refused.returncode == 2, refused.stdout
        assert "partition 1 has an encoder of its own" in refused.stderr
    finally:
        for up in reversed(ups):
            up.stop()
    run_in_process(config.replaced(name="here", faast__encoders="pixels, relu:32:pixels"))
    made = []
    for name in ("nodes", "here"):
        found = tmp_path / name
        (told,) = [e for e in rows(found, "events") if e["event"] == "groups"]
        named = {g["group"]: g["encoder"] for g in told["groups"]}
        digests = {
            named[p.name]: (p / "adapter/digest.txt").read_text()
            for p in (found / "groups").iterdir()
        }
        scores = json.loads((found / "events.jsonl").read_text().splitlines()[-2])["row-accuracy"]
        made.append((digests, scores))
    assert made[0] == made[1]
    assert made[0][0].keys() == {"pixels", "relu:32:pixels"}

# SPDX-License-Identifier: Apache-2.0
"""Two SuperNodes with TLS and keys, one of which names an encoder of its own in ``node.toml``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process

from deployments import change, fedloom, two_nodes
from runs import rows

pytestmark = pytest.mark.slow


def test_a_nodes_own_encoder_makes_a_group_and_the_simulations_weights(digits, tmp_path):
    folder = tmp_path / "d"

    def settle(number: int, node: Path) -> None:
        if number == 2:
            change(node / "node.toml", 'encoder = ""', 'encoder = "relu:32:pixels"')

    config = digits(clients__count=2, data__dirichlet=1.0, faast__encoders="pixels")
    recipe = tmp_path / "recipe.toml"
    with two_nodes(folder, settle):
        recipe.write_text(toml_lines(config.flat()))
        done = fedloom("run", recipe, "--on", folder, "--name", "nodes")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "2 groups: 1 node with pixels, 1 with relu:32:pixels" in done.stdout
        plain = config.replaced(faast__encoders="", faast__encoder="pixels")
        recipe.write_text(toml_lines(plain.flat()))
        refused = fedloom("run", recipe, "--on", folder, "--name", "plain")
        assert refused.returncode == 2, refused.stdout
        assert "partition 1 has an encoder of its own" in refused.stderr
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

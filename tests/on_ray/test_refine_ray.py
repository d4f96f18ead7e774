"""FedRefine on Ray gives the scores that it gives in process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from fedloom.config import RunConfig
from fedloom.flat import toml_lines

from meetings import events, write_fusers

pytestmark = pytest.mark.slow
FAMILIES = ("llama", "qwen3")


def test_ray_and_in_process_give_the_same_scores(questions, tmp_path):
    flat = {
        "method": "fedrefine",
        "rounds": 1,
        "refine.models": ",".join(f"tiny:{family}" for family in FAMILIES),
        "refine.fusers": str(write_fusers(tmp_path / "fusers", FAMILIES)),
        "refine.questions": 2,
        "data.source": f"path:{questions}",
        "data.min-train": 4,
        "data.min-test": 2,
        "clients.count": 2,
        "output": str(tmp_path / "runs"),
    }
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(toml_lines(RunConfig.from_flat(flat).flat()))
    found = []
    for runtime in ("ray", "inprocess"):
        command = [sys.executable, "-m", "fedloom.simulations", "run", str(recipe)]
        command += ["--runtime", runtime, "--name", runtime]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        folder = tmp_path / "runs" / runtime
        rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        scored = [r for r in rows if r["phase"] == "evaluate"]
        found.append({r["partition"]: (r["gold-ce-sum"], r["cache-bytes"]) for r in scored})
        assert len(events(folder, "pair")) == 2
        page = (folder / "report.html").read_text()
        assert "tiny:llama" in page
        assert "McNemar" in page
    assert found[0] == found[1]
    assert sorted(found[0]) == [0, 1]

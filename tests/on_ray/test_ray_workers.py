"""Ray's workers that die by SIGKILL in the middle of a message, as when memory runs out.

Flower alone puts a dead worker back into its pool, where it swallows message after message.
"""

from __future__ import annotations

import json
import os

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.inprocess import run_in_process

from crashes import small, told
from deployments import PATIENCE, start_run
from runs import rows

pytestmark = pytest.mark.slow

CLIENT = """
import os
import signal
from pathlib import Path

from fedloom.clients.fednl import FedNLClient


def die():
    if "MORTAL_RAISES" in os.environ:
        raise RuntimeError("in process nobody would be left")
    os.kill(os.getpid(), signal.SIGKILL)


class Mortal(FedNLClient):
    def fit(self, parameters, config):
        when, had = (config["round"], self.partition_id), Path(os.environ["MORTAL"])
        trained = super().fit(parameters, config)
        if when == (1, 0) and not had.exists():
            had.touch()
            die()
        if when == (2, 1):
            die()
        return trained
"""


def test_a_dead_worker_is_replaced_and_its_message_repeated_once(questions, tmp_path, monkeypatch):
    """Client 0 dies once, in round 1, and nothing is lost; client 1 each time, and is named."""
    (tmp_path / "site/mortal").mkdir(parents=True)
    (tmp_path / "site/mortal/__init__.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    monkeypatch.setenv("MORTAL", str(tmp_path / "died-once"))
    small_run = {"clients__count": 3, "clients__total_cpus": 2, "client": "mortal:Mortal"}
    config = small(questions, tmp_path, name="killed", **small_run)
    recipe, log, folder = tmp_path / "r.toml", tmp_path / "run.log", tmp_path / "killed"
    recipe.write_text(toml_lines(config.flat()))
    assert start_run(recipe, log=log).wait(PATIENCE) == 0, log.read_text()
    assert (tmp_path / "died-once").exists()
    events = rows(folder, "events")
    lost = [(e["round"], e["partition"]) for e in events if e["event"] == "client-failed"]
    assert lost == [(2, 1)], [e for e in events if e["event"] == "client-failed"]
    assert events[-1]["status"] == "completed"
    assert "client 1" in log.read_text()
    whole = config.replaced(name="whole")
    monkeypatch.setenv("MORTAL_RAISES", "1")
    run_in_process(whole)
    digests = {(tmp_path / n / "adapter/digest.txt").read_text() for n in ("killed", "whole")}
    assert len(digests) == 1
    assert scores(config) == scores(whole)


def scores(config) -> list[str]:
    kept = [{k: v for k, v in row.items() if k != "gpu"} for row in told(config, "metrics")]
    assert {(r["phase"], r["round"], r["partition"]) for r in kept} >= {("train", 3, 1)}
    return sorted(json.dumps(row, sort_keys=True) for row in kept)

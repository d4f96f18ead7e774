"""Coordinators killed with SIGKILL, in process and on Ray; the runs end as if nothing had been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedloom.flat import toml_lines
from fedloom.simulations.processes import process_table

from crashes import small, told

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "fedloom.simulations", "run", *map(str, arguments)]


def coordinator_of(runner: int) -> int:
    """Find the process that runs the ServerApp, below the SuperLink that a runner started."""
    table = process_table()

    def is_below(pid: int) -> bool:
        return pid == runner or (pid in table and is_below(table[pid].parent))

    (found,) = [
        pid
        for pid in table
        if is_below(pid) and b"flwr-simulation" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def test_kills_at_random_moments_lose_no_round():
    """The benchmark of fifty rounds, with eight; its clients fail, too."""
    script = [sys.executable, ROOT / "benchmarks/faults.py", "--rounds", "8"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rounds_lost"], found["rounds_twice"], found["kills"]) == (0, 0, 3)
    assert found["hash_equal"] is found["metrics_equal"] is found["ledger_equal"] is True
    assert found["client_failures"] > 0


def test_a_coordinator_killed_on_ray_goes_on(questions, tmp_path):
    config = small(questions, tmp_path, baseline="scaffold", clients__total_cpus=1)
    path = tmp_path / "r.toml"
    path.write_text(toml_lines(config.flat()))
    here = command(path, "--runtime", "inprocess", "--name", "whole")
    assert subprocess.run(here, capture_output=True, timeout=900).returncode == 0
    folder = tmp_path / "killed"
    with (tmp_path / "killed.log").open("wb") as log:
        first = subprocess.Popen(command(path, "--name", "killed"), stdout=log, stderr=log)
    while first.poll() is None and not list((folder / "checkpoints").glob("round-000001*")):
        time.sleep(0.05)
    os.kill(coordinator_of(first.pid), signal.SIGKILL)  # its runner would wait for it, so it too
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    again = subprocess.run(command("--resume", folder), capture_output=True, text=True, timeout=900)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "goes on after round" in again.stdout
    killed, whole = (config.replaced(name=name) for name in ("killed", "whole"))
    digests = {(tmp_path / n / "adapter/digest.txt").read_text() for n in ("killed", "whole")}
    assert len(digests) == 1
    aside = {"gpu"}

    def metrics(which) -> list[dict]:
        rows = told(which, "metrics")
        return [{k: v for k, v in row.items() if k not in aside} for row in rows]

    assert metrics(killed) == metrics(whole)

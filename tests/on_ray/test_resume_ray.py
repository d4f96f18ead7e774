"""A coordinator on Ray is killed with SIGKILL; its run goes on and ends as if nothing had been."""

from __future__ import annotations

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

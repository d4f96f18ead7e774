# SPDX-License-Identifier: Apache-2.0
"""Coordinators killed with SIGKILL at random moments lose no round."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def test_kills_at_random_moments_lose_no_round():
    """The benchmark of fifty rounds, with eight; its clients fail, too."""
    script = [sys.executable, ROOT / "benchmarks/faults.py", "--rounds", "8"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["rounds_lost"], found["rounds_twice"], found["kills"]) == (0, 0, 3)
    assert found["hash_equal"] is found["metrics_equal"] is found["ledger_equal"] is True
    assert found["client_failures"] > 0

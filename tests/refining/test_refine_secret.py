"""A fact that only the sender sees reaches the receiver through Flower's messages, and only so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fedrefine" / "secret.py"


def test_a_secret_passes_matched_and_not_shuffled_or_zeroed():
    command = [sys.executable, str(SCRIPT), "--quick", "--through-flower"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["through"] == "flower"
    assert told["matched"] >= 0.95
    assert max(told["shuffled"], told["zeroed"], told["alone"]) <= told["chance"] + 0.05
    assert told["follows_sender"] >= 0.95

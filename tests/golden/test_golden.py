"""One small loss curve a method: a change that moves it is either meant or a fault.

``PYTHONPATH=. python tests/golden/test_golden.py`` rewrites the curve.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np

from fedloom.config import RunConfig
from fedloom.simulations.inprocess import run_in_process

CURVE = Path(__file__).with_name("fednl.json")
# Another CPU sums float32 in another order; over these few steps that stays below this.
TOLERANCE = 2e-4


def curve(folder: Path, questions: Path) -> dict[str, list[float]]:
    config = RunConfig().replaced(
        model__source="tiny:qwen3",
        data__source=f"path:{questions}",
        data__min_train=4,
        data__min_test=2,
        output=str(folder),
        rounds=3,
        train__max_steps=3,
        train__learning_rate=5e-3,
        memory__chunk=16,
        memory__window=32,
    )
    run_in_process(config)
    lines = (folder / "fednl" / "events.jsonl").read_text().splitlines()
    rounds = [e for e in map(json.loads, lines) if e["event"] == "round"]
    return {key: [row[key] for row in rounds] for key in ("train-loss", "gold-ce")}


def test_fednl_curve(tmp_path, questions):
    expected = json.loads(CURVE.read_text())
    got = curve(tmp_path, questions)
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, rtol=0, atol=TOLERANCE, err_msg=key)
    assert expected["gold-ce"][-1] < expected["gold-ce"][0] - 0.05  # a curve that falls


if __name__ == "__main__":
    from tests.conftest import write_questions

    with tempfile.TemporaryDirectory() as folder:
        made = curve(Path(folder), write_questions(Path(folder) / "mmlu.jsonl"))
    CURVE.write_text(json.dumps(made, indent=1) + "\n")

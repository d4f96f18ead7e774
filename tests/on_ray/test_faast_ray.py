# SPDX-License-Identifier: Apache-2.0
"""FAAST through Flower on Ray: 100 supernodes, and the recipe of ``make run METHOD=faast``."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedloom.config import RunConfig

from fast import least_squares, off, rows_of, weights_of
from fetched import skip_without

pytestmark = pytest.mark.slow


def fedloom(*arguments: str | Path, timeout: int = 1500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedloom.simulations", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == name]


def test_a_hundred_supernodes_on_ray_solve_what_one_process_does(tmp_path):
    done = fedloom("run", "faast-digits", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "faast-digits"
    (last,) = events(folder, "round")
    assert (last["summed-clients"], last["failed"]) == (100, 0)
    config = RunConfig.from_toml(folder / "config.toml")
    keys, values = rows_of(config, range(100))
    assert off(weights_of(config), least_squares(keys, values, last["alpha"])) < 1e-9
    here = fedloom("run", "faast-digits", "--runtime", "inprocess", "--output", tmp_path / "here")
    assert here.returncode == 0, here.stderr
    other = tmp_path / "here/faast-digits/adapter/digest.txt"
    assert other.read_text() == (folder / "adapter/digest.txt").read_text()


def test_sentences_of_three_shops(tmp_path):
    """MiniLM and UCI's sentences: ``make run METHOD=faast``."""
    skip_without("packaged:uci-sentences")
    done = fedloom("run", "faast", "--output", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "faast"
    told = json.loads((folder / "summary.json").read_text())
    macro = {how: told["macro"][how]["accuracy"]["value"] for how in ("frozen", "federated")}
    assert macro["federated"] > max(0.75, macro["frozen"])
    assert told["payload-bytes"]["measured"] == [told["fast-weights"]["sums-bytes"]]
    assert "MiniLM" in (folder / "report.html").read_text() or "minilm" in told["model"]


def test_a_run_leaves_the_encoder_as_it_was(tmp_path):
    """No gradient anywhere: torch would raise at the first, and the weights' bits stay."""
    import torch

    from fedloom.models.encoders import load_encoder
    from fedloom.simulations.inprocess import run_in_process

    encoder = load_encoder("packaged:minilm")
    modules = [m for m in vars(encoder).values() if isinstance(m, torch.nn.Module)]
    assert modules

    def bits() -> str:
        whole = hashlib.sha256()
        for module in modules:
            for name, tensor in sorted(module.state_dict().items()):
                whole.update(
                    name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes()
                )
        return whole.hexdigest()

    before, digest = bits(), encoder.digest
    flat = RunConfig.from_toml(Path("simulations/faast.toml")).flat() | {
        "output": str(tmp_path),
        "data.max-train": 40,
        "data.max-test": 10,
        "model.device": "cpu",
    }
    forwards = []
    hooks = [m.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
             for m in modules]  # fmt: skip
    run_in_process(RunConfig.from_flat(flat))
    for hook in hooks:
        hook.remove()
    assert forwards
    assert not any(forwards)
    assert (bits(), encoder.digest) == (before, digest)
    assert not any(p.grad is not None for m in modules for p in m.parameters())
    weights = load_file(tmp_path / "faast/adapter/weights.safetensors")["weights"]
    assert np.isfinite(weights).all()

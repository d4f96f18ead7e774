"""Whole runs through Flower on Ray, as a user starts them; minutes, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.config import RunConfig
from fedloom.flat import toml_lines
from fedloom.simulations.superlink import LocalSuperLink, federation_config

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def fedloom(*arguments: str | Path, timeout: int = 900) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedloom.simulations", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def write(recipe: RunConfig, path: Path) -> Path:
    path.write_text(toml_lines(recipe.flat()))
    return path


def rows(folder: Path, kind: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{kind}.jsonl").read_text().splitlines()]


def schedule(folder: Path) -> list[tuple]:
    return [(r["round"], r["phase"], r["partition"]) for r in rows(folder, "metrics")]


def test_ray_and_in_process_give_the_same_bits_and_schedule(recipe, tmp_path):
    """One seed, three runs: twice on Ray, once in process."""
    path = write(recipe(sampling__fraction=0.6, rounds=3), tmp_path / "r.toml")
    for name, runtime in (("ray", "ray"), ("again", "ray"), ("here", "inprocess")):
        done = fedloom("run", path, "--runtime", runtime, "--name", name)
        assert done.returncode == 0, done.stdout + done.stderr
    digests = {(tmp_path / n / "adapter/digest.txt").read_text() for n in ("ray", "again", "here")}
    assert len(digests) == 1
    assert schedule(tmp_path / "ray") == schedule(tmp_path / "again") == schedule(tmp_path / "here")
    ledgers = [rows(tmp_path / n, "ledger") for n in ("ray", "here")]
    values = [
        [(r["round"], r["direction"], r["bytes"]) for r in ledger if r["dtype"] == "float32"]
        for ledger in ledgers
    ]
    assert sorted(values[0]) == sorted(values[1])


def test_base_loads_once_in_every_actor(recipe, tmp_path):
    done = fedloom("run", write(recipe(rounds=3, clients__total_cpus=2), tmp_path / "r.toml"))
    assert done.returncode == 0, done.stderr
    trained = [r for r in rows(tmp_path / "fednl", "metrics") if r["phase"] == "train"]
    assert len(trained) == 15
    assert {row["base-loads"] for row in trained} == {1}
    assert len({row["pid"] for row in trained}) <= 2  # one actor a CPU


def test_run_whose_clients_all_refuse_exits_1_with_their_sentence(recipe, tmp_path):
    broken = recipe(train__learning_rate=1e30, train__max_steps=3)
    done = fedloom("run", write(broken, tmp_path / "r.toml"))
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback (most recent call last" not in said, said  # a refusal: its line is enough
    assert "the training loss is nan" in said
    assert "0 usable replies" in said


def test_shares_of_gpus_spread_the_clients(recipe, tmp_path):
    """Ray is told of two GPUs that are not there: bookkeeping is what is tested."""
    spread = recipe(rounds=1, clients__gpus=0.5, clients__total_gpus=2, clients__total_cpus=4)
    done = fedloom("run", write(spread, tmp_path / "r.toml"))
    assert done.returncode == 0, done.stdout + done.stderr
    trained = [
        r for r in rows(tmp_path / "fednl", "metrics") if r["phase"] in ("train", "evaluate")
    ]
    assert {row["gpu"] for row in trained if "gpu" in row} == {0, 1}
    assert "GPU" in done.stdout


def test_flwr_run_of_the_checkout_works(recipe, tmp_path):
    """`flwr run . --run-config RECIPE`: the same run without our runner."""
    config = recipe(rounds=1, name="by-flwr")
    with LocalSuperLink(tmp_path / "superlink.log") as link:
        run = link.submit(ROOT, config.flat(), federation_config(config))
        status, details = link.wait(run)
        assert status == "finished:completed", details + link.run_log(run)
    assert rows(tmp_path / "by-flwr", "events")[-1]["status"] == "completed"


def test_the_first_round_of_make_run_beats_the_frozen_model(tmp_path):
    """SmolLM2-135M, real questions, five clients: what `make run` promises, a third of its time."""
    done = fedloom("run", "fednl", "--set", "rounds=1", "--output", tmp_path, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "fednl"
    ce: dict[str, list[float]] = {"frozen": [], "evaluate": []}
    for row in rows(folder, "metrics"):
        if row["phase"] == "frozen" or (row["phase"] == "evaluate" and row["round"] == 1):
            ce[row["phase"]].append(row["gold-ce-sum"] / row["num-examples"])
    better = [after < before for before, after in zip(ce["frozen"], ce["evaluate"], strict=True)]
    assert len(better) == 5
    assert sum(better) >= 4
    page = (folder / "report.html").read_text()
    assert all(
        name in page for name in ("Law/Ethics", "Humanities", "STEM", "Math/CS", "Med/Psych")
    )

"""``examples/custom_strategy``: a package of its own, installed beside fedloom, without a fork."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedloom.config import RunConfig
from fedloom.flat import toml_lines
from fedloom.simulations import client_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process
from fedloom.testing import LAWS, check_strategy, laws
from fedloom.wire import Update

from runs import adapter_of, equal, rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_strategy"


def recipe_of(recipe, **changes) -> RunConfig:
    own = RunConfig.from_toml(EXAMPLE / "trimmed.toml")
    told = {"strategy": own.strategy, "client": own.client, "custom__trim": own.custom["trim"]}
    return recipe(name="trimmed", server__rule=own.server.rule, **{**told, **changes})


@pytest.fixture
def installed(monkeypatch):
    """The example's package, importable as an installed one is."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("trimmed_lora.strategy")
    for name in [name for name in sys.modules if name.partition(".")[0] == "trimmed_lora"]:
        del sys.modules[name]


def test_the_example_is_short():
    files = list(EXAMPLE.rglob("*.py"))
    assert len(files) == 3
    assert sum(len(path.read_text().splitlines()) for path in files) < 80


def test_it_runs_in_process_and_brings_its_rule_and_its_metric(recipe, installed):
    config = recipe_of(recipe, rounds=1)
    run_in_process(config)
    trained = [r for r in rows(Path(config.output) / "trimmed", "metrics") if r["phase"] == "train"]
    assert len(trained) == 5
    assert all(row["moved"] > 0 for row in trained)
    plain = recipe(name="plain", server__rule="ffa", rounds=1)
    run_in_process(plain)
    assert adapter_of(config).keys() == adapter_of(plain).keys()
    assert not equal(adapter_of(config), adapter_of(plain))


def test_its_rule_keeps_the_laws_that_it_promises(installed):
    config = {"server.rule": "ffa", "custom.trim": 1}
    report = check_strategy(
        installed.TrimmedLora,
        config,
        without=["grouping-free"],
        only=LAWS.keys() - {"streaming"},
    )
    assert report.ok, str(report)
    (streams,) = (law for law in laws(installed.TrimmedLora, config) if law.name == "streaming")
    streams()


@pytest.mark.parametrize(("clients", "trim"), [(5, 0), (5, 1), (7, 2), (6, 5), (1, 1), (2, 3)])
def test_its_rule_is_the_sorted_trimmed_mean_and_wild_clients_do_not_move_it(
    installed, clients, trim
):
    random = np.random.default_rng(clients)
    values = random.normal(size=(clients, 4, 3))
    updates = [Update.of({"w": x}, random.integers(1, 99)) for x in values]
    drop = min(trim, (clients - 1) // 2)
    wanted = np.sort(values, axis=0)[drop : clients - drop].mean(axis=0)
    made = installed.trimmed_mean(iter(updates), trim)["w"]
    np.testing.assert_allclose(made, wanted, rtol=1e-12, atol=1e-12)
    for i in range(drop):
        updates[i] = Update.of({"w": np.full((4, 3), (-1.0) ** i * 1e9)}, 1)
    made = installed.trimmed_mean(iter(updates), trim)["w"]
    honest = values[drop:]
    assert (made >= honest.min(axis=0) - 1e-6).all()
    assert (made <= honest.max(axis=0) + 1e-6).all()


def test_a_package_that_came_with_the_app_is_not_imported(recipe, tmp_path, monkeypatch):
    """A FAB's folder is first on a node's path; a package there runs no line of its code."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    app = tmp_path / "home" / "apps" / "somebody.app.1.0.0.abc"
    (app / "pushed_pkg").mkdir(parents=True)
    (app / "pushed_pkg" / "__init__.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(app))
    config = recipe(client="pushed_pkg:Client", rounds=1)
    grid = InProcessGrid(client_app.app, 1, config.flat())
    from flwr.app import Message, RecordDict

    (reply,) = grid.send_and_receive([Message(RecordDict(), 1000, "query.properties")])
    assert "code that a coordinator sends is not run" in reply.error.reason
    assert "pushed_pkg" not in sys.modules


def fedloom(*arguments: str | Path, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "fedloom.simulations", *map(str, arguments)]
    seen = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=seen)


@pytest.mark.slow
def test_pip_installs_it_and_it_runs_on_ray_with_the_bits_of_in_process(recipe, tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)  # setuptools leaves build/ behind
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--disable-pip-version-check", "--target", str(target), str(source)]
    subprocess.run(pip, check=True, capture_output=True)
    assert (target / "trimmed_lora" / "strategy.py").exists()
    config = recipe_of(recipe, rounds=1, clients__count=2)
    written = tmp_path / "r.toml"
    written.write_text(toml_lines(config.flat()))
    assert fedloom("run", written, path=tmp_path / "nowhere").returncode == 2
    misspelt = fedloom("run", written, "--set", "custom.trmi=2", path=target)
    assert misspelt.returncode == 2
    assert "did you mean trim?" in misspelt.stderr
    for name in ("ray", "inprocess"):
        done = fedloom("run", written, "--runtime", name, "--name", name, path=target)
        assert done.returncode == 0, done.stdout + done.stderr
        trained = [r for r in rows(tmp_path / name, "metrics") if r["phase"] == "train"]
        assert [row["moved"] > 0 for row in trained] == [True] * 2
    digests = {(tmp_path / n / "adapter/digest.txt").read_text() for n in ("ray", "inprocess")}
    assert len(digests) == 1

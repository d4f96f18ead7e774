# SPDX-License-Identifier: Apache-2.0
"""``fedloom doctor`` tells what stands in a recipe's way, and its exit code tells the truth."""

from __future__ import annotations

from importlib import resources

import pytest

from fedloom.models import tiny
from fedloom.simulations.cli import main

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")
RECIPES = sorted(
    file.name.removesuffix(".toml")
    for file in resources.files("fedloom.simulations").iterdir()
    if file.name.endswith(".toml")
)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["doctor", *arguments])
    return int(left.value.code or 0)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_shipped_recipe_is_valid(recipe, capsys):
    call(recipe)
    assert "valid" in capsys.readouterr().out


def test_a_tiny_model_needs_nothing(capsys):
    assert call("fednl", "--set", "model.source=tiny:llama") == 0
    assert "problem" not in capsys.readouterr().out


def test_a_model_that_is_here_is_counted(tmp_path, capsys):
    tiny.build("llama").save_pretrained(tmp_path)
    assert call("fednl", "--set", f"model.source=path:{tmp_path}") == 0
    said = capsys.readouterr().out
    assert "0 M parameters" in said
    assert "GB before they work" in said


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("clients.cpus=4096", "4096 a client"),
        ("clients.gpus=4096.0", "4096 a client"),
        ("model.source=path:nowhere", "not a saved model"),
    ],
)
def test_what_cannot_run_is_a_problem(setting, said, capsys):
    assert call("fednl", "--set", "model.source=tiny:llama", "--set", setting) == 1
    shown = capsys.readouterr().out
    assert "problem" in shown
    assert said in " ".join(shown.split())


def test_a_model_to_be_fetched_is_a_note_and_nothing_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path))
    assert call("fednl") == 0
    assert "the first run fetches it" in " ".join(capsys.readouterr().out.split())
    assert not list(tmp_path.iterdir())


def test_a_bad_recipe_is_refused(capsys):
    assert call("fednl", "--set", "rounds=0") == 2
    assert "rounds = 0" in capsys.readouterr().err


def test_no_weights_are_refused(tmp_path, capsys):
    tiny.build("llama").config.save_pretrained(tmp_path)
    assert call("fednl", "--set", f"model.source=path:{tmp_path}") == 2
    assert "no safetensors" in capsys.readouterr().err

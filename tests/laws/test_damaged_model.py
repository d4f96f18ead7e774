"""A base model whose file was damaged on disk: named in one line, and nothing is trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom.models.base import forget_bases
from fedloom.simulations.runner import run_recipe

from rooms import save_with_tokenizer
from runs import rows


@pytest.fixture
def saved(tmp_path) -> Path:
    """A tiny model with a byte for each token, as ``save_pretrained`` writes them."""
    return save_with_tokenizer(tmp_path / "model", "llama")


def test_a_run_on_a_damaged_model_fails_with_its_name_and_runs_once_mended(
    recipe, saved, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("FEDLOOM_CACHE", str(tmp_path / "cache"))
    file = saved / "model.safetensors"
    whole = file.read_bytes()
    config = recipe(rounds=1, clients__count=2, model__source=f"path:{saved}", train__max_steps=1)
    for name, damaged in (("half", whole[: len(whole) // 2]), ("head", b"\xff" * 8 + whole[8:])):
        file.write_bytes(damaged)
        forget_bases()
        assert run_recipe(config.replaced(name=name), runtime="inprocess") != 0
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert "cannot be" in said
        assert "model" in said
        assert not (tmp_path / name / "adapter").exists()
        ends = [row for row in rows(tmp_path / name, "events") if row["event"] == "end"]
        assert [row["status"] for row in ends] == ["failed"]
    file.write_bytes(whole)
    assert run_recipe(config.replaced(name="mended"), runtime="inprocess") == 0

"""Small real pieces that many tests share: a question file, a recipe over a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.clients.workbench import release
from fedloom.config import RunConfig
from fedloom.data import mmlu
from fedloom.data.niah.words import WordLists, load_words
from fedloom.flat import kebab

import hay

_WORDS = ("amber", "brook", "cedar", "dune", "ember", "fjord", "grove", "harbor", "inlet", "kelp")


def write_questions(path: Path, rows_a_client: int = 12) -> Path:
    """Write made-up questions in MMLU's columns; the gold letter follows a rule worth learning."""
    random = np.random.default_rng(7)
    lines = []
    for _, subjects in mmlu.CLIENTS:
        for i in range(rows_a_client):
            choices = [str(word) for word in random.choice(_WORDS, 4, replace=False)]
            text = f"{i} {random.choice(_WORDS)}?"
            row = {
                "question": text,
                "subject": subjects[i % len(subjects)],
                "choices": choices,
                "answer": int(np.argmin(choices)),
            }
            lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_questions(tmp_path_factory.mktemp("questions") / "mmlu.jsonl")


@pytest.fixture
def recipe(questions: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """``recipe(lora__rank=4)``: a two-round run on tiny:llama in seconds."""

    def build(**changes: bool | int | float | str) -> RunConfig:
        small = {
            "model__source": "tiny:llama",
            "data__source": f"path:{questions}",
            "data__min_train": 4,
            "data__min_test": 2,
            "output": str(tmp_path),
            "rounds": 2,
            "train__max_steps": 2,
            "memory__chunk": 16,
        }
        return RunConfig().replaced(**{**small, **changes})

    return build


@pytest.fixture
def digits(tmp_path: Path) -> Callable[..., RunConfig]:
    """``digits(clients__count=9)``: FAAST over handwritten digits, whose pixels are the keys."""

    def build(**changes: bool | int | float | str) -> RunConfig:
        small = {
            "method": "faast",
            "name": "faast",
            "rounds": 1,
            "data__task": "classes",
            "data__source": "packaged:digits",
            "data__split": "dirichlet",
            "data__min_test": 1,
            "faast__encoder": "pixels",
            "output": str(tmp_path),
            "model__device": "cpu",
        }
        flat = {**small, **changes}
        # All at once: method and task stand or fall together.
        return RunConfig.from_flat({kebab(k.replace("__", ".")): v for k, v in flat.items()})

    return build


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> WordLists:
    """Read a small wheel of made-up words in place of the packaged one, for this process."""
    with pytest.MonkeyPatch.context() as patch:
        hay.shelve_words(tmp_path_factory.mktemp("cache"), patch)
        return load_words()


@pytest.fixture(scope="session")
def filler(words: WordLists, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A text source of made-up prose; with ``words``, all that needle rows are made of."""
    return f"path:{hay.write_works(tmp_path_factory.mktemp('hay'))}"


@pytest.fixture(autouse=True)
def _a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread, a home for its clients, and no adapter left on the base model."""
    torch.set_num_threads(1)
    monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "clients"))
    yield
    release()

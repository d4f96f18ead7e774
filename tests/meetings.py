"""Tiny models of several architectures that meet in one federation, with fusers made of noise."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from fedloom.adapters.fuser_files import card_of, save_fuser
from fedloom.config import RunConfig

from rooms import fuser_of

MODELS = ("llama", "qwen3", "qwen2")


def write_fusers(folder: Path, models=MODELS, pairs=None) -> Path:
    """Save the fuser of every ordered pair, or of some."""
    for sender, receiver in pairs or itertools.permutations(models, 2):
        fuser = fuser_of(sender, receiver, dtype="float32")
        card = card_of(fuser, f"tiny:{sender}", f"tiny:{receiver}", scores={"gain": 0.5})
        save_fuser(folder / f"{sender}-{receiver}.safetensors", fuser, card)
    return folder


def meeting_of(questions: Path, fusers: Path, output: Path, **changes) -> RunConfig:
    """Return the recipe of a federation of all three, two questions each."""
    flat = {
        "method": "fedrefine",
        "name": "fedrefine",
        "rounds": 1,
        "refine.models": ",".join(f"tiny:{family}" for family in MODELS),
        "refine.fusers": str(fusers),
        "refine.questions": 2,
        "data.source": f"path:{questions}",
        "data.min-train": 4,
        "data.min-test": 2,
        "clients.count": 3,
        "output": str(output),
    }
    return RunConfig.from_flat({**flat, **changes})


def events(folder: Path, name: str) -> list[dict]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == name]

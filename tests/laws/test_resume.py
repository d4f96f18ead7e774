"""A run that is killed anywhere and goes on ends as if nothing had been: to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord

from fedloom.clients.workbench import release
from fedloom.strategies.checkpoint import Checkpoint
from fedloom.strategies.faast import FAAST, WEIGHTS
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster
from fedloom.wire import Manifest

from crashes import left, run_with_crashes, small, told
from fast import upload
from runs import rows

# Every phase of a round is hit by one method or another; what is not here is a file's name.
CRASHES = {
    "fold": ("events 2 reply train", 2),
    "begin": ("events 2 phase train", 1),
    "asked": ("ledger 3 down train", 2),
    "adapter": ("digest.txt", 2),
    "kept, not told": ("metrics 2 ", 1),
    "scores": ("events 2 reply evaluate", 1),
    "round": ("events 3 round", 1),
    "checkpoint": ("round-000002", 1),
    "first checkpoint": ("round-000000", 1),
    "frozen": ("events 0 reply frozen", 1),
    "last": ("round-000003", 1),
}
METHODS = {
    "mean": ({"server__rule": "mean"}, ["begin", "adapter", "asked"]),
    "fedadam": ({"baseline": "fedadam"}, ["frozen", "fold", "kept, not told"]),
    "fedavgm": ({"baseline": "fedavgm"}, ["scores", "checkpoint"]),
    "scaffold": ({"baseline": "scaffold"}, ["control-000002", "round"]),
    "ditto": ({"baseline": "ditto"}, ["first checkpoint", "personal-000002"]),
    "fedala": ({"baseline": "fedala"}, ["local-000002", "checkpoint"]),
    "fedssi": ({"baseline": "fedssi"}, ["omega-000002", "kept, not told"]),
    "fedsa-lora": ({"baseline": "fedsa-lora"}, ["adapter-000002", "scores"]),
    "flora": ({"baseline": "flora"}, ["side.safetensors", "last"]),
    "svd": ({"sampling__fraction": 0.5}, ["checkpoint", "asked", "adapter"]),
}

DEARER = {"fedavgm", "ditto", "fedala", "fedssi", "flora", "svd", "mean"}


def same(clean, crashed) -> None:
    ours, theirs = (Path(c.output) / c.name for c in (crashed, clean))
    assert left(ours / "adapter") == left(theirs / "adapter")
    for kind in ("metrics", "ledger", "events"):
        assert told(crashed, kind) == told(clean, kind), kind


@pytest.fixture
def both(questions, monkeypatch, tmp_path):
    """``both(name, crashes, **changes)``: a run without crashes and one with, each at home."""

    def run(crashes, **changes):
        made = {}
        for name, where in (("clean", []), ("crashed", crashes)):
            monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "homes" / name))
            made[name] = small(questions, tmp_path, **changes).replaced(name=name)
            run_with_crashes(made[name], where)
            release()
        for config in made.values():  # which folder it is, it tells
            events = Path(config.output) / config.name / "events.jsonl"
            events.write_text(events.read_text().replace(f"/{config.name}", "/run"))
        return made["clean"], made["crashed"]

    return run


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=pytest.mark.slow if m in DEARER else ()) for m in METHODS]
)
def test_killed_and_resumed_is_uninterrupted(method, both, tmp_path):
    changes, places = METHODS[method]
    crashes = [CRASHES.get(place, (place, 1)) for place in places]
    clean, crashed = both(crashes, **changes)
    same(clean, crashed)
    homes = [left(tmp_path / "homes" / name) for name in ("clean", "crashed")]
    assert homes[0].keys() == homes[1].keys()
    assert homes[0] == homes[1]
    folder = Path(crashed.output) / "crashed"
    resumed = [e for e in rows(folder, "events") if e["event"] == "resumed"]
    assert 1 <= len(resumed) <= len(crashes)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["round-000003.safetensors"]
    assert not list(folder.rglob(".*.[0-9]*"))


def test_faast_killed_and_resumed_is_uninterrupted(digits, tmp_path):
    """Half of the clients come in a round; the shelf runs ahead of the last whole one."""
    made = {}
    crashes = [
        ("client-000002", 1), ("total.safetensors", 2), ("weights.safetensors", 3),
        ("events 4 choice", 1), ("round-000004", 1),
    ]  # fmt: skip
    for name, where in (("clean", []), ("crashed", crashes)):
        made[name] = digits(
            name=name, rounds=4, clients__count=5, sampling__fraction=0.4, faast__keep_sums=True
        )
        run_with_crashes(made[name], where)
    clean, crashed = made["clean"], made["crashed"]
    ours, theirs = tmp_path / "crashed", tmp_path / "clean"
    for part in ("adapter", "sums"):
        assert left(ours / part) == left(theirs / part)
    assert told(crashed, "metrics") == told(clean, "metrics")

    def sent(config, kind: str) -> list[dict]:
        """Without framing: how many items had to be encoded again is told in a varint."""
        kept = [row for row in told(config, kind) if row.get("dtype") != "framing"]
        return [{k: v for k, v in row.items() if k not in ("bytes-up", "folder")} for row in kept]

    for kind in ("events", "ledger"):
        assert sent(crashed, kind) == sent(clean, kind)
    assert len([e for e in rows(ours, "events") if e["event"] == "resumed"]) >= 3


def test_new_rows_in_a_torn_round_still_find_the_old_sums(digits, tmp_path):
    """What a revision replaces is needed until no checkpoint can call for it."""
    random = np.random.default_rng(3)
    config = digits(rounds=5, clients__count=2, faast__keep_sums=True, faast__alphas="0.5")
    manifest = Manifest.of(
        {WEIGHTS: np.zeros((6, 2))}, method="faast", version="0", base="0" * 64, tokenizer=""
    )
    keys, values = random.normal(size=(90, 6)), np.eye(2)[random.integers(2, size=90)]

    def process() -> FAAST:
        return FAAST(config, manifest, Roster({0: 10, 1: 11}, {}), Journal(tmp_path / "run"))

    def fold(made: FAAST, part: slice, origin: int, revision: int) -> np.ndarray:
        made._revisions[origin] = revision
        return made.fold([upload(keys[part], values[part], origin)], {})[WEIGHTS]

    first = process()
    fold(first, slice(0, 30), 0, 1)
    fold(first, slice(30, 60), 1, 1)
    first.whole(1, ArrayRecord())
    held = Checkpoint(
        round=1, arrays={}, parts={n: p.state() for n, p in first.parts.items()}, about={}
    )
    wanted = fold(first, slice(60, 90), 0, 2)  # and here it is killed
    path = tmp_path / "held.safetensors"
    path.write_bytes(held.to_bytes())
    second = process()
    second.resume(Checkpoint.read(path), [])
    assert (fold(second, slice(60, 90), 0, 2) == wanted).all()
    assert second.shelf.find(0, 1) is not None
    second.whole(2, ArrayRecord())
    second.whole(3, ArrayRecord())
    assert second.shelf.find(0, 1) is None
    assert second.shelf.find(0, 2) is not None

"""One file a client, in one folder or each on its own node: the same clients, and the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict

from fedloom import holdings
from fedloom.clients.bridge import with_own_rows
from fedloom.config import RunConfig
from fedloom.data import by_file
from fedloom.data.partition import client_rows
from fedloom.errors import Refusal
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on

from runs import adapter_of, equal, rows


@pytest.fixture
def shares(questions: Path, tmp_path: Path) -> Path:
    """Two owners' files, of 30 rows each; only the folder knows both."""
    folder = tmp_path / "shares"
    folder.mkdir()
    lines = questions.read_text().splitlines()
    (folder / "b.jsonl").write_text("\n".join(lines[30:60]) + "\n")
    (folder / "a.jsonl").write_text("\n".join(lines[:30]) + "\n")
    return folder


class OwnRows(InProcessGrid):
    """Nodes that were started with ``data``."""

    def __init__(self, config: RunConfig, files: list[Path]) -> None:
        super().__init__(client_app.app, len(files), config.flat())
        for context, file in zip(self._contexts.values(), files, strict=True):
            context.node_config["data"] = str(file)


def node(config: RunConfig, data: str) -> Context:
    place = {"partition-id": 1, "num-partitions": 2, "data": data}
    return Context(1, 7, place, RecordDict(), dict(config.flat()))


def test_nodes_with_own_files_train_what_a_simulation_of_the_folder_does(recipe, shares, tmp_path):
    small = {"data__split": "files", "clients__count": 2, "rounds": 1}
    here = recipe(**small, data__source=f"path:{shares}", name="folder")
    run_in_process(here)
    there = recipe(**small, data__source="path:not-on-this-machine", name="nodes")
    assert there.digest() == here.digest()
    serve_on(OwnRows(there, sorted(shares.iterdir())), server_app.app, there)
    assert equal(adapter_of(here), adapter_of(there))
    scores = [
        [
            (r["partition"], r["gold-ce-sum"])
            for r in rows(tmp_path / n, "metrics")
            if "gold-ce-sum" in r
        ]
        for n in ("folder", "nodes")
    ]
    assert scores[0] == scores[1]
    _counts_and_a_hash(tmp_path / "nodes", shares)


def _counts_and_a_hash(run: Path, shares: Path) -> None:
    """Look at what the server learnt and kept of the rows."""
    assert not (run / "partition.json").exists()  # it would name rows by their hashes
    (event,) = [e for e in rows(run, "events") if e["event"] == "nodes"]
    for index, said in enumerate(event["nodes"]):
        assert said["name"] == f"node {index + 1}"
        assert (said["train"], said["test"]) == (25, 5)
        assert len(said["held"]) == 64
    assert event["nodes"][0]["held"] != event["nodes"][1]["held"]
    kept = "".join(file.read_text() for file in run.glob("*.json*"))
    for file in shares.iterdir():
        assert str(file) not in kept
        for line in file.read_text().splitlines():
            assert json.loads(line)["question"] not in kept


def test_a_node_knows_of_the_others_only_that_they_are_elsewhere(recipe, shares):
    config = recipe(data__split="files", clients__count=2)
    mine = with_own_rows(config, node(config, str(shares / "b.jsonl")))
    found, partition = holdings.holdings(mine)
    train, test = client_rows(partition, found, 1)
    both, whole = holdings.holdings(config.replaced(data__source=f"path:{shares}"))
    assert (train, test) == client_rows(whole, both, 1)
    with pytest.raises(Refusal, match="on another node lacks 1 of its rows"):
        client_rows(partition, found, 0)


def test_labelled_files_are_dealt_out_alike_and_need_every_class(digits, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, words in (("x", "red green blue"), ("y", "one two three")):
        table = [
            json.dumps({"text": f"{word} {n}", "label": label})
            for n, word in enumerate(words.split() * 4)
            for label in ("good", "bad")
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(table))
    small = {"data__split": "files", "data__min_train": 1, "clients__count": 2}
    config = digits(**small, data__source=f"path:{folder}")
    items, whole = holdings.holdings(config)
    mine = with_own_rows(digits(**small), node(config, str(folder / "y.jsonl")))
    own_items, partition = holdings.holdings(mine)
    assert client_rows(partition, own_items, 1) != ([], [])
    names = [[i.row() for i in side] for side in client_rows(partition, own_items, 1)]
    assert names == [[i.row() for i in side] for side in client_rows(whole, items, 1)]
    (folder / "z.jsonl").write_text((folder / "y.jsonl").read_text().replace("bad", "odd"))
    with pytest.raises(Refusal, match="every file needs a row of each class"):
        by_file.holdings(config.data, seed=5)


def test_own_rows_are_not_taken_nor_left_aside_without_a_word(recipe, shares):
    dealt = recipe()
    with pytest.raises(Refusal, match="has rows of its own and data"):
        with_own_rows(dealt, node(dealt, str(shares / "a.jsonl")))
    forged = recipe(data__split="files", data__source="own:0:/etc/passwd")
    with pytest.raises(Refusal, match="only a node itself may say that"):
        with_own_rows(forged, node(forged, ""))


@pytest.mark.parametrize("source", ["packaged:mmlu-dev", "path:absent"])
def test_files_need_a_folder_of_tables(recipe, source):
    with pytest.raises(Refusal, match="expected path:FOLDER with a table"):
        holdings.holdings(recipe(data__split="files", data__source=source))


def test_empty_folder_is_refused(recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="holds no tables"):
        holdings.holdings(recipe(data__split="files", data__source=f"path:{tmp_path / 'empty'}"))

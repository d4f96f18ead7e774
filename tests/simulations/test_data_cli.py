"""``fedloom data`` and a run over needles, from the recipe to the folder that it leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedloom.config import RunConfig
from fedloom.data.partition import Partition
from fedloom.flat import toml_lines
from fedloom.holdings import holdings
from fedloom.simulations.cli import main
from fedloom.simulations.runner import preflight, with_absolute_paths

from runs import METRICS_THAT_MAY_LEAVE, recorded, rows

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")


@pytest.fixture
def needles(recipe, filler) -> RunConfig:
    return recipe(
        data__task="niah",
        niah__filler=filler,
        niah__kinds="passkey,counter",
        niah__train_rows=8,
        niah__train_tokens_min=600,
        niah__train_tokens_max=640,
        niah__test_rows=4,
        niah__test_tokens="640,800",
        clients__count=2,
        rounds=1,
    )


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return int(left.value.code or 0)


def test_files_are_the_rows_and_regenerate(needles, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(toml_lines(needles.flat()))
    printed = []
    for folder in ("one", "two"):
        assert (
            call("data", "niah", str(tmp_path / "r.toml"), "--write", str(tmp_path / folder)) == 0
        )
        printed.append(capsys.readouterr().out.replace(folder, "*"))
    assert printed[0] == printed[1]
    names = {
        f"{kind}-{side}.jsonl" for kind in ("passkey", "counter") for side in ("train", "test")
    }
    assert {path.name for path in (tmp_path / "one").iterdir()} == names
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    lines = (tmp_path / "one" / "counter-train.jsonl").read_text().splitlines()
    _, partition = holdings(needles)
    assert [json.loads(line)["row"] for line in lines] == [*partition.clients[1].train]
    assert partition.digest() in printed[0]


def test_ruler_files(filler, tmp_path, capsys):
    arguments = ("--tokens", "3000", "--rows", "2", "--model", "tiny:llama", "--text", filler)
    assert call("data", "ruler", "--task", "single_1", "--write", str(tmp_path), *arguments) == 0
    lines = (tmp_path / "niah_single_1-3000.jsonl").read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    assert call("data", "ruler", "--task", "single", "--write", str(tmp_path), *arguments) == 2
    assert "RULER task" in capsys.readouterr().err


def test_partition_of_needles_and_a_manifest(needles, tmp_path, capsys):
    (tmp_path / "r.toml").write_text(toml_lines(needles.flat()))
    manifest = tmp_path / "p.json"
    assert call("partition", str(tmp_path / "r.toml"), "--write", str(manifest)) == 0
    out = capsys.readouterr().out
    assert "Passkey" in out
    assert "Counter state" in out
    assert Partition.from_json(manifest.read_text()) == holdings(needles)[1]
    assert "Officer" not in manifest.read_text()
    preflight(needles.replaced(data__manifest=str(manifest)), "inprocess")
    with pytest.raises(ValueError, match="partitions differ in seed"):
        preflight(needles.replaced(data__manifest=str(manifest), seed=1), "inprocess")
    with pytest.raises(ValueError, match="niah has 2 clients"):
        preflight(needles.replaced(clients__count=3), "inprocess")


def test_filler_paths_are_made_absolute(needles, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(needles.replaced(niah__filler="path:hay"))
    assert config.niah.filler == f"path:{tmp_path / 'hay'}"


def test_needles_run_in_process(needles):
    grid = recorded(needles)
    assert all(reply.has_content() for reply in grid.answered)
    sent = {
        re.sub(r"^(local-)?depth-\d+-", "", key)
        for reply in grid.answered
        for record in reply.content.metric_records.values()
        for key in record
    }
    assert {"distance-sum", "chance-sum"} <= sent  # sums by depth, no row
    sent -= {"examples", "distance-sum"}
    assert sent - {f"local-{key}" for key in METRICS_THAT_MAY_LEAVE} <= METRICS_THAT_MAY_LEAVE
    folder = Path(needles.output) / needles.name
    assert Partition.from_json((folder / "partition.json").read_text()) == holdings(needles)[1]
    assert rows(folder, "events")[-1]["status"] == "completed"
    for message in grid.answered:  # no text leaves but the partition's own, which is hashes
        assert "Officer" not in str(message.content)

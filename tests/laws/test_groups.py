# SPDX-License-Identifier: Apache-2.0
"""Nodes with different encoders in one run: each encoder's group is as if it were alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from made_run import page_of
from safetensors.numpy import load_file

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations import client_app, server_app
from fedloom.simulations.cli import main
from fedloom.simulations.findings import report_data
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on
from fedloom.simulations.progress import Picture, plain_lines
from fedloom.simulations.report import summary, write_report
from fedloom.strategies.checkpoint import Checkpoint
from fedloom.strategies.shelf import SumsShelf

from crashes import left, run_with_crashes, told
from fast import off, weights_of
from runs import Recorder, rows

A, B = "pixels", "relu:32:pixels"
NODES = {A: [0, 2, 4], B: [1, 3]}
WIDTH = {A: 64, B: 32}


class Some(InProcessGrid):
    """Nodes of some partitions only, told what their ``node_config`` says besides."""

    def __init__(self, config, partitions, **own) -> None:
        super().__init__(client_app.app, config.clients.count, config.flat())
        self._contexts = {n: c for n, c in self._contexts.items() if n - 1000 in partitions}
        for node, context in self._contexts.items():
            context.node_config |= own.get(f"node_{node - 1000}", {})


def folder_of(config) -> Path:
    return Path(config.output) / config.name


def by_encoder(config) -> dict[str, Path]:
    """Return each group's folder."""
    (roll,) = [e for e in rows(folder_of(config), "events") if e["event"] == "groups"]
    return {g["encoder"]: folder_of(config) / "groups" / g["group"] for g in roll["groups"]}


def weights_in(folder: Path) -> np.ndarray:
    return load_file(folder / "adapter/weights.safetensors")["weights"]


def small(output: Path, **changes) -> RunConfig:
    flat = {"method": "faast", "name": "mixed", "rounds": 1, "clients.count": 5}
    flat |= {"data.task": "classes", "data.source": "packaged:digits", "data.split": "dirichlet"}
    flat |= {"data.min-test": 1, "faast.encoders": f"{A}, {B}", "faast.keep-sums": True}
    flat |= {"output": str(output), "model.device": "cpu", "sampling.wait-seconds": 0.0}
    return RunConfig.from_flat(flat).replaced(**changes)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[RunConfig, Recorder]:
    """Five owners of digits, two encoders, all that crossed."""
    config = small(tmp_path_factory.mktemp("runs"))
    grid = Recorder(client_app.app, 5, config.flat())
    serve_on(grid, server_app.app, config)
    return config, grid


@pytest.mark.parametrize("encoder", [A, B])
def test_a_group_is_a_run_of_its_own(mixed, encoder):
    """Weights, choice, scores and bytes: to the bit those of a run that never met the others."""
    config, _ = mixed
    alone = config.replaced(name=f"alone-{WIDTH[encoder]}", faast__encoder=encoder,
                            faast__encoders="")  # fmt: skip
    serve_on(Some(alone, NODES[encoder]), server_app.app, alone)
    ours = by_encoder(config)[encoder]
    assert (weights_in(ours) == weights_of(alone)).all()
    assert left(ours / "adapter") == left(folder_of(alone) / "adapter")
    assert left(ours / "sums") == left(folder_of(alone) / "sums")
    assert (ours / "manifest.json").read_text() == (folder_of(alone) / "manifest.json").read_text()
    for kind in ("metrics", "ledger", "events"):
        mine = [
            {k: v for k, v in row.items() if k != "group"} | (
                {"event": "round"} if row.get("event") == "group-round" else {}
            )
            for row in told(config, kind) if row.get("group") == ours.name
        ]  # fmt: skip
        theirs = [
            row for row in told(alone, kind)
            if row.get("phase") != "properties"
            and row.get("event") not in ("start", "nodes", "client-state", "end")
        ]  # fmt: skip
        assert [*map(_unweighed, mine)] == [*map(_unweighed, theirs)], kind


def _unweighed(row: dict) -> dict:
    """Leave out bytes of what hangs on the process: seconds, pids, what it had encoded before."""
    framing = row.get("dtype") == "framing"
    return {k: v for k, v in row.items() if k != "bytes-up" and not (k == "bytes" and framing)}


def test_no_message_of_a_group_holds_an_array_of_the_other(mixed):
    config, grid = mixed
    width = {p: WIDTH[encoder] for encoder, ps in NODES.items() for p in ps}
    manifests = {WIDTH[e]: json.loads(_event(config, "groups"))[e] for e in NODES}
    seen = set()
    for sent, answer in zip(grid.sent, grid.answered, strict=True):
        d = width[sent.metadata.dst_node_id - 1000]
        said = border.config_of(sent.content)
        assert said.get("manifest", manifests[d]) == manifests[d]
        for way, records in (("down", sent.content), ("up", answer.content)):
            for record in records.array_records.values():
                for name, array in border.unpack_arrays(record).items():
                    sizes = {"weights": (d, 10), "cross": (d, 10), "gram": (d * (d + 1) // 2,)}
                    if name in sizes:
                        assert array.shape[-len(sizes[name]) :] == sizes[name]
                        seen.add((way, name, d))
    kinds = [("down", "weights"), ("up", "weights"), ("up", "cross"), ("up", "gram")]
    assert seen == {(*kind, d) for kind in kinds for d in (64, 32)}


def _event(config, name: str) -> str:
    found = [e for e in rows(folder_of(config), "events") if e["event"] == name][-1]
    return json.dumps({g["encoder"]: g["manifest"] for g in found["groups"]})


def test_over_all_every_test_row_counts_the_same(mixed):
    config, _ = mixed
    done = [e for e in rows(folder_of(config), "events") if e["event"] == "round"][-1]
    scored = [r for r in rows(folder_of(config), "metrics") if r["phase"] == "evaluate"]
    right, count, each = 0, 0, {}
    for encoder, partitions in NODES.items():
        mine = [r for r in scored if r["partition"] in partitions]
        n = sum(r["num-examples"] for r in mine)
        each[encoder] = sum(r["correct"] for r in mine) / n
        right, count = right + each[encoder] * n, count + n
    assert {g["encoder"]: g["row-accuracy"] for g in done["groups"]} == pytest.approx(each)
    assert done["row-accuracy"] == pytest.approx(right / count)
    assert done["accuracy"] == pytest.approx(
        np.mean([r["correct"] / r["num-examples"] for r in scored])
    )
    assert done["bytes-up"] == sum(r["bytes"] for r in rows(folder_of(config), "ledger")
                                   if (r["round"], r["direction"]) == (1, "up"))  # fmt: skip


def test_screen_page_and_summary_tell_the_groups(mixed):
    config, _ = mixed
    picture, lines = Picture(), []
    for event in rows(folder_of(config), "events"):
        picture.take(event)
        lines += plain_lines(event, picture)
    assert f"2 groups: 3 nodes with {A}, 2 with {B}" in lines
    assert any(line.startswith("round 1/1: ") and "% of all rows" in line for line in lines)
    one, two = (by_encoder(config)[e].name for e in (A, B))
    write_report(folder_of(config))
    page = page_of(folder_of(config))
    for words in ("Frozen encoders", f"Group {one}: {A}", f"Group {two}: {B}", "1 20093.393.2"):
        assert words in page.text.replace("\N{NARROW NO-BREAK SPACE}", " "), words
    fast = summary(report_data(folder_of(config)))["fast-weights"]
    assert [(g["encoder"], g["keys"], g["partitions"]) for g in fast["groups"]] == [
        (A, 64, NODES[A]), (B, 32, NODES[B]),
    ]  # fmt: skip
    assert 0.85 < fast["groups"][1]["row-accuracy"] < fast["row-accuracy"]


def test_forgetting_a_client_leaves_the_other_group_alone(mixed, capsys):
    config, _ = mixed
    folders = by_encoder(config)
    before = left(folders[A])
    for client, code in ((9, 2), (3, 0)):
        with pytest.raises(SystemExit) as end:
            main(["faast", "forget", str(folder_of(config)), f"--client={client}", "--revision=1"])
        assert int(end.value.code or 0) == code
    assert "no group's sums; expected one of 0, 1, 2, 3, 4" in capsys.readouterr().err
    assert left(folders[A]) == before
    (proof,) = map(json.loads, (folder_of(config) / "forgotten.jsonl").read_text().splitlines())
    assert (proof["group"], proof["clients-left"]) == (folders[B].name, 1)
    assert proof["weights-after"] == (folders[B] / "adapter/digest.txt").read_text().strip()
    (kept,) = (folder_of(config) / "checkpoints").iterdir()
    last = Checkpoint.read(kept)
    for encoder, clients in {A: ["0", "2", "4"], B: ["1"]}.items():
        part, folder = last.part(f"{folders[encoder].name}.sums"), folders[encoder]
        assert sorted(part.tree["clients"]) == clients
        assert (last.arrays[f"{folder.name}/weights"] == weights_in(folder)).all()
        total = {f"sum/{n}": a for n, a in _total(folder).sums.items()}
        assert all((part.arrays[name] == array).all() for name, array in total.items())


def _total(folder: Path):
    return SumsShelf(folder / "sums").restore()[0].total


def test_one_encoder_in_the_list_is_a_run_as_ever(tmp_path):
    listed = small(tmp_path, faast__encoders=A, clients__count=2)
    plain = listed.replaced(name="plain", faast__encoder=A, faast__encoders="")
    for config in (listed, plain):
        run_in_process(config)
    names = [sorted(str(p.relative_to(folder_of(c))) for p in folder_of(c).rglob("*"))
             for c in (listed, plain)]  # fmt: skip
    assert names[0] == names[1]
    for part in ("adapter", "sums"):
        assert left(folder_of(listed) / part) == left(folder_of(plain) / part)
    assert told(listed, "metrics") == told(plain, "metrics")


def test_a_node_names_its_own_encoder(tmp_path):
    config = small(tmp_path, faast__encoders=A, clients__count=3)
    own = {"node_1": {"encoder": B}}
    serve_on(Some(config, [0, 1, 2], **own), server_app.app, config)
    assert {e: len(weights_in(f)) for e, f in by_encoder(config).items()} == WIDTH
    one = config.replaced(name="one", faast__encoder=A, faast__encoders="")
    with pytest.raises(Refusal, match=r"partition 1 has an encoder of its own and faast\.encoders"):
        serve_on(Some(one, [0, 1], **own), server_app.app, one)
    most = one.replaced(name="most")
    serve_on(Some(most, [0, 1, 2], **own), server_app.app, most)
    (failed,) = [e for e in rows(folder_of(most), "events") if e["event"] == "client-failed"]
    assert "partition 1 has an encoder of its own" in failed["reason"]


def test_other_classes_are_refused_by_name(tmp_path):
    class Other(FAASTClient):
        def get_properties(self, config):
            said = super().get_properties(config)
            return {**said, "classes": "f" * 64} if self.partition_id == 1 else said

    app = ClientApp()
    serve(app, Other, action="faast")
    with pytest.raises(Refusal, match=r"partition 1 \(dirichlet 1\) differs in classes: ffff"):
        run_in_process(small(tmp_path, clients__count=2), app)


def test_a_group_that_cannot_go_on_is_named(tmp_path):
    """All of one encoder's nodes have too few rows: the run ends, and says whose fault it is."""
    config = small(tmp_path, clients__count=3, faast__min_count=2000)
    with pytest.raises(Exception, match=rf"group \w+ \({A}\): round 1: 0 usable replies"):
        run_in_process(config)


def test_under_masks_each_group_is_a_sum_of_its_own(tmp_path):
    bare = small(tmp_path, faast__keep_sums=False, faast__alphas="0.6", clients__count=4)
    masked = bare.replaced(name="masked", faast__shares="masked")
    for config in (bare, masked):
        run_in_process(config)
    for encoder, folder in by_encoder(masked).items():
        assert off(weights_in(folder), weights_in(by_encoder(bare)[encoder])) < 1e-6


def test_a_run_of_groups_that_is_killed_goes_on_to_the_same_bits(tmp_path):
    clean = small(tmp_path, name="clean", rounds=2, sampling__fraction=0.5)
    run_in_process(clean)
    crashed = clean.replaced(name="crashed")
    where = [("round-000001", 1), ("events 2 reply train", 1), ("ledger.json", 2)]
    run_with_crashes(crashed, where)
    assert left(folder_of(crashed) / "groups") == left(folder_of(clean) / "groups")
    for kind in ("metrics", "ledger"):
        ours, theirs = (map(_unweighed, told(config, kind)) for config in (crashed, clean))
        assert [*ours] == [*theirs], kind
    ours, theirs = ([e["event"] for e in told(c, "events")] for c in (crashed, clean))
    assert ours == theirs


@pytest.mark.slow
def test_two_language_models_learn_from_one_set_of_sentences(tmp_path):
    config = small(
        tmp_path,
        clients__count=3,
        data__source="packaged:uci-sentences",
        data__split="iid",
        data__max_train=60,
        faast__encoders="lm:tiny:llama, lm:tiny:qwen2",
    )
    run_in_process(config)
    found = by_encoder(config)
    assert found.keys() == {"lm:tiny:llama", "lm:tiny:qwen2"}
    bases = {json.loads((f / "manifest.json").read_text())["base"] for f in found.values()}
    assert len(bases) == 2

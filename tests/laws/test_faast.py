# SPDX-License-Identifier: Apache-2.0
"""FAAST's laws on the real apps, every message serialised: digits, whose pixels are the keys."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from flwr.serverapp.exception import AggregationError

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.clients.keys import key_bench
from fedloom.errors import Refusal
from fedloom.rules.solving import solve
from fedloom.rules.statistics import CROSS, GRAM, SQUARES, Gram
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on

from fast import WIRE_METRICS, encoded, least_squares, off, rows_of, weights_of
from runs import Recorder, rows


def events(config, name: str) -> list[dict]:
    folder = Path(config.output) / config.name
    return [e for e in rows(folder, "events") if e["event"] == name]


def test_a_hundred_clients_are_one(digits):
    """All through Flower's messages; the whole by LAPACK, without a sum."""
    config = digits(clients__count=100, faast__min_count=1, data__dirichlet=0.01)
    run_in_process(config)
    (done,) = events(config, "round")
    assert (done["summed-clients"], done["failed"]) == (100, 0)
    keys, values = rows_of(config, range(100))
    assert done["rows"] == len(keys) == 1200
    # kappa squared is 5e5 for alpha 1, at 1e-16 a rounding
    assert off(weights_of(config), least_squares(keys, values, done["alpha"])) < 1e-9
    one = digits(clients__count=1, name="one", faast__alphas=str(done["alpha"]))
    run_in_process(one)
    assert weights_of(one).shape == weights_of(config).shape
    assert done["accuracy"] > 0.85


def test_the_same_weights_in_any_order_and_again(digits):
    class Backwards(InProcessGrid):
        def push_messages(self, messages):
            return super().push_messages(reversed(list(messages)))

    config = digits(clients__count=7)
    for name in ("a", "b"):
        run_in_process(config.replaced(name=name))
    grid = Backwards(client_app.app, 7, config.flat())
    serve_on(grid, server_app.app, config.replaced(name="c"))
    a, b, c = (weights_of(config.replaced(name=name)) for name in "abc")
    assert (a == b).all()
    assert (a == c).all()


def test_clients_who_come_round_by_round_are_added_once(digits):
    """Half are drawn each round; whoever is in is not asked again, and all in is all at once."""
    config = digits(clients__count=6, faast__alphas="0.6", sampling__fraction=0.5, rounds=6)
    run_in_process(config)
    trained = [r["partition"] for r in rows(Path(config.output) / "faast", "metrics")
               if r["phase"] == "train"]  # fmt: skip
    assert sorted(trained) == [0, 1, 2, 3, 4, 5]
    at_once = config.replaced(name="once", rounds=1, sampling__fraction=1.0)
    run_in_process(at_once)
    assert (weights_of(config) == weights_of(at_once)).all()
    assert not events(config, "client-failed")


def test_messages_hold_listed_arrays_and_numbers_and_nothing_else(digits):
    config = digits(clients__count=4)
    grid = Recorder(client_app.app, 4, config.flat())
    serve_on(grid, server_app.app, config)
    bench = key_bench(config)
    sums = {GRAM: (64 * 65 // 2,), CROSS: (64, 10), SQUARES: (1,)}
    raw = [item.content.tobytes() for item in bench.items]
    keys = [k.tobytes() for p in range(4) for k in bench.side(p, "summed").keys]
    labels = [bench.side(p, "summed").labels for p in range(4)]
    seen = set()
    for message in grid.answered:
        kind = message.metadata.message_type
        content = message.content
        for record in content.array_records.values():
            arrays = border.unpack_arrays(record)
            seen.add((kind, tuple(sorted(arrays))))
            if kind == "train.faast":
                assert {n: a.shape for n, a in arrays.items()} == sums
        for record in content.metric_records.values():
            names = {_plain(name) for name in record}
            assert names <= WIRE_METRICS, names - WIRE_METRICS
            assert all(type(value) in (int, float) for value in record.values())
        if kind.startswith(("train", "evaluate")):
            assert not content.config_records
        wire = recorddict_to_proto(content).SerializeToString()
        assert not any(part in wire for part in (*raw, *keys))
        assert not any(part.tobytes() in wire for part in labels)
    assert seen == {
        ("train.faast", (CROSS, GRAM, SQUARES)),
        ("query.initial_adapter", ("weights",)),
    }
    down = [m for m in grid.sent if m.metadata.message_type == "train.faast"]
    assert all(not border.arrays_of(m.content) for m in down)


def _plain(name: str) -> str:
    """Take the prefix and the place of a solution off a metric's name."""
    name = name.removeprefix("local-")
    for stem in ("correct", "gold-ce-sum"):
        if name.startswith(f"{stem}-") and name.removeprefix(f"{stem}-")[0].isdigit():
            return stem
    return name


def test_a_reply_is_as_long_for_ten_rows_as_for_a_thousand(digits):
    def reply_bytes(most: int) -> tuple[int, int]:
        config = digits(clients__count=1, data__max_train=most, faast__alphas="0.6")
        client = FAASTClient(InProcessGrid(client_app.app, 1, config.flat())._contexts[1000])
        told = {"manifest": key_bench(config).manifest.digest(), "round": 1}
        arrays, count, metrics = client.fit([], told)
        named = dict(zip(client.array_names, arrays, strict=True))
        records = border.content(named, metrics={"num-examples": count, **metrics})
        counts = border.wire_bytes(records)
        return counts.pop("framing"), sum(counts.values())

    few, many = reply_bytes(10), reply_bytes(1400)
    assert few[1] == many[1]
    assert abs(few[0] - many[0]) < 16  # whole numbers are written in as many bytes as they need


def test_every_item_goes_through_the_encoder_once(digits, monkeypatch):
    config = digits(clients__count=5)
    seen = encoded(monkeypatch)
    run_in_process(config.replaced(name="counted"))
    bench = key_bench(config.replaced(name="counted"))
    assert sorted(seen) == sorted(item.content.tobytes() for item in bench.items)
    assert bench.forwards == len(bench.items)
    told = rows(Path(config.output) / "counted", "metrics")
    assert sum(row.get("forwards", 0) for row in told) == len(bench.items)


def test_no_gradient_library_is_loaded_for_pixels(digits, tmp_path):
    """A node that sums light keys needs neither torch nor peft, and no code of FedNL's."""
    from fedloom.flat import toml_lines

    path = tmp_path / "r.toml"
    path.write_text(toml_lines(digits(clients__count=2, name="light").flat()))
    script = (
        "import sys; from pathlib import Path; from fedloom.config import RunConfig;"
        "from fedloom.simulations.inprocess import run_in_process;"
        f"run_in_process(RunConfig.from_toml(Path({str(path)!r})));"
        "assert not {'torch', 'transformers', 'peft', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


class _Liar(FAASTClient):
    """Partition 0 is honest; the others each try something."""

    def fit(self, parameters, config):
        mine = self.partition_id
        if mine == 5:  # with the sums of another
            self.partition_id = 0
        arrays, examples, metrics = super().fit(parameters, config)
        self.partition_id = mine
        at = self.array_names.index(GRAM)
        if mine == 1:
            arrays[at] = np.full_like(arrays[at], np.nan)
        if mine == 2:
            arrays[at] = arrays[at].copy()
            arrays[at][1] = 1e3
        if mine == 3:
            examples = 10**6
        if mine == 4:
            arrays[at] = 100 * arrays[at]
        return arrays, examples, metrics


def test_bad_uploads_are_named_and_dropped_and_the_round_goes_on(digits):
    app = ClientApp()
    serve(app, _Liar, action="faast")
    config = digits(clients__count=8, data__split="iid", data__max_train=100, faast__alphas="0.6")
    run_in_process(config, app)
    failed = {e["partition"]: e["reason"] for e in events(config, "client-failed")}
    twin = (failed.keys() & {0, 5}).pop()  # whichever of the two came second
    assert failed.keys() == {1, 2, 3, 4, twin}
    said = ("not finite", "eigenvalue", "rows came", "trace of K'K")
    for partition, words in zip((1, 2, 3, 4), said, strict=True):
        assert words in failed[partition]
        by_itself = partition == 1  # a node does not send what is not finite
        assert (
            f"client {partition}{':' if by_itself else f' (iid {partition})'}" in failed[partition]
        )
    assert f"client {5 - twin}'s revision 1" in failed[twin]
    keys, values = rows_of(config, [0, 6, 7])
    assert off(weights_of(config), least_squares(keys, values, 0.6)) < 1e-11
    assert events(config, "end")[-1]["status"] == "completed"


def test_too_few_rows_stay_at_home(digits):
    """The key of a client with one row is the top eigenvector of its Gram: none is sent."""
    config = digits(
        clients__count=60, faast__min_count=25, data__split="iid", sampling__min_nodes=1
    )
    with pytest.raises(AggregationError, match="0 usable replies"):
        run_in_process(config)
    failed = events(config, "client-failed")
    assert len(failed) == 60
    assert all("fewer than faast.min-count = 25" in e["reason"] for e in failed)
    bench = key_bench(config)
    key = bench.side(0, "summed").unit()[0]
    leak = np.linalg.eigh(Gram.of(key[None], np.ones((1, 1))).dense())[1][:, -1]
    assert abs(leak @ key) == pytest.approx(1.0, abs=1e-12)  # why


def test_another_encoder_is_refused_before_any_sum(digits):
    class Other(FAASTClient):
        def get_properties(self, config):
            told = super().get_properties(config)
            return {**told, "base": "f" * 64} if self.partition_id == 1 else told

    app = ClientApp()
    serve(app, Other, action="faast")
    config = digits(clients__count=2)
    with pytest.raises(Refusal, match=r"partition 1 \(dirichlet 1\) differs in base"):
        run_in_process(config, app)
    client = FAASTClient(InProcessGrid(client_app.app, 1, config.flat())._contexts[1000])
    for work in (client.fit, client.evaluate):
        with pytest.raises(Refusal, match="use the same encoder, classes"):
            work([], {"manifest": "0" * 64})


def test_the_manifest_tells_encoders_apart_and_not_filters(digits):
    mine = key_bench(digits()).manifest
    other = key_bench(digits(faast__encoder="pixels:63")).manifest
    assert mine.base != other.base
    assert mine.values == other.values
    assert mine == key_bench(digits(faast__alphas="0.5")).manifest
    fewer = key_bench(digits()).classes[:9]
    changed = replace(key_bench(digits()), classes=fewer)
    assert changed.manifest.values != mine.values
    with pytest.raises(Refusal, match="no embeddings of names"):
        key_bench(digits(faast__values="labels"))


def test_the_filter_is_chosen_on_rows_that_are_in_no_sum_and_no_test(digits):
    config = digits(clients__count=5)
    run_in_process(config)
    bench = key_bench(config)
    for p in range(5):
        sides = [{r.row() for r in bench.rows(p, s)} for s in ("summed", "validation", "test")]
        assert sum(map(len, sides)) == len(set.union(*sides))
        assert len(sides[1]) == config.faast.held_out(len(sides[0]) + len(sides[1]))
    (choice,) = events(config, "choice")
    keys, values = rows_of(config, range(5))
    held = [bench.side(p, "validation") for p in range(5)]
    for told in choice["solutions"]:
        weights = least_squares(keys, values, told["alpha"])
        right = sum(((s.unit() @ weights).argmax(1) == s.labels).sum() for s in held)
        assert told["accuracy"] == pytest.approx(right / choice["rows"])
    best = max(choice["solutions"], key=lambda t: (t["accuracy"], -t["gold-ce"]))
    assert events(config, "round")[-1]["alpha"] == choice["taken"]["alpha"] == best["alpha"]


def test_one_alpha_holds_nothing_back_and_asks_nobody(digits):
    config = digits(clients__count=3, faast__alphas="0.7")
    run_in_process(config)
    assert not events(config, "choice")
    assert {e["phase"] for e in events(config, "phase")} == {"frozen", "train", "evaluate"}
    assert len(rows_of(config, range(3))[0]) == 1500


def test_forgetting_a_client_is_a_run_without_it(digits):
    """The command's weights against sums that never knew the client."""
    from fedloom.simulations.forget_cli import without
    from fedloom.strategies.shelf import SumsShelf

    config = digits(clients__count=5, faast__keep_sums=True, faast__alphas="0.6")
    run_in_process(config)
    shelf = SumsShelf(Path(config.output) / "faast" / "sums")
    found, choice = without(shelf, 2, 1)
    assert found.difference <= 1e-12
    bench, hot = key_bench(config), np.eye(10)
    gram = Gram.zero(64, 10)
    for p in (0, 1, 3, 4):
        side = bench.side(p, "summed")
        gram = gram + Gram.of(side.unit(), hot[side.labels])
    assert off(found.weights, solve(gram, alpha=choice.alpha).weights) <= 1e-12
    assert off(found.weights, weights_of(config)) > 1e-3  # it had counted
    with pytest.raises(Refusal, match="nothing was deleted"):
        without(shelf, 2, 2)

# SPDX-License-Identifier: Apache-2.0
"""Uploads that follow the letter and not the rows: how many there are, and where they lie."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.clients.keys import key_bench
from fedloom.config import FaastConfig, RunConfig
from fedloom.errors import Refusal
from fedloom.rules.statistics import CROSS, GRAM, SQUARES, Gram
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on
from fedloom.strategies.faast import FAAST, WEIGHTS
from fedloom.strategies.roster import Roster
from fedloom.wire import Manifest

from fast import least_squares, off, rows_of, weights_of
from runs import Recorder, rows


def events(config, name: str) -> list[dict]:
    folder = Path(config.output) / config.name
    return [e for e in rows(folder, "events") if e["event"] == name]


class _Liar(FAASTClient):
    """Sums of no rows of theirs."""

    def get_properties(self, config):
        told = super().get_properties(config)
        if self.partition_id == 2 and "train" in told:
            told["train"] = 10**9
        if self.partition_id == 3:
            told.pop("train", None)
        return told

    def fit(self, parameters, config):
        arrays, examples, metrics = super().fit(parameters, config)
        named = dict(zip(self.array_names, (a.copy() for a in arrays), strict=True))
        d = named[CROSS].shape[0]
        if self.partition_id == 1:  # no row's bound is broken, and no rows have these sums
            key, pull = np.ones(d) / 8, np.tile([1.0, -1.0], d // 2) / 8
            named[GRAM] = (examples * np.outer(key, key))[np.triu_indices(d)]
            named[CROSS][:] = 0.0
            named[CROSS][:, 3] = 0.9 * examples * pull
        if self.partition_id in (2, 3):
            examples = 10**9
            named[GRAM] = (np.eye(d) * examples / d)[np.triu_indices(d)]
            named[SQUARES][:] = examples
        if self.partition_id == 4:
            one = np.eye(d)[:3]
            found = Gram.of(one, np.eye(10)[:3])
            named, examples = dict(found.arrays()), 3
        return [named[n] for n in self.array_names], examples, metrics


def liars() -> ClientApp:
    app = ClientApp()
    serve(app, _Liar, action="faast")
    return app


def test_sums_that_no_rows_have_are_named_and_dropped(digits):
    config = digits(clients__count=7, data__split="iid", data__max_train=100, faast__alphas="0.6")
    run_in_process(config, liars())
    failed = {e["partition"]: e["reason"] for e in events(config, "client-failed")}
    assert failed.keys() == {1, 2, 3, 4}
    assert "client 1 (iid 1): K'V lies where K'K has no keys" in failed[1]
    for partition in (2, 3):  # whatever they told, or left out, at the roll call
        assert "1000000000 rows came, but it can have 100 to sum" in failed[partition]
    assert "client 4 (iid 4): sums over 3 rows came, fewer than faast.min-count = 8" in failed[4]
    keys, values = rows_of(config, [0, 5, 6])
    assert off(weights_of(config), least_squares(keys, values, 0.6)) < 1e-11


def test_noise_does_not_hide_a_thousand_times_too_many_rows(digits):
    class Heavy(FAASTClient):
        def fit(self, parameters, config):
            arrays, examples, metrics = super().fit(parameters, config)
            named = dict(zip(self.array_names, (a.copy() for a in arrays), strict=True))
            if self.partition_id == 1:
                named[GRAM] += (np.eye(64) * 1e4)[np.triu_indices(64)]
            if self.partition_id == 2:
                named[CROSS][:, 0] += 1e6
            return [named[n] for n in self.array_names], examples, metrics

    app = ClientApp()
    serve(app, Heavy, action="faast")
    config = digits(clients__count=4, faast__shares="private", faast__epsilon=8.0)
    run_in_process(config, app)
    failed = {e["partition"]: e["reason"] for e in events(config, "client-failed")}
    assert failed.keys() == {1, 2}
    assert "expected at most 2000 of each client" in failed[1]
    assert "K'V lies where K'K has no keys" in failed[2]


@pytest.mark.parametrize(("rows", "says"), [(10**5, "expected at most 2000"), (3, "fewer than")])
def test_a_sum_under_masks_has_no_more_rows_than_its_clients_may(digits, rows, says, monkeypatch):
    from fedloom.clients import faast

    made = faast.own_sums

    def lying(given, keys, values):
        gram = made(given, keys, values)
        share = rows / gram.count
        return Gram(share * gram.packed, share * gram.cross, float(rows), rows)

    monkeypatch.setattr(faast, "own_sums", lying)
    config = digits(clients__count=4, faast__shares="masked", faast__alphas="0.6")
    with pytest.raises(Refusal, match=rf"the sum of 4 clients.* {4 * rows} rows came, .*{says}"):
        run_in_process(config)


def strategy(properties: dict[int, dict], **flat) -> FAAST:
    manifest = Manifest.of(
        {WEIGHTS: np.zeros((4, 2))}, method="faast", version="0", base="0" * 64, tokenizer=""
    )
    head = {"method": "faast", "data.task": "classes", "faast.alphas": "0.5"}
    config = RunConfig.from_flat({**head, **flat})
    return FAAST(config, manifest, Roster({p: 1000 + p for p in properties}, properties))


def test_the_most_rows_are_the_recipes_whatever_a_client_says():
    told = {0: {"train": 10**9}, 1: {}, 2: {"train": 30}}
    assert [strategy(told)._rows_to_sum(p) for p in told] == [2000, 2000, 30]
    few = strategy(told, **{"faast.max-count": 50})
    assert [few._rows_to_sum(p) for p in told] == [50, 50, 30]
    chosen = strategy(told, **{"faast.alphas": "0.5,1", "data.max-train": 40})
    assert [chosen._rows_to_sum(p) for p in told] == [32, 32, 24]


def test_in_a_simulation_the_partition_says_how_many(digits):
    bench = key_bench(digits(clients__count=2, data__max_train=100))
    dealt = {"train": 10**9, "partition-json": bench.partition_json}
    agreed = {**dealt, "data": bench.partition.digest()}
    assert strategy({0: agreed, 1: agreed})._rows_to_sum(1) == 100
    for other in ({**dealt, "data": "0" * 64}, {**agreed, "partition-json": "no partition"}):
        assert strategy({0: other, 1: other})._rows_to_sum(1) == 2000


def test_a_client_with_more_rows_than_are_taken_says_so_itself(digits):
    config = digits(clients__count=1, faast__max_count=20)
    client = FAASTClient(InProcessGrid(client_app.app, 1, config.flat())._contexts[1000])
    with pytest.raises(Refusal, match=r"more rows to sum than faast.max-count = 20; raise it, or"):
        client.fit([], {"manifest": key_bench(config).manifest.digest(), "round": 1})
    with pytest.raises(Refusal, match=r"faast.max-count = 7: expected .*8"):
        FaastConfig(max_count=7)


def test_a_client_with_few_rows_factorises_no_more_than_them(digits, monkeypatch):
    config = digits(clients__count=1, data__max_train=30)
    client = FAASTClient(InProcessGrid(client_app.app, 1, config.flat())._contexts[1000])
    sizes, eigh = [], np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda m: sizes.append(len(m)) or eigh(m))
    _, count, told = client.fit([], {"manifest": key_bench(config).manifest.digest(), "round": 1})
    assert sizes == [count] == [24]
    assert 0 < told["local-correct"] <= told["local-num-examples"]


def test_under_noise_scores_are_of_test_rows_alone(digits):
    """Whatever filters are named, none is chosen; a server that asks all the same gets nothing."""
    config = digits(clients__count=3, faast__shares="private", faast__epsilon=4.0)
    assert len(config.faast.alpha_list) > 1
    grid = Recorder(client_app.app, 3, config.flat())
    serve_on(grid, server_app.app, config)
    bench = key_bench(config)
    asked = [m for m in grid.sent if m.metadata.message_type == "evaluate.faast"]
    assert len(asked) == 6  # frozen, and the solution
    assert not any(border.config_of(m.content).get("validation") for m in asked)
    told = [m for m in grid.answered if m.metadata.message_type == "evaluate.faast"]
    counts = sorted(int(border.metrics_of(m.content)[border.WEIGHT]) for m in told)
    tested = [len(client.test) for client in bench.partition.clients]
    assert counts == sorted(2 * tested)
    assert all(not bench.rows(p, "validation") for p in range(3))
    (nosy,) = [FAASTClient(c) for n, c in grid._contexts.items() if n == 1001]
    stack = np.zeros((1, 64, 10))
    heard = {"manifest": bench.manifest.digest(), "validation": True, "memory-shares": [1.0]}
    loss, count, metrics = nosy.evaluate([stack], heard)
    assert (loss, count, metrics["correct-0-0"], metrics["gold-ce-sum-0-0"]) == (0, 0, 0, 0)

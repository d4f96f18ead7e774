# SPDX-License-Identifier: Apache-2.0
"""One row more in a file is one row more in the sums: what epsilon is promised for."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from fedloom import holdings
from fedloom.clients.bridge import with_own_rows
from fedloom.clients.keys import key_bench
from fedloom.clients.shares import own_sums
from fedloom.config import DataConfig
from fedloom.data import steady
from fedloom.data.dealing import Item
from fedloom.errors import Refusal
from fedloom.rules.private import joint_norm
from fedloom.rules.reading import one_hot
from fedloom.rules.shares import Noise

WORDS = ["amber", "brook", "cedar", "dune", "ember", "fjord", "grove", "harbor", "inlet", "kelp"]


def table(count: int) -> list[str]:
    random = np.random.default_rng(3)
    rows = [(" ".join(random.choice(WORDS, 5)), ("good", "bad")[i % 2]) for i in range(count)]
    return [json.dumps({"text": f"{text} {i}", "label": y}) for i, (text, y) in enumerate(rows)]


@pytest.fixture
def sums_of(digits, tmp_path):
    """``sums_of(lines)``: from a node's file to what is handed to the noise."""
    made = iter(range(1000))

    def build(lines: list[str], **changes):
        folder = tmp_path / f"folder{next(made)}"  # a cache goes by names
        folder.mkdir()
        (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
        noise = {"faast__shares": "private", "faast__epsilon": 1.0}
        config = digits(
            **{"data__source": f"path:{folder}", "data__split": "files", "clients__count": 1,
               "faast__encoder": "lm:tiny:llama", **noise, **changes}
        )  # fmt: skip
        bench = key_bench(config)
        side = bench.side(0, "summed")
        return config, own_sums(config.faast, side.unit(), one_hot(side.labels, 2))

    return build


def test_one_row_moves_the_sums_no_farther_than_was_promised(sums_of):
    lines = table(60)
    config, whole = sums_of(lines)
    reach = Noise.of(config.faast).sensitivity
    assert 30 < whole.count < 60  # and the others are for testing
    items, made = holdings.holdings(config)
    tested = [at for at, item in enumerate(items) if item.name in made.clients[0].test]
    moves = []
    for at in (0, 17, 44, 59, tested[0], tested[-1]):
        _, without = sums_of(lines[:at] + lines[at + 1 :])
        _, elsewhere = sums_of([lines[at], *lines[:at], *lines[at + 1 :]])
        moves.append(joint_norm(whole - without))
        assert whole.count - without.count in (0, 1)
        # A batch has other company, which shows in the last bits of float32.
        assert moves[-1] < reach + 1e-4
        assert joint_norm(whole - elsewhere) < 1e-4
    assert max(moves) == pytest.approx(reach, abs=1e-4)  # a row of the training side
    assert min(moves) < 1e-4  # a row of the test side


def test_the_shuffle_of_a_run_without_noise_moves_them_farther(sums_of):
    """The check above can fail."""
    lines, bare = table(60), {"faast__shares": "sums", "faast__epsilon": 0.0}
    bare["faast__alphas"] = "0.6"
    (config, whole), (_, without) = sums_of(lines, **bare), sums_of(lines[:-1], **bare)
    assert not config.faast.private
    assert joint_norm(whole - without) > 2


def made_items(count: int) -> list[Item]:
    return [Item(f"row {i}", i % 2, f"{i:016x}") for i in range(count)]


def test_no_row_moves_for_another_wherever_it_stands():
    data = DataConfig(task="classes", max_test=10)
    whole = made_items(150)
    train, test = (set(side) for side in steady.sides(whole, 5, data, "a"))
    assert not train & test
    assert len(test) == 10
    assert 102 < len(train) < 148  # five in six of 150, within five standard deviations
    for row in whole:
        left = [item for item in whole if item is not row]
        found, tested = (set(side) for side in steady.sides(left, 5, data, "a"))
        assert found == train - {row}
        assert row in train or tested >= test - {row}
        assert row not in train or tested == test
    assert set(steady.sides(whole, 6, data, "a")[0]) != train  # the seed's
    backwards = steady.sides(whole[::-1], 5, data, "a")
    assert backwards == steady.sides(whole, 5, data, "a")


def test_a_cap_on_training_rows_is_refused_and_numbers_are_not_told():
    data = DataConfig(task="classes", max_train=200)
    with pytest.raises(Refusal, match=r"more training rows than data.max-train = 200: .* raise"):
        steady.sides(made_items(300), 5, data, "a")
    few = replace(data, min_train=50)
    with pytest.raises(Refusal, match=r"has fewer training rows than data.min-train = 50") as said:
        steady.sides(made_items(30), 5, few, "a")
    train = sum(steady.place(5, item.name) >= data.test_share for item in made_items(30))
    assert str(train) not in str(said.value)


def test_a_node_deals_its_file_out_as_the_simulation_does(sums_of, digits):
    config, _ = sums_of(table(40))
    folder = config.data.source.removeprefix("path:")
    place = {"partition-id": 0, "num-partitions": 1, "data": f"{folder}/a.jsonl"}
    mine = with_own_rows(
        config.replaced(data__source="path:elsewhere"),
        Context(1, 7, place, RecordDict(), dict(config.flat())),
    )
    (here,), (there,) = (holdings.holdings(c)[1].clients for c in (config, mine))
    assert (here.train, here.test) == (there.train, there.test)
    shuffled = config.replaced(faast__shares="sums", faast__epsilon=0.0)
    assert holdings.holdings(shuffled)[1].clients[0].train != here.train

# SPDX-License-Identifier: Apache-2.0
"""Labelled items are dealt out whole, once each, and as skewed as asked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from fedloom.data import dealing
from fedloom.data.labelled import SOURCES, Labelled, load_labelled
from fedloom.data.partition import Partition
from fedloom.errors import Refusal
from fedloom.holdings import holdings


def shops() -> Labelled:
    """Three shops of different sizes, a test split, and a sentence that two shops share."""
    texts = [f"text {i}" for i in range(60)] + ["text 3"]
    owners = ["b"] * 30 + ["a"] * 20 + ["c"] * 10 + ["a"]
    labels = np.array([i % 2 for i in range(60)] + [1])
    test = np.array([i % 5 == 0 for i in range(61)])
    return Labelled(texts, labels, ("no", "yes"), tuple(owners), test)


@pytest.fixture
def shop_source(monkeypatch):
    monkeypatch.setitem(SOURCES, "made:shops", shops)
    yield "made:shops"
    load_labelled.cache_clear()
    dealing.holdings.cache_clear()


@pytest.mark.parametrize("split", ["iid", "dirichlet"])
@pytest.mark.parametrize("clients", [1, 7, 100])
def test_every_item_goes_to_one_client_and_shares_are_equal(digits, split, clients):
    items, made = holdings(digits(data__split=split, clients__count=clients))
    names = [row for c in made.clients for row in (*c.train, *c.test)]
    assert sorted(names) == sorted(item.row() for item in items)
    sizes = [len(c.train) + len(c.test) for c in made.clients]
    assert max(sizes) - min(sizes) <= 1
    assert Partition.from_json(made.to_json()) == made


def test_concentration_decides_how_many_classes_a_client_has(digits):
    def classes(concentration: float) -> float:
        _, made = holdings(digits(data__dirichlet=concentration, clients__count=50))
        rows = [
            Counter(c.subjects).most_common(1)[0][1] / sum(c.subjects.values())
            for c in made.clients
        ]
        return float(np.mean(rows))

    shares = [classes(a) for a in (0.01, 0.3, 1000.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.75  # one class each, but for the last: they get what is left
    assert shares[-1] < 0.35


def test_a_split_is_its_seeds(digits):
    made = [holdings(digits(seed=seed))[1].digest() for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


def test_owners_hold_their_own_and_the_sources_test_items_test(digits, shop_source):
    config = digits(
        data__source=shop_source, data__split="natural", clients__count=3, data__min_train=4
    )
    items, made = holdings(config)
    assert [c.name for c in made.clients] == ["a", "b", "c"]
    assert [len(c.train) + len(c.test) for c in made.clients] == [20, 30, 10]
    test = {item.content for item in items if item.row() in made.clients[1].test}
    assert test == {f"text {i}" for i in range(0, 30, 5)}


def test_a_source_split_is_kept_under_skew(digits, shop_source):
    config = digits(data__source=shop_source, data__dirichlet=0.1, clients__count=4)
    items, made = holdings(config)
    source = shops()
    of_test = {str(x) for x, t in zip(source.items, source.test, strict=True) if t}
    content = {item.row(): item.content for item in items}
    assert {content[row] for c in made.clients for row in c.test} == of_test - {
        "text 3"
    }  # trained on before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data__split": "natural"}, 'set data.split = "iid" or "dirichlet"'),
        ({"clients__count": 2000}, "packaged:digits has 1797 items"),
        ({"clients__count": 300, "data__split": "iid"}, "data.min-train asks for 8"),
        ({"data__source": "packaged:digts"}, "did you mean packaged:digits"),
    ],
)
def test_what_cannot_be_dealt_is_refused(digits, changes, said):
    with pytest.raises(Refusal, match=said):
        holdings(digits(**changes))

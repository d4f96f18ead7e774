# SPDX-License-Identifier: Apache-2.0
"""The server's half alone: whatever the split, the weights are those of least squares over all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from flwr.app import ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.holdings import holdings
from fedloom.rules.reading import one_hot, unit
from fedloom.rules.statistics import Gram
from fedloom.strategies.faast import FAAST, WEIGHTS, gram_of, sums_of
from fedloom.strategies.roster import Roster
from fedloom.strategies.shelf import Choice, SumsShelf
from fedloom.wire import Manifest, Update, arrays_digest

from fast import least_squares, off, upload

D, CLASSES = 24, 5


def recipe(**flat) -> RunConfig:
    head = {"method": "faast", "data.task": "classes", "rounds": 1, "faast.alphas": "0.5"}
    return RunConfig.from_flat({**head, **flat})


def strategy(clients: int, d: int = D, classes: int = CLASSES, **flat) -> FAAST:
    arrays = {WEIGHTS: np.zeros((d, classes))}
    about = {"version": "0", "base": "0" * 64, "tokenizer": ""}
    manifest = Manifest.of(arrays, method="faast", **about)
    return FAAST(recipe(**flat), manifest, Roster({p: 1000 + p for p in range(clients)}, {}))


def solved(updates: list[Update], **flat) -> np.ndarray:
    return strategy(len(updates), **flat).fold(iter(updates), {})[WEIGHTS][0]


def pile(rows: int, seed: int, classes: int = CLASSES) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    labels = random.integers(classes, size=rows)
    keys = unit(random.normal(size=(rows, D)) + 2 * np.eye(CLASSES, D)[labels])
    return keys, one_hot(labels, CLASSES)


@settings(max_examples=25, deadline=None)
@given(
    clients=st.integers(1, 200),
    rows=st.integers(200, 400),
    seed=st.integers(0, 2**32),
    classes=st.integers(1, CLASSES),  # below CLASSES: some class that nobody has
)
def test_any_number_of_clients_in_any_order_gives_least_squares(clients, rows, seed, classes):
    keys, values = pile(rows, seed, classes)
    random = np.random.default_rng(seed)
    cuts = np.sort(random.choice(np.arange(1, rows), size=clients - 1, replace=False))
    held = itertools.pairwise([0, *cuts.tolist(), rows])
    updates = [upload(keys[a:b], values[a:b], p) for p, (a, b) in enumerate(held)]
    wanted = least_squares(keys, values, 0.5)
    found = solved(updates)
    # Sums square the condition, at most N^0.5 = 20 here, and eigh works to 1e-16 of the largest.
    assert off(found, wanted) < 1e-11
    shuffled = [updates[i] for i in random.permutation(clients)]
    assert (solved(shuffled) == found).all()  # to the bit: sums carry what rounding takes


def test_clients_of_one_row_and_of_one_class_are_no_special_case():
    keys, values = pile(120, 1)
    wanted = least_squares(keys, values, 0.5)
    single = [upload(keys[i : i + 1], values[i : i + 1], i) for i in range(120)]
    assert off(solved(single), wanted) < 1e-11
    by_class = [upload(keys[values[:, c] == 1], values[values[:, c] == 1], c) for c in range(5)]
    assert off(solved(by_class), wanted) < 1e-11


@pytest.mark.parametrize("clients", [2, 10, 50])
@pytest.mark.parametrize("concentration", [0.1, 0.01])
def test_skew_that_ruins_averaged_weights_changes_nothing(digits, clients, concentration):
    """Real digits: fails for whoever averages what clients solved, as Eq. 14 does."""
    config = digits(data__dirichlet=concentration, clients__count=clients)
    items, made = holdings(config)
    by_name = {item.row(): item for item in items}
    random = np.random.default_rng(0)
    lift = random.normal(size=(64, 200))

    def keyed(names) -> tuple[np.ndarray, np.ndarray]:
        rows = [by_name[name] for name in names]
        pixels = np.stack([row.content for row in rows]).reshape(len(rows), -1) / 255
        labels = np.array([row.label for row in rows])
        return unit(np.maximum(unit(pixels) @ lift, 0)), labels

    held = [keyed(client.train) for client in made.clients]
    keys, labels = (np.concatenate(part) for part in zip(*held, strict=True))
    test_keys, test_labels = keyed([name for client in made.clients for name in client.test])

    def right(weights: np.ndarray) -> float:
        return float(((test_keys @ weights).argmax(1) == test_labels).mean())

    updates = [upload(k, one_hot(y, 10), p) for p, (k, y) in enumerate(held)]
    federated = strategy(clients, 200, 10, **{"faast.alphas": "0.8"}).fold(updates, {})[WEIGHTS][0]
    central = least_squares(keys, one_hot(labels, 10), 0.8)
    assert off(federated, central) < 1e-11
    assert right(federated) == right(central) > 0.95
    share = [len(y) / len(labels) for _, y in held]
    own = [least_squares(k, one_hot(y, 10), 0.8) for k, y in held]
    averaged = sum(s * w for s, w in zip(share, own, strict=True))
    assert off(averaged, central) > 0.1  # this is what the bound above would catch
    if concentration == 0.01 and clients >= 10:
        assert right(averaged) < right(central) - 0.15


def test_all_filters_come_from_one_set_of_sums():
    keys, values = pile(300, 2)
    made = strategy(1, **{"faast.alphas": "0.1,0.5,1.0", "faast.ridge": 0.0})
    stack = made.fold([upload(keys, values, 0)], {})[WEIGHTS]
    for alpha, weights in zip((0.1, 0.5, 1.0), stack, strict=True):
        assert off(weights, least_squares(keys, values, alpha)) < 1e-11
    ridge = strategy(1, **{"faast.alphas": "1.0", "faast.ridge": 0.3})
    found = ridge.fold([upload(keys, values, 0)], {})[WEIGHTS][0]
    wanted = np.linalg.solve(keys.T @ keys + 0.3 * np.eye(D), keys.T @ values)
    assert off(found, wanted) < 1e-11


def test_a_reply_has_one_size_and_the_server_keeps_one_total():
    expected = sums_of(strategy(1).manifest)
    for rows in (1, 10, 10_000):
        arrays = Gram.of(*pile(rows, rows)).arrays()
        expected.check_arrays(arrays)
        assert sum(a.nbytes for a in arrays.values()) == expected.nbytes()
    made = strategy(200)
    keys, values = pile(400, 3)
    made.fold((upload(keys[i : i + 2], values[i : i + 2], i // 2) for i in range(0, 400, 2)), {})
    assert sum(a.nbytes for a in made.contributions.total.sums.values()) == expected.nbytes()
    assert made.shelf.find(7, 1) is None


def test_a_replaced_client_counts_with_its_new_rows_only():
    keys, values = pile(300, 4)
    made = strategy(2, **{"faast.keep-sums": True})
    made.fold([upload(keys[:100], values[:100], 0), upload(keys[100:200], values[100:200], 1)], {})
    made._revisions[0] = 2
    found = made.fold([upload(keys[200:], values[200:], 0)], {})[WEIGHTS][0]
    assert off(found, least_squares(keys[100:], values[100:], 0.5)) < 1e-11
    assert made.shelf.find(0, 1) is not None  # the round may have to be repeated
    made.whole(1, ArrayRecord())
    assert made.shelf.find(0, 1) is None
    assert made.shelf.find(0, 2) is not None
    careless = strategy(1)
    careless.fold([upload(keys[:100], values[:100], 0)], {})
    careless._revisions[0] = 2
    with pytest.raises(Refusal, match="were not kept"):
        careless.fold([upload(keys[100:], values[100:], 0)], {})


def test_later_rounds_ask_those_who_are_not_in_or_have_news():
    made = strategy(3)
    keys, values = pile(60, 5)
    made.fold([upload(keys[:30], values[:30], 0), upload(keys[30:], values[30:], 1)], {})
    made.roster = Roster(made.roster.nodes, {1: {"revision": 2}})
    assert [p for p in range(3) if made._has_news(p)] == [2]  # no one has what it would replace
    made.shares.given = recipe(**{"faast.keep-sums": True}).faast
    assert [p for p in range(3) if made._has_news(p)] == [1, 2]


@pytest.mark.parametrize("on_disk", [True, False])
def test_what_the_shelf_keeps_comes_back_to_the_bit(tmp_path, on_disk):
    made = strategy(2)
    keys, values = pile(60, 6)
    updates = [upload(keys[:30], values[:30], 0), upload(keys[30:], values[30:], 1)]
    made.fold(updates, {})
    shelf = SumsShelf(tmp_path / "sums" if on_disk else None)
    shelf.keep(made.contributions, Choice(0.5, 0.0, 0.0))
    shelf.put(1, 1, updates[1])
    held, choice = shelf.restore()
    assert choice == Choice(0.5, 0.0, 0.0)
    assert held.to_tree() == made.contributions.to_tree()
    assert arrays_digest(held.total.residue) == arrays_digest(made.contributions.total.residue)
    held.delete(1, 1, shelf.find(1, 1))
    assert (gram_of(held.total).packed == gram_of(updates[0]).packed).all()
    shelf.drop(1, 1)
    assert shelf.find(1, 1) is None
    if on_disk:
        (tmp_path / "sums/ledger.json").write_text("{}")
        with pytest.raises(Refusal, match="no ledger"):
            shelf.restore()

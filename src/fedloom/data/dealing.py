# SPDX-License-Identifier: Apache-2.0
"""Who holds which labelled items: by nature, in equal shares, or with skewed classes.

``dirichlet`` is the synthesis of arXiv 1909.06335, section 3: each client draws class shares around
those of the whole set, then fills an equal number of rows by them; a class that has run out leaves
its share to the others.  So there is a skew for every concentration and no client is left empty.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedloom import seeds
from fedloom.config import DataConfig
from fedloom.data.labelled import Labelled, load_labelled
from fedloom.data.partition import Client, Partition, read_partition, rows_hash
from fedloom.errors import Refusal

Indices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Item:
    """One labelled item of a set."""

    content: str | NDArray[np.uint8]
    label: int
    name: str
    """16 hex digits of a SHA-256 over content and label."""

    def row(self) -> str:
        """Identify the row by its content."""
        return self.name


@functools.lru_cache(maxsize=4)
def holdings(data: DataConfig, seed: int, clients: int) -> tuple[list[Item], Partition]:
    """Load a recipe's items and deal them out; hold the result against ``data.manifest``.

    Raises
    ------
    Refusal
        If the data cannot be had, a client has too few rows, or the manifest says otherwise.
    """
    labelled = load_labelled(data.source)
    items, kept = distinct(labelled)
    held = [np.sort(own) for own in deal(labelled, kept, data, seed, clients)]
    names = _names(labelled, kept, data, len(held))
    position = {int(index): at for at, index in enumerate(kept)}
    made = []
    for index, own in enumerate(held):
        order = seeds.generator(seed, index, "partition").permutation(own)
        train, test = sides(labelled, order, data)
        rows = [[items[position[int(i)]] for i in side] for side in (train, test)]
        made.append(client_of(names[index], rows, labelled.classes, data))
    partition = Partition(seed, data.source, rows_hash(items), tuple(made))
    if data.manifest:
        read_partition(Path(data.manifest)).check_same(partition)
    return items, partition


def deal(
    labelled: Labelled, kept: Indices, data: DataConfig, seed: int, clients: int
) -> list[Indices]:
    """Return each client's items as indices into the set.

    Raises
    ------
    Refusal
        If a natural split is asked of a set whose items have no owners, or there are fewer items
        than clients.
    """
    if data.split == "natural":
        if not labelled.owners:
            raise Refusal(
                f'data.split = "natural": nobody in particular holds the items of {data.source};'
                ' set data.split = "iid" or "dirichlet"'
            )
        owner = np.array(labelled.owners)[kept]
        return [kept[owner == name] for name in sorted(set(labelled.owners))]
    if len(kept) < clients:
        raise Refusal(f"clients.count = {clients}: {data.source} has {len(kept)} items")
    # The source's own test items are dealt apart, by the same class shares.
    test = np.zeros(len(kept), bool) if labelled.test is None else labelled.test[kept]
    sides = [kept[~test], kept[test]]
    if data.split == "iid":
        drawn = [seeds.generator(seed, n, "dealing").permutation(s) for n, s in enumerate(sides)]
        parts = [np.array_split(side, clients) for side in drawn]
    else:
        shares = _class_shares(labelled, data.dirichlet, seed, clients)
        parts = [
            _fill(labelled.labels, side, shares, seeds.generator(seed, n, "dealing"))
            for n, side in enumerate(sides)
        ]
    return [np.concatenate(own) for own in zip(*parts, strict=True)]


def _class_shares(
    labelled: Labelled, concentration: float, seed: int, clients: int
) -> NDArray[np.float64]:
    """Draw each client's class shares: ``[clients, C]``."""
    counts = np.bincount(labelled.labels, minlength=len(labelled.classes))
    centre = np.maximum(concentration * counts / counts.sum(), 1e-12)
    return seeds.generator(seed, "dirichlet").dirichlet(centre, size=clients)


def _fill(
    labels: NDArray[np.int64],
    rows: Indices,
    shares: NDArray[np.float64],
    random: np.random.Generator,
) -> list[Indices]:
    """Let the clients take rows by turns, each of a class drawn by its shares."""
    stock = [list(random.permutation(rows[labels[rows] == c])) for c in range(shares.shape[1])]
    taken: list[list[int]] = [[] for _ in shares]
    for turn in range(len(rows)):
        client = turn % len(shares)
        left = np.array([len(pile) > 0 for pile in stock])
        # The tiny addition serves those whose every class has run out.
        weights = np.where(left, shares[client] + 1e-300, 0.0)
        chosen = int(random.choice(len(stock), p=weights / weights.sum()))
        taken[client].append(int(stock[chosen].pop()))
    return [np.array(own, np.intp) for own in taken]


def distinct(labelled: Labelled) -> tuple[list[Item], Indices]:
    """Name the items and drop repetitions; return them with their indices in the set."""
    first: dict[str, int] = {}
    for index, name in enumerate(labelled.rows()):
        first.setdefault(name, index)
    items = [
        Item(labelled.items[index], int(labelled.labels[index]), name)
        for name, index in first.items()
    ]
    return items, np.array(list(first.values()), np.intp)


def _names(labelled: Labelled, kept: Indices, data: DataConfig, clients: int) -> list[str]:
    if data.split == "natural":
        return sorted({labelled.owners[i] for i in kept})
    return [f"{data.split} {index}" for index in range(clients)]


def sides(labelled: Labelled, order: Indices, data: DataConfig) -> tuple[Indices, Indices]:
    """Split one client's shuffled items for training and testing."""
    if labelled.test is not None:
        test = labelled.test[order]
        return order[~test][: data.max_train], order[test][: data.max_test]
    count = min(data.max_test, int(len(order) * data.test_share + 1e-9))
    return order[count:][: data.max_train], order[:count]


def client_of(
    name: str, rows: Sequence[Sequence[Item]], classes: tuple[str, ...], data: DataConfig
) -> Client:
    """Name one client's training and test items.

    Raises
    ------
    Refusal
        If there are too few.
    """
    train, test = rows
    for side, own, least in (("train", train, data.min_train), ("test", test, data.min_test)):
        if len(own) < least:
            raise Refusal(
                f"{name} has {len(own)} {side} rows: data.min-{side} asks for {least}; take fewer"
                f" clients, another data.split or a lower data.min-{side}"
            )
    found = Counter(classes[item.label] for item in (*train, *test))
    names = [tuple(item.name for item in own) for own in (train, test)]
    return Client(name, names[0], names[1], dict(sorted(found.items())))

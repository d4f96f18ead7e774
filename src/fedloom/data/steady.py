# SPDX-License-Identifier: Apache-2.0
"""Which side a row is on, told by the row alone: what a promise about one row needs.

A shuffle depends on how many rows there are: with one more in a file, most rows change places, some
of them sides, and sums over the training side move by far more than a row.  Here a row's place is a
hash of the seed and its own content, its side is the place's, and no row moves for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedloom import seeds
from fedloom.config import DataConfig
from fedloom.data.dealing import Item
from fedloom.errors import Refusal


def place(seed: int, row: str) -> float:
    """Return where a row of that name stands, from 0 to 1."""
    return float(seeds.split(seed, row, "side") / 2**63)


def sides(
    items: Sequence[Item], seed: int, data: DataConfig, name: str
) -> tuple[list[Item], list[Item]]:
    """Return a client's training and test items, each in the order of their places.

    A row is for testing if its place is below ``data.test-share``, so sides have about that share.
    Of the test side the first ``data.max-test`` count; the training side is whole.

    Raises
    ------
    Refusal
        If more rows are for training than ``data.max-train``, as a cap would let a row push another
        one out of the sums, or fewer than ``data.min-train``; their number is not told.
    """
    places = {item.name: place(seed, item.name) for item in items}
    ordered = sorted(items, key=lambda item: (places[item.name], item.name))
    test = [item for item in ordered if places[item.name] < data.test_share]
    train = ordered[len(test) :]
    if len(train) > data.max_train:
        raise Refusal(
            f"{name} has more training rows than data.max-train = {data.max_train}: to leave some"
            " out would tie each to the others, and noise hides one by itself; raise data.max-train"
        )
    if len(train) < data.min_train:
        raise Refusal(
            f"{name} has fewer training rows than data.min-train = {data.min_train}: give it more"
            " rows or lower data.min-train"
        )
    return train, test[: data.max_test]

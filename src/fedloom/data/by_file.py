# SPDX-License-Identifier: Apache-2.0
"""One file a client: ``data.split = "files"``, on one machine or on nodes that show no rows.

In a simulation ``data.source`` names a folder, and client k holds the k-th of its tables.  On a
node that was started with rows of its own the source is ``own:K:FILE``, which the node itself puts
in the place of what the recipe says: it knows client K and of the others only that they are
elsewhere.  Both deal a file out in the same way, so the arrays of the two runs are the same.

A row that two clients hold is seen by nobody: it may be trained on at one and tested at the other,
unless rows have their sides by themselves (``fedloom.data.steady``), the same wherever they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom import seeds
from fedloom.config import DataConfig
from fedloom.data import dealing, files, steady
from fedloom.data.dealing import Item
from fedloom.data.labelled import load_labelled
from fedloom.data.partition import Client, Partition, client_of, read_partition, rows_hash
from fedloom.data.questions import Question, distinct, load_questions
from fedloom.errors import Refusal

OWN = "own"
_ELSEWHERE = Client("on another node", ("elsewhere",), (), {})
"""Stands for a client that this node knows nothing of; asking for its rows is refused."""


def own(partition: int, path: str) -> str:
    """Name a node's own rows as a source.

    >>> own(2, "/rows.jsonl"), is_own("own:2:/rows.jsonl"), table_of("own:2:/rows.jsonl")
    ('own:2:/rows.jsonl', True, 'path:/rows.jsonl')
    """
    return f"{OWN}:{partition}:{path}"


def is_own(source: str) -> bool:
    """Say whether a source is a node's own rows."""
    return source.startswith(f"{OWN}:")


def table_of(source: str) -> str:
    """Return the source of the rows themselves."""
    return f"path:{source.split(':', 2)[2]}" if is_own(source) else source


@functools.lru_cache(maxsize=4)
def holdings(
    data: DataConfig, seed: int, by_row: bool = False
) -> tuple[Sequence[Question] | Sequence[Item], Partition]:
    """Load the files of a recipe, or this node's, and split each for training and testing.

    Parameters
    ----------
    by_row
        Give each labelled row a side by itself, whatever rows are beside it: what noise that hides
        one row counts on.

    Raises
    ------
    Refusal
        If there are none, one has too few rows, or the classes of two differ.
    """
    held = _files(data.source)
    rows: list[Question | Item] = []
    clients = [_ELSEWHERE] * (max(held) + 1)
    classes: tuple[str, ...] = ()
    found: Sequence[Question | Item]
    for index, file in held.items():
        name = f"node {index + 1}" if is_own(data.source) else file.stem
        if data.task == "classes":
            found, client, its = _labelled(data, seed, index, file, name, by_row)
            if classes and its != classes:
                raise Refusal(
                    f"{file.name} has the classes {', '.join(its)[:80]}, another client"
                    f" {', '.join(classes)[:80]}: with data.split = files every file needs a row"
                    " of each class"
                )
            classes = its
        else:
            found, client = _questions(data, seed, index, file, name)
        rows += found
        clients[index] = client
    made = Partition(seed, data.source, rows_hash(rows), tuple(clients))
    if data.manifest and not is_own(data.source):
        read_partition(Path(data.manifest)).check_same(made)
    return rows, made  # type: ignore[return-value]  # one task, one kind of rows


def _files(source: str) -> dict[int, Path]:
    """Return the clients' files by index."""
    kind, _, name = source.partition(":")
    if is_own(source):
        index, _, name = name.partition(":")
        return {int(index): Path(name)}
    folder = Path(name).expanduser()
    if kind != "path" or not folder.is_dir():
        raise Refusal(
            f'data.source = "{source}" with data.split = "files": expected path:FOLDER with a table'
            " for each client, or nodes that were started with data of their own"
        )
    found = sorted(p for p in folder.iterdir() if p.suffix in files.ENDINGS)
    if not found:
        raise Refusal(f"{folder} holds no tables: expected {', '.join(files.ENDINGS)}")
    return dict(enumerate(found))


def _questions(
    data: DataConfig, seed: int, index: int, file: Path, name: str
) -> tuple[list[Question], Client]:
    rows = distinct(load_questions(f"path:{file}"))
    client = client_of(
        name,
        index,
        rows,
        seed=seed,
        max_train=data.max_train,
        max_test=data.max_test,
        test_share=data.test_share,
        min_train=data.min_train,
        min_test=data.min_test,
    )
    return rows, client


def _labelled(
    data: DataConfig, seed: int, index: int, file: Path, name: str, by_row: bool
) -> tuple[list[Item], Client, tuple[str, ...]]:
    labelled = load_labelled(f"path:{file}")
    items, kept = dealing.distinct(labelled)
    if by_row:
        split = steady.sides(items, seed, data, name)
        return items, dealing.client_of(name, split, labelled.classes, data), labelled.classes
    order = seeds.generator(seed, index, "partition").permutation(np.sort(kept))
    at = {int(place): item for place, item in zip(kept, items, strict=True)}
    train, test = ([at[int(i)] for i in side] for side in dealing.sides(labelled, order, data))
    return items, dealing.client_of(name, (train, test), labelled.classes, data), labelled.classes

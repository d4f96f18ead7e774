# SPDX-License-Identifier: Apache-2.0
"""What FAAST's clients of one process share: the frozen encoder, and each item's key once.

A client comes and goes with each message, and an encoder's forward pass is all that its work costs.
Keys stay in this process: they are as good as the items.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedloom import __version__
from fedloom.clients.bridge import client_at, partition_of, with_own_rows
from fedloom.config import RunConfig
from fedloom.data import by_file
from fedloom.data.dealing import Item
from fedloom.data.labelled import load_labelled
from fedloom.data.partition import Partition
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.holdings import holdings
from fedloom.models.encoders import Encoder, load_encoder
from fedloom.rules.reading import unit
from fedloom.wire import Manifest, arrays_digest

SIDES = ("summed", "validation", "test")
PREPROCESSING = "unit-length keys, one-hot values"


@dataclass(frozen=True, eq=False)
class Side:
    """Keys and labels of some of one client's rows."""

    keys: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def unit(self) -> NDArray[np.float64]:
        """Return keys of length one."""
        return unit(self.keys)


@dataclass(eq=False)
class KeyBench:
    """An encoder, a data set dealt out, and the keys made so far."""

    config: RunConfig
    source: str
    """The encoder's name: of nodes with different ones each has a bench of its own."""
    encoder: Encoder
    items: Sequence[Item]
    partition: Partition
    classes: tuple[str, ...]
    table: NDArray[np.float64] | None
    """The classes' names as keys of length one ``[C, d]``, if the encoder has them."""
    forwards: int = 0
    """Items that went through the encoder in this process; each client's side goes once."""
    _sides: dict[tuple[int, str], Side] = field(default_factory=dict)

    @functools.cached_property
    def _by_name(self) -> dict[str, Item]:
        return {item.row(): item for item in self.items}

    @property
    def own(self) -> bool:
        """Say whether these rows are the node's own, which it names to nobody."""
        return by_file.is_own(self.config.data.source)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """What the weights are, and all that their sums must agree in to be added."""
        weights = {"weights": np.zeros((self.encoder.width, len(self.classes)))}
        return Manifest.of(
            weights,
            method=self.config.method,
            version=__version__,
            base=self.encoder.digest,
            tokenizer="",
            values=self.values_digest,
        )

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """What nodes must agree in; each takes a walk over everything, so once a process."""
        mixed = {}
        if self.config.faast.mixed:
            mixed["classes"] = hashlib.sha256(json.dumps(self.classes).encode()).hexdigest()
        return {
            **mixed,
            "recipe": self.config.digest(),
            "data": by_file.OWN if self.own else self.partition.digest(),
            "base": self.encoder.digest,
            "tokenizer": "",
            "values": self.values_digest,
            "manifest": self.manifest.digest(),
        }

    @functools.cached_property
    def values_digest(self) -> str:
        """SHA-256 over the classes in order, the table of their values and the preprocessing."""
        labels = self.config.faast.values == "labels"
        table = arrays_digest({"table": self.table}) if labels and self.table is not None else ""
        told = [PREPROCESSING, self.config.faast.values, table, *self.classes]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @functools.cached_property
    def partition_json(self) -> str:
        """Who holds which rows, by the rows' hashes."""
        return self.partition.to_json()

    def rows(self, partition: int, side: str) -> list[Item]:
        """Return one client's rows: to sum, to choose a filter by, or to test on.

        Validation rows are the first of the training rows, whose order the partition shuffled.
        """
        client = client_at(self.partition, partition)
        held_out = self.config.faast.held_out(len(client.train))
        summed, validation = client.train[held_out:], client.train[:held_out]
        names = {"summed": summed, "validation": validation, "test": client.test}[side]
        return [self._by_name[name] for name in names]

    def side(self, partition: int, side: str) -> Side:
        """Encode one client's rows, unless this process has done so."""
        place = partition, side
        if place not in self._sides:
            rows = self.rows(partition, side)
            keys = self._encode([row.content for row in rows])
            labels = np.array([row.label for row in rows], np.int64)
            self._sides[place] = Side(keys, labels)
        return self._sides[place]

    def _encode(self, content: list[Any]) -> NDArray[np.float32]:
        if not content:
            return np.zeros((0, self.encoder.width), np.float32)
        self.forwards += len(content)
        return self.encoder.encode(content if isinstance(content[0], str) else np.stack(content))


class _Held:
    """The benches of this process, one for each encoder; another recipe's take their place."""

    def __init__(self) -> None:
        self._config: RunConfig | None = None
        self._benches: dict[str, KeyBench] = {}

    def get(self, config: RunConfig, source: str) -> KeyBench:
        if self._config is not config and self._config != config:
            self._benches, self._config = {}, config
        if source not in self._benches:
            self._benches[source] = _build(config, source)
        return self._benches[source]


def _build(config: RunConfig, source: str) -> KeyBench:
    encoder = load_encoder(source, _device(config))
    if torch := sys.modules.get("torch"):  # pixels need none, and then it stays out
        torch.set_num_threads(config.clients.threads)
    rows, partition = holdings(config)
    items = cast("Sequence[Item]", rows)  # the task of every faast recipe has these
    classes = load_labelled(by_file.table_of(config.data.source)).classes
    names = encoder.label_keys(classes)
    if names is None and config.faast.values == "labels":
        raise Refusal(
            f'faast.values = "labels" with faast.encoder = "{source}": it has no'
            ' embeddings of names; set faast.values = "one-hot"'
        )
    table = None if names is None else unit(names)
    return KeyBench(config, source, encoder, items, partition, classes, table)


def _device(config: RunConfig) -> str:
    if config.model.device != "auto":
        return config.model.device
    from fedloom.clients.workbench import device  # torch: only to look for a GPU

    return device(config)


_HELD = _Held()


def recipe_of(context: Context) -> RunConfig:
    """Read a node's recipe; of a hundred messages with one recipe, the first does."""
    return with_own_rows(_recipe(tuple(sorted(context.run_config.items()))), context)


@functools.lru_cache(maxsize=4)
def _recipe(items: tuple[tuple[str, Scalar], ...]) -> RunConfig:
    return RunConfig.from_flower(dict(items))


def encoder_of(config: RunConfig, context: Context) -> str:
    """Return the encoder of a node: its own if it was started with one, or the recipe's for it.

    Raises
    ------
    Refusal
        If it has one and the recipe is for one encoder: neither is left aside without a word.
    """
    own, partition = str(context.node_config.get("encoder", "")), partition_of(context)
    if own and not config.faast.mixed:
        raise Refusal(
            f"partition {partition} has an encoder of its own and faast.encoders is empty: set"
            f' faast.encoders = "{config.faast.encoder}", for nodes without one, or start the node'
            " without encoder"
        )
    return own or config.faast.encoder_of(partition)


def key_bench(config: RunConfig, source: str = "") -> KeyBench:
    """Return this process's bench for a recipe and an encoder, built on first use.

    Parameters
    ----------
    source
        The encoder; the recipe's one if left out.
    """
    return _HELD.get(config, source or config.faast.encoder)


def shown(source: str) -> str:
    """Name an encoder to others: of a folder or file of this machine its last part only.

    >>> shown("relu:512:path:/home/anna/encoder"), shown("lm:embedded:smollm2-135m")
    ('relu:512:path:encoder', 'lm:embedded:smollm2-135m')
    """
    for kind in ("path:", "gguf:"):
        head, found, place = source.partition(kind)
        if found:
            return head + kind + Path(place).name
    return source

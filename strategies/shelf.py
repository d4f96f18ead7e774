# SPDX-License-Identifier: Apache-2.0
"""``SumsShelf``: the sums that outlive a round, so that clients can come, change and go later.

``total.safetensors`` and ``ledger.json`` say what the fast weights were solved from and whose rows
are in it.  Single clients' sums lie beside them only with ``faast.keep-sums``: they tell of their
rows what a node sent in confidence, so whoever keeps them guards them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedloom.disk import write_whole
from fedloom.errors import Refusal
from fedloom.rules.revisions import Contributions
from fedloom.wire import Arrays, Update

_TOTAL, _LEDGER, _COUNT = "total.safetensors", "ledger.json", "count"
_ALL = "client-*.safetensors"


@dataclass(frozen=True)
class Choice:
    """How the weights were made of the total."""

    alpha: float | None
    """None if the sums are noisy: no filter is for those."""
    ridge: float
    prior: float


class SumsShelf:
    """Keep a total, its ledger and, if asked, single contributions; in memory without a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._held: dict[str, bytes] = {}

    def put(self, partition: int, revision: int, update: Update) -> None:
        """Keep one client's sums."""
        self._write(_name(partition, revision), _pack(update.whole(), update.weight))

    def find(self, partition: int, revision: int) -> Update | None:
        """Return one client's sums, if they were kept."""
        data = self._read(_name(partition, revision))
        if data is None:
            return None
        arrays, count = _unpack(data, _name(partition, revision))
        return Update.summed(arrays, count, partition)

    def drop(self, partition: int, revision: int) -> None:
        """Forget one client's sums."""
        name = _name(partition, revision)
        self._held.pop(name, None)
        if self.folder is not None:
            (self.folder / name).unlink(missing_ok=True)

    def prune(self, needed: Collection[tuple[int, int]]) -> None:
        """Forget all sums but those of these (partition, revision)."""
        kept = {_name(*which) for which in needed}
        found = [p.name for p in self.folder.glob(_ALL)] if self.folder is not None else self._held
        for name in [n for n in found if n.startswith("client-") and n not in kept]:
            self._held.pop(name, None)
            if self.folder is not None:
                (self.folder / name).unlink(missing_ok=True)

    def keep(self, held: Contributions, choice: Choice) -> None:
        """Keep the total with what rounding took from it, whose it is, and how it was solved."""
        total = held.total
        self._write(_TOTAL, _pack(summed_arrays(total), total.weight))
        tree = {"solved": asdict(choice), "clients": held.to_tree(), "gone": held.gone_tree()}
        self._write(_LEDGER, json.dumps(tree, indent=1, sort_keys=True).encode())

    def restore(self) -> tuple[Contributions, Choice]:
        """Read what ``keep`` wrote.

        Raises
        ------
        Refusal
            If nothing was kept here or a file is damaged.
        """
        ledger, data = self._read(_LEDGER), self._read(_TOTAL)
        if ledger is None or data is None:
            raise Refusal(f"no sums in {self.folder}; expected what a run of method faast leaves")
        arrays, count = _unpack(data, _TOTAL)
        try:
            total = summed_of(arrays, count)
            tree = json.loads(ledger)
            held = Contributions.from_tree(total, tree["clients"], tree.get("gone"))
            return held, Choice(**tree["solved"])
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{self.folder} holds no ledger of sums: {error!r}") from error

    def _write(self, name: str, data: bytes) -> None:
        if self.folder is None:
            self._held[name] = data
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / name, data)

    def _read(self, name: str) -> bytes | None:
        if self.folder is None:
            return self._held.get(name)
        path = self.folder / name
        return path.read_bytes() if path.exists() else None


def summed_arrays(total: Update) -> dict[str, NDArray[np.float64]]:
    """Return a total's arrays by name, with what rounding took from it."""
    sums = {f"sum/{n}": a for n, a in total.sums.items()}
    return sums | {f"residue/{n}": a for n, a in total.residue.items()}


def summed_of(arrays: Arrays, weight: float) -> Update:
    """Read what ``summed_arrays`` made."""
    parts: dict[str, dict[str, NDArray[np.float64]]] = {"sum": {}, "residue": {}}
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        parts[kind][rest] = array
    return Update(parts["sum"], weight, parts["residue"])


def _name(partition: int, revision: int) -> str:
    return f"client-{partition:06d}-{revision:06d}.safetensors"


def _pack(arrays: Mapping[str, NDArray[np.float64]], count: float) -> bytes:
    return save({**arrays, _COUNT: np.array([count])})


def _unpack(data: bytes, name: str) -> tuple[dict[str, NDArray[np.float64]], float]:
    try:
        arrays = load(data)
        return arrays, float(arrays.pop(_COUNT)[0])
    except (SafetensorError, KeyError, ValueError) as error:
        raise Refusal(f"{name} is damaged: {error}") from error

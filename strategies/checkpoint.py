# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: all that a run must know to go on after its last whole round, in one file a round.

A file holds the global arrays, what parts of the strategy remember (a server optimiser's moments,
FAAST's sums, ...), the run's token, and how far the journal had come.  Randomness needs no place in
it: every draw is split off (seed, round, ...).  What clients keep lies with them, by round
(``fedloom.local.home``).

A part of a strategy that remembers something from round to round registers itself in
``AdapterStrategy.parts`` with ``state`` and ``restore``; nothing else is asked of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedloom.disk import flush_folder, write_whole
from fedloom.errors import Refusal
from fedloom.wire import Arrays, Manifest, arrays_digest

FOLDER = "checkpoints"
_KEPT = 2
_FORMAT = 1
_GLOBAL = "arrays"


@dataclass(frozen=True)
class State:
    """What a part remembers: arrays by name, and what JSON can say."""

    arrays: Arrays = field(default_factory=dict)
    tree: Mapping[str, Any] = field(default_factory=dict)


class Part(Protocol):
    """Whatever remembers something from round to round."""

    def state(self) -> State:
        """Return all that is remembered."""

    def restore(self, state: State) -> None:
        """Take up what ``state`` returned in an earlier process."""


class Torn(dict[int, list[int]]):
    """Rounds that were cut off: number -> the partitions that had been asked to train in it.

    Parameters
    ----------
    opened : mapping
        Round -> the partitions that had been asked to take the masks off its sum.
    """

    def __init__(
        self,
        asked: Mapping[int, Collection[int]],
        opened: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        super().__init__({r: sorted(partitions) for r, partitions in asked.items()})
        self.opened = {r: sorted(partitions) for r, partitions in (opened or {}).items()}

    def among(self, partitions: Collection[int]) -> Torn:
        """Return what some partitions were asked."""
        asked, opened = (
            {r: [p for p in ps if p in partitions] for r, ps in rounds.items()}
            for rounds in (self, self.opened)
        )
        return Torn(asked, opened)

    def check_masks(self) -> None:
        """Refuse if a sum under masks may have been opened.

        Before anybody was asked to open it, the server held nothing but uniform words; who takes
        part in the repeated round draws new keys, and the old ones are told to nobody.

        Raises
        ------
        Refusal
            The same sum over other survivors would, by the difference, show single clients' parts.
        """
        if opened := [r for r, partitions in sorted(self.opened.items()) if partitions]:
            raise Refusal(
                f"round {opened[0]} was torn after clients had been asked to take the masks off its"
                " sum: the same sum over other survivors would show what single clients sent; start"
                " a new run"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A run after a whole round."""

    round: int
    """0: the frozen model was scored, or the first round's clients will; nobody has trained."""
    arrays: Arrays
    """The global state, as the next round's clients are to get it."""
    parts: Mapping[str, State]
    about: Mapping[str, Any]
    """What the run is: its recipe, token, manifest, nodes, and where its journal stands."""

    def manifest(self) -> Manifest:
        """Return the run's manifest."""
        return Manifest.from_json(self.about["manifest"])

    def part(self, name: str) -> State:
        """Return what a part of the strategy remembered.

        Raises
        ------
        Refusal
            If the strategy that wrote this had no such part.
        """
        if name not in self.parts:
            raise Refusal(
                f"the checkpoint of round {self.round} knows nothing of {name}: another strategy"
                " wrote it; go on with the code that began the run"
            )
        return self.parts[name]

    def to_bytes(self) -> bytes:
        """Write as safetensors, whose header says what JSON can."""
        arrays = {f"{_GLOBAL}/{name}": array for name, array in self.arrays.items()}
        for part, state in self.parts.items():
            arrays |= {f"{part}/{name}": array for name, array in state.arrays.items()}
        plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        trees = {part: state.tree for part, state in self.parts.items()}
        told = {"format": _FORMAT, "round": self.round, "parts": trees, "about": self.about}
        text = json.dumps(told)
        return save(plain, metadata={"told": text, "digest": _digest(plain, text)})

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read a file.

        Raises
        ------
        Refusal
            If it is damaged, or another format's.
        """
        try:
            with safe_open(path, framework="numpy") as opened:
                header = opened.metadata() or {}
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if header.get("digest") != _digest(arrays, header["told"]):
                raise Refusal(f"{path.name} is damaged: its digest differs")
            told = json.loads(header["told"])
            if told["format"] != _FORMAT:
                raise Refusal(f"{path.name} has format {told['format']}, expected {_FORMAT}")
            parts = {name: State({}, tree) for name, tree in told["parts"].items()}
            split: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in (_GLOBAL, *parts)}
            for name, array in arrays.items():
                part, _, rest = name.partition("/")
                split[part][rest] = array
            made = {name: State(split[name], state.tree) for name, state in parts.items()}
            about, whole = told["about"], split[_GLOBAL]
            return cls(round=int(told["round"]), arrays=whole, parts=made, about=about)
        except Refusal:
            raise
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{path.name} cannot be read ({error})") from error


def _digest(arrays: Arrays, told: str) -> str:
    return hashlib.sha256(f"{arrays_digest(arrays)}\n{told}".encode()).hexdigest()


class Checkpoints:
    """The last two whole rounds of a run, a file each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, checkpoint: Checkpoint) -> None:
        """Write one, whole or not at all; only then let go of what is older than the one before.

        Later rounds' are of a past that was given up: the run went back behind them.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(checkpoint.round), checkpoint.to_bytes())
        rounds = [r for r, _ in self._found() if r <= checkpoint.round]
        self._keep_only(rounds[-_KEPT:])

    def keep_last(self) -> None:
        """Let go of all but the newest: a run that is complete goes back to no earlier round."""
        if newest := [r for r, _ in self._found()][-1:]:
            self._keep_only(newest)

    def newest(
        self, usable: Callable[[Checkpoint], str] = lambda checkpoint: ""
    ) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest that is whole and ``usable`` has nothing against.

        Returns
        -------
        Checkpoint or None
            None if there is none.
        list of str
            Why newer ones were passed over, a sentence each.
        """
        passed: list[str] = []
        for _, path in reversed(list(self._found())):
            try:
                checkpoint = Checkpoint.read(path)
            except Refusal as refusal:
                passed.append(str(refusal))
                continue
            if not (reason := usable(checkpoint)):
                return checkpoint, passed
            passed.append(f"{path.name} cannot be used: {reason}")
        return None, passed

    def _keep_only(self, rounds: list[int]) -> None:
        for server_round, path in list(self._found()):
            if server_round not in rounds:
                path.unlink(missing_ok=True)
        flush_folder(self.folder)

    def _path(self, server_round: int) -> Path:
        return self.folder / f"round-{server_round:06d}.safetensors"

    def _found(self) -> Iterator[tuple[int, Path]]:
        """Yield (round, file) in order of rounds."""
        for path in sorted(self.folder.glob("round-*.safetensors")):
            number = path.stem.removeprefix("round-")
            if number.isdigit():
                yield int(number), path

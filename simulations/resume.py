# SPDX-License-Identifier: Apache-2.0
"""Go on with a run that was stopped: what must be the same as before, and where it begins.

A run's folder is cut back to its last whole round, so that the journal holds each round once; what
was cut is told in ``resumes.jsonl``, which is never cut: clients worked for it, bytes travelled,
and where privacy is counted it counts.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom import __version__
from fedloom.config import RunConfig
from fedloom.disk import sweep
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.secure import messages
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.checkpoint import FOLDER, Checkpoint, Checkpoints, Torn
from fedloom.strategies.groups import FOLDER as GROUPS
from fedloom.strategies.journal import Journal, Row, append_lasting
from fedloom.strategies.roster import Roster
from fedloom.wire import Arrays

LOCK = "run.lock"
RESUMES = "resumes.jsonl"
_MAY_DIFFER = {
    "name", "output", "resume", "model.device", "clients.total-cpus", "clients.total-gpus",
    "clients.warm", "wire.budget-bytes",
}  # fmt: skip
"""Where a run lies, what its machine has and how many bytes it may send; ``rounds`` may grow."""
_NOBODY = 2
"""Node ids from here on stand for partitions whose node has not come back: Flower draws 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Stand:
    """How far a run has come."""

    checkpoint: Checkpoint | None
    """The last whole round; none if not even the frozen model was scored."""
    note: str
    """Why a later checkpoint was passed over, if one was."""
    complete: bool
    torn: tuple[Torn, ...] = ()
    """What was asked in rounds that were cut and that no checkpoint has counted, cut by cut."""

    @property
    def round(self) -> int:
        """The last whole round, 0 also before."""
        return self.checkpoint.round if self.checkpoint else 0


def stand_of(folder: Path) -> Stand:
    """Look how far a run has come; nothing is changed.

    Raises
    ------
    Refusal
        If no run is there, another version made it, or what it did can no longer be told.
    """
    if not (folder / "config.toml").is_file():
        raise Refusal(f"{folder}: no run is there; expected a folder that fedloom run made")
    found, passed = Checkpoints(folder / FOLDER).newest(lambda held: _journal_lacks(folder, held))
    note = "; ".join(passed)
    if found is not None and found.about["fedloom"] != __version__:
        raise Refusal(
            f"{folder} was made by fedloom {found.about['fedloom']}, this is {__version__}: go on"
            " with the version that began it"
        )
    events = _rows(folder / "events.jsonl")
    rounds = sum(row.get("event") == "round" for row in events)
    complete = _is_complete(events)
    if found is None and rounds and not complete:
        raise Refusal(
            f"{folder}: {note or 'no checkpoint is there'}, and the {rounds} rounds it made would"
            " be lost; start a new run under another --name"
        )
    return Stand(checkpoint=found, note=note, complete=complete)


def check_recipe(config: RunConfig, folder: Path, stand: Stand) -> None:
    """Refuse another recipe than the run's: only ``rounds`` may grow.

    Raises
    ------
    Refusal
        Naming the key that differs, or saying that the noise was solved for fewer rounds.
    """
    held: dict[str, Scalar]
    if stand.checkpoint is not None:
        held = stand.checkpoint.about["recipe"]
    else:
        held = RunConfig.from_toml(folder / "config.toml").flat()
    now = config.flat()
    for key in sorted((held.keys() | now.keys()) - _MAY_DIFFER - {"rounds"}):
        if held.get(key) != now.get(key):
            raise Refusal(
                f"{key} = {json.dumps(now.get(key))}: {folder} was run with"
                f" {json.dumps(held.get(key))}; only rounds may grow when a run goes on"
            )
    least = max(int(held["rounds"]) if not stand.complete else 0, stand.round)
    if config.rounds < least:
        raise Refusal(
            f"rounds = {config.rounds}: {folder} was run with {held['rounds']} and has done"
            f" {stand.round}; rounds may grow when a run goes on, and never shrink"
        )
    if config.privacy.epsilon and config.rounds != int(held["rounds"]):
        raise Refusal(
            f"rounds = {config.rounds}: {folder} was run with {held['rounds']}, and the noise of"
            f" what it has done was solved for privacy.epsilon = {config.privacy.epsilon:g} over so"
            " many; start a new run under another --name"
        )
    if stand.complete and stand.checkpoint is None and config.rounds > int(held["rounds"]):
        raise Refusal(
            f"rounds = {config.rounds}: {folder} is complete and has no checkpoint to go on from;"
            " start a new run under another --name"
        )


def is_finished(config: RunConfig, stand: Stand) -> bool:
    """Tell whether nothing is left to do."""
    return stand.complete and (stand.checkpoint is None or config.rounds == stand.round)


def take_up(config: RunConfig, folder: Path, journal: Journal) -> Stand:
    """Cut the journal back to the last whole round; what was cut is told first.

    Doing it twice does nothing more.  The caller holds the run's lock.

    Raises
    ------
    Refusal
        As ``stand_of`` and ``check_recipe`` do.
    """
    stand = stand_of(folder)
    check_recipe(config, folder, stand)
    for run in (folder, *(folder / GROUPS).glob("*")):
        for place in (run, run / FOLDER, run / "adapter", run / "sums"):
            sweep(place)
    about: Mapping[str, Any] = stand.checkpoint.about if stand.checkpoint else {}
    sizes = about.get("journal", {})
    torn = journal.behind(sizes)
    if any(torn.values()):
        _tell(folder / RESUMES, stand, torn)
    journal.cut(sizes)
    told = _rows(folder / RESUMES)[int(about.get("resumes", 0)) :]
    return replace(stand, torn=tuple(map(_torn, told)))


def _tell(path: Path, stand: Stand, torn: Mapping[str, list[Row]]) -> None:
    """Append what is about to be cut."""
    asked: dict[int, set[int]] = defaultdict(set)
    opened: dict[int, set[int]] = defaultdict(set)
    for row in torn["ledger"]:
        kinds = {"train": asked, messages.UNMASK: opened}
        if row["direction"] == "down" and row["phase"] in kinds:
            kinds[row["phase"]][int(row["round"])].add(int(row["partition"]))
    for row in torn["events"]:
        if row["event"] == "privacy":  # a secret draw that fell on nobody is paid for, too
            asked.setdefault(int(row["round"]), set())
    row = {
        "time": datetime.now(UTC).isoformat(),
        "after": stand.round,
        "note": stand.note,
        "bytes": sum(int(row["bytes"]) for row in torn["ledger"]),
        "asked": {str(r): sorted(ps) for r, ps in asked.items()},
        "opened": {str(r): sorted(ps) for r, ps in opened.items()},
    }
    append_lasting(path, row)


def _torn(row: Row) -> Torn:
    """Read what ``_tell`` wrote; an older row does not say what was opened, so all of it was."""
    asked, opened = (
        {int(r): list(ps) for r, ps in rounds.items()}
        for rounds in (row["asked"], row["opened" if "opened" in row else "asked"])
    )
    return Torn(asked, opened)


def keeper(
    config: RunConfig,
    folder: Path,
    strategy: AdapterStrategy,
    agreed: Mapping[str, str],
    peft: str,
) -> Callable[[int, Arrays], None]:
    """Return what writes a checkpoint of ``strategy`` after each whole round."""
    kept = Checkpoints(folder / FOLDER)
    hidden = "partition-json"  # it lies in a file of its own
    about = {
        "fedloom": __version__,
        "recipe": config.flat(),
        "run": strategy.run_token,
        "manifest": strategy.manifest.to_json(),
        "peft": peft,
        "agreed": dict(agreed),
    }

    def keep(server_round: int, arrays: Arrays) -> None:
        nodes = {  # a later round may have more of them than the first
            str(p): {k: v for k, v in strategy.roster.properties[p].items() if k != hidden}
            for p in strategy.roster.partitions
        }
        now = {"journal": strategy.journal.sizes(), "resumes": len(_rows(folder / RESUMES))}
        now |= {"nodes": nodes}
        parts = {name: part.state() for name, part in strategy.parts.items()}
        kept.write(
            Checkpoint(round=server_round, arrays=arrays, parts=parts, about={**about, **now})
        )

    return keep


def same_nodes(held: Checkpoint, roster: Roster, agreed: Mapping[str, str]) -> Roster:
    """Return the run's partitions with the nodes that hold them now.

    A partition whose node has not come back stays, or another sample would be drawn: it is named
    as failed wherever it is asked.  One that was not in the run is left out.

    Raises
    ------
    Refusal
        If the nodes' model, data or version are not those that the run began with.
    """
    for key, wanted in held.about["agreed"].items():
        if key != "recipe" and agreed.get(key, "") != wanted:
            raise Refusal(
                f"the nodes have another {key} than the run began with:"
                f" {agreed.get(key, '')[:16]} came, {wanted[:16]} was expected; go on with the"
                " model, data and fedloom version that it had"
            )
    nodes, told = {}, {}
    for name, properties in held.about["nodes"].items():
        partition = int(name)
        nodes[partition] = roster.nodes.get(partition, _NOBODY + partition)
        told[partition] = roster.properties.get(partition, properties)
    return Roster(nodes, told)


def _journal_lacks(folder: Path, held: Checkpoint) -> str:
    """Say which journal file ends before the checkpoint does, if one does."""
    for kind, wanted in held.about["journal"].items():
        path = folder / f"{kind}.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size < wanted:
            return f"{path.name} holds {size} of the {wanted} bytes that it had then"
    return ""


def _is_complete(events: list[dict[str, Any]]) -> bool:
    """Tell whether the last thing a run said of its end is that it is complete."""
    last: dict[str, Any] = next(
        (e for e in reversed(events) if e.get("event") in ("end", "resumed", "phase")), {}
    )
    return last.get("event") == "end" and last.get("status") == "completed"


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read whole lines of JSON; a torn last one is not there."""
    data = path.read_bytes() if path.exists() else b""
    found = []
    for line in data.split(b"\n")[:-1]:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found.append(row)
    return found

# SPDX-License-Identifier: Apache-2.0
"""``Grouped``: nodes with different frozen encoders in one run, each encoder's sums by themselves.

Sums of one encoder's keys say nothing to another's.  So each group (``fedloom.strategies.groups``)
has a strategy of its own, with its own manifest, roster, sums and weights, which is the same as in
a run of that group alone, to the bit.  They go through the rounds together: all nodes work at once,
and one checkpoint holds all groups after a whole round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.common import log
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from fedloom import border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.checkpoint import Checkpoint, State, Torn
from fedloom.strategies.faast import FAAST
from fedloom.strategies.groups import Group, GroupJournal, Outbox, merged
from fedloom.strategies.journal import Journal
from fedloom.strategies.later_calls import RollCall, joined, part_of
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.tallies import announce
from fedloom.wire import Arrays, Manifest, Update

Keep = Callable[[int, dict[str, NDArray[Any]]], None]
_PART = "groups"
_FIGURES = ("accuracy", "row-accuracy", "gold-ce", "alpha", "prior", "rank", "rows")


@dataclass
class Member:
    """One group in a run."""

    group: Group
    strategy: AdapterStrategy
    arrays: ArrayRecord = field(default_factory=ArrayRecord)
    stream: Outbox | None = None

    @property
    def grid(self) -> Outbox:
        """The group's stream, once the run has begun."""
        assert self.stream is not None
        return self.stream

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say in which group something ended the run."""
        try:
            yield
        except (Refusal, AggregationError) as error:
            who = f"group {self.group.name} ({self.group.encoder})"
            raise type(error)(f"{who}: {error}") from error


class Grouped(AdapterStrategy):
    """Carry several groups through the same rounds.

    Parameters
    ----------
    method : type of AdapterStrategy
        What each group gets one of.
    manifests : mapping of Group to Manifest
        The groups, and what travels in each.
    config, roster, journal, run_token
        As of ``AdapterStrategy``, for the whole run.
    keep_of : callable
        Returns a group's ``keep``.
    """

    action = "faast"
    roll_call: RollCall | None = None
    """As of ``FAAST``."""

    def __init__(
        self,
        method: type[AdapterStrategy],
        manifests: Mapping[str, tuple[Group, Manifest]],
        config: RunConfig,
        roster: Roster,
        journal: Journal,
        keep_of: Callable[[Group, Manifest], Keep],
        run_token: str | None = None,
    ) -> None:
        whole = merged({name: manifest for name, (_, manifest) in manifests.items()})
        super().__init__(config, whole, roster, journal, None, run_token)
        self.members: list[Member] = []
        for name, (group, manifest) in manifests.items():
            own, keep = GroupJournal(journal, name), keep_of(group, manifest)
            made = method(config, manifest, group.roster, own, keep, self.run_token)
            self.members.append(Member(group, made))
            self.parts |= {f"{name}.{part}": held for part, held in made.parts.items()}
        self.parts[_PART] = _Listed(manifests)

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Return what was there: groups fold, each its own."""
        return dict(sent)

    def resume(self, held: Checkpoint | None, torn: Iterable[Torn]) -> None:
        """Go on, every group from the same whole round."""
        torn = list(torn)
        self.after = -1 if held is None else held.round
        for member in self.members:
            mine = set(member.group.roster.partitions)
            asked = [rounds.among(mine) for rounds in torn]
            with member.named():
                member.strategy.resume(held and _of_group(held, member), asked)

    def run(self, grid: ReplyStream, arrays: Arrays) -> Result:
        """Measure the frozen encoders, then run all rounds, or what a stopped run still needs."""
        seconds = self.config.sampling.reply_seconds
        for member in self.members:
            member.stream = Outbox(grid, seconds)
            member.arrays = border.pack_arrays(_split(arrays, member.group.name))
        if self.after < 0:
            self.journal.event("client-state", run=self.run_token)
            self._measure_all()
            self.checkpoint(0, arrays)
        for server_round in range(max(self.after, 0) + 1, self.config.rounds + 1):
            log(INFO, "[ROUND %s/%s]", server_round, self.config.rounds)
            self._train(server_round)
            self._score(server_round)
            self._announce_round(server_round, self._scored(server_round))
            self.checkpoint(server_round, self._all_arrays())  # before a group lets go of old sums
            for member in self.members:
                member.strategy.whole(server_round, member.arrays)
        result = Result()
        result.arrays = border.pack_arrays(self._all_arrays())
        return result

    def _measure_all(self) -> None:
        """Score what needs no sums."""
        told: dict[str, Any] = {"round": 0, "frozen": True}
        asked = []
        for member in self.members:
            everyone, of = member.group.roster.partitions, member.strategy
            of._grid = member.grid
            asked.append(of._messages("evaluate", "frozen", 0, everyone, ArrayRecord(), told))
        for member, replies in self._heard(asked):
            member.strategy._gather_scores(0, "frozen", replies)

    def _call(self, server_round: int) -> None:
        """Hold a later round's roll call once for all groups, each of which takes in its own."""
        if server_round < 2 or self.roll_call is None:
            return
        of_run = {member.group.manifest for member in self.members}
        found = self.roll_call(server_round, self.roster, of_run)
        self.roster = joined(self.roster, found)
        for member in self.members:
            told = found.properties.items()
            mine = [p for p, said in told if said.get("manifest") == member.group.manifest]
            if isinstance(member.strategy, FAAST):
                with member.named():
                    member.strategy.take_in(server_round, member.grid, part_of(found, mine))
                member.group = replace(member.group, roster=member.strategy.roster)

    def _train(self, server_round: int) -> None:
        self._call(server_round)
        asked = []
        for member in self.members:
            given = server_round, member.arrays, ConfigRecord(), member.grid
            with member.named():
                asked.append(list(member.strategy.configure_train(*given)))
        for member, replies in self._heard(asked):
            with member.named():
                made, _ = member.strategy.aggregate_train(server_round, replies)
            if made is not None:
                member.arrays = made

    def _score(self, server_round: int) -> None:
        asked = []
        for member in self.members:
            given = server_round, member.arrays, ConfigRecord(), member.grid
            asked.append(list(member.strategy.configure_evaluate(*given)))
        for member, replies in self._heard(asked):
            member.strategy.aggregate_evaluate(server_round, replies)

    def _heard(self, asked: list[list[Message]]) -> Iterator[tuple[Member, Iterator[Message]]]:
        """Send all groups' messages; yield each group with its replies, which come as it reads.

        Every group's time begins when all were sent: what came while another was heard is there.
        """
        pairs = list(zip(self.members, asked, strict=True))
        for member, messages in pairs:
            member.grid.post(messages)
        over = time.monotonic() + self.config.sampling.reply_seconds
        for member, messages in pairs:
            left = max(0.0, over - time.monotonic())
            yield member, member.grid.send_and_receive(messages, timeout=left)

    def _scored(self, server_round: int) -> list[dict[str, Any]]:
        """Return all groups' scores of a round."""
        return [row for row in self.journal.of_phase("evaluate") if row["round"] == server_round]

    def _announce_round(self, server_round: int, rows: list[dict[str, Any]]) -> None:
        """Say how each group did and, over all, the mean in which every test row counts the same.

        ``accuracy`` and ``gold-ce`` are means over clients, as they are in all runs.
        """
        told: list[dict[str, Any]] = []
        for member in self.members:
            mine = [row for row in rows if row.get("group") == member.group.name]
            rounds = [e for e in member.strategy.journal.rows["events"] if e["event"] == "round"]
            figures = {**(rounds[-1] if rounds else {}), **_over_rows(mine)}
            about = {"group": member.group.name, "encoder": member.group.encoder}
            told.append({**about, **{k: figures[k] for k in _FIGURES if k in figures}})
        each = {"rounds": self.config.rounds, "groups": told, **_over_rows(rows)}
        announce(self.journal, server_round, rows, each)

    def _all_arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{member.group.name}/{name}": array
            for member in self.members
            for name, array in border.unpack_arrays(member.arrays).items()
        }


class _Listed:
    """What a checkpoint says of the groups themselves."""

    def __init__(self, manifests: Mapping[str, tuple[Group, Manifest]]) -> None:
        self._tree = {name: manifest.to_json() for name, (_, manifest) in manifests.items()}

    def state(self) -> State:
        """Return each group's manifest."""
        return State({}, self._tree)

    def restore(self, state: State) -> None:
        """Leave it: ``manifests_in`` read it before there was a strategy."""


def manifests_in(held: Checkpoint) -> dict[str, Manifest]:
    """Return the groups' manifests by name, as a checkpoint has them; empty if it has no groups."""
    tree = held.parts[_PART].tree if _PART in held.parts else {}
    return {name: Manifest.from_json(text) for name, text in tree.items()}


def _of_group(held: Checkpoint, member: Member) -> Checkpoint:
    """Return a group's share of a checkpoint, as a run of its own would have written it."""
    name = member.group.name
    parts = {part: held.part(f"{name}.{part}") for part in member.strategy.parts}
    arrays = _split(held.arrays, name)
    return Checkpoint(round=held.round, arrays=arrays, parts=parts, about=held.about)


def _split(arrays: Arrays, group: str) -> dict[str, NDArray[Any]]:
    head = f"{group}/"
    return {n.removeprefix(head): array for n, array in arrays.items() if n.startswith(head)}


def _over_rows(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the share of test rows that were answered right."""
    count = sum(row[border.WEIGHT] for row in rows)
    return {"row-accuracy": sum(row["correct"] for row in rows) / count} if count else {}

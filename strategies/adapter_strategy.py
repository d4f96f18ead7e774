# SPDX-License-Identifier: Apache-2.0
"""``AdapterStrategy``: the loop that all methods share, on Flower's ``Strategy``.

A method says how replies become one (``fold``) and what a client is told (``train_config``).  The
base samples partitions from (seed, round), holds every reply against the manifest, names and drops
a bad client, keeps the byte ledger, and folds each reply when it arrives.
"""

from __future__ import annotations

import math
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedloom import __version__, border
from fedloom.config import WITH_SIDE, RunConfig
from fedloom.flat import Scalar
from fedloom.rules import ControlSum, without_controls
from fedloom.strategies.budget import Budget
from fedloom.strategies.checkpoint import Checkpoint, Part, Torn
from fedloom.strategies.gate import Gate
from fedloom.strategies.inbox import Inbox
from fedloom.strategies.journal import Journal
from fedloom.strategies.resting import drawn
from fedloom.strategies.riding import SCORES, Riding
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.rounds import run_rounds, score_alone
from fedloom.strategies.tallies import announce, keep_rows, macro
from fedloom.wire import Arrays, Manifest, Update


class AdapterStrategy(Strategy):
    """Train adapters of one frozen model over many nodes.

    Parameters
    ----------
    config : RunConfig
        The recipe.
    manifest : Manifest
        What travels; every reply is held against it.
    roster : Roster
        Which node holds which partition.
    journal : Journal, optional
        Where events, metrics and bytes go; in memory if left out.
    keep : callable, optional
        Given each round's number and new arrays before anything else can fail.
    run_token : str, optional
        Names the folders where clients keep what is theirs; drawn if left out. A run that goes on
        after a stop needs the one it had.
    """

    action = "default"
    """Flower's action name: messages are ``train.<action>`` and ``evaluate.<action>``."""
    train_metrics: tuple[str, ...] = ("loss",)
    """Metrics that every training reply must have, besides its number of examples."""
    own_keys: Mapping[str, Scalar] = {}
    """Recipe keys of ``[custom]`` that a strategy reads, with their defaults."""

    def __init__(
        self,
        config: RunConfig,
        manifest: Manifest,
        roster: Roster,
        journal: Journal | None = None,
        keep: Callable[[int, dict[str, NDArray[Any]]], None] | None = None,
        run_token: str | None = None,
    ) -> None:
        self.config, self.manifest, self.roster = config, manifest, roster
        self.journal = journal or Journal()
        self._keep = keep
        self.run_token = run_token or uuid.uuid4().hex  # of folders: no result depends on it
        seconds = config.sampling.reply_seconds
        self.inbox = Inbox(roster, self.journal, self.run_token, manifest.digest(), seconds)
        self.gate = Gate(config, roster, self.journal)
        grows = config.server.rule in WITH_SIDE
        self.budget = Budget(config.wire.budget_bytes, config.rounds, self.journal, grows)
        self._grid: Grid | None = None
        self._sent: dict[str, NDArray[Any]] = {}
        self._train_loss: float | None = None
        self.server_round = 0
        self.round_facts: dict[str, float] = {}  # for the round's event; ``fold`` may add to it
        self.riding = Riding(config.evaluation.with_training, self.journal, self._row)
        # What is remembered from round to round, by name.
        self.parts: dict[str, Part] = {"riding": self.riding} if self.riding.on else {}
        self.after = -1  # the last whole round: of the run that goes on; -1: nothing is done
        self.checkpoint: Callable[[int, Arrays], None] = lambda server_round, arrays: None

    @property
    def custom(self) -> dict[str, Scalar]:
        """The recipe's values of ``own_keys``."""
        return self.config.custom.over(self.own_keys)

    @abstractmethod
    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Make one set of arrays of the replies, which stream in; ``sent`` is the round's start."""

    def for_client(self, partition: int, state: ArrayRecord) -> ArrayRecord:
        """Return what a client gets of the global state: all of it, or override."""
        return state

    def expected_reply(self, server_round: int, partition: int) -> Manifest:
        """Return what a client's trained arrays are held against, or override."""
        return self.manifest

    def read_update(self, server_round: int, partition: int, records: RecordDict) -> Update:
        """Read a training reply, or override; a ``Refusal`` names the client and drops it."""
        expected, code = self.expected_reply(server_round, partition), self.config.wire.dtype
        start = None if code == "float32" else without_controls(self.sent_to(partition))
        return border.update_of(records, expected, partition, code, start)

    def sent_to(self, partition: int) -> Arrays:
        """Return what a client was sent in this round; override beside ``for_client``."""
        return self._sent

    @classmethod
    def known_start(cls) -> tuple[dict[str, NDArray[Any]], Manifest, str] | None:
        """Return what a node would otherwise be asked for, if the server knows it."""
        return None

    @classmethod
    def sizes(cls, manifest: Manifest) -> dict[str, int]:
        """Count trainable parameters by group, and the bytes that one reply's arrays take."""
        counts = {"lora": 0, "memory": 0}
        for name, (shape, _) in without_controls(manifest.arrays).items():
            counts["memory" if ".memory." in name else "lora"] += math.prod(shape)
        return {**counts, "bytes": manifest.nbytes()}

    def train_config(self, server_round: int) -> dict[str, Scalar]:
        """Return what a client is told besides the arrays; override to add a method's own keys."""
        return self._round_config(server_round)

    def evaluate_config(self, server_round: int) -> dict[str, Scalar]:
        """Return what a client that scores is told; override to add a method's own keys."""
        return self._round_config(server_round)

    def _round_config(self, server_round: int) -> dict[str, Scalar]:
        return {
            "round": server_round,
            "manifest": self.manifest.digest(),
            "run": self.run_token,
            "version": __version__,
            "base": self.manifest.base,
            "last": server_round == self.budget.final,
        }

    def run(self, grid: ReplyStream, arrays: Arrays) -> Result:
        """Measure the frozen model, then run all rounds, or what a stopped run still needs."""
        if self.after < 0:
            self.journal.event("client-state", run=self.run_token)
            self.measure_frozen(grid)
            self.checkpoint(0, arrays)
        packed, after, last = border.pack_arrays(arrays), max(self.after, 0), self.config.rounds
        if self.config.local.method == "none":
            if self._keep is not None and after < last:
                self._keep(last, dict(arrays))
            return score_alone(self, grid, packed, after=after, rounds=last, whole=self.whole)
        seconds = self.config.sampling.reply_seconds
        return run_rounds(
            self, grid, packed, after=after, rounds=last, timeout=seconds, whole=self.whole
        )

    def whole(self, server_round: int, arrays: ArrayRecord) -> None:
        """Keep what a round left, once its scores are in; override to tidy up afterwards."""
        if server_round <= self.budget.final:  # what a budget stopped was no round
            self.checkpoint(server_round, border.unpack_arrays(arrays))

    def resume(self, held: Checkpoint | None, torn: Iterable[Torn]) -> None:
        """Go on after a whole round, if any; ``torn`` is whom rounds that were cut had asked."""
        if held is not None:
            self.after = held.round
            for name, part in self.parts.items():
                part.restore(held.part(name))

    def measure_frozen(self, grid: ReplyStream) -> None:
        """Score the untouched model on every test row: what all else stands against."""
        self._grid = grid
        config: dict[str, Scalar] = {"round": 0, "frozen": True}
        asked, nothing = self.riding.frozen(self.roster.partitions, self._drawn), ArrayRecord()
        messages = self._messages("evaluate", "frozen", 0, asked, nothing, config)
        self._gather_scores(0, "frozen", grid.send_and_receive(messages))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the adapter to the round's partitions."""
        self._grid, self._sent = grid, border.unpack_arrays(arrays)
        self.server_round, self.round_facts = server_round, {}
        if self.budget.is_over(server_round, self._round_bytes):
            return self._messages("train", "train", server_round, [], arrays, {})
        chosen = self.draw(server_round)
        told = {**config, **self.train_config(server_round)}
        if self.config.local.method == "pooled":  # one client with all rows takes all their steps
            told |= {"stands-for": chosen, "pool": self.roster.partitions}
            chosen = self.roster.partitions[:1]
        each = self.told_apart
        return self._messages("train", "train", server_round, chosen, arrays, told, each)

    def draw(self, server_round: int) -> list[int]:
        """Return the partitions that a round asks, or override."""
        return self._drawn(server_round, announce=True)

    def told_apart(self, partition: int) -> Mapping[str, Any]:
        """Return what one client's training message says besides, or override."""
        return {}

    def _drawn(self, server_round: int, announce: bool = False) -> list[int]:
        """Return whom a round asks: drawn by seed and round, without those that rest."""
        events = self.journal.rows["events"]
        chosen, left_out = drawn(self.config, self.roster, server_round, events)
        if left_out and announce:
            self.journal.event("rested", round=server_round, partitions=left_out)
        return chosen

    def _round_bytes(self, server_round: int) -> int:
        """Bound the bytes of a round and of scoring its adapter."""
        down = {p: self.sent_to(p) for p in self.roster.partitions}
        up = {p: self.expected_reply(server_round, p) for p in self._drawn(server_round)}
        return self.budget.most(down, up, self.config.wire.dtype)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the good replies; name and drop the bad; fail below ``sampling.min-nodes``."""
        if server_round > self.budget.final:
            return None, None
        asked = len(self.inbox.asked)
        rows: list[dict[str, Any]] = []
        controls = ControlSum(self._sent, len(self.roster.nodes))
        updates = controls.set_aside(self._updates(server_round, replies, rows))
        first = next(updates, None)
        folded = dict(self._sent)
        if first is not None:
            made = self.fold(chain([first], updates), without_controls(self._sent))
            folded = {**made, **controls.moved()}
        self.inbox.report_missing(server_round, "train")
        self.riding.land()
        if (come := self.usable(len(rows))) < (needed := self._needed(asked)):
            raise AggregationError(
                f"round {server_round}: {come} usable replies, at least {needed} are needed"
            )
        folded = self.settle(server_round, folded)
        if self._keep is not None:
            self._keep(server_round, folded)
        keep_rows(self.journal, rows)
        if "loss" not in self.train_metrics:
            return border.pack_arrays(folded), None
        weights = [row[border.WEIGHT] for row in rows]
        self._train_loss = float(np.average([row["loss"] for row in rows], weights=weights))
        return border.pack_arrays(folded), border.numbers({"train-loss": self._train_loss})

    def usable(self, come: int) -> int:
        """Count what a round can build on: its good replies, or override."""
        return come

    def _needed(self, asked: int) -> int:
        if self.config.local.method == "pooled":
            return 1
        sampling = self.config.sampling
        return max(sampling.min_nodes, math.ceil(sampling.min_share * asked - 1e-9))

    def settle(self, server_round: int, folded: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return what is kept and scored once all replies are in: the fold itself, or override."""
        return folded

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the averaged adapter to every partition, where its turn has come."""
        final = self.budget.final
        if server_round > final:  # nobody trained; the last adapter may still have no scores
            if any(row["round"] == final for row in self.journal.of_phase("evaluate")):
                return self._messages("evaluate", "evaluate", final, [], arrays, {})
            server_round = final
        elif server_round % self.config.evaluation.every and server_round < final:
            self._announce_round(server_round, [])
            return []
        elif self.riding.on and server_round < final:
            self.riding.wait(server_round, self._told())
            return []
        self._grid = grid
        told = {**config, **self.evaluate_config(server_round)}
        everyone = self.roster.partitions
        scored = ArrayRecord(without_controls(arrays))  # scores need no control
        return self._messages("evaluate", "evaluate", server_round, everyone, scored, told)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Collect the sums of every client's test rows."""
        if not self.inbox.asked:
            return None
        server_round = min(server_round, self.budget.final)
        rows = self._gather_scores(server_round, "evaluate", replies)
        self._announce_round(server_round, rows)
        return border.numbers(macro(rows)) if rows else None

    def summary(self) -> None:
        """Say nothing: the journal has it all."""

    def _messages(
        self,
        kind: str,
        phase: str,
        server_round: int,
        partitions: list[int],
        arrays: ArrayRecord,
        config: dict[str, Any],
        each: Callable[[int], Mapping[str, Any]] = lambda partition: {},
    ) -> list[Message]:
        """Build one message a partition, which also says what ``each`` has for it; weigh it."""
        self.inbox.listen(self._grid)
        self.inbox.expect(kind, partitions, "run" in config)
        if not partitions:
            return []
        if kind == "train":
            config = {**config, **self.riding.ask(config, self.evaluate_config)}
        self.journal.event("phase", round=server_round, phase=phase, clients=len(partitions))
        messages, parcels = [], border.Parcels()
        for partition in self.roster.by_work(partitions, "train" if kind == "train" else "test"):
            given = self.for_client(partition, arrays) if len(arrays) else arrays
            parcel = parcels.of(given) if len(given) else given
            records = border.content(parcel, {**config, **each(partition)})
            where: dict[str, Any] = {"phase": phase, "partition": partition}
            self.journal.weigh(records, server_round=server_round, direction="down", **where)
            node = self.roster.nodes[partition]
            messages.append(Message(records, node, f"{kind}.{self.action}"))
        if kind == "train":
            self.journal.sync()  # no power cut may forget who was asked
        return messages

    def _updates(
        self, server_round: int, replies: Iterable[Message], rows: list[dict[str, Any]]
    ) -> Iterator[Update]:
        norms: dict[int, dict[str, float]] = {}

        def read(partition: int, records: RecordDict) -> Update:
            records = self.riding.take(partition, records)
            update = self.read_update(server_round, partition, records)
            metrics = border.checked_metrics(records, self.train_metrics)
            norms[partition] = found = self.admit(server_round, partition, update, metrics)
            rows.append(self._row(server_round, "train", partition, {**metrics, **found}))
            return update

        def drop(partition: int, reason: str) -> None:
            rows[:] = [row for row in rows if row["partition"] != partition]
            self.inbox.failed(server_round, "train", partition, reason)

        updates = self.inbox.read(server_round, "train", replies, read)
        for update in self.gate.sift(server_round, updates, norms, drop):
            yield update
            del update  # it may be the size of an adapter; the next one is on its way

    def admit(
        self, server_round: int, partition: int, update: Update, metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Hold weight and change against the gate, or override; return the change's norms."""
        self.gate.check_weight(partition, metrics[border.WEIGHT])
        return self.gate.check_change(update, self.sent_to(partition))

    def _gather_scores(
        self, server_round: int, phase: str, replies: Iterable[Message]
    ) -> list[dict[str, Any]]:
        def read(partition: int, records: RecordDict) -> dict[str, Any]:
            metrics = border.checked_metrics(records, SCORES)
            return self._row(server_round, phase, partition, metrics)

        rows = list(self.inbox.read(server_round, phase, replies, read))
        self.inbox.report_missing(server_round, phase)
        keep_rows(self.journal, rows)
        return rows

    def _row(
        self, server_round: int, phase: str, partition: int, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        name = self.roster.name(partition) if partition in self.roster.properties else ""
        head = {"round": server_round, "phase": phase, "partition": partition, "name": name}
        return {**head, **metrics}

    def _announce_round(self, server_round: int, rows: list[dict[str, Any]]) -> None:
        announce(self.journal, server_round, rows, self.riding.told(server_round, self._told()))

    def _told(self) -> dict[str, Any]:
        """Return what a round's event says besides its scores."""
        return {"rounds": self.config.rounds, "train_loss": self._train_loss, **self.round_facts}

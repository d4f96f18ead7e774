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
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result, Strategy
from numpy.typing import NDArray

from fedloom import border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.rules import ControlSum, without_controls
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.tallies import macro, prefixed
from fedloom.wire import Arrays, Manifest, Update

Read = TypeVar("Read")

_APART = ("local-", "personal-")


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
        self._partition_of = {node: p for p, node in roster.nodes.items()}
        self._grid: Grid | None = None
        self._asked: set[int] = set()
        self._sent: dict[str, NDArray[Any]] = {}
        self._train_loss: float | None = None
        self.server_round = 0
        self.round_facts: dict[str, float] = {}  # for the round's event; ``fold`` may add to it

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
        expected = self.expected_reply(server_round, partition)
        return border.update_of(records, expected, partition)

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
            "last": server_round == self.config.rounds,
        }

    def run(self, grid: ReplyStream, arrays: Arrays) -> Result:
        """Measure the frozen model, then run Flower's loop over all rounds."""
        self.journal.event("client-state", run=self.run_token)
        self.measure_frozen(grid)
        if self.config.local.method == "none":
            return self._score_alone(grid, arrays)
        return self.start(
            grid=grid,
            initial_arrays=border.pack_arrays(arrays),
            num_rounds=self.config.rounds,
            timeout=self.config.sampling.reply_seconds,
        )

    def _score_alone(self, grid: ReplyStream, arrays: Arrays) -> Result:
        """Score the start where the last round's adapter would be: nobody trains."""
        last, result = self.config.rounds, Result()
        result.arrays = border.pack_arrays(arrays)
        if self._keep is not None:
            self._keep(last, dict(arrays))
        messages = self.configure_evaluate(last, result.arrays, ConfigRecord(), grid)
        self.aggregate_evaluate(last, grid.send_and_receive(messages))
        return result

    def measure_frozen(self, grid: ReplyStream) -> None:
        """Score the untouched model on every test row: what all else stands against."""
        self._grid = grid
        config: dict[str, Scalar] = {"round": 0, "frozen": True}
        nothing = ArrayRecord()
        messages = self._messages("evaluate", "frozen", 0, self.roster.partitions, nothing, config)
        self._gather_scores(0, "frozen", grid.send_and_receive(messages))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the adapter to the round's partitions."""
        self._grid, self._sent = grid, border.unpack_arrays(arrays)
        self.server_round, self.round_facts = server_round, {}
        chosen = self.roster.sample(self.config.seed, server_round, self.config.sampling.fraction)
        told = {**config, **self.train_config(server_round)}
        if self.config.local.method == "pooled":  # one client with all rows takes all their steps
            told |= {"stands-for": chosen, "pool": self.roster.partitions}
            chosen = self.roster.partitions[:1]
        return self._messages("train", "train", server_round, chosen, arrays, told)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Fold the good replies; name and drop the bad; fail below ``sampling.min-nodes``."""
        rows: list[dict[str, Any]] = []
        controls = ControlSum(self._sent, len(self.roster.nodes))
        updates = controls.set_aside(self._updates(server_round, replies, rows))
        first = next(updates, None)
        folded = dict(self._sent)
        if first is not None:
            made = self.fold(chain([first], updates), without_controls(self._sent))
            folded = {**made, **controls.moved()}
        self._report_missing(server_round, "train")
        if (come := self.usable(len(rows))) < self._needed():
            raise AggregationError(
                f"round {server_round}: {come} usable replies, at least {self._needed()} are needed"
            )
        folded = self.settle(server_round, folded)
        if self._keep is not None:
            self._keep(server_round, folded)
        self._keep_rows(rows)
        if "loss" not in self.train_metrics:
            return border.pack_arrays(folded), None
        weights = [row[border.WEIGHT] for row in rows]
        self._train_loss = float(np.average([row["loss"] for row in rows], weights=weights))
        return border.pack_arrays(folded), border.numbers({"train-loss": self._train_loss})

    def usable(self, come: int) -> int:
        """Count what a round can build on: its good replies, or override."""
        return come

    def _needed(self) -> int:
        return 1 if self.config.local.method == "pooled" else self.config.sampling.min_nodes

    def settle(self, server_round: int, folded: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return what is kept and scored once all replies are in: the fold itself, or override."""
        return folded

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the averaged adapter to every partition, where its turn has come."""
        last = server_round == self.config.rounds
        if server_round % self.config.evaluation.every and not last:
            self._announce_round(server_round, [])
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
        if not self._asked:
            return None
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
        self._asked = set(partitions)
        self.journal.event("phase", round=server_round, phase=phase, clients=len(partitions))
        messages = []
        for partition in self.roster.by_work(partitions, "train" if kind == "train" else "test"):
            given = self.for_client(partition, arrays) if len(arrays) else arrays
            records = border.content(given, {**config, **each(partition)})
            self._weigh(records, server_round, phase, "down", partition)
            node = self.roster.nodes[partition]
            messages.append(Message(records, node, f"{kind}.{self.action}"))
        return messages

    def _updates(
        self, server_round: int, replies: Iterable[Message], rows: list[dict[str, Any]]
    ) -> Iterator[Update]:
        def read(partition: int, records: RecordDict) -> Update:
            update = self.read_update(server_round, partition, records)
            metrics = border.checked_metrics(records, self.train_metrics)
            rows.append(self._row(server_round, "train", partition, metrics))
            return update

        for update in self._read(server_round, "train", replies, read):
            yield update
            del update  # it may be the size of an adapter; the next one is on its way

    def _gather_scores(
        self, server_round: int, phase: str, replies: Iterable[Message]
    ) -> list[dict[str, Any]]:
        def read(partition: int, records: RecordDict) -> dict[str, Any]:
            metrics = border.checked_metrics(records, ("gold-ce-sum", "correct"))
            return self._row(server_round, phase, partition, metrics)

        rows = list(self._read(server_round, phase, replies, read))
        self._report_missing(server_round, phase)
        self._keep_rows(rows)
        return rows

    def _read(
        self,
        server_round: int,
        phase: str,
        replies: Iterable[Message],
        read: Callable[[int, RecordDict], Read],
    ) -> Iterator[Read]:
        """Yield what ``read`` makes of each good reply; weigh every reply and name the failures."""
        for reply in replies:
            partition = self._partition_of.get(self._answered_for(reply), -1)
            if reply.has_error():
                reason, trace, _ = border.failure_reason(reply)
                self._failed(server_round, phase, partition, reason, trace)
                continue
            try:
                self._weigh(reply.content, server_round, phase, "up", partition)
                if partition not in self._asked:
                    raise Refusal("a reply that nobody asked for")
                made = read(partition, reply.content)
            except Exception as error:  # a reply is foreign data: no fault in it is the run's
                reason = str(error) if isinstance(error, Refusal) else f"bad reply: {error!r}"
                self._failed(server_round, phase, partition, reason)
                continue
            self._asked.discard(partition)
            metrics = border.metrics_of(reply.content)
            told = {key: metrics.get(key) for key in ("seconds", "loss")}
            where = {"round": server_round, "phase": phase, "partition": partition}
            self.journal.event("reply", **where, **told)
            yield made

    def _answered_for(self, reply: Message) -> int:
        """Return the node that a reply answers for, also if Flower answers in its place."""
        if isinstance(self._grid, ReplyStream):
            return self._grid.destination(reply)
        return reply.metadata.src_node_id

    def _failed(
        self, server_round: int, phase: str, partition: int, reason: str, trace: str = ""
    ) -> None:
        self._asked.discard(partition)
        where = {"round": server_round, "phase": phase, "partition": partition}
        self.journal.event("client-failed", **where, reason=reason, traceback=trace)

    def _report_missing(self, server_round: int, phase: str) -> None:
        seconds = self.config.sampling.reply_seconds
        for partition in sorted(self._asked):
            reason = f"no reply: not delivered, or not answered within {seconds:.0f} s"
            self._failed(server_round, phase, partition, reason)

    def _weigh(
        self, records: Any, server_round: int, phase: str, direction: str, partition: int
    ) -> None:
        where: dict[str, Any] = {"phase": phase, "partition": partition}
        self.journal.weigh(records, server_round=server_round, direction=direction, **where)

    def _row(
        self, server_round: int, phase: str, partition: int, metrics: dict[str, Any]
    ) -> dict[str, Any]:
        name = self.roster.name(partition) if partition in self.roster.properties else ""
        head = {"round": server_round, "phase": phase, "partition": partition, "name": name}
        return {**head, **metrics}

    def _keep_rows(self, rows: list[dict[str, Any]]) -> None:
        """Write metrics in partition order; what another adapter than the global scored goes apart.

        ``local-``: the adapter that is averaged next; ``personal-``: the client's own.
        """
        for row in sorted(rows, key=lambda r: cast(int, r["partition"])):
            head = {key: row[key] for key in ("round", "partition", "name")}
            self.journal.metric(**{k: v for k, v in row.items() if not k.startswith(_APART)})
            for prefix in _APART:
                if scores := prefixed(row, prefix):
                    self.journal.metric(**head, phase=prefix.removesuffix("-"), **scores)

    def _announce_round(self, server_round: int, rows: list[dict[str, Any]]) -> None:
        failures = self.journal.rows["events"]
        failed = [
            e for e in failures if e["event"] == "client-failed" and e["round"] == server_round
        ]
        self.journal.event(
            "round",
            round=server_round,
            rounds=self.config.rounds,
            train_loss=self._train_loss,
            bytes_down=self.journal.bytes_of(server_round, "down"),
            bytes_up=self.journal.bytes_of(server_round, "up"),
            failed=len(failed),
            **self.round_facts,
            **(macro(rows) if rows else {}),
        )

# SPDX-License-Identifier: Apache-2.0
"""``Inbox``: who was asked, what of the replies can be used, who failed, and who came too late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from flwr.app import Message, RecordDict

from fedloom import border
from fedloom.errors import Refusal
from fedloom.strategies.journal import LATE, Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.wire import START_PHASE, doubts_start, ticket

Read = TypeVar("Read")

_LOOKED_BACK = 64
"""Rounds in which a foreign ticket is looked for, to name the round that a reply belongs to."""


class Inbox:
    """Read one phase's replies after another; a bad one is named and dropped.

    Parameters
    ----------
    run : str
        The run's token.
    manifest : str
        Digest of the run's manifest; a reply's ticket must be of both.
    seconds : float
        How long replies are waited for, to say so.
    """

    def __init__(
        self, roster: Roster, journal: Journal, run: str, manifest: str, seconds: float
    ) -> None:
        self.roster, self.journal = roster, journal
        self._run, self._manifest, self._seconds = run, manifest, seconds
        self._partition_of = {node: p for p, node in roster.nodes.items()}
        self._grid: Any = None
        self.asked: set[int] = set()
        self._answered: set[int] = set()
        self._doubts: dict[int, str] = {}
        self._kind, self._bound = "", False

    def listen(self, grid: Any) -> None:
        """Name the grid whose replies these are."""
        self._grid = grid

    def expect(self, kind: str, partitions: Collection[int], bound: bool) -> None:
        """Begin a phase.

        Parameters
        ----------
        kind
            ``train`` or ``evaluate``.
        bound
            Whether clients were told run, round and manifest, so that replies must say the same.
        """
        self.asked, self._answered, self._doubts = set(partitions), set(), {}
        self._kind, self._bound = kind, bound

    def read(
        self,
        server_round: int,
        phase: str,
        replies: Iterable[Message],
        read: Callable[[int, RecordDict], Read],
    ) -> Iterator[Read]:
        """Yield what ``read`` makes of each good reply; weigh every reply and name the failures.

        Raises
        ------
        Refusal
            If at least half of those that answered have another start of the adapter: then it is
            they who are many, and the node that sent it is named.
        """
        heard: set[int] = set()
        for reply in replies:
            partition = self.partition(reply)
            heard.add(partition)
            if reply.has_error():
                reason, trace, refused = border.failure_reason(reply)
                self.journal.weigh_error(reply, server_round=server_round, partition=partition)
                if refused and partition in self.asked and doubts_start(reason):
                    self._doubts[partition] = reason
                self.failed(server_round, phase, partition, reason, trace)
                continue
            try:
                self._weigh(reply.content, server_round, phase, partition)
                self._check(server_round, partition, reply.content)
                made = read(partition, reply.content)
                metrics = border.metrics_of(reply.content)
            except Exception as error:  # a reply is foreign data: no fault in it is the run's
                reason = str(error) if isinstance(error, Refusal) else f"bad reply: {error!r}"
                self.failed(server_round, phase, partition, reason)
                continue
            self.asked.discard(partition)
            self._answered.add(partition)
            told = {key: metrics.get(key) for key in ("seconds", "loss")}
            where = {"round": server_round, "phase": phase, "partition": partition}
            self.journal.event("reply", **where, **told)
            yield made
        if self._doubts and 2 * len(self._doubts) >= len(heard):
            self._blame_start(len(heard))

    def _blame_start(self, heard: int) -> None:
        """Refuse the start by the name of its sender, while nobody has trained on it."""
        rows = self.journal.rows["ledger"]
        sent = [r for r in rows if (r["phase"], r["direction"]) == (START_PHASE, "up")]
        if not sent or self.journal.of_phase("train"):
            return
        whose = int(sent[-1]["partition"])
        name = self.roster.name(whose) if whose in self.roster.properties else ""
        raise Refusal(
            f"partition {whose} ({name}) sent the adapter's start, and {len(self._doubts)} of"
            f" {heard} nodes have another ({min(self._doubts.items())[1]}): run without that node,"
            " or mend it"
        )

    def partition(self, reply: Message) -> int:
        """Return whose a reply is, also if Flower answers in its place; -1 if nobody's."""
        if isinstance(self._grid, ReplyStream):
            return self._partition_of.get(self._grid.destination(reply), -1)
        return self._partition_of.get(reply.metadata.src_node_id, -1)

    def failed(
        self, server_round: int, phase: str, partition: int, reason: str, trace: str = ""
    ) -> None:
        """Name a client that failed, and why."""
        self.asked.discard(partition)
        where = {"round": server_round, "phase": phase, "partition": partition}
        reason = border.one_line(reason)
        self.journal.event("client-failed", **where, reason=reason, traceback=trace)

    def report_missing(self, server_round: int, phase: str) -> None:
        """Name those whose replies did not come, and those whose reply to an earlier phase did."""
        for partition in sorted(self.asked):
            reason = f"no reply: not delivered, or not answered within {self._seconds:.0f} s"
            self.failed(server_round, phase, partition, reason)
        if isinstance(self._grid, ReplyStream):
            for node, reply in self._grid.late():
                partition = self._partition_of.get(node, -1)
                if reply.has_error():
                    self.journal.weigh_error(reply, server_round=server_round, partition=partition)
                    continue
                self._weigh(reply.content, server_round, LATE, partition)
                self.journal.event("late-reply", round=server_round, partition=partition)

    def _check(self, server_round: int, partition: int, records: RecordDict) -> None:
        """Refuse what nobody asked for, what came before, and what answers something else."""
        came = border.ticket_of(records)
        if partition in self._answered:
            raise Refusal("a second reply came; the first one counts")
        if partition not in self.asked:
            raise Refusal("a reply that nobody asked for")
        if not self._bound or came == self._ticket(server_round, partition):
            return
        if came is None:
            raise Refusal("the reply has no ticket; use the same fedloom version on every node")
        for earlier in range(server_round - 1, max(0, server_round - _LOOKED_BACK), -1):
            if came == self._ticket(earlier, partition):
                raise Refusal(f"a reply of round {earlier} came again in round {server_round}")
        raise Refusal("the reply answers another run, round, adapter or client's message")

    def _ticket(self, server_round: int, partition: int) -> int:
        return ticket(self._run, server_round, self._manifest, self._kind, partition)

    def _weigh(self, records: Any, server_round: int, phase: str, partition: int) -> None:
        where: dict[str, Any] = {"phase": phase, "partition": partition, "direction": "up"}
        self.journal.weigh(records, server_round=server_round, **where)

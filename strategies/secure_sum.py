# SPDX-License-Identifier: Apache-2.0
"""``SecureSum``: what a strategy needs to learn a sum of its clients' arrays and nothing else.

Two queries before the method's own message, one after it.  A strategy calls ``begin`` where it
configures a round, adds ``told`` to each client's message, gives each reply to ``take``, and gets
the sum from ``finish``; clients may be lost at any step as long as a threshold of them stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from numpy.typing import NDArray

from fedloom import border
from fedloom.errors import Refusal
from fedloom.rules.fixed_point import BITS
from fedloom.secure import Collector, Summation, decoded, messages, threshold_for
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.wire import Arrays


@dataclass(frozen=True, eq=False)
class Summed:
    """A sum, whose it is, and who was lost on the way."""

    arrays: dict[str, NDArray[Any]]
    """In float64; see ``fedloom.rules.fixed_point`` for the one rounding."""
    partitions: list[int]
    """Whose numbers are in it."""
    lost: dict[int, str]
    """Partition -> at which step, and why; one lost at the last step is in the sum all the same."""


class SecureSum:
    """Sums over the partitions of a roster, one after another.

    Parameters
    ----------
    run : str
        The run's token.
    journal : Journal, optional
        Where failures and bytes go.
    threshold : float
        More than so large a share of those asked must stay to the end.
    bits : int
        After the point in fixed point: a sum must stay below ``2 ** (63 - bits)``.
    seconds : float, optional
        To wait for answers to the short queries; the grid's own default if left out.
    """

    def __init__(
        self,
        roster: Roster,
        run: str,
        journal: Journal | None = None,
        *,
        threshold: float = 2 / 3,
        bits: int = BITS,
        seconds: float | None = None,
    ) -> None:
        self.run, self.journal = run, journal or Journal()
        self.threshold, self.bits, self.seconds = threshold, bits, seconds
        self.meet(roster)

    def meet(self, roster: Roster) -> None:
        """Take these for the nodes that are there, between two sums."""
        self.roster = roster
        self._partition_of = {node: p for p, node in roster.nodes.items()}

    def begin(self, grid: ReplyStream, server_round: int, partitions: Collection[int]) -> list[int]:
        """Exchange keys and shares; return which partitions to ask for their numbers.

        Parameters
        ----------
        server_round
            Must be higher than in every earlier sum of the run.

        Raises
        ------
        Refusal
            If fewer than the threshold answer.
        """
        self._grid, self._lost = grid, dict[int, str]()
        here = Summation(self.run, server_round)
        needed = threshold_for(len(partitions), self.threshold)
        self._collector = collector = Collector(here, needed)

        def keys(partition: int, arrays: Arrays) -> None:
            collector.add_keys(partition, messages.take_keys(arrays))

        def letters(partition: int, arrays: Arrays) -> None:
            collector.add_letters(partition, *messages.take_letters(arrays))

        self._ask(messages.KEYS, dict.fromkeys(partitions, messages.ask_keys(here)), keys)
        peers = collector.keys()
        asked = messages.ask_shares(here, peers, needed)
        self._ask(messages.SHARES, dict.fromkeys(peers, asked), letters)
        return collector.senders()

    @property
    def needed(self) -> int:
        """How many clients must stay to the end of the sum that was begun."""
        return self._collector.threshold

    def told(self, partition: int) -> dict[str, Any]:
        """Return what a partition's own message must say besides: letters that only it can open."""
        letters = self._collector.letters_to(partition)
        return messages.ask_numbers(self._collector.summation, letters, self.bits)

    def take(self, partition: int, arrays: Arrays) -> None:
        """Add a reply's masked arrays; a ``Refusal`` says why they cannot be in the sum."""
        self._collector.add_masked(partition, arrays)

    def finish(self) -> Summed:
        """Ask the survivors for what takes the masks off, and take them off.

        Raises
        ------
        Refusal
            If fewer than the threshold sent numbers or answer now, or there are too few true
            shares among theirs.
        """
        collector = self._collector
        survivors = collector.survivors()
        for partition in collector.senders():
            if partition not in survivors:
                self._lost[partition] = "numbers: they did not come"
        asked = messages.ask_unmask(collector.summation, survivors)

        def shares(partition: int, arrays: Arrays) -> None:
            collector.add_shares(partition, messages.take_shares(arrays))

        self._ask(messages.UNMASK, dict.fromkeys(survivors, asked), shares)
        arrays = decoded(collector.total(), self.bits)
        for partition, owner in collector.false_shares.items():
            reason = (
                f"its share of client {owner}'s secret is false, by its own doing or by client"
                f" {owner}'s; another's was taken"
            )
            where = {"round": collector.summation.round, "phase": messages.UNMASK}
            self.journal.event(
                "client-failed", **where, partition=partition, reason=reason, traceback=""
            )
        where = {"round": collector.summation.round, "threshold": collector.threshold}
        self.journal.event("secure-sum", **where, partitions=survivors, lost=sorted(self._lost))
        return Summed(arrays, survivors, dict(self._lost))

    def _ask(
        self,
        action: str,
        configs: Mapping[int, dict[str, Any]],
        read: Callable[[int, Arrays], None],
    ) -> None:
        """Ask partitions and read their answers; name whoever gives none or a bad one."""
        waiting = set(configs)
        built = []
        for partition, config in sorted(configs.items()):
            records = border.content(config=config)
            self._weigh(records, action, "down", partition)
            built.append(Message(records, self.roster.nodes[partition], f"query.{action}"))
        if action == messages.UNMASK:
            self.journal.sync()  # a run that goes on must know that this sum may be open
        for reply in self._grid.send_and_receive(built, timeout=self.seconds):
            partition = self._partition_of.get(self._grid.destination(reply), -1)
            trace = ""
            try:
                if reply.has_error():
                    self._weigh_error(reply, partition)
                    reason, trace, _ = border.failure_reason(reply)
                    raise Refusal(reason)
                self._weigh(reply.content, action, "up", partition)
                if partition not in waiting:
                    raise Refusal("a reply that nobody asked for")
                read(partition, border.arrays_of(reply.content))
                waiting.discard(partition)
            except Exception as error:  # a reply is foreign data: no fault in it is the run's
                waiting.discard(partition)
                self._failed(action, partition, str(error), trace)
        for partition in sorted(waiting):
            self._failed(action, partition, "no reply in time")

    def _failed(self, action: str, partition: int, reason: str, trace: str = "") -> None:
        self._lost[partition] = f"{action}: {reason}"
        where = {"round": self._collector.summation.round, "phase": action}
        self.journal.event(
            "client-failed", **where, partition=partition, reason=reason, traceback=trace
        )

    def _weigh_error(self, reply: Message, partition: int) -> None:
        now = self._collector.summation.round
        self.journal.weigh_error(reply, server_round=now, partition=partition)

    def _weigh(self, records: Any, action: str, direction: str, partition: int) -> None:
        where: dict[str, Any] = {"phase": action, "direction": direction, "partition": partition}
        self.journal.weigh(records, server_round=self._collector.summation.round, **where)

# SPDX-License-Identifier: Apache-2.0
"""Who is there: node ids, which Flower draws anew each run, against partition ids, which last."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError

from fedloom import border
from fedloom.errors import Refusal
from fedloom.rules.schedule import drawn
from fedloom.strategies.journal import Journal

_POLL_SECONDS = 0.1
_POLL_SECONDS_MAX = 0.5
_PULLED_AT_ONCE = 4  # messages; Flower unpacks all that it hands out together


class ReplyStream(Grid):
    """A grid whose ``send_and_receive`` yields each reply when it arrives.

    Flower's own waits for the slowest client and holds all replies; here the server's memory does
    not grow with the number of clients.
    """

    def __init__(self, grid: Grid, default_timeout: float) -> None:
        self._grid, self._timeout = grid, default_timeout
        self._sent_to: dict[str, int] = {}
        self._overdue: dict[str, int] = {}  # message -> node, of phases that are over

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send, then yield replies until all are in or the time is up.

        Afterwards ``destination`` tells which node a reply answers for: Flower's own error replies
        come from the SuperLink, not from the node that is gone.
        """
        listed = list(messages)
        waiting = [name for name in self._grid.push_messages(listed) if name]
        # By the id that pushing wrote on each message: a grid may leave out the ids of messages
        # that it could not store, so the order of the returned ids tells nothing.
        self._sent_to = {m.metadata.message_id: m.metadata.dst_node_id for m in listed}
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        pause = _POLL_SECONDS
        try:
            while waiting:
                before = len(waiting)
                for start in range(0, len(waiting), _PULLED_AT_ONCE):
                    for reply in self._grid.pull_messages(waiting[start : start + _PULLED_AT_ONCE]):
                        answered = reply.metadata.reply_to_message_id
                        yield reply
                        waiting = [name for name in waiting if name != answered]
                if len(waiting) == before:  # replies to nothing must not keep the wait alive
                    if time.monotonic() > deadline:
                        return
                    time.sleep(pause)
                    pause = min(pause * 1.2, _POLL_SECONDS_MAX)
        finally:
            self._overdue |= {n: self._sent_to[n] for n in waiting if n in self._sent_to}

    def late(self) -> Iterator[tuple[int, Message]]:
        """Yield what came after its phase was over, errors too, and whose it is: it is not used."""
        names = list(self._overdue)
        for start in range(0, len(names), _PULLED_AT_ONCE):
            for reply in self._grid.pull_messages(names[start : start + _PULLED_AT_ONCE]):
                node = self._overdue.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    yield node, reply

    def destination(self, reply: Message) -> int:
        """Return the node that was asked what ``reply`` answers."""
        asked = self._sent_to.get(reply.metadata.reply_to_message_id)
        return reply.metadata.src_node_id if asked is None else asked

    def set_run(self, run: Any) -> None:
        """Pass on."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Pass on."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Pass on."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Pass on."""
        return self._grid.get_node_ids()

    def get_nodes(self) -> Any:
        """Pass on."""
        return self._grid.get_nodes()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Pass on."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Pass on."""
        return self._grid.pull_messages(message_ids)


@dataclass(frozen=True)
class Roster:
    """Partition id -> node id, and what each node said of itself."""

    nodes: dict[int, int]
    properties: dict[int, dict[str, Any]]

    @property
    def partitions(self) -> list[int]:
        """Partition ids in order."""
        return sorted(self.nodes)

    def name(self, partition: int) -> str:
        """Return what the client calls itself."""
        return str(self.properties[partition].get("name", f"client {partition}"))

    def by_work(self, partitions: list[int], rows: str) -> list[int]:
        """Order partitions by how many ``rows`` ("train" or "test") they hold, most first.

        Who has most to do starts first, so that no worker waits for a straggler at the end.
        """
        held = {p: int(self.properties.get(p, {}).get(rows, 0)) for p in partitions}
        return sorted(partitions, key=lambda p: (-held[p], p))

    def sample(self, seed: int, server_round: int, fraction: float) -> list[int]:
        """Draw the partitions of a round: the same for one (seed, round), whatever the node ids.

        >>> roster = Roster({p: 100 + p for p in range(10)}, {})
        >>> roster.sample(0, 1, 0.3) == roster.sample(0, 1, 0.3), len(roster.sample(0, 2, 0.25))
        (True, 3)
        """
        partitions = self.partitions
        return [partitions[i] for i in drawn(seed, server_round, fraction, len(partitions))]


def wait_for_nodes(grid: Grid, count: int, seconds: float, least: int) -> list[int]:
    """Wait until ``count`` nodes are there; after ``seconds`` go on with ``least`` of them or fail.

    Flower's own sampling waits for ever.
    """
    deadline = time.monotonic() + seconds
    while len(nodes := sorted(grid.get_node_ids())) < count and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if len(nodes) < least:
        raise AggregationError(
            f"{len(nodes)} nodes came in {seconds:.0f} s, at least {least} are needed"
        )
    return nodes


@dataclass(frozen=True)
class Dropped:
    """A node that answered the roll call and is left out."""

    partition: int
    """-1 if it did not say."""
    node: int
    reason: str
    counts: bool
    """Whether it may be right and the others, or the recipe, wrong: then it has a vote."""


def roll_call(
    grid: ReplyStream,
    nodes: list[int],
    build: Callable[[int], Message],
    check: Callable[[Mapping[str, Any]], int],
    journal: Journal,
    server_round: int = 0,
) -> tuple[Roster, list[Dropped]]:
    """Ask every node which partition it holds; no model is loaded for the answer.

    Parameters
    ----------
    check
        Looks at what a node says and returns its partition; a ``Refusal`` leaves it out.
    server_round
        In whose books it is entered; 0 is before the first.

    Returns
    -------
    Roster
        Whose answers can be used.
    list of Dropped
        Who refused (its data or model are not what the recipe says), whose reply cannot be read,
        and all nodes that say they hold one and the same partition: nobody can tell whose it is.
    """
    told: dict[int, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    dropped: list[Dropped] = []
    where: dict[str, Any] = {"server_round": server_round, "phase": "properties"}
    for reply in grid.send_and_receive([build(node) for node in nodes]):
        node, partition, said = grid.destination(reply), -1, {}
        if reply.has_error():
            reason, trace, refused = border.failure_reason(reply)
            journal.weigh_error(reply, server_round=server_round, partition=-1)
            if refused:
                dropped.append(Dropped(-1, node, reason, True))
                continue
            lost = {"round": server_round, "phase": "properties", "partition": -1, "node": node}
            journal.event("client-failed", **lost, reason=reason, traceback=trace)
            continue
        try:
            said = border.config_of(reply.content)
            partition = check(said)
            told[partition].append((node, said))
        except Refusal as refusal:
            dropped.append(Dropped(partition, node, str(refusal), False))
        journal.weigh(build(node).content, direction="down", partition=partition, **where)
        journal.weigh(reply.content, direction="up", partition=partition, **where)
    for partition in [p for p, found in told.items() if len(found) > 1]:
        why = f"two nodes hold partition {partition}: give each its own partition-id"
        dropped += [Dropped(partition, node, why, True) for node, _ in told.pop(partition)]
    alone = {partition: found[0] for partition, found in told.items()}
    nodes_of = {partition: node for partition, (node, _) in alone.items()}
    return Roster(nodes_of, {partition: said for partition, (_, said) in alone.items()}), dropped

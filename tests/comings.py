"""Nodes that come, go and start again between the rounds of a run, in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.clients.keys import KeyBench, key_bench
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import serve_on

from runs import Recorder, rows

Told = Mapping[int, Mapping[str, Any]]
"""Partition -> what its node was started with, of those that are there."""


def there(*partitions: int, **started: Mapping[str, Any]) -> Told:
    """``there(0, 1, p1={"revision": 2})``: nodes 0 and 1, the second started anew."""
    return {p: started.get(f"p{p}", {}) for p in partitions}


class Comings(Recorder):
    """``calls[n]`` is who is there from the n-th roll call on.

    A node that is started with something else is another node to Flower; a message to one that is
    gone is never answered.
    """

    def __init__(self, config, calls: Sequence[Told], app: ClientApp = client_app.app) -> None:
        super().__init__(app, config.clients.count, config.flat())
        plain, self._contexts = self._contexts[1000], {}
        self._calls, self._ids = list(calls), dict[str, int]()
        self._plain, self._now = plain, set[int]()

    def get_node_ids(self) -> Iterable[int]:
        """Go on to the next roll call: with no time to wait, it is asked once in each."""
        told = self._calls.pop(0) if len(self._calls) > 1 else self._calls[0]
        self._now = {self._node(partition, own) for partition, own in told.items()}
        return sorted(self._now)

    def _node(self, partition: int, own: Mapping[str, Any]) -> int:
        node = self._ids.setdefault(f"{partition} {sorted(own.items())}", 1000 + len(self._ids))
        made = {**self._plain.node_config, "partition-id": partition, **own}
        self._contexts.setdefault(
            node,
            Context(
                run_id=self._plain.run_id,
                node_id=node,
                node_config=made,
                state=RecordDict(),
                run_config=dict(self._plain.run_config),
            ),
        )
        return node

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let a node work if it is there."""
        found = [n for n in message_ids if self._at(n) in self._now]
        return super().pull_messages(found)

    def _at(self, name: str) -> int:
        waiting = self._waiting.get(name)
        return -1 if waiting is None else waiting.metadata.dst_node_id

    def asked(self, kind: str) -> list[tuple[int, int]]:
        """Return (round, partition) of all messages of a kind, in order."""
        found = []
        for message in self.sent:
            if message.metadata.message_type == kind:
                (record,) = message.content.config_records.values()
                context = self._contexts[message.metadata.dst_node_id]
                found.append((int(record["round"]), int(context.node_config["partition-id"])))
        return sorted(found)


def run_with(config, calls: Sequence[Told], app: ClientApp = client_app.app) -> Comings:
    """Run a recipe while nodes come and go."""
    grid = Comings(config, calls, app)
    serve_on(grid, server_app.app, config)
    return grid


def events(config, name: str) -> list[dict]:
    folder = Path(config.output) / config.name
    return [e for e in rows(folder, "events") if e["event"] == name]


class Halved(FAASTClient):
    """An owner of digits who in its second revision has every other row of the first.

    It says the same data at the roll call, as nodes with files of their own do.
    """

    def bench(self) -> KeyBench:
        whole = super().bench()
        return whole if self.revision < 2 else halved(whole, self.partition_id)


def halved(whole: KeyBench, partition: int) -> KeyBench:
    clients = list(whole.partition.clients)
    clients[partition] = replace(clients[partition], train=clients[partition].train[::2])
    made = replace(whole, partition=replace(whole.partition, clients=tuple(clients)), _sides={})
    made.__dict__["digests"] = whole.digests
    return made


def halving() -> ClientApp:
    """Serve ``Halved``."""
    app = ClientApp()
    serve(app, Halved, action="faast")
    return app


def summed_rows(config, partition: int, half: bool = False):
    """Return the keys and labels that a client sums."""
    bench = key_bench(config)
    bench = halved(bench, partition) if half else bench
    side = bench.side(partition, "summed")
    return side.unit(), side.labels

# SPDX-License-Identifier: Apache-2.0
"""The same ServerApp and ClientApp in one process: no Ray, no SuperLink, no sockets.

Every message is serialised and read back on its way, so that what works here works on a wire;
clients run one after the other.  For tests, debugging and small machines.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import NUM_PARTITIONS_KEY, PARTITION_ID_KEY, SUPERLINK_NODE_ID
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity

from fedloom.config import RunConfig
from fedloom.flat import Scalar

_FIRST_NODE = 1000
_RUN_ID = 1


class InProcessGrid(Grid):
    """Let a client work when its reply is pulled: one reply in memory at a time."""

    def __init__(self, app: ClientApp, nodes: int, run_config: dict[str, Scalar]) -> None:
        # Flower's Message reads these; outside a Flower process nobody sets them.
        TaskIdentity.task_id, TaskIdentity.run_id = 1, _RUN_ID
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self._app = app
        self._waiting: dict[str, Message] = {}
        self._contexts = {
            _FIRST_NODE + i: Context(
                run_id=_RUN_ID,
                node_id=_FIRST_NODE + i,
                node_config={PARTITION_ID_KEY: i, NUM_PARTITIONS_KEY: nodes},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for i in range(nodes)
        }

    def set_run(self, run: Any) -> None:
        """Ignore: there is one run."""

    @property
    def run(self) -> Any:
        """Return nothing: there is no run record outside a SuperLink."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Build a message."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes."""
        return list(self._contexts)

    def get_nodes(self) -> Any:
        """Return all nodes' ids; there is nothing else to know of them."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages in; they wait in the order in which they came."""
        names = []
        for message in messages:
            names.append(str(uuid.uuid4()))
            message.metadata.__dict__["_message_id"] = names[-1]  # as Flower's grids do
            self._waiting[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let one client work and return its reply."""
        asked = set(message_ids)
        for name in self._waiting:
            if name in asked:
                return [self._deliver(name, self._waiting.pop(name))]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Deliver and collect."""
        names = list(self.push_messages(messages))
        return [reply for _ in names for reply in self.pull_messages(names)]

    def _deliver(self, name: str, message: Message) -> Message:
        node = message.metadata.dst_node_id
        sent = Message(_through_the_wire(message.content), node, message.metadata.message_type)
        sent.metadata.__dict__["_message_id"] = name  # what a SuperLink would do
        reply = self._app(sent, self._contexts[node])
        if reply.has_content():
            reply.content = _through_the_wire(reply.content)
        return reply


def _through_the_wire(records: RecordDict) -> RecordDict:
    data = recorddict_to_proto(records).SerializeToString()
    return recorddict_from_proto(ProtoRecordDict.FromString(data))


def run_in_process(config: RunConfig, client: ClientApp | None = None) -> None:
    """Run a recipe's ServerApp over as many nodes as it names; raises what the ServerApp raises.

    Parameters
    ----------
    client : ClientApp, optional
        Another ClientApp than fedloom's own.
    """
    from fedloom.clients.warm import kept_here
    from fedloom.simulations import client_app, server_app  # torch: only when it is run

    grid = InProcessGrid(client or client_app.app, config.clients.count, config.flat())
    with kept_here():
        serve_on(grid, server_app.app, config)


def serve_on(grid: InProcessGrid, server: ServerApp, config: RunConfig) -> None:
    """Run a ServerApp on a grid."""
    server(
        grid=grid,
        context=Context(
            run_id=_RUN_ID,
            node_id=SUPERLINK_NODE_ID,
            node_config={},
            state=RecordDict(),
            run_config=dict(config.flat()),
        ),
    )

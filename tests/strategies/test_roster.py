from __future__ import annotations

import time

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import AggregationError
from hypothesis import given
from hypothesis import strategies as st

from fedloom import border
from fedloom.errors import Refusal
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.strategies import Journal, ReplyStream, Roster
from fedloom.strategies.roster import roll_call, wait_for_nodes


def echo() -> ClientApp:
    app = ClientApp()

    @app.query("properties")
    def properties(message, context):
        told = {"partition": context.node_config["partition-id"] // 2 * 2}
        return Message(border.content(config=told), reply_to=message)

    return app


class Mute(InProcessGrid):
    """Nodes that never answer."""

    def pull_messages(self, message_ids):
        return []


def ask(node: int) -> Message:
    return Message(border.content(config={}), node, "query.properties")


def test_replies_come_one_by_one_and_only_once():
    grid = ReplyStream(InProcessGrid(echo(), 3, {}), 10)
    stream = grid.send_and_receive([ask(1000), ask(1001), ask(1002)])
    first = next(stream)
    assert first.metadata.src_node_id == 1000
    assert len(list(stream)) == 2


def test_replies_are_their_own_nodes_though_a_message_was_not_stored():
    """Flower's in-memory grid leaves out the id of a message that it could not store."""

    class Lossy(InProcessGrid):
        def push_messages(self, messages):
            first, *others = super().push_messages(messages)
            del self._waiting[first]
            return others

    grid = ReplyStream(Lossy(echo(), 3, {}), 10)
    replies = list(grid.send_and_receive([ask(1000), ask(1001), ask(1002)]))
    assert [grid.destination(reply) for reply in replies] == [1001, 1002]
    assert [reply.metadata.src_node_id for reply in replies] == [1001, 1002]


def test_an_error_reply_from_flower_itself_is_its_nodes():
    """For a node that is gone the SuperLink answers, under its own node id."""

    class Gone(InProcessGrid):
        def _deliver(self, name, message):
            reply = super()._deliver(name, message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply

    grid = ReplyStream(Gone(echo(), 2, {}), 10)
    assert [grid.destination(r) for r in grid.send_and_receive([ask(1000), ask(1001)])] == [
        1000,
        1001,
    ]


def test_silent_nodes_end_the_wait():
    started = time.monotonic()
    assert list(ReplyStream(Mute(echo(), 2, {}), 0.3).send_and_receive([ask(1000)])) == []
    assert 0.3 <= time.monotonic() - started < 3  # seconds; Flower's own would wait an hour


def test_too_few_nodes_is_an_error_and_no_endless_wait():
    grid = InProcessGrid(echo(), 2, {})
    assert wait_for_nodes(grid, 2, seconds=5, least=1) == [1000, 1001]
    assert wait_for_nodes(grid, 3, seconds=0.2, least=2) == [1000, 1001]
    with pytest.raises(AggregationError, match="2 nodes came in 0 s, at least 3 are needed"):
        wait_for_nodes(grid, 3, seconds=0.2, least=3)


def call(grid, *nodes: int, journal: Journal | None = None):
    stream = ReplyStream(grid, 10)
    return roll_call(stream, list(nodes), ask, lambda said: said["partition"], journal or Journal())


def test_nodes_that_hold_one_partition_are_left_out_together():
    roster, dropped = call(InProcessGrid(echo(), 3, {}), 1000, 1001, 1002)
    assert roster.nodes == {2: 1002}
    assert [(d.partition, d.node, d.counts) for d in dropped] == [(0, 1000, True), (0, 1001, True)]
    assert {d.reason for d in dropped} == {
        "two nodes hold partition 0: give each its own partition-id"
    }


def test_who_refuses_who_fails_and_who_cannot_be_read_are_left_out_and_weighed():
    app = ClientApp()

    @app.query("properties")
    def properties(message, context):
        match context.node_config["partition-id"]:
            case 0:
                return border.failure(message, Refusal("no rows here"))
            case 1:
                return border.failure(message, KeyError("gone"))
            case 2:
                return Message(border.content(config={"name": "x"}), reply_to=message)
        return Message(border.content(config={"partition": 3}), reply_to=message)

    def check(said):
        if "partition" not in said:
            raise Refusal("no partition")
        return said["partition"]

    journal, grid = Journal(), ReplyStream(InProcessGrid(app, 4, {}), 10)
    roster, dropped = roll_call(grid, [1000, 1001, 1002, 1003], ask, check, journal)
    assert roster.nodes == {3: 1003}
    assert [(d.node, d.reason, d.counts) for d in dropped] == [
        (1000, "no rows here", True),
        (1002, "no partition", False),
    ]
    (failed,) = [e for e in journal.rows["events"] if e["event"] == "client-failed"]
    assert (failed["node"], failed["phase"]) == (1001, "properties")
    assert failed["reason"].startswith("KeyError")
    up = [(r["phase"], r["partition"]) for r in journal.rows["ledger"] if r["direction"] == "up"]
    assert up == [("error", -1), ("error", -1), ("properties", -1), ("properties", 3)]
    assert all(r["bytes"] > 0 for r in journal.rows["ledger"])


@given(
    st.integers(0, 99),
    st.integers(1, 50),
    st.floats(0.01, 1),
    st.lists(st.integers(1, 2**60), min_size=1, max_size=12, unique=True),
)
def test_sample_knows_partitions_not_node_ids(seed, server_round, fraction, node_ids):
    """Flower draws node ids anew each run; whom we ask must not depend on them."""
    numbers = range(len(node_ids))
    there = Roster(dict(zip(numbers, node_ids, strict=True)), {})
    again = Roster(dict(zip(numbers, sorted(node_ids), strict=True)), {})
    drawn = there.sample(seed, server_round, fraction)
    assert drawn == again.sample(seed, server_round, fraction)
    assert drawn == sorted(set(drawn))
    assert 1 <= len(drawn) <= len(node_ids)
    assert len(drawn) - 1 < fraction * len(node_ids) + 1e-6

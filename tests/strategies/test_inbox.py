"""Replies that come twice, unasked or too late are named, and waits end."""

from __future__ import annotations

import time

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from fedloom import border
from fedloom.errors import Refusal
from fedloom.simulations.inprocess import InProcessGrid
from fedloom.strategies import Journal, ReplyStream, Roster
from fedloom.strategies.budget import Budget
from fedloom.strategies.inbox import Inbox
from fedloom.wire import ticket

RUN, MANIFEST = "ab" * 16, "m" * 64


def echo() -> ClientApp:
    app = ClientApp()

    @app.train("mine")
    def train(message, context):
        told = border.config_of(message.content)
        number = ticket(RUN, told["round"], MANIFEST, "train", context.node_id - 1000)
        return Message(
            border.content(metrics={"loss": 1.0, border.TICKET: number}), reply_to=message
        )

    return app


def asked(count: int, server_round: int) -> list[Message]:
    config = {"run": RUN, "round": server_round}
    return [Message(border.content(config=config), 1000 + i, "train.mine") for i in range(count)]


class Slow(InProcessGrid):
    """Hold the first node's reply back until it is asked for a second time with others."""

    held = True

    def pull_messages(self, message_ids):
        wanted = [n for n in message_ids if not self._holds(n)]
        return super().pull_messages(wanted)

    def _holds(self, name: str) -> bool:
        waiting = self._waiting.get(name)
        return self.held and waiting is not None and waiting.metadata.dst_node_id == 1000


@pytest.fixture
def journal() -> Journal:
    return Journal()


def inbox(journal: Journal, count: int) -> Inbox:
    roster = Roster({p: 1000 + p for p in range(count)}, {})
    return Inbox(roster, journal, RUN, MANIFEST, 1.0)


def reasons(journal: Journal) -> dict[int, str]:
    rows = journal.rows["events"]
    return {e["partition"]: e["reason"] for e in rows if e["event"] == "client-failed"}


def test_a_second_reply_and_one_that_nobody_asked_for_are_named(journal):
    grid, box = ReplyStream(InProcessGrid(echo(), 3, {}), 5), inbox(journal, 3)
    box.listen(grid)
    box.expect("train", [0, 1], bound=True)
    first, second, third = grid.send_and_receive(asked(3, 1))
    replies = [first, second, first, third]
    made = list(box.read(1, "train", replies, lambda partition, records: partition))
    assert made == [0, 1]
    assert reasons(journal) == {
        0: "a second reply came; the first one counts",
        2: "a reply that nobody asked for",
    }
    assert border.metrics_of(second.content) == {"loss": 1.0}


def test_what_comes_too_late_is_counted_once_and_not_used(journal):
    slow = Slow(echo(), 2, {})
    grid, box = ReplyStream(slow, 0.2), inbox(journal, 2)
    box.listen(grid)
    for server_round in (1, 2):
        box.expect("train", [0, 1], bound=True)
        began, replies = time.monotonic(), grid.send_and_receive(asked(2, server_round))
        made = list(box.read(server_round, "train", replies, lambda p, records: p))
        assert time.monotonic() - began < 30
        slow.held = False  # from now on the first node answers
        box.report_missing(server_round, "train")
        assert made == ([1] if server_round == 1 else [0, 1])
    late = [e for e in journal.rows["events"] if e["event"] == "late-reply"]
    assert [(e["round"], e["partition"]) for e in late] == [(1, 0)]
    assert reasons(journal) == {0: "no reply: not delivered, or not answered within 1 s"}
    (weighed,) = [r for r in journal.rows["ledger"] if r["phase"] == "late"]
    (on_time,) = [r for r in journal.rows["ledger"] if (r["round"], r["partition"]) == (2, 0)]
    assert (weighed["round"], weighed["direction"], weighed["partition"]) == (1, "up", 0)
    assert weighed["bytes"] == on_time["bytes"]  # the same words
    assert Budget(10**6, 2, journal).spent() == sum(r["bytes"] for r in journal.rows["ledger"])


def test_replies_to_nothing_do_not_keep_a_wait_alive():
    class Chatty(InProcessGrid):
        def pull_messages(self, message_ids):
            message = Message(border.content(), 1000, "train.mine")
            message.metadata.__dict__["_message_id"] = "another"
            return [Message(border.content(), reply_to=message)]

    grid = ReplyStream(Chatty(echo(), 1, {}), 0.2)
    began = time.monotonic()
    assert all(reply.has_content() for reply in grid.send_and_receive(asked(1, 1)))
    assert time.monotonic() - began < 30


def refusing(*words: str) -> ClientApp:
    """Node k answers with the k-th words: a refusal, or its metrics if there are none."""
    app, made = echo(), ClientApp()

    @made.train("mine")
    def train(message, context):
        said = words[context.node_id - 1000]
        return border.failure(message, Refusal(said)) if said else app(message, context)

    return made


DOUBT = "partition 1: the start that came is not the one that this node makes"


def hear(journal: Journal, *words: str, started: bool = True) -> None:
    grid, box = ReplyStream(InProcessGrid(refusing(*words), len(words), {}), 5), inbox(journal, 5)
    box.listen(grid)
    box.expect("train", range(len(words)), bound=True)
    if started:
        where = {"server_round": 0, "phase": "initial-adapter", "direction": "up"}
        journal.weigh(border.content(), **where, partition=0)
        journal.weigh(border.content(config={"peft": "x"}), **where, partition=0)
    list(box.read(1, "train", grid.send_and_receive(asked(len(words), 1)), lambda p, records: p))


def test_error_replies_are_weighed_in_a_phase_of_their_own(journal):
    hear(journal, "", "no room", started=False)
    (row,) = [r for r in journal.rows["ledger"] if r["phase"] == "error"]
    assert (row["round"], row["direction"], row["partition"]) == (1, "up", 1)
    assert row["bytes"] > len("Refusal: no room")
    assert journal.bytes_of(1, "up") == sum(r["bytes"] for r in journal.rows["ledger"])


def test_a_start_that_half_have_not_is_blamed_on_its_sender(journal):
    hear(journal, "", "", DOUBT)
    assert list(reasons(journal)) == [2]  # one of three: it is the odd one
    with pytest.raises(Refusal, match=r"partition 0 .* sent the adapter's start, and 2 of 4 nodes"):
        hear(journal, "", "", DOUBT, "partition 3: manifest 12ab came, 34cd is this node's")


def test_a_start_is_blamed_only_while_it_is_one_and_only_by_those_who_say_so(journal):
    hear(journal, "", "no room", "out of memory")
    hear(Journal(), "", DOUBT, DOUBT, started=False)  # nobody was asked for one
    journal.metric(round=1, phase="train", partition=0)
    hear(journal, "", DOUBT, DOUBT)


def test_long_and_unprintable_reasons_become_one_line(journal):
    inbox(journal, 1).failed(1, "train", 0, "a\nb\x1b[2J" + "x" * 10_000)
    (reason,) = reasons(journal).values()
    assert reason.startswith("a b [2Jxxx")
    assert reason.isprintable()
    assert len(reason) == 500

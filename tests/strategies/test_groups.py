# SPDX-License-Identifier: Apache-2.0
"""Who may add with whom, by what nodes said at the roll call; what a group sees of a journal."""

from __future__ import annotations

import pytest
from flwr.app import Message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.task_identity import TaskIdentity

from fedloom import border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.strategies.groups import GroupJournal, Outbox, check_same, groups_of, merged
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.wire import Manifest

ENCODERS = ("a" * 64, "b" * 64, "a" * 64)


def recipe(**flat) -> RunConfig:
    head = {"method": "faast", "data.task": "classes", "faast.encoders": "one, two"}
    return RunConfig.from_flat({**head, **flat})


def roster(manifests=ENCODERS) -> Roster:
    told = {
        p: {"partition": p, "name": f"shop {p}", "manifest": m, "encoder": f"enc-{m[:1]}"}
        for p, m in enumerate(manifests)
    }
    return Roster({p: 100 + p for p in told}, told)


def test_nodes_of_one_manifest_are_a_group_in_the_order_of_partitions():
    one, two = groups_of(recipe(), roster())
    assert (one.name, one.encoder, one.roster.partitions) == ("aaaaaaaa", "enc-a", [0, 2])
    assert (two.name, two.encoder, two.roster.nodes) == ("bbbbbbbb", "enc-b", {1: 101})
    alike = roster(("c" * 8 + "0" * 56, "c" * 8 + "1" * 56))
    assert [len(g.name) for g in groups_of(recipe(), alike)] == [16, 16]  # no two of one name


def test_nothing_is_divided_without_the_key_or_with_one_encoder():
    assert groups_of(recipe(**{"faast.encoders": ""}), roster()) == []
    assert groups_of(recipe(), roster(("a" * 64,) * 3)) == []
    assert groups_of(RunConfig(), roster()) == []


@pytest.mark.parametrize(
    ("flat", "words"),
    [
        ({"sampling.min-nodes": 2}, "sampling.min-nodes = 2 holds for each group"),
        ({"faast.shares": "masked"}, "hides nobody in a sum of one"),
    ],
)
def test_an_encoder_on_too_few_nodes_is_named(flat, words):
    with pytest.raises(Refusal) as refused:
        groups_of(recipe(**flat), roster())
    said = str(refused.value)
    assert "encoder enc-b (group bbbbbbbb) is on 1 of the 2 nodes" in said
    assert "partition 1 (shop 1)" in said
    assert words in said


@pytest.mark.parametrize("digest", ["", "../../../etc", "A" * 64, "a" * 65])
def test_a_group_is_called_by_nothing_but_a_digest(digest):
    """It becomes a folder's name, and a node may say what it likes."""
    with pytest.raises(Refusal, match=r"partition 1 \(shop 1\) told .* expected a SHA-256"):
        groups_of(recipe(), roster(("a" * 64, digest)))


def test_a_node_that_comes_back_with_another_encoder_is_named():
    before = {str(p): told for p, told in roster().properties.items()}
    check_same(before, roster())
    gone = Roster({0: 100}, {0: roster().properties[0]})
    check_same(before, gone)  # who is not there has none
    with pytest.raises(Refusal, match=r"partition 2 \(shop 2\) comes back with encoder enc-b"):
        check_same(before, roster(("a" * 64, "b" * 64, "b" * 64)))


def test_a_group_reads_its_own_rows_also_after_a_stop(tmp_path):
    whole = Journal(tmp_path)
    one, two = (GroupJournal(whole, name) for name in ("one", "two"))
    one.event("round", round=1, bytes_up=3)
    two.event("client-failed", round=1, partition=1)
    two.metric(round=1, phase="evaluate", partition=1, correct=2)
    whole.event("round", round=1)
    assert [(e["event"], e.get("group")) for e in whole.rows["events"]] == [
        ("group-round", "one"), ("client-failed", "two"), ("round", None),
    ]  # fmt: skip
    again = Journal(tmp_path)
    again.cut(again.sizes())
    for name, before in (("one", one), ("two", two)):
        assert GroupJournal(again, name).rows == before.rows
    assert two.of_phase("evaluate") == [
        {"round": 1, "phase": "evaluate", "partition": 1, "correct": 2}
    ]
    assert one.folder == tmp_path / "groups" / "one"


def test_the_manifest_of_all_keeps_groups_apart():
    parts = {
        name: Manifest("faast", "1", name * 64, "", {"weights": ((width, 3), "float64")})
        for name, width in (("a", 4), ("b", 5))
    }
    whole = merged(parts)
    assert whole.arrays == {
        "a/weights": ((4, 3), "float64"),
        "b/weights": ((5, 3), "float64"),
    }
    assert Manifest.from_json(whole.to_json()) == whole


class _Grid(ReplyStream):
    """Stores messages, and cannot store those of node 13; each pull answers what it is asked."""

    def __init__(self) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id = 1, 1  # what a Message asks Flower for
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        self.pushed: list[Message] = []

    def push_messages(self, messages):
        names = []
        for message in messages:
            self.pushed.append(message)
            name = f"m{len(self.pushed)}"
            message.metadata.__dict__["_message_id"] = name
            names.append("" if message.metadata.dst_node_id == 13 else name)
        return names

    def pull_messages(self, message_ids):
        kept = {m.metadata.message_id: m for m in self.pushed}
        return [Message(border.content(), reply_to=kept[name]) for name in message_ids]


def test_what_was_posted_is_sent_once_and_heard_later():
    grid = _Grid()
    early, late = Outbox(grid, 1.0), Outbox(grid, 1.0)
    asked = [[Message(border.content(), node, "train") for node in to] for to in ((1, 13), (2,))]
    for box, messages in zip((early, late), asked, strict=True):
        box.post(messages)
    assert len(grid.pushed) == 3
    heard = [[box.destination(r) for r in box.send_and_receive(ms, timeout=0.0)]
             for box, ms in zip((early, late), asked, strict=True)]  # fmt: skip
    assert heard == [[1], [2]]
    more = [Message(border.content(), 3, "train")]
    assert [early.destination(r) for r in early.send_and_receive(more)] == [3]
    assert len(grid.pushed) == 4
    assert list(late.send_and_receive(late.post([]))) == []

"""What most nodes have in common, who has it not, and when nobody can tell."""

from __future__ import annotations

import json

import pytest

from fedloom import __version__
from fedloom.config import RunConfig
from fedloom.data.partition import Partition
from fedloom.errors import Refusal
from fedloom.strategies import Journal, Roster
from fedloom.strategies.agreement import agree, check_properties, partition_told
from fedloom.strategies.roster import Dropped

CONFIG = RunConfig()


def said(partition: int, **other) -> dict:
    told = {
        "partition": partition, "name": f"c{partition}", "test": 7, "device": "cpu",
        "version": __version__, "recipe": CONFIG.digest(), "data": "d" * 64,
        "base": "b" * 64, "tokenizer": "t" * 64,
    }  # fmt: skip
    return {k: x for k, x in {**told, **other}.items() if x is not None}


def of(*told: dict) -> Roster:
    return Roster({i: 1000 + i for i in range(len(told))}, dict(enumerate(told)))


def left_out(journal: Journal) -> dict[int, str]:
    return {e["partition"]: e["reason"] for e in journal.rows["events"]}


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"base": "f" * 64}, "differs in base: ffffffffffffffff came, bbbbbbbbbbbbbbbb was"),
        ({"base": None}, "differs in base: nothing came, bbbbbbbbbbbbbbbb was expected"),
        ({"data": "e" * 64}, "differs in data"),
        ({"values": "v"}, "differs in values: v came, nothing was expected"),
        ({"recipe": "other"}, "differs in recipe"),
        ({"version": "9"}, "differs in version"),
    ],
)
def test_the_one_that_differs_is_named_whoever_it_is(who, odd, reason):
    """The lowest partition is no truth, and what it leaves out is not left unchecked."""
    journal = Journal()
    roster = of(*(said(p, **(odd if p == who else {})) for p in range(3)))
    found = agree(CONFIG, roster, [], journal)
    assert found.roster.partitions == [p for p in range(3) if p != who]
    assert found.common == {
        k: said(0)[k] for k in ("version", "recipe", "base", "tokenizer", "data")
    }
    assert list(left_out(journal)) == [who]
    assert reason in left_out(journal)[who]


def test_where_there_is_no_majority_nobody_is_left_out_and_the_run_is_refused():
    journal = Journal()
    for told in (
        (said(0), said(1, base="f" * 64)),
        (said(0), said(1), said(2, base="f" * 64), said(3, base="f" * 64)),
        (said(0), said(1, base="e" * 64), said(2, base="f" * 64)),
    ):
        with pytest.raises(Refusal, match=r"partition \d \(c\d\) differs in base: [ef]{16} came"):
            agree(CONFIG, of(*told), [], journal)
    with pytest.raises(Refusal, match=r"partition 0 \(c0\) differs in recipe"):
        agree(CONFIG, of(*(said(p, recipe="other") for p in range(3))), [], journal)
    assert journal.rows["events"] == []


def test_fewer_than_min_nodes_is_no_majority_either():
    config = CONFIG.replaced(sampling__min_nodes=3)
    told = [said(p, recipe=config.digest()) for p in range(3)]
    agree(config, of(*told), [], Journal())
    told[2]["base"] = "f" * 64
    with pytest.raises(Refusal, match="differs in base"):
        agree(config, of(*told), [], Journal())


def test_refusals_have_a_vote_and_bad_replies_have_none():
    refused = Dropped(-1, 1009, "no rows here", True)
    bad = Dropped(-1, 1008, "the roll-call reply has no name", False)
    journal = Journal()
    assert agree(CONFIG, of(said(0)), [bad, bad], journal).roster.partitions == [0]
    assert [e["node"] for e in journal.rows["events"]] == [1008, 1008]
    assert agree(CONFIG, of(said(0), said(1)), [refused], journal).roster.partitions == [0, 1]
    for roster in (of(said(0)), of()):
        with pytest.raises(Refusal, match="no rows here"):
            agree(CONFIG, roster, [refused], journal)


@pytest.mark.parametrize(
    "odd",
    [
        {"partition": None}, {"partition": "0"}, {"partition": -1}, {"partition": True},
        {"partition": 2**60}, {"name": None}, {"name": 7}, {"name": "a\nb"}, {"name": "\x1b[2J"},
        {"name": "x" * 2000}, {"device": None}, {"device": ["cpu"]}, {"test": None}, {"test": 1.5},
        {"train": "40"}, {"train": -1}, {"base": 7}, {"pid": "x"}, {"partition-json": 7},
    ],
)  # fmt: skip
def test_replies_are_looked_at_key_by_key(odd):
    assert check_properties(said(3)) == 3
    told = {key: x for key, x in {**said(3), **odd}.items() if x is not None}
    with pytest.raises(Refusal, match=next(iter(odd))) as refused:
        check_properties(told)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_who_holds_what_is_taken_from_a_node_that_tells_what_was_agreed_on():
    held = Partition(0, "here", "s", ())
    other = Partition(1, "here", "s", ())
    told = [
        said(0, **{"partition-json": other.to_json()}),
        said(1, **{"partition-json": "[" * 5000}),
        said(2, **{"partition-json": json.dumps(7)}),
        said(3, **{"partition-json": held.to_json()}),
    ]
    assert partition_told(of(*told), {"data": held.digest()}) == held.to_json()
    assert partition_told(of(*told[:3]), {"data": held.digest()}) == ""

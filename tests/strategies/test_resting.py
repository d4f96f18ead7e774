from __future__ import annotations

import pytest

from fedloom.config import RunConfig
from fedloom.strategies.resting import drawn, resting
from fedloom.strategies.roster import Roster

ROSTER = Roster({p: 1000 + p for p in range(10)}, {})


def events(story: dict[int, str]) -> list[dict]:
    """``{4: "x.xx"}``: client 4 failed in rounds 1, 3 and 4 and answered in round 2."""
    names = {"x": "client-failed", ".": "reply"}
    told = [
        {"event": names[mark], "phase": "train", "round": r, "partition": who}
        for who, marks in story.items()
        for r, mark in enumerate(marks, 1)
        if mark in names
    ]
    scored = {"event": "client-failed", "phase": "evaluate", "round": 1, "partition": 7}
    return [*told, scored, {"event": "round", "round": 1}]


@pytest.mark.parametrize(
    ("marks", "rests"),
    [
        ("xx....", {3, 4}),
        ("x.x.xx", {7, 8}),
        ("x xx..", {4, 5}),  # not asked in round 2: still in a row
        ("xx  xx", {3, 4, 7, 8}),
        ("......", set()),
    ],
)
def test_who_fails_twice_in_a_row_rests_for_two_rounds(marks, rests):
    told = events({4: marks})
    found = {r for r in range(1, 10) if 4 in resting(told[: len(told)], 2, 2, r)}
    # A later rest hides an earlier one only after its time: ask as a run would, round by round.
    seen = {r for r in range(1, 10) if 4 in resting(_before(told, r), 2, 2, r)}
    assert seen == rests
    assert found <= rests | set(range(1, 10))
    assert not resting(told, 0, 2, 4)


def _before(told: list[dict], r: int) -> list[dict]:
    return [row for row in told if row["round"] < r]


def recipe(**flat) -> RunConfig:
    head = {"clients.count": 10, "sampling.fraction": 0.4, "sampling.rest-after": 1}
    return RunConfig.from_flat({**head, "sampling.rest-rounds": 3, **flat})


def test_nobody_rests_means_the_same_draw_and_others_stand_in():
    config = recipe()
    usual = ROSTER.sample(config.seed, 2, 0.4)
    assert drawn(config, ROSTER, 2, []) == (usual, [])
    gone = usual[1]
    told = events({gone: "x"})
    once, again = drawn(config, ROSTER, 2, told), drawn(config, ROSTER, 2, list(reversed(told)))
    assert once == again
    asked, left_out = once
    assert left_out == [gone]
    assert len(asked) == 4
    assert set(usual) - {gone} < set(asked)
    assert drawn(config, ROSTER, 5, told)[0] == ROSTER.sample(config.seed, 5, 0.4)


def test_the_resting_are_asked_rather_than_nobody():
    config = recipe(**{"sampling.fraction": 1.0, "sampling.min-nodes": 3})
    asked, left_out = drawn(config, ROSTER, 2, events(dict.fromkeys(range(9), "x")))
    assert (len(asked), len(left_out)) == (3, 7)
    assert 9 in asked

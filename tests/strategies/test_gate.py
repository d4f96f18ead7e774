"""Whom the gate lets through, on arrays that are one number: its norm is how far it moved."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.config import RunConfig
from fedloom.rules.bounds import MOVE, NORM
from fedloom.strategies.gate import Gate
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster
from fedloom.wire import Update


def gate_of(rows: list[int], past: list[dict[int, float]] = (), key: str = NORM, **changes) -> Gate:
    """A gate of clients with so many rows, after rounds in which they moved so far."""
    config = RunConfig().replaced(clients__count=len(rows), **changes)
    journal = Journal()
    for at, moved in enumerate(past, start=1):
        for partition, norm in moved.items():
            journal.metric(round=at, phase="train", partition=partition, **{key: norm})
    told = {p: {"train": count} for p, count in enumerate(rows)}
    return Gate(config, Roster({p: p for p in told}, told), journal)


def dropped(gate: Gate, at: int, moved: dict[int, float], key: str = NORM) -> dict[int, str]:
    """Sift a round whose replies come in the order of ``moved``; say whom it drops, and why."""
    norms: dict[int, dict[str, float]] = {}
    found: dict[int, str] = {}

    def come():
        for partition, norm in moved.items():
            norms[partition] = {key: norm}
            yield Update.of({"w": np.float32([norm])}, 1, partition)

    kept = [u.origin for u in gate.sift(at, come(), norms, found.__setitem__)]
    assert sorted([*kept, *found]) == sorted(moved)  # each is judged, and once
    return found


ALIKE = dict.fromkeys(range(7), 1.0)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("past", [[], [ALIKE], [ALIKE, ALIKE]])
def test_ten_times_is_named_in_every_round_wherever_it_comes(order, past):
    gate = gate_of([12] * 7, past)
    moved = dict(list({**ALIKE, 2: 10.0, 5: 4.9}.items())[::order])
    found = dropped(gate, len(past) + 1, moved)
    assert found.keys() == {2}
    assert "10 times the median of accepted ones; expected at most 5 times" in found[2]


def test_a_client_with_fifty_times_the_rows_may_go_fifty_times_as_far_but_no_other():
    rows = [4, 4, 4, 4, 200]
    for past in ([], [dict.fromkeys(range(4), 1.0) | {4: 50.0}]):
        gate, at = gate_of(rows, past), len(past) + 1
        assert not dropped(gate, at, {4: 50.0, 0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0})
        found = dropped(gate, at, {4: 500.0, 0: 50.0, 1: 1.0, 2: 1.0, 3: 1.0})
        assert found.keys() == {0, 4}
        assert "expected at most 5 times (gate.norm-factor), 250 for its rows" in found[4]
        assert "10 times the median of accepted ones" in found[4]
    fixed = gate_of(rows, train__max_steps=3)  # all take as many: rows give no right to more
    assert dropped(fixed, 1, {4: 50.0, 0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}).keys() == {4}


def test_a_small_client_among_large_ones_has_not_their_room():
    rows = [4, 4, 4, 200, 200, 200, 200]
    honest = dict.fromkeys(range(3), 1.0) | dict.fromkeys(range(3, 7), 30.0)
    for past in ([], [honest]):
        gate, at = gate_of(rows, past), len(past) + 1
        for order in (1, -1):  # the large ones are asked first, and often answer last
            moved = dict(list({**honest, 1: 10.0}.items())[::order])
            assert dropped(gate, at, moved).keys() == {1}
            assert dropped(gate, at, {**moved, 1: 1.0, 5: 300.0}).keys() == {5}
        assert not dropped(gate, at, honest)


def test_where_all_go_further_than_before_nobody_is_odd_but_who_goes_ten_times_as_far():
    past = [dict.fromkeys(range(8), 0.1)]
    gate = gate_of([12] * 8, past)
    moved = {**dict.fromkeys(range(8), 3.0), 1: 30.0}
    assert dropped(gate, 2, moved).keys() == {1}  # more of them wait than are held at once
    assert dropped(gate_of([12] * 8, past), 2, dict(list(moved.items())[:4])).keys() == {1}


def test_two_clients_are_held_against_what_they_did_and_one_against_nobody():
    past = [{0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}]
    assert not dropped(gate_of([12, 12], past[:1]), 2, {0: 1.0, 1: 10.0})  # two norms are no median
    assert dropped(gate_of([12, 12], past), 3, {1: 10.0, 0: 1.0}).keys() == {1}
    assert not dropped(gate_of([12, 12], past), 3, {1: 10.0, 0: 8.0})
    alone = [{0: 1.0}] * 3
    assert not dropped(gate_of([12], alone), 4, {0: 90.0})
    pooled = gate_of([12] * 5, alone, local__method="pooled", server__rule="mean")
    assert not dropped(pooled, 4, {0: 90.0})
    one_asked = gate_of([12] * 5, [{0: 1.0}, {1: 1.0}, {2: 1.0}])
    assert dropped(one_asked, 4, {3: 10.0}).keys() == {3}


def test_rounds_are_compared_at_their_rates_and_with_rounds_that_train_the_same():
    past = [ALIKE, ALIKE, ALIKE]
    slow = gate_of([12] * 7, past, rounds=4, train__last_rate=0.1)
    assert dropped(slow, 4, {**dict.fromkeys(range(7), 0.1), 3: 1.0}).keys() == {3}
    plain = gate_of([12] * 7, past, rounds=4)
    assert not dropped(plain, 4, {**dict.fromkeys(range(7), 0.1), 3: 1.0})
    turns = [ALIKE, dict.fromkeys(range(7), 20.0), ALIKE]  # B and A by turns
    rolora = gate_of([12] * 7, turns, server__rule="rolora")
    assert not dropped(rolora, 4, dict.fromkeys(range(7), 20.0))
    assert dropped(rolora, 5, {**ALIKE, 3: 10.0}).keys() == {3}
    later = gate_of([12] * 7, turns[:2], server__rule="rolora")
    assert dropped(later, 3, {**ALIKE, 3: 10.0}).keys() == {3}


def test_under_fedsa_who_takes_one_step_first_is_no_measure():
    rows = [4, 4, 4, 4, 12, 12, 12]  # A, which alone is sent, stands still in a client's first step
    moved = {**dict.fromkeys(range(4), 0.01), **dict.fromkeys((4, 5, 6), 1.0)}
    sparse = {"server__rule": "fedsa"}
    assert not dropped(gate_of(rows, **sparse), 1, moved)
    assert dropped(gate_of(rows, **sparse), 1, {**moved, 6: 10.0}).keys() == {6}
    assert not dropped(gate_of(rows, [moved], **sparse), 2, dict.fromkeys(range(7), 1.0))


def test_a_controls_move_is_held_against_controls_whatever_the_work():
    changes = {"local__method": "scaffold", "server__rule": "mean"}
    gate = gate_of([4, 4, 4, 4, 200], [dict.fromkeys(range(5), 1.0)], MOVE, **changes)
    found = dropped(gate, 2, {**dict.fromkeys(range(5), 1.0), 4: 10.0}, MOVE)
    assert "norm of its control's move is 10" in found[4]
    few = dict.fromkeys(range(4), 0.05)  # controls have settled, and one comes for the first time
    gate = gate_of([12] * 5, [dict.fromkeys(range(4), 1.0), few, few, few], MOVE, **changes)
    assert not dropped(gate, 5, {**few, 4: 1.0}, MOVE)
    assert dropped(gate, 5, {**few, 4: 10.0}, MOVE).keys() == {4}


def test_nothing_is_bounded_where_no_norm_is_known_or_no_bound_is_set():
    assert not dropped(gate_of([12] * 7, [ALIKE], gate__norm_factor=0.0), 2, {**ALIKE, 1: 1e6})
    gate, kept = gate_of([12] * 7, [ALIKE]), []
    kept += gate.sift(2, iter([Update.summed({}, 1.0, 3)]), {3: {}}, kept.append)
    assert [u.origin for u in kept] == [3]  # under masks nothing shows

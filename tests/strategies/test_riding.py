from __future__ import annotations

import json

import pytest
from flwr.app import MetricRecord, RecordDict

from fedloom.strategies.checkpoint import State
from fedloom.strategies.journal import Journal
from fedloom.strategies.riding import Riding

SCORES = {"num-examples": 4, "gold-ce-sum": 2.0, "correct": 3}


def row(server_round, phase, partition, metrics):
    return {"round": server_round, "phase": phase, "partition": partition, "name": "", **metrics}


@pytest.fixture
def riding():
    return Riding(True, Journal(), row)


def reply(**scores) -> RecordDict:
    trained = {"num-examples": 9, "loss": 1.0}
    return RecordDict({"metrics": MetricRecord({**trained, **scores})})


def with_scores(**changes) -> RecordDict:
    return reply(**{f"before-{key}": value for key, value in {**SCORES, **changes}.items()})


def test_off_asks_for_nothing_and_takes_nothing():
    riding = Riding(False, Journal(), row)
    assert riding.frozen([0, 1], lambda r: [0]) == [0, 1]
    assert riding.ask({"round": 1}, lambda r: {"round": r}) == {}
    came = with_scores()
    assert riding.take(0, came) is came
    riding.land()
    assert riding.told(1, {"rounds": 3}) == {"rounds": 3}


def test_only_words_that_differ_are_said(riding):
    riding.wait(4, {})
    told = {"round": 5, "run": "f0", "last": True, "mine": 1}
    words = riding.ask(told, lambda r: {"round": r, "run": "f0", "last": False, "other": 2})
    assert words == {"before-round": 4, "before-last": False, "before-other": 2}


def test_those_not_drawn_first_are_asked_of_the_frozen_model_apart(riding):
    assert riding.frozen([0, 1, 2, 3], lambda r: {1: [1, 3]}[r]) == [0, 2]
    assert riding.ask({"round": 1}, lambda r: {}) == {"before-round": 0, "before-frozen": True}
    riding.take(3, with_scores())
    riding.land()
    journal = riding._journal
    assert [(r["round"], r["phase"], r["partition"]) for r in journal.rows["metrics"]] == [
        (0, "frozen", 3)
    ]
    assert journal.rows["events"] == []  # round 0 is no round


def test_scores_are_taken_out_kept_in_order_and_told_once(riding):
    riding.wait(2, {"rounds": 3, "train_loss": 0.5})
    for partition in (2, 0):
        came = with_scores(correct=partition)
        assert riding.take(partition, came)["metrics"] == reply()["metrics"]
        assert came["metrics"]["before-correct"] == partition  # what came stays as it came
    riding.land()
    riding.land()
    journal = riding._journal
    assert [r["partition"] for r in journal.of_phase("evaluate")] == [0, 2]
    (event,) = journal.rows["events"]
    assert (event["round"], event["train-loss"], event["accuracy"]) == (2, 0.5, 0.25)
    assert event["seconds"] >= 0


@pytest.mark.parametrize(
    ("came", "said"),
    [
        (reply(), "brought no scores"),
        (reply(**{"before-correct": 3}), "no metric named gold-ce-sum"),
        (with_scores(correct=float("inf")), "expected a finite number"),
        (with_scores(correct=[1, 2]), "expected a finite number"),
        (with_scores(**{"num-examples": 0}), "expected a positive number"),
    ],
)
def test_bad_scores_are_named_and_leave_the_rest_of_the_reply(came, said, riding):
    riding.wait(1, {})
    rest = riding.take(7, came)
    (event,) = riding._journal.rows["events"]
    assert (event["phase"], event["round"], event["partition"]) == ("evaluate", 1, 7)
    assert said in event["reason"]
    assert rest["metrics"] == reply()["metrics"]
    riding.land()
    assert riding._journal.rows["metrics"] == []


def test_what_is_waited_for_outlives_the_process(riding):
    assert Riding(True, Journal(), row).state() == State()
    riding.wait(2, {"rounds": 3, "train_loss": 0.1 + 0.2, "agg-error": 1e-17})
    riding.take(0, with_scores())  # not in a checkpoint: it is asked for again
    state = riding.state()
    again = Riding(True, Journal(), row)
    again.restore(State(tree=json.loads(json.dumps(state.tree))))
    assert again.state() == state
    again.take(1, with_scores())
    again.land()
    assert [r["partition"] for r in again._journal.of_phase("evaluate")] == [1]
    assert again._journal.rows["events"][0]["agg-error"] == 1e-17


def test_a_round_that_became_the_last_too_late_is_told_as_it_was(riding):
    riding.wait(2, {"rounds": 9, "train_loss": 0.5})
    told = riding.told(2, {"rounds": 9, "train_loss": 0.5, "later": 1})
    assert (told["rounds"], "later" in told) == (9, False)
    assert riding.ask({}, lambda r: {"round": r}) == {}


def test_what_nobody_landed_is_told_before_the_next(riding):
    riding.wait(1, {})
    riding.wait(2, {})
    assert [e["round"] for e in riding._journal.rows["events"]] == [1]
    assert set(riding.told(3, {})) == {"seconds"}
    assert [e["round"] for e in riding._journal.rows["events"]] == [1, 2]

"""A private run that is killed and goes on reports what its clients gave away: all of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from fedloom.errors import Refusal
from fedloom.flat import toml_lines
from fedloom.rules.releases import Promise
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.resume import Stand, check_recipe
from fedloom.strategies import journal

from crashes import Killed, left, run_with_crashes, small, writes
from runs import rows

NOISE = {"rounds": 4, "privacy__clip": 0.5, "evaluation__every": 9}


def folder_of(config) -> Path:
    return Path(config.output) / config.name


def given_away(config) -> Counter:
    """Count a client's releases by what is on the disk: the ledger, and what was cut off it."""
    asked = {
        (row["round"], row["partition"])
        for row in rows(folder_of(config), "ledger")
        if (row["phase"], row["direction"]) == ("train", "down")
    }
    found = Counter(partition for _, partition in asked)
    for row in rows(folder_of(config), "resumes"):
        for partitions in row["asked"].values():
            found.update(partitions)
    return found


def test_every_torn_round_is_paid_for_though_a_whole_one_came_between(questions, tmp_path):
    config = small(questions, tmp_path, **NOISE, privacy__noise=3.0)
    run_with_crashes(config, [("events 2 reply train", 1), ("events 3 reply train", 1)])
    assert given_away(config) == {0: 6, 1: 6}  # four rounds and two torn ones
    told = [e for e in rows(folder_of(config), "events") if e["event"] == "privacy"]
    assert [e["releases"] for e in told] == [1, 3, 5, 6]
    (last,) = [e for e in rows(folder_of(config), "events") if e["event"] == "round"][-1:]
    assert last["epsilon-spent"] == Promise.of(config).epsilon(6) > Promise.of(config).epsilon(5)


def test_no_round_is_made_that_epsilon_does_not_pay_for_however_often_it_is_tried(
    questions, tmp_path
):
    config = small(questions, tmp_path, **NOISE, privacy__epsilon=2.0)
    with writes("events 2 reply train"), pytest.raises(Killed):
        run_in_process(config)
    for _ in range(3):
        with pytest.raises(Refusal, match=r"round 4: all who were drawn have been asked in the 4"):
            run_in_process(config.replaced(resume=True))
    assert given_away(config) == {0: 4, 1: 4}
    told = [e for e in rows(folder_of(config), "events") if e["event"] == "round"]
    assert [e["round"] for e in told] == [1, 2, 3]
    assert told[-1]["epsilon-spent"] == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize("torn", [2, 3])
def test_a_masked_run_that_dies_in_training_goes_on_to_the_same_adapter(questions, tmp_path, torn):
    whole = small(questions, tmp_path, privacy__masks=True, evaluation__every=9, name="whole")
    killed = whole.replaced(name="killed")
    run_in_process(whole)
    run_with_crashes(killed, [(f"events {torn} reply train", 1)])
    assert left(folder_of(killed) / "adapter") == left(folder_of(whole) / "adapter")
    (told,) = rows(folder_of(killed), "resumes")
    assert (told["asked"], told["opened"]) == ({str(torn): [0, 1]}, {})


@pytest.mark.parametrize("noise", [{}, {"privacy__clip": 0.5, "privacy__noise": 3.0}])
def test_a_masked_run_that_dies_after_a_sum_was_opened_does_not_sum_again(
    questions, tmp_path, noise
):
    config = small(questions, tmp_path, privacy__masks=True, evaluation__every=9, **noise)
    with writes("events 2 secure-sum"), pytest.raises(Killed):
        run_in_process(config)
    for _ in range(2):
        with pytest.raises(Refusal, match="round 2 was torn after clients had been asked to take"):
            run_in_process(config.replaced(resume=True))
    assert rows(folder_of(config), "resumes")[0]["opened"] == {"2": [0, 1]}


def test_noise_that_was_solved_for_its_rounds_takes_no_more_of_them(questions, tmp_path):
    """Earlier rounds would be accounted for at the noise of later ones, which is more."""
    stand = Stand(checkpoint=None, note="", complete=False)

    def grow(**noise) -> None:
        config = small(questions, tmp_path, **NOISE, **noise)
        folder_of(config).mkdir(exist_ok=True)
        (folder_of(config) / "config.toml").write_text(toml_lines(config.flat()))
        check_recipe(config, folder_of(config), stand)
        check_recipe(config.replaced(rounds=5), folder_of(config), stand)

    grow(privacy__noise=3.0)
    with pytest.raises(Refusal, match=r"rounds = 5: .* solved for privacy.epsilon = 2 over"):
        grow(privacy__epsilon=2.0)


def test_what_was_cut_is_told_on_a_line_of_its_own_after_a_torn_one(tmp_path):
    path = tmp_path / "resumes.jsonl"
    journal.append_lasting(path, {"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"n": ')  # killed here
    journal.append_lasting(path, {"n": 2})
    journal.append_lasting(path, {"n": 3})
    lines = path.read_text().splitlines()
    assert [json.loads(line) for line in (lines[0], *lines[2:])] == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert lines[1] == '{"n": '

"""What ``fedloom run --resume`` goes on with, what it refuses, and what a full disk leaves."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.errors import Refusal
from fedloom.rules.shares import Noise
from fedloom.simulations import report, resume
from fedloom.simulations.inprocess import run_in_process
from fedloom.simulations.resume import check_recipe, stand_of
from fedloom.simulations.runner import resume_run, run_recipe
from fedloom.strategies.checkpoint import FOLDER, Checkpoint, State, Torn
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster
from fedloom.strategies.shares import Shares

from crashes import Killed, small, writes
from runs import rows


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """Drawing takes longer than these runs, and has tests of its own."""
    monkeypatch.setattr(report, "write_report", lambda folder: folder / "report.html")


@pytest.fixture(scope="module")
def stopped(questions, tmp_path_factory):
    """A run of three rounds that was killed in its third, and the same without a kill."""
    place = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_STATE", str(place / "clients"))
        config = small(questions, place, server__rule="mean", evaluation__every=3)
        run_in_process(config.replaced(name="whole"))
        with writes("events 3 phase evaluate"), pytest.raises(Killed):
            run_in_process(config)
    return config


@pytest.fixture
def killed(stopped, tmp_path):
    """``killed()``: the stopped run, in a folder of this test's own."""
    shutil.copytree(Path(stopped.output), tmp_path / "runs")
    return stopped.replaced(output=str(tmp_path / "runs"))


def folder_of(config) -> Path:
    return Path(config.output) / config.name


def digest(config, name: str = "") -> str:
    return (Path(config.output) / (name or config.name) / "adapter/digest.txt").read_text()


def again(config, **changes) -> int:
    return resume_run(config.replaced(**changes), folder_of(config), runtime="inprocess")


def test_a_stopped_run_goes_on_is_finished_and_grows(killed, capsys):
    folder = folder_of(killed)
    assert [p.name for p in sorted((folder / FOLDER).iterdir())] == [
        "round-000001.safetensors", "round-000002.safetensors"]  # fmt: skip
    assert again(killed) == 0
    out = capsys.readouterr().out
    assert "goes on after round 2 of 3" in out
    assert "round 1/3" not in out  # what was shown once
    assert digest(killed) == digest(killed, "whole")
    (told,) = rows(folder, "resumes")
    assert (told["after"], told["asked"]) == (2, {"3": [0, 1]})
    assert told["bytes"] > 0
    before = (folder / "events.jsonl").read_bytes()
    assert again(killed) == 0
    assert "is complete: 3 of 3 rounds" in capsys.readouterr().out
    assert (folder / "events.jsonl").read_bytes() == before
    assert "resume = false" in (folder / "config.toml").read_text()
    assert again(killed, rounds=4) == 0
    events = rows(folder, "events")
    assert [e["status"] for e in events if e["event"] == "end"] == ["completed"]
    assert [e["round"] for e in events if e["event"] == "round"] == [1, 2, 3, 4]
    with pytest.raises(Refusal, match=r"rounds = 3: .* was run with 4 and has done 4"):
        check_recipe(killed, folder, stand_of(folder))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 5}, "seed = 5: .* was run with 0; only rounds may grow"),
        ({"train__learning_rate": 0.5}, r"train.learning-rate = 0.5: .* was run with "),
        ({"rounds": 2}, "rounds = 2: .* was run with 3 and has done 2"),
        ({"clients__threads": 2}, "clients.threads = 2"),
    ],
)
def test_only_rounds_may_grow(killed, changes, said, capsys):
    folder = folder_of(killed)
    before = (folder / "events.jsonl").read_bytes()
    assert again(killed, **changes) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    with pytest.raises(Refusal, match=said):
        check_recipe(killed.replaced(**changes), folder, stand_of(folder))
    assert (folder / "events.jsonl").read_bytes() == before


def change(path: Path, **about) -> None:
    held = Checkpoint.read(path)
    made = Checkpoint(
        round=held.round, arrays=held.arrays, parts=held.parts, about={**held.about, **about}
    )
    path.write_bytes(made.to_bytes())


def newest(config) -> Path:
    return max((folder_of(config) / FOLDER).iterdir())


def test_another_version_or_model_is_refused(killed, capsys):
    held = Checkpoint.read(newest(killed))
    change(newest(killed), agreed={**held.about["agreed"], "base": "0" * 64})
    assert again(killed) == 2
    assert "the nodes have another base than the run began with" in capsys.readouterr().err
    change(newest(killed), fedloom="0.0.1")
    assert again(killed) == 2
    assert "was made by fedloom 0.0.1, this is" in capsys.readouterr().err


def test_no_run_and_nothing_whole(killed, tmp_path, capsys):
    assert resume_run(killed, tmp_path / "nowhere", runtime="inprocess") == 2
    assert "no run is there" in capsys.readouterr().err
    shutil.rmtree(folder_of(killed) / FOLDER)
    assert again(killed) == 2
    err = capsys.readouterr().err
    assert "no checkpoint is there, and the 2 rounds it made would be lost" in err


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("how", [cut_short, flip, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_falls_back_and_says_so(killed, how, capsys):
    how(newest(killed))
    stand = stand_of(folder_of(killed))
    assert stand.round == 1
    assert "round-000002.safetensors" in stand.note
    if how is flip:  # one of them to the end
        assert again(killed) == 0
        assert "goes on after round 1 of 3 (round-000002.safetensors is damaged" in (
            capsys.readouterr().out
        )
        assert digest(killed) == digest(killed, "whole")
        (told,) = rows(folder_of(killed), "resumes")
        assert told["asked"] == {"2": [0, 1], "3": [0, 1]}


def test_both_damaged_or_a_journal_that_lost_lines(killed):
    folder = folder_of(killed)
    metrics = (folder / "metrics.jsonl").read_bytes()
    # as after a power cut of a disk that lied: round 2's rows are not there
    (folder / "metrics.jsonl").write_bytes(metrics[: metrics.index(b'"round": 2')])
    stand = stand_of(folder)
    assert stand.round == 1
    assert "metrics.jsonl holds" in stand.note
    for path in (folder / FOLDER).iterdir():
        flip(path)
    with pytest.raises(Refusal, match=r"is damaged.*; .*is damaged.* 2 rounds it made"):
        stand_of(folder)


@pytest.mark.slow
def test_a_run_killed_before_anything_was_whole_begins_anew(killed):
    folder = folder_of(killed)
    first = (folder / "events.jsonl").read_bytes().index(b'{"event": "phase", "time"')
    for kind in ("events", "metrics", "ledger"):
        path = folder / f"{kind}.jsonl"
        path.write_bytes(path.read_bytes()[:first])
    shutil.rmtree(folder / FOLDER)
    assert again(killed) == 0
    assert digest(killed) == digest(killed, "whole")
    assert [e["event"] for e in rows(folder, "events")].count("start") == 1


def test_two_processes_never_write_to_one_run(killed, capsys, monkeypatch):
    from fedloom.disk import held
    from fedloom.simulations import runner

    monkeypatch.setattr(runner, "held", lambda path, seconds: held(path, 0.0))
    with held(folder_of(killed) / resume.LOCK):
        assert again(killed) == 2
    assert "another process is at work on this run" in capsys.readouterr().err


@pytest.mark.parametrize("room", [pytest.param(0.9, marks=pytest.mark.slow), 3.0])
def test_a_full_disk_ends_the_run_in_one_line_and_it_goes_on(questions, tmp_path, room, capsys):
    """The kernel refuses to let a file grow above a size: first the adapter's, then a checkpoint's.

    Under FedAdam a checkpoint holds five times what the adapter's file does.
    """
    config = small(questions, tmp_path, baseline="fedadam")
    assert run_recipe(config.replaced(name="whole"), runtime="inprocess") == 0
    file = tmp_path / "whole/adapter/adapter_model.safetensors"
    assert run_recipe(config.replaced(rounds=1), runtime="inprocess") == 0
    capsys.readouterr()
    folder, limits = folder_of(config), resource.getrlimit(resource.RLIMIT_FSIZE)
    full = int(file.stat().st_size * room)
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
    try:
        code = again(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr()
    assert code == 1, said.out + said.err
    assert "File too large" in said.err
    assert "Traceback" not in said.err
    assert said.err.splitlines()[0].startswith("fedloom: run failed: ")
    assert not list(folder.rglob(".*.[0-9]*"))
    assert stand_of(folder).round == 1
    assert not stand_of(folder).note
    assert again(config) == 0
    assert digest(config) == digest(config, "whole")


def test_clients_that_stay_away_keep_their_place(killed):
    held = Checkpoint.read(newest(killed))
    agreed = held.about["agreed"]
    roster = resume.same_nodes(held, Roster({1: 77, 9: 99}, {1: {"name": "b"}, 9: {}}), agreed)
    assert roster.partitions == [0, 1]
    assert roster.nodes[1] == 77
    assert roster.name(0) == held.about["nodes"]["0"]["name"]


def test_what_noisy_sums_cost_in_torn_rounds_is_counted(digits):
    told = {"clients__count": 3, "rounds": 2}
    config = digits(faast__shares="private", faast__epsilon=1.0, **told)
    shares = Shares(config, Roster({p: p + 9 for p in range(3)}, {}), "ab" * 16, Journal())
    shares.restore(State({}, {"variance": 2.5, "releases": {"0": 1, "2": 1}, "lost": {}}))
    shares.count_torn(Torn({2: [0, 1]}))
    assert shares.state().tree["releases"] == {"0": 2, "1": 1, "2": 1}
    assert shares.figures()["epsilon-spent"] == Noise.of(config.faast).spent(2)
    masked = digits(faast__shares="masked", **told)
    shares = Shares(masked, Roster({p: p + 9 for p in range(3)}, {}), "ab" * 16, Journal())
    shares.count_torn(Torn({2: [0, 1]}))
    with pytest.raises(Refusal, match="round 2 was torn after clients had been asked to take"):
        shares.count_torn(Torn({2: [0, 1]}, {2: [0, 1]}))


def test_the_command(killed, tmp_path):
    def fedloom(*arguments):
        command = [sys.executable, "-m", "fedloom.simulations", "run", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    folder = folder_of(killed)
    done = fedloom("--resume", folder, "--set", "seed=7")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "seed = 7: " in done.stderr

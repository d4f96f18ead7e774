# SPDX-License-Identifier: Apache-2.0
import io
import json
import threading

import pytest
from rich.console import Console

from fedloom.simulations.progress import Picture, follow, plain_lines, render, show

START = {"event": "start", "method": "fednl", "rounds": 4, "clients": 2, "seed": 0, "folder": "f"}
NODES = {
    "event": "nodes",
    "nodes": [
        {"partition": 0, "name": "Law [x]", "train": 60, "test": 12, "device": "cpu"},
        {
            "partition": 1,
            "name": "Medicine",
            "train": 41,
            "test": 8,
            "device": "cuda:0",
            "visible-gpus": "1",
        },
    ],
}
TRAIN = {"event": "phase", "round": 1, "phase": "train", "clients": 2}
REPLY = {"event": "reply", "round": 1, "phase": "train", "partition": 0, "seconds": 2, "loss": 1.4}
FAILED = {
    "event": "client-failed",
    "round": 1,
    "phase": "train",
    "partition": 1,
    "reason": "ValueError: [bold]no[/bold]",
    "traceback": "Traceback (most recent call last):\n  line 1\nValueError: [bold]no[/bold]\n",
}
ROUND = {
    "event": "round",
    "round": 1,
    "rounds": 4,
    "train-loss": 1.52,
    "gold-ce": 1.61,
    "accuracy": 0.275,
    "agg-error": 0.01234,
    "truncation-error": 2.5e-9,
    "bytes-down": 123,
    "bytes-up": 4_560_000,
    "seconds": 40.0,
    "failed": 1,
}
END = {"event": "end", "status": "completed", "reason": ""}
ALL = [START, NODES, TRAIN, REPLY, FAILED, ROUND, {**FAILED, "round": 2}, END]


def _lines(*events):
    return "".join(json.dumps(event) + "\n" for event in events).encode()


def _taken(*events):
    picture = Picture()
    for event in events:
        picture.take(event)
    return picture


def test_follow_reads_a_file_that_comes_late_and_in_pieces(tmp_path):
    path, over, got = tmp_path / "events.jsonl", threading.Event(), []
    reader = threading.Thread(
        target=lambda: got.extend(follow(path, over.is_set, poll_seconds=0.005))
    )
    reader.start()
    text = _lines({**START, "folder": "café"}, TRAIN, END)
    for index in range(0, len(text), 7):  # cuts lines, and the two bytes of a letter too
        with path.open("ab") as handle:
            handle.write(text[index : index + 7])
        over.wait(0.002)
    over.set()
    reader.join(5)
    assert got == [{**START, "folder": "café"}, TRAIN, END]


def test_follow_reads_what_was_written_before_the_end(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(_lines(START, END))
    assert list(follow(path, lambda: True)) == [START, END]


def test_follow_leaves_out_what_is_no_event(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"not json\n[1]\n\n\xff\xfe\n{}\n" + _lines(END) + b'{"event": "half')
    assert list(follow(path, lambda: True)) == [END]


def test_follow_ends_without_a_file(tmp_path):
    assert list(follow(tmp_path / "none", lambda: True)) == []


def test_plain_output_has_one_line_an_event_and_the_first_traceback_once(tmp_path):
    path, out = tmp_path / "events.jsonl", io.StringIO()
    path.write_bytes(_lines(*ALL))
    picture = Picture()
    show(path, Console(file=out, width=60), lambda: True, picture)
    assert out.getvalue().splitlines() == [
        "fednl: 4 rounds, 2 clients, seed 0",
        "client 0 Law [x]: 60 train rows, 12 test rows, cpu",
        "client 1 Medicine: 41 train rows, 8 test rows, cuda:0 (GPUs 1)",
        "round 1/4: train, 2 clients",
        "round 1/4: client 0 Law [x] answered train in 2.0 s, loss 1.400",
        "round 1/4: client 1 Medicine failed in train: ValueError: [bold]no[/bold]",
        "Traceback (most recent call last):",
        "  line 1",
        "ValueError: [bold]no[/bold]",
        (
            "round 1/4: train loss 1.520, gold CE 1.610, accuracy 27.5%, 123 B down, 4.6 MB up,"
            " agg error 0.012, cut off 2.5e-09, 40.0 s, 1 failed, 2 min 0 s left"
        ),
        "round 2/4: client 1 Medicine failed in train: ValueError: [bold]no[/bold]",
    ]
    assert picture.status == "completed"
    assert len(picture.failures) == 2


def test_live_display_shows_nodes_rounds_and_the_traceback_once(tmp_path):
    path, out = tmp_path / "events.jsonl", io.StringIO()
    path.write_bytes(_lines(*ALL))
    console = Console(file=out, width=120, height=40, force_terminal=True, color_system=None)
    show(path, console, lambda: True, Picture())
    text = out.getvalue()
    assert "\x1b[" in text
    assert text.count("Traceback (most recent call last):") == 1
    for part in ("client 0 Law [x]", "cuda:0 (GPUs 1)", "1.610", "27.5%", "left 2 min 0 s"):
        assert part in text


def test_time_left_is_the_mean_round_times_the_rounds_to_come():
    picture = _taken(START, ROUND, {**ROUND, "round": 2, "seconds": 20.0})
    assert picture.seconds_left() == pytest.approx(60.0, abs=1.0)  # two rounds of 30 s
    assert _taken(START, TRAIN).seconds_left() is None
    done = _taken(START, {**ROUND, "round": 4})
    assert done.seconds_left() == 0.0


def test_time_left_comes_from_the_stamps_if_rounds_do_not_say_how_long_they_took():
    row = {key: value for key, value in ROUND.items() if key != "seconds"}
    stamp = "2026-01-02T03:0{}:00+00:00".format
    picture = _taken(START, {**TRAIN, "time": stamp(0)}, {**row, "time": stamp(2)})
    assert picture.round_seconds == [120.0]
    picture.take({**row, "round": 2, "time": stamp(3)})
    assert picture.round_seconds == [120.0, 60.0]


def test_answers_are_counted_anew_in_each_phase():
    picture = _taken(START, TRAIN, REPLY, FAILED)
    assert picture.answered == 2
    picture.take({**TRAIN, "phase": "evaluate"})
    assert picture.answered == 0


def test_what_was_not_measured_is_left_out():
    row = {"event": "round", "round": 1, "rounds": 4, "train-loss": None, "bytes-up": 10}
    assert plain_lines(row, _taken(START)) == ["round 1/4: 10 B up"]


@pytest.mark.parametrize("count", range(len(ALL) + 1))
def test_every_stage_can_be_drawn(count):
    console = Console(file=io.StringIO(), width=80)
    console.print(render(_taken(*ALL[:count])))
    assert console.file.getvalue().strip()

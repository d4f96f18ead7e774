"""Clients that come, change and go between the rounds of one run: its sums are of those in it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto

from fedloom.clients.bridge import serve
from fedloom.clients.faast import FAASTClient
from fedloom.simulations.progress import Picture, plain_lines

from comings import Comings, events, halving, run_with, summed_rows, there
from crashes import Killed, left, told, writes
from fast import encoded, least_squares, off, rows_of, weights_of
from runs import rows

ONE = {"faast__alphas": "0.6", "sampling__wait_seconds": 0.0}


def later(digits, **changes):
    """Three rounds of four owners of digits, one filter."""
    small = {"clients__count": 4, "data__split": "iid", "data__max_train": 60, "rounds": 3}
    small["sampling__reply_seconds"] = 0.5  # nodes of one process answer at once or never
    return digits(**{**ONE, **small, "data__max_test": 20, **changes})


def test_who_came_since_is_asked_and_nobody_else(digits, monkeypatch):
    config = later(digits)
    seen = encoded(monkeypatch)
    grid = run_with(config, [there(0, 1, 3), there(0, 1, 2, 3), there(0, 1, 2, 3)])
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (1, 3), (2, 2)]
    second, third = events(config, "roll-call")
    assert (second["joined"], second["answered"], second["revised"]) == ([2], 4, {})
    assert [third[k] for k in ("joined", "revised", "held-back", "absent")] == [[], {}, {}, []]
    assert [e["round"] for e in events(config, "phase") if e["phase"] == "train"] == [1, 2]
    done = events(config, "round")
    assert ["solve-seconds" in e for e in done] == [True, True, False]
    assert [e.get("summed-clients") for e in done] == [3, 4, None]
    scored = rows(Path(config.output) / "faast", "metrics")
    frozen = [(r["round"], r["partition"]) for r in scored if r["phase"] == "frozen"]
    assert sorted(frozen) == [(0, 0), (0, 1), (0, 3), (2, 2)]  # before it is asked for any sum
    assert len(seen) == len(set(seen)) == sum(row.get("forwards", 0) for row in scored)
    assert off(weights_of(config), least_squares(*rows_of(config, range(4)), 0.6)) < 1e-11
    at_once = config.replaced(name="once", rounds=1)
    run_with(at_once, [there(0, 1, 2, 3)])
    assert (weights_of(config) == weights_of(at_once)).all()
    adds_up(config, grid)


def adds_up(config, grid: Comings) -> None:
    """The books hold every message of every round, and each round's event its own."""
    ledger = rows(Path(config.output) / config.name, "ledger")
    crossed = [*grid.sent, *grid.answered]
    wire = sum(len(recorddict_to_proto(m.content).SerializeToString()) for m in crossed)
    assert sum(row["bytes"] for row in ledger) == wire
    for done in events(config, "round"):
        ups = [r["bytes"] for r in ledger if (r["round"], r["direction"]) == (done["round"], "up")]
        assert done["bytes-up"] == sum(ups)
    called = {r["round"] for r in ledger if r["phase"] == "properties"}
    assert called == {0, 2, 3}  # before the first round, and in each later one


def test_a_later_revision_takes_the_place_of_the_earlier(digits):
    config = later(digits, faast__keep_sums=True)
    again = there(0, 1, 2, 3, p1={"revision": 2})
    grid = run_with(config, [there(0, 1, 2, 3), again, again], halving())
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)]
    assert [e["revised"] for e in events(config, "roll-call")] == [{"1": 2}, {}]
    keys, labels = zip(*(summed_rows(config, p, half=p == 1) for p in range(4)), strict=True)
    assert len(keys[1]) == 30
    wanted = least_squares(np.concatenate(keys), np.eye(10)[np.concatenate(labels)], 0.6)
    assert off(weights_of(config), wanted) < 1e-11
    fresh = config.replaced(name="fresh", rounds=1)
    run_with(fresh, [again], halving())
    assert off(weights_of(config), weights_of(fresh)) <= 1e-12  # deleted = retrained
    names = [p.name for p in (Path(config.output) / "faast/sums").glob("client-000001-*")]
    assert names == ["client-000001-000002.safetensors"]
    adds_up(config, grid)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ({}, "not kept; see faast.keep-sums"),
        ({"faast__shares": "masked"}, "came under masks"),
        ({"faast__shares": "private", "faast__epsilon": 4.0}, "another release costs"),
    ],
    ids=["not kept", "masked", "private"],
)
def test_what_cannot_be_taken_out_is_not_asked_for_again(digits, mode, why):
    """Asking would make a node give the same rows away twice, for nothing."""
    config = later(digits, rounds=2, **mode)
    again = there(0, 1, 2, 3, p1={"revision": 2})
    grid = run_with(config, [there(0, 1, 2, 3), again])
    assert [r for r, _ in grid.asked("train.faast")] == [1] * 4
    (call,) = events(config, "roll-call")
    assert why in call["held-back"]["1"]
    assert call["revised"] == {}
    (line,) = plain_lines(call, Picture(start={"rounds": 2}))
    assert line.startswith("round 2/2: roll call, 4 nodes: client 1 stays as it was (revision 2:")
    shares = events(config, "shares")
    assert shares[-1].get("epsilon-spent") == shares[0].get("epsilon-spent")  # of one release


def test_two_who_come_later_are_summed_under_masks_by_themselves(digits):
    config = later(digits, faast__shares="masked")
    grid = run_with(config, [there(0, 1), there(0, 1, 2), there(0, 1, 2, 3)])
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (3, 2), (3, 3)]  # one alone has to wait
    assert off(weights_of(config), least_squares(*rows_of(config, range(4)), 0.6)) < 1e-8


def test_one_who_goes_leaves_its_sums_and_is_named(digits):
    config = later(digits, rounds=2)
    grid = run_with(config, [there(0, 1, 2), there(0, 2, 3)])
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (1, 2), (2, 3)]
    assert events(config, "roll-call")[0]["absent"] == [1]
    (failed,) = events(config, "client-failed")
    assert (failed["phase"], failed["partition"]) == ("evaluate", 1)
    assert off(weights_of(config), least_squares(*rows_of(config, range(4)), 0.6)) < 1e-11


def test_a_newcomer_is_held_against_the_first_roll_call(digits):
    class Other(FAASTClient):
        def get_properties(self, config):
            told = super().get_properties(config)
            return {**told, "base": "f" * 64} if self.partition_id == 3 else told

    app = ClientApp()
    serve(app, Other, action="faast")
    config = later(digits, rounds=2)
    grid = run_with(config, [there(0, 1, 2), there(0, 3)], app)  # there is no new vote
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (1, 2)]
    failed = events(config, "client-failed")[0]
    assert events(config, "roll-call")[0]["joined"] == []
    assert (failed["round"], failed["phase"], failed["partition"]) == (2, "properties", 3)
    assert "partition 3 (iid 3) differs in base" in failed["reason"]


PLACES = {
    "before the roll call is over": [("ledger 2 up properties", 2), ("events 2 roll-call", 1)],
    "a newcomer's first scores": [("events 2 reply frozen", 1)],
    "new sums on the shelf": [("client-000001-000002", 1), ("total.safetensors", 2)],
    "the checkpoint of it": [("round-000002", 1), ("events 3 roll-call", 1)],
}


DEARER = {"a newcomer's first scores", "the checkpoint of it"}


@pytest.mark.parametrize(
    "places", [pytest.param(p, marks=pytest.mark.slow if p in DEARER else ()) for p in PLACES]
)
def test_killed_in_a_later_round_and_resumed_is_uninterrupted(digits, places):
    """Round 2 has a newcomer and a later revision, round 3 nothing new."""
    first, later_on = there(0, 1, 2), there(0, 1, 2, 3, p1={"revision": 2})
    clean = later(digits, faast__keep_sums=True, name="clean")
    run_with(clean, [first, later_on], halving())
    crashed = clean.replaced(name="crashed")
    calls = [first, later_on]
    for place, nth in PLACES[places]:
        with writes(place, nth), pytest.raises(Killed):
            run_with(crashed, calls, halving())
        crashed, calls = crashed.replaced(resume=True), [later_on]
    run_with(crashed, calls, halving())
    ours, theirs = (Path(c.output) / c.name for c in (crashed, clean))
    for part in ("adapter", "sums"):
        assert left(ours / part) == left(theirs / part)
    assert told(crashed, "metrics") == told(clean, "metrics")
    for kind in ("events", "ledger"):
        assert plain(crashed, kind) == plain(clean, kind)
    assert len(events(crashed, "resumed")) >= 1


def plain(config, kind: str) -> list[dict]:
    """Return rows without what hangs on the process: see ``test_resume``."""
    kept = [row for row in told(config, kind) if row.get("dtype") != "framing"]
    return [{k: v for k, v in row.items() if k not in ("bytes-up", "folder")} for row in kept]


@pytest.mark.slow
def test_groups_hold_one_roll_call_and_each_takes_in_its_own(digits):
    """Nodes 0, 2 have pixels, 1, 3 others; 2 and 3 come later, with two whom no group knows."""
    config = later(
        digits, clients__count=6, faast__encoders="pixels, relu:32:pixels", faast__keep_sums=True
    )
    odd = {"p4": {"encoder": "relu:16:pixels"}, "p0": {"encoder": "relu:32:pixels", "revision": 2}}
    calls = [there(0, 1), there(0, 1, 2, 3, 4, **odd), there(0, 1, 2, 3, p1={"revision": 2})]
    grid = run_with(config, calls, halving())
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (2, 2), (2, 3), (3, 1)]
    told = [(e["round"], e["joined"], e["revised"], e["absent"])
            for e in events(config, "roll-call")]  # fmt: skip
    assert told == [(2, [2], {}, [0]), (2, [3], {}, []), (3, [], {}, []), (3, [], {"1": 2}, [])]
    failed = {e["partition"]: e["reason"] for e in events(config, "client-failed")
              if e["phase"] == "properties"}  # fmt: skip
    assert failed.keys() == {0, 4}
    assert "came with encoder relu:16:pixels, and no group of this run has it" in failed[4]
    assert "comes back with encoder relu:32:pixels, the run began with pixels" in failed[0]
    clean = config.replaced(name="alone", faast__encoders="")
    run_with(clean, [there(0), there(2, 0), there(0, 2)])
    folder = Path(config.output)
    (found,) = [
        g["group"] for g in events(config, "groups")[0]["groups"] if g["encoder"] == "pixels"
    ]
    assert left(folder / "faast/groups" / found / "sums") == left(folder / "alone/sums")
    # A run that goes on knows the newcomers, and that the rest of its groups are as they were.
    longer = config.replaced(resume=True, rounds=4)
    grid = run_with(longer, [calls[2]], halving())
    assert grid.asked("train.faast") == []
    assert [e["absent"] for e in events(longer, "resumed")] == [[]]


@pytest.mark.slow
def test_a_node_that_starts_again_with_other_rows_of_its_own(digits, tmp_path):
    """As a user does it: each node has a file, and a new one goes with a higher revision."""
    words = {"wet": ("rain", "storm", "flood"), "dry": ("sun", "dust", "heat")}

    def table(name: str, seed: int) -> str:
        random = np.random.default_rng(seed)
        made = []
        for i in range(40):
            label = ("wet", "dry")[i % 2]
            text = " ".join(random.choice(words[label], 4)) + f" {seed} {i}"
            made.append(json.dumps({"text": text, "label": label}))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(made) + "\n")
        return str(tmp_path / f"{name}.jsonl")

    files = {name: {"data": table(name, seed)} for seed, name in enumerate(("p0", "p1", "p2"))}
    config = later(
        digits, data__split="files", data__source=f"path:{tmp_path}", clients__count=3, rounds=2,
        faast__encoder="lm:tiny:llama", faast__keep_sums=True, faast__exact_bits=40,
        sampling__reply_seconds=60.0,
    )  # fmt: skip
    now = {**files, "p1": {"data": table("p1-new", 7), "revision": 2}}
    grid = run_with(config, [there(0, 1, **files), there(0, 1, 2, **now)])
    assert grid.asked("train.faast") == [(1, 0), (1, 1), (2, 1), (2, 2)]
    fresh = config.replaced(name="fresh", rounds=1)
    run_with(fresh, [there(0, 1, 2, **now)])
    assert (weights_of(config) == weights_of(fresh)).all()

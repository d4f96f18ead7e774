"""Scores that come with the next round's training are those that messages of their own bring."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from flwr.clientapp import ClientApp

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.workbench import release
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.simulations.inprocess import run_in_process

from crashes import left, run_with_crashes, small, told
from runs import METRICS_THAT_MAY_LEAVE, recorded, rows

RIDING = {"evaluation__with_training": True}
WAYS = {
    "scaffold": {"local__method": "scaffold", "server__rule": "mean"},  # controls are not scored
    "ditto": {"local__method": "ditto", "server__rule": "mean"},
    "ranks": {"lora__ranks": "8,4", "server__rule": "svd"},
    "flora": {"server__rule": "flora"},  # LoRA is drawn anew for training
    "rolora, int8": {"server__rule": "rolora", "wire__dtype": "int8"},
    "fedala": {"local__method": "fedala", "server__rule": "mean"},
    "fedex": {"server__rule": "fedex"},
    "ffa": {"server__rule": "ffa"},
    "fedsa": {"server__rule": "fedsa"},
    "gates": {"share": "memory"},
    "alone": {"share": "none"},
    "fine-tune": {"local__method": "fine-tune", "server__rule": "mean"},
    "server momentum": {"baseline": "fedadam"},
    "trunk": {"last_layers": 1, "train__keep_trunk": 50},
    "every": {"rounds": 5, "evaluation__every": 2},
}
QUICK = {"scaffold", "ditto", "ranks"}


def folder_of(config) -> Path:
    return Path(config.output) / config.name


def scores_of(config) -> list[dict]:
    return [row for row in told(config, "metrics") if row["phase"] != "train"]


def rounds_of(config) -> list[dict]:
    """Return the rounds' events without what they took: bytes, time."""
    kept = [e for e in told(config, "events") if e["event"] == "round"]
    return [{k: v for k, v in e.items() if not k.startswith("bytes")} for e in kept]


def messages(config) -> Counter:
    """Count messages by what they ask for."""
    ledger = rows(folder_of(config), "ledger")
    down = {(r["round"], r["phase"], r["partition"]) for r in ledger if r["direction"] == "down"}
    return Counter(phase for _, phase, _ in down)


def sent(config, **wanted) -> int:
    """Add up bytes of the ledger."""
    ledger = rows(folder_of(config), "ledger")
    return sum(r["bytes"] for r in ledger if wanted.items() <= r.items())


def failures(config) -> list[tuple]:
    lost = [e for e in rows(folder_of(config), "events") if e["event"] == "client-failed"]
    return [(e["round"], e["phase"], e["partition"], e["reason"]) for e in lost]


@pytest.fixture
def both(questions, tmp_path):
    """``both(**changes)``: a run with messages of their own for scores, and one without."""

    def run(client=None, **changes):
        made = []
        for name, how in (("apart", {}), ("riding", RIDING)):
            made.append(small(questions, tmp_path, name=name, **changes, **how))
            run_in_process(made[-1], client)
            release()
        return made

    return run


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=() if w in QUICK else pytest.mark.slow) for w in WAYS]
)
def test_arrays_rows_and_events_are_the_same_bits(way, both):
    apart, riding = both(**WAYS[way])
    assert left(folder_of(riding) / "adapter") == left(folder_of(apart) / "adapter")
    assert told(riding, "metrics") == told(apart, "metrics")
    assert rounds_of(riding) == rounds_of(apart)
    assert not failures(riding)
    asked = messages(apart)
    scored = sum("gold-ce" in e for e in rounds_of(apart))
    assert asked["evaluate"] == 2 * scored
    del asked["frozen"]
    assert messages(riding) == {**asked, "evaluate": 2}


def test_a_run_of_three_rounds_takes_eight_messages_for_fourteen(both):
    """Two clients: a frozen score, three trainings and three scores; three and a last score."""
    apart, riding = both()
    wanted = {"train": 6, "properties": 2, "initial-adapter": 1}
    assert messages(apart) == {**wanted, "frozen": 2, "evaluate": 6}
    assert messages(riding) == {**wanted, "evaluate": 2}
    one = 20992  # bytes of an adapter's values
    down = {"direction": "down", "dtype": "float32"}
    assert [sent(c, **down) for c in (apart, riding)] == [12 * one, 8 * one]
    up = {"direction": "up", "dtype": "float32", "phase": "train"}
    assert sent(riding, **up) == sent(apart, **up)
    framing = {"dtype": "framing", "direction": "down"}
    assert sent(riding, **framing) < sent(apart, **framing)
    # A score's name has a prefix, and a reply of its own has what every reply has.
    framing = {"dtype": "framing", "direction": "up"}
    assert abs(sent(riding, **framing) - sent(apart, **framing)) < 6 * 100


def test_who_is_asked_next_scores_and_the_frozen_model_is_scored_by_all(both):
    apart, riding = both(clients__count=4, sampling__fraction=0.5)
    assert left(folder_of(riding) / "adapter") == left(folder_of(apart) / "adapter")
    trained = {r: {row["partition"] for row in told(apart, "metrics")
                   if (row["round"], row["phase"]) == (r, "train")} for r in (1, 2, 3)}  # fmt: skip
    assert len({frozenset(who) for who in trained.values()}) > 1
    asked = {1: trained[2], 2: trained[3], 3: {0, 1, 2, 3}, 0: {0, 1, 2, 3}}
    wanted = [r for r in scores_of(apart) if r["partition"] in asked[r["round"]]]

    def place(row: dict) -> tuple:
        return row["round"], row["phase"], row["partition"]

    assert sorted(scores_of(riding), key=place) == sorted(wanted, key=place)
    assert messages(riding)["frozen"] == 2  # by those whom the first round does not ask


class Odd(FedNLClient):
    """Client 1 trains too far; client 2 cannot score round 1, and says nonsense of round 2."""

    def fit(self, parameters, config):
        sent = dict(zip(self.array_names, parameters, strict=True))
        arrays, examples, metrics = super().fit(parameters, config)
        if self.partition_id == 1:
            starts = [sent[name] for name in self.array_names]
            arrays = [start + 1000 * (a - start) for a, start in zip(arrays, starts, strict=True)]
        return arrays, examples, metrics

    def evaluate(self, parameters, config):
        loss, examples, metrics = super().evaluate(parameters, config)
        if self.partition_id == 2 and config["round"] == 1:
            raise RuntimeError("a row of mine")
        if self.partition_id == 2 and config["round"] == 2:
            metrics["gold-ce-sum"] = float("nan")
        return loss, examples, metrics


def test_a_refused_update_and_a_failed_score_do_not_touch_each_other(both):
    """As where scores have messages of their own: what was scored is what was sent."""
    client = ClientApp()
    serve(client, Odd, action="fednl")
    changes = {"clients__count": 3, "gate__norm_factor": 5.0, "server__rule": "mean"}
    apart, riding = both(client, **changes)
    assert left(folder_of(riding) / "adapter") == left(folder_of(apart) / "adapter")
    assert told(riding, "metrics") == told(apart, "metrics")
    assert rounds_of(riding) == rounds_of(apart)  # with the numbers of those that failed
    scored = {(r["round"], r["partition"]) for r in scores_of(riding) if r["phase"] == "evaluate"}
    assert scored == {(r, p) for r in (1, 2, 3) for p in range(3)} - {(1, 2), (2, 2)}
    lost = {f[:3]: f[3] for f in failures(riding)}
    assert lost.keys() == {f[:3] for f in failures(apart)}
    assert lost.keys() == {(r, "train", 1) for r in (1, 2, 3)} | {
        (r, "evaluate", 2) for r in (1, 2)
    }
    assert "times the median" in lost[1, "train", 1]
    assert lost[1, "evaluate", 2] == "its reply brought no scores; why stands in the node's log"
    assert lost[2, "evaluate", 2] == "metric gold-ce-sum = nan: expected a finite number"
    assert "a row of mine" not in (folder_of(riding) / "events.jsonl").read_text()


@pytest.mark.parametrize("every", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_a_budgets_last_round_is_scored_by_all(every, questions, tmp_path):
    free = small(questions, tmp_path, rounds=2, name="free", evaluation__every=every, **RIDING)
    run_in_process(free)
    limit = int(1.6 * sent(free))
    bound = free.replaced(name="bound", rounds=9, wire__budget_bytes=limit)
    run_in_process(bound)
    last = max(r["round"] for r in told(bound, "metrics") if r["phase"] == "train")
    assert 1 < last < 9
    assert sent(bound) <= limit
    found = Counter(r["round"] for r in scores_of(bound) if r["phase"] == "evaluate")
    assert found == {r: 2 for r in range(1, last + 1) if r == last or every == 1}
    assert [e["round"] for e in rounds_of(bound)] == list(range(1, last + 1))


CRASHES = [
    ("round-000000", 1),  # the frozen model's scores have not come
    ("metrics 0  frozen", 2),  # they are just being kept
    ("round-000001", 1),
    ("events 2 reply train", 2),
    ("metrics 1  evaluate", 1),  # in round 2
    ("events 1 round", 1),
    ("ledger 3 down train", 1),
    ("events 3 phase evaluate", 1),
]


@pytest.mark.parametrize(
    ("changes", "crashes"),
    [
        ({}, [CRASHES[i] for i in (1, 3, 4)]),
        pytest.param({"local__method": "ditto", "server__rule": "mean"}, CRASHES,
                     marks=pytest.mark.slow),
        pytest.param({"clients__count": 4, "sampling__fraction": 0.5}, CRASHES,
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_killed_and_resumed_has_each_row_once(changes, crashes, questions, tmp_path, monkeypatch):
    made = {}
    for name, where in (("clean", []), ("crashed", crashes)):
        monkeypatch.setenv("FEDLOOM_STATE", str(tmp_path / "homes" / name))
        made[name] = small(questions, tmp_path, name=name, **changes, **RIDING)
        run_with_crashes(made[name], where)
        release()
    clean, crashed = made["clean"], made["crashed"]
    assert left(folder_of(crashed) / "adapter") == left(folder_of(clean) / "adapter")
    for kind in ("metrics", "ledger"):
        assert told(crashed, kind) == told(clean, kind)
    assert rounds_of(crashed) == rounds_of(clean)
    resumed = [e for e in rows(folder_of(crashed), "events") if e["event"] == "resumed"]
    assert [e["after"] for e in resumed] == ([0, 1, 2] if crashes == CRASHES else [0, 1])


def test_a_reply_holds_numbers_of_scores_and_nothing_else_more(questions, tmp_path):
    config = small(questions, tmp_path, rounds=2, local__method="ditto", server__rule="mean",
                   **RIDING)  # fmt: skip
    grid = recorded(config)
    scores = METRICS_THAT_MAY_LEAVE | {f"personal-{m}" for m in METRICS_THAT_MAY_LEAVE}
    may = METRICS_THAT_MAY_LEAVE | {border.BEFORE + m for m in scores}
    told_first = set()
    for message, reply in zip(grid.sent, grid.answered, strict=True):
        if message.metadata.message_type == "train.fednl":
            words = border.config_of(message.content)
            told_first.add(tuple(k for k in words if k.startswith(border.BEFORE)))
            names = {n.removeprefix("local-") for n in border.metrics_of(reply.content)}
            assert names <= may
            assert any(n.startswith(border.BEFORE) for n in names)
    # What scoring is told like training is not said again.
    assert told_first == {("before-round", "before-frozen"), ("before-round", "before-last")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local.method": "none"}, 'with local.method = "none": clients that are not asked'),
        ({"local.method": "pooled"}, 'with local.method = "pooled": clients that are not asked'),
        ({"privacy.clip": 1.0}, "with privacy: a reply may hold nothing but the change"),
        ({"method": "faast", "data.task": "classes"}, 'with method = "faast": no message that'),
        ({"method": "fedrefine", "rounds": 1}, 'with method = "fedrefine": no message that'),
    ],
)
def test_what_scores_cannot_ride_on_is_refused_in_one_line(changes, said):
    with pytest.raises(Refusal, match=r"evaluation\.with-training = true") as refused:
        RunConfig.from_flat({"evaluation.with-training": True, **changes})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    RunConfig.from_flat(changes)

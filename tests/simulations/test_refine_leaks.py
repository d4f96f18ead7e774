"""What senders can read back from their own frames stands beside what the frames were worth."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import pytest
from flwr.app import ConfigRecord

from fedloom.clients import eavesdrop
from fedloom.clients.eavesdrop import read_back
from fedloom.errors import Refusal
from fedloom.refining import Request, export
from fedloom.secure.channel import EXPORT
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import serve_on
from fedloom.simulations.report import write_report
from fedloom.strategies.attacks import Attacks

from meetings import events, meeting_of, write_fusers
from rooms import room
from runs import Recorder

TEXT = "Zoë, 555-019: what is it?"


@pytest.fixture(scope="module")
def fusers(tmp_path_factory):
    return write_fusers(tmp_path_factory.mktemp("fusers"))


def run(config, on_reply=lambda message, reply: reply):
    class Grid(Recorder):
        def _deliver(self, name, message):
            return on_reply(message, super()._deliver(name, message))

    grid = Grid(client_app.app, config.clients.count, config.flat())
    serve_on(grid, server_app.app, config)
    return grid, Path(config.output) / config.name


def tapped(text: str, **told) -> bytes:
    base, geometry = room("llama", "float32")
    told = {"layers": (0, 1), "scheme": "int4", "key": secrets.token_bytes(32), **told}
    return b"".join(export(base, geometry, Request(text=text, **told)))


def test_the_rate_is_beside_the_accuracy_and_no_word_leaves(questions, tmp_path, fusers):
    one = {"sampling.fraction": 0.3, "refine.attack-frames": 1, "refine.dtype": "int4"}
    grid, folder = run(meeting_of(questions, fusers, tmp_path, **one))
    pairs = events(folder, "pair")
    assert len(pairs) == 2
    for row in pairs:
        assert (row["attacked"], row["recovered"]) == (1, 1.0)
        assert row["attacked-tokens"] > 10
        assert 0 <= row["refined"] <= 1
    assert events(folder, "round")[-1]["recovered"] == 1.0
    told = [
        dict(record)
        for message, reply in zip(grid.sent, grid.answered, strict=True)
        if message.metadata.message_type == f"query.{EXPORT}"
        for record in reply.content.config_records.values()
    ]
    assert len(told) == 2
    assert all({type(value) for value in record.values()} == {int} for record in told)
    texts = [json.loads(line)["question"] for line in questions.read_text().splitlines()]
    left = "".join(p.read_text() for p in folder.glob("*.json*"))
    assert not any(text in left for text in texts)
    assert "tokens read back" in write_report(folder).read_text()
    tree = json.loads((folder / "summary.json").read_text())
    assert [row["recovered"] for row in tree["refined"]["pairs"]] == [1.0, 1.0]


def test_nothing_is_attacked_unless_it_is_asked_for(questions, tmp_path, fusers):
    _, folder = run(meeting_of(questions, fusers, tmp_path, **{"sampling.fraction": 0.3}))
    assert not any("recovered" in row for row in events(folder, "pair"))
    with pytest.raises(Refusal, match="at least 0"):
        meeting_of(questions, fusers, tmp_path, **{"refine.attack-frames": -1})


def test_a_sender_that_counts_nonsense_is_not_believed(questions, tmp_path, fusers):
    def on_reply(message, reply):
        if message.metadata.message_type == f"query.{EXPORT}":
            reply.content["config"] = ConfigRecord(
                {"attack-frames": 1, "attack-tokens": 3, "attack-right": 4}
            )
        return reply

    one = {"sampling.fraction": 0.3, "refine.attack-frames": 1}
    _, folder = run(meeting_of(questions, fusers, tmp_path, **one), on_reply)
    assert [row["used"] for row in events(folder, "pair")] == [2, 2]
    assert not any("recovered" in row for row in events(folder, "pair"))


def test_attacks_are_counted_by_pair_and_in_all():
    held = Attacks()
    counts = {"attack-frames": 2, "attack-tokens": 4, "attack-right": 1}
    held.keep(0, 1, counts)
    held.keep(0, 2, {**counts, "attack-right": 3})
    for odd in ({}, {**counts, "attack-right": 1.5}, {**counts, "attack-right": True}):
        held.keep(1, 0, odd)
    assert held.of(0, 1) == {"attacked": 2, "attacked_tokens": 4, "recovered": 0.25}
    assert held.of(1, 0) == {}
    assert held.all() == {"recovered": 0.5}
    assert Attacks().all() == {}


def test_another_text_is_not_what_was_read():
    """The control: the same frames held against other words of the same length."""
    base, _ = room("llama", "float32")
    stream, tokens = tapped(TEXT), len(base.tokenizer.encode(TEXT))
    right = {"attack-frames": 1, "attack-tokens": tokens, "attack-right": tokens}
    assert read_back(base, [(TEXT, stream)]) == right
    assert read_back(base, [(TEXT[::-1], stream)])["attack-right"] < tokens / 2
    assert read_back(base, []) == {}


def test_without_layer_0_the_first_tokens_are_read_from_a_deeper_one(monkeypatch):
    monkeypatch.setattr(eavesdrop, "SHORTLIST", 0)  # a tiny vocabulary: all of it
    base, _ = room("llama", "float32")
    told = read_back(base, [(TEXT, tapped(TEXT, layers=(1,)))])
    assert told == {"attack-frames": 1, "attack-tokens": 8, "attack-right": 8}
    some = read_back(base, [(TEXT, tapped(TEXT, layers=(1,), share=0.5))])
    assert some["attack-tokens"] == 0  # tokens are missing in between: nothing to stand on

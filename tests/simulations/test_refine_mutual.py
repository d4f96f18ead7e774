"""Co-C2C through Flower's messages: two nodes exchange caches and both answer."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fedloom import border, ciphers
from fedloom.adapters.fuser_files import load_fuser
from fedloom.clients.bridge import serve, serve_questions
from fedloom.clients.refine import FedRefineClient
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.models.base import load_base
from fedloom.refining import Party, measured, mutual
from fedloom.secure import channel
from fedloom.secure.channel import ANSWER, ASK, EXPORT, MARK
from fedloom.simulations import server_app
from fedloom.simulations.inprocess import serve_on
from fedloom.simulations.refine_remote import opened

from meetings import events, meeting_of, write_fusers
from runs import Meddler

# typer 0.20, which Flower 1.42 asks for, uses what click 8.5 calls deprecated
pytestmark = pytest.mark.filterwarnings("ignore:'click:DeprecationWarning")
PAIR, TEXT = ("llama", "qwen3"), "what is cheese?"
LOGITS: dict[int, torch.Tensor] = {}


class Telling(FedRefineClient):
    """FedRefine's own; what it answered from is looked at."""

    def _refined(self, *given, **told):
        answer = super()._refined(*given, **told)
        LOGITS[self.partition_id] = answer.logits
        return answer


@pytest.fixture(scope="module")
def fusers(tmp_path_factory):
    return write_fusers(tmp_path_factory.mktemp("fusers"))


@pytest.fixture
def meeting(questions, tmp_path, fusers):
    def build(**changes) -> RunConfig:
        told = {"refine.models": "tiny:llama,tiny:qwen3", "clients.count": 2}
        told |= {"refine.question": TEXT, "refine.mutual": 1, "refine.new-tokens": 6}
        return meeting_of(questions, fusers, tmp_path, **{**told, **changes})

    return build


def run(config, on_reply=None) -> Meddler:
    app = ClientApp()
    serve(app, Telling, action="fedrefine", queries=False)
    serve(app, Telling)
    serve_questions(app, Telling, channel.ACTIONS)
    LOGITS.clear()
    grid = Meddler(app, config.clients.count, config.flat())
    grid.on_reply = on_reply or grid.on_reply
    serve_on(grid, server_app.app, config)
    return grid


def folder(config) -> Path:
    return Path(config.output) / config.name


def told(config) -> dict[int, dict]:
    """What each node answered, with its receipt; no key was given, so it is plain."""
    rows = events(folder(config), "answer")
    return {r["partition"]: r | json.loads(bytes.fromhex(r["sealed"])) for r in rows}


def kinds(grid, action) -> list[int]:
    sent = [m.metadata for m in grid.sent if m.metadata.message_type == f"query.{action}"]
    return [each.dst_node_id - 1000 for each in sent]


def in_one_process(fusers, rounds):
    bases = [load_base(f"tiny:{family}", "float32") for family in PAIR]
    made = {}
    for s, r in ((0, 1), (1, 0)):
        path = fusers / f"{PAIR[s]}-{PAIR[r]}.safetensors"
        made[s, r] = load_fuser(path, measured(bases[s]), measured(bases[r]))[0]
    parties = [Party(base, base.tokenizer.encode(TEXT)) for base in bases]
    return bases, mutual(parties, made, rounds=rounds, scheme="bf16")


def written(base, made) -> str:
    stop = {base.tokenizer.eos_token_id}
    return base.tokenizer.decode([i for i in made.generate(6, stop) if i not in stop])


@pytest.mark.parametrize("rounds", [1, 3])
def test_two_nodes_answer_as_mutual_does_in_one_process(meeting, fusers, rounds):
    config = meeting(**{"refine.mutual": rounds})
    grid = run(config)
    answers = told(config)
    bases, wanted = in_one_process(fusers, rounds)
    assert sorted(answers) == [0, 1]
    for place, (base, made) in enumerate(zip(bases, wanted, strict=True)):
        assert torch.equal(LOGITS[place], made.logits[-1])
        assert answers[place]["answer"] == written(base, made)
        (source,) = answers[place]["receipt"]["sources"]
        assert (source["status"], source["name"]) == ("used", f"{1 - place} tiny:{PAIR[1 - place]}")
        assert answers[place]["receipt"]["fallback"] == ""
    counts = [len(kinds(grid, action)) for action in (ASK, EXPORT, ANSWER)]
    assert counts == [2, 2 * rounds, 2]
    left = "".join(p.read_text() for p in folder(config).iterdir() if p.is_file())
    assert TEXT not in left
    for message in [*grid.sent, *grid.answered]:
        records = message.content.array_records.values() if message.has_content() else ()
        assert not any(TEXT.encode() in a.data for record in records for a in record.values())


def dying(code, turn):
    """Node 1 is gone (5), or fails (2), at a turn."""

    def on_reply(message, reply):
        if message.metadata.message_type != f"query.{EXPORT}":
            return reply
        one = message.metadata.dst_node_id == 1001
        if one and border.config_of(message.content)["turn"] == turn:
            return Message(Error(code, "as Flower says it"), reply_to=message)
        return reply

    return on_reply


@pytest.mark.parametrize("turn", [0, 1])
def test_one_that_dies_leaves_the_other_alone_and_marked(meeting, turn):
    config = meeting(**{"refine.mutual": 2})
    grid = run(config, dying(5, turn))
    answers = told(config)
    assert sorted(answers) == [0]
    receipt = answers[0]["receipt"]
    assert [s["cause"] for s in receipt["sources"]] == ["gone"]
    assert (receipt["mode"], receipt["fallback"]) == ("standalone", "standalone")
    assert answers[0]["answer"] == answers[0]["standalone"]
    assert kinds(grid, ANSWER) == [0]  # the dead is not asked again
    assert kinds(grid, EXPORT).count(1) == turn + 1


def test_one_that_fails_a_turn_still_answers(meeting):
    config = meeting()
    run(config, dying(2, 0))
    answers = told(config)
    assert [answers[p]["receipt"]["sources"][0]["cause"] for p in (0, 1)] == ["failed", ""]
    assert answers[0]["receipt"]["fallback"] == "standalone"
    assert answers[1]["receipt"]["mode"] == "prefix"


def test_a_cache_that_was_changed_on_its_way_is_not_believed(meeting):
    def on_reply(message, reply):
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if kind == f"query.{EXPORT}" and node == 1001:
            record = next(iter(reply.content.array_records.values()))
            arrays = {n: x.copy() for n, x in border.unpack_arrays(record).items()}
            arrays["0"][100] ^= 1
            reply.content["arrays"] = border.pack_arrays(arrays)
        return reply

    config = meeting()
    run(config, on_reply)
    answers = told(config)
    assert [answers[p]["receipt"]["sources"][0]["cause"] for p in (0, 1)] == ["integrity", ""]
    assert answers[0]["answer"] == answers[0]["standalone"]


def test_a_turn_is_taken_once_and_in_order(meeting):
    config = meeting(**{"refine.mutual": 2})
    grid = run(config)
    turns = [m for m in grid.sent if m.metadata.message_type == f"query.{EXPORT}"]
    reply = grid._app(turns[0], grid._contexts[turns[0].metadata.dst_node_id])
    assert reply.has_error()
    assert "expected turn" in reply.error.reason


def test_both_answers_come_back_through_the_log_sealed(meeting):
    private, lines = bytes(range(32)), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    try:
        run(meeting(**{"refine.reply-key": ciphers.public_key(private).hex()}))
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    found = [json.loads(line.partition(MARK)[2]) for line in lines if MARK in line]
    assert [(row["partition"], row["answers"]) for row in found] == [(0, 2), (1, 2)]
    assert all(set(opened(row, private)) == {"answer", "standalone"} for row in found)


def test_recipes_that_cannot_be_are_refused(meeting):
    for change, said in (
        ({"refine.mutual": -1}, "at least 0"),
        ({"refine.keep": 0.5}, "whole caches"),
        ({"clients.count": 1}, "two or more"),
    ):
        with pytest.raises(Refusal, match=said):
            meeting(**change)
    with pytest.raises(Refusal, match="Co-C2C answers one question"):
        run(meeting(**{"refine.question": ""}))


ASKED = ["refine", TEXT, "--receiver", "tiny:qwen3", "--sender", "tiny:llama", "--mutual", 2]


def test_the_command_lets_both_answer(fedloom, fusers):
    two = [*ASKED, "--fuser", fusers, "--max-new-tokens", 6]
    code, out, _ = fedloom(*two, "--json")
    assert code == 0
    answers = json.loads(out)["answers"]
    assert [each["model"] for each in answers] == ["tiny:qwen3", "tiny:llama"]
    found = zip(answers, *(side[::-1] for side in in_one_process(fusers, 2)), strict=True)
    for each, base, made in found:
        assert each["receipt"]["sources"][0]["status"] == "used"
        assert each["answer"] == written(base, made)
    code, out, err = fedloom(*two, "--compare")
    assert code == 0
    assert out.startswith("0 tiny:qwen3: ")
    assert "1 tiny:llama alone: " in out
    assert "1 tiny:llama | tiny:qwen3: used, 2 of 2 gates open" in err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--rephrase"], "--mutual with --rephrase"),
        (["--keep-tokens", "0.5"], "--mutual with --keep-tokens"),
        (["--words", "5"], "--mutual with --words"),
        (["--sender", "tiny:qwen3"], "name each model once"),
        ([], "fedloom fuser train --sender tiny:llama --receiver tiny:qwen3"),
    ],
)
def test_bad_input_is_one_line(fedloom, more, said):
    code, out, err = fedloom(*ASKED, *more)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1

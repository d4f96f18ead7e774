"""FedRefine through Flower's messages, in one process: three models, each asks the others."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fedloom import ciphers
from fedloom.adapters.fuser_files import card_of, save_fuser
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.secure.channel import ASK, EXPORT, HELLO, KEEP, MARK
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import serve_on
from fedloom.simulations.refine_remote import opened

from meetings import events, meeting_of, write_fusers
from rooms import fuser_of
from runs import Meddler, rows


@pytest.fixture(scope="module")
def fusers(tmp_path_factory):
    return write_fusers(tmp_path_factory.mktemp("fusers"))


@pytest.fixture
def meeting(questions, tmp_path, fusers):
    def build(**changes) -> RunConfig:
        return meeting_of(questions, fusers, tmp_path, **changes)

    return build


ONE = {"sampling.fraction": 0.3}  # with seed 0, partition 2 alone asks


def serve(config, on_reply=None, on_message=None) -> Meddler:
    grid = Meddler(client_app.app, config.clients.count, config.flat())
    grid.on_reply = on_reply or grid.on_reply
    grid.on_message = on_message or grid.on_message
    serve_on(grid, server_app.app, config)
    return grid


def folder(config) -> Path:
    return Path(config.output) / config.name


def scored(config) -> dict[int, dict]:
    return {r["partition"]: r for r in rows(folder(config), "metrics") if r["phase"] == "evaluate"}


def kind(message) -> str:
    return message.metadata.message_type.partition(".")[2]


def test_everyone_asks_everyone_and_no_text_is_in_the_clear(meeting, questions):
    config = meeting()
    grid = serve(config)
    assert events(folder(config), "end")[-1]["status"] == "completed"
    found = scored(config)
    assert sorted(found) == [0, 1, 2]
    for partition, row in found.items():
        others = {0, 1, 2} - {partition}
        assert row["used"] == 2 * len(others)
        assert row["lost"] == row["fallbacks"] == 0
        assert all(row[f"pair-{p}-used"] == 2 for p in others)
        assert row["gold-ce-sum"] != row["alone-gold-ce-sum"]
    texts = [json.loads(line)["question"] for line in questions.read_text().splitlines()]
    left = "".join(p.read_text() for p in folder(config).glob("*.json*"))
    for message in [*grid.sent, *grid.answered]:
        words = b"".join(
            array.data
            for record in message.content.array_records.values()
            for array in record.values()
        )
        words += str([dict(r) for r in message.content.config_records.values()]).encode()
        assert not any(text.encode() in words for text in texts)
    assert not any(text in left for text in texts)
    assert len(events(folder(config), "pair")) == 6
    assert events(folder(config), "pair")[0]["sender-model"].startswith("tiny:")


def test_ledger_is_what_crossed_and_fusers_go_once(meeting, fusers):
    config = meeting()
    serve(config)
    sizes = sum(path.stat().st_size for path in fusers.glob("*.safetensors"))
    ledger = rows(folder(config), "ledger")

    def weighed(phase, direction):
        kept = [r for r in ledger if (r["phase"], r["direction"]) == (phase, direction)]
        return sum(r["bytes"] for r in kept if r["dtype"] == "uint8")

    assert weighed(KEEP, "down") == sizes
    caches = weighed(EXPORT, "up")
    assert caches == weighed("evaluate", "down")
    slices = sum(row["cache-bytes"] for row in scored(config).values())
    assert slices < caches <= slices + 28 * 12  # what a seal adds to each of twelve
    again = meeting(name="again")
    serve(again)
    second = [r for r in rows(folder(again), "ledger") if r["phase"] == KEEP]
    assert sum(r["bytes"] for r in second if r["dtype"] == "uint8") == 0
    assert scored(again)[0]["gold-ce-sum"] == scored(config)[0]["gold-ce-sum"]


def change(name: str):
    """Return what a bad sender or a bad wire does to the caches of partition 1."""

    def on_reply(message, reply):
        if kind(message) != EXPORT or reply.metadata.src_node_id != 1001:
            return reply
        if name == "raises":
            from fedloom import border

            return border.failure(message, OSError("the node is dead"))
        record = next(iter(reply.content.array_records.values()))
        from fedloom.border import pack_arrays, unpack_arrays

        arrays = unpack_arrays(record)
        first = next(iter(arrays))
        if name == "mutated":
            arrays[first] = arrays[first].copy()
            arrays[first][100] ^= 1
        elif name == "swapped":
            arrays["0000"], arrays["0001"] = arrays["0001"], arrays["0000"]
        elif name == "oversized":
            arrays[first] = np.zeros(1_000_000, np.uint8)
        elif name == "empty":
            arrays = {}
        elif name == "floats":
            arrays = {n: np.full(7, np.nan) for n in arrays}
        reply.content["arrays"] = pack_arrays(arrays)
        return reply

    return on_reply


@pytest.mark.parametrize(
    ("name", "lost"),
    [("raises", 2), ("mutated", 1), ("swapped", 2), ("oversized", 1), ("empty", 2), ("floats", 2)],
)
def test_a_bad_sender_is_a_fallback_and_no_more(meeting, name, lost):
    config = meeting(**ONE)
    serve(config, on_reply=change(name))
    (row,) = scored(config).values()
    assert row["partition"] != 1
    assert row["pair-1-lost"] == row["lost"] == lost
    assert row["fallbacks"] == lost
    assert row["used"] == 4 - lost
    if lost == 2:
        assert row["pair-1-gold-ce-sum"] == row["alone-gold-ce-sum"]


@pytest.mark.parametrize("key", ["geometry", "public"])
def test_one_who_tells_nonsense_of_itself_harms_nobody_else(meeting, key):
    def on_reply(message, reply):
        if kind(message) == HELLO and reply.metadata.src_node_id == 1001:
            said = dict(reply.content["config"])
            nonsense = {"geometry": '{"model": "x"}', "public": "00" * 32}
            reply.content["config"] = ConfigRecord({**said, key: nonsense[key]})
        return reply

    config = meeting(**ONE)
    serve(config, on_reply=on_reply)
    (row,) = scored(config).values()
    assert row["used"] == 2
    assert "pair-1-used" not in row


def test_a_client_of_ones_own_answers_the_questions_too(meeting):
    config = meeting(**ONE, client="lingering:ReluctantClient")
    serve(config)
    (row,) = scored(config).values()
    assert (row["used"], row["lost"]) == (0, 4)
    failed = [e for e in events(folder(config), "client-failed") if e["phase"] == EXPORT]
    assert [e["reason"] for e in failed] == ["this one reads for nobody: ask another"] * 2


@pytest.mark.parametrize(("code", "cause"), [(5, "gone"), (2, "failed")])
def test_a_node_that_is_gone_is_told_from_one_that_failed(meeting, code, cause):
    from flwr.app import Error, Message

    def on_reply(message, reply):
        if kind(message) == EXPORT and reply.metadata.src_node_id == 1001:
            return Message(Error(code, "as Flower says it"), reply_to=message)
        return reply

    config = meeting(**{"refine.question": "what is cheese?", "refine.new-tokens": 2})
    serve(config, on_reply=on_reply)
    (told,) = events(folder(config), "answer")
    causes = {s["name"]: s["cause"] for s in told["receipt"]["sources"]}
    assert causes == {"1 tiny:qwen3": cause, "2 tiny:qwen2": ""}


def test_a_registry_of_two_kinds_of_fusers_leaves_one_out_and_answers(meeting, tmp_path):
    mixed = write_fusers(tmp_path / "mixed", pairs=[("qwen3", "llama")])
    fuser = fuser_of("qwen2", "llama", dtype="float32", tail=1)
    save_fuser(mixed / "tail.safetensors", fuser, card_of(fuser, "tiny:qwen2", "tiny:llama"))
    asked = {"refine.fusers": str(mixed), "refine.question": "what is it?"}
    config = meeting(**asked, **{"refine.new-tokens": 2})
    serve(config)
    (told,) = events(folder(config), "answer")
    assert sorted(s["cause"] for s in told["receipt"]["sources"]) == ["", "unfit"]
    assert told["receipt"]["fallback"] == "fewer"


def test_an_exchange_is_answered_once(meeting):
    config, kept = meeting(**ONE), []

    def on_message(message):
        if message.metadata.message_type == "evaluate.fedrefine":
            kept.append(message)
        return message

    grid = serve(config, on_message=on_message)
    reply = grid._app(kept[0], grid._contexts[kept[0].metadata.dst_node_id])
    assert reply.has_error()
    assert "not open here" in reply.error.reason


def test_a_pair_without_a_fuser_stands_alone(meeting, tmp_path):
    some = write_fusers(tmp_path / "some", pairs=[("llama", "qwen3")])
    config = meeting(**{"refine.fusers": str(some)})
    grid = serve(config)
    found = scored(config)
    assert found[1]["used"] == 2
    assert found[1]["pair-2-lost"] == 2
    assert found[0]["used"] == 0
    assert found[0]["gold-ce-sum"] == found[0]["alone-gold-ce-sum"]
    asked = [m for m in grid.sent if kind(m) == EXPORT]
    assert [m.metadata.dst_node_id for m in asked] == [1000]  # nobody reads for nothing
    assert sum(kind(m) == ASK for m in grid.sent) == 3


def test_no_fuser_at_all_is_refused(meeting, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(Refusal, match="fedloom fuser train --sender"):
        serve(meeting(**{"refine.fusers": str(tmp_path / "none")}))
    with pytest.raises(Refusal, match="no such folder"):
        serve(meeting(name="b", **{"refine.fusers": str(tmp_path / "nowhere")}))


def test_one_model_on_every_node_needs_no_fuser(meeting, tmp_path):
    (tmp_path / "none").mkdir()
    config = meeting(
        **{
            "refine.fusers": str(tmp_path / "none"),
            "refine.models": "tiny:qwen3",
            "clients.count": 2,
        }
    )
    serve(config)
    assert all(row["used"] == 2 for row in scored(config).values())


def test_one_question_is_answered_with_a_receipt_and_kept_from_the_folder(meeting):
    config = meeting(**{"refine.question": "what is cheese?", "refine.new-tokens": 4})
    serve(config)
    (told,) = events(folder(config), "answer")
    assert [s["status"] for s in told["receipt"]["sources"]] == ["used", "used"]
    text = json.loads(bytes.fromhex(told["sealed"]))  # no key was given: it is plain
    assert set(text) == {"answer", "standalone"}
    left = "".join(p.read_text() for p in folder(config).iterdir() if p.is_file())
    assert "what is cheese?" not in left


def test_an_answer_comes_back_through_the_log_sealed_for_who_asked(meeting):
    private, lines = bytes(range(32)), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("flwr").addHandler(handler)
    key = ciphers.public_key(private).hex()
    asked = {"refine.question": "what is cheese?", "refine.new-tokens": 4, "refine.reply-key": key}
    try:
        serve(meeting(**asked))
    finally:
        logging.getLogger("flwr").removeHandler(handler)
    (line,) = [line for line in lines if MARK in line]
    told = json.loads(line.partition(MARK)[2])
    assert set(opened(told, private)) == {"answer", "standalone"}
    with pytest.raises(Refusal, match="does not open"):
        opened(told, bytes(32))
    assert "what is cheese?" not in "".join(lines)


def test_recipes_that_cannot_be_are_refused(meeting):
    for change_, said in (
        ({"rounds": 2}, "rounds = 1"),
        ({"refine.receiver": 3}, "partitions 0 to 2"),
        ({"refine.keep": 0.0}, "above 0"),
        ({"refine.models": "tiny:llama,,"}, "commas between"),
        ({"refine.dtype": "int9"}, "bf16, int8, int4"),
        ({"refine.reply-key": "xyz"}, "64 hexadecimal"),
    ):
        with pytest.raises(Refusal, match=said):
            meeting(**change_)

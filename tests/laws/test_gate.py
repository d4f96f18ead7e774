"""Updates that must not be folded, messages that no node works on: each named, with its reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import AggregationError

from fedloom import border
from fedloom.clients import fednl
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on

from runs import adapter_of, equal, recorded, rows


def tampering(change) -> ClientApp:
    """The real ClientApp with ``change(partition, round, message, reply)`` on its training."""
    app = ClientApp()

    @app.train("fednl")
    def train(message: Message, context) -> Message:
        told = border.config_of(message.content)
        partition = context.node_config["partition-id"]
        given = change(partition, told["round"], message, None)
        reply = client_app.app(given or message, context)
        return change(partition, told["round"], message, reply) or reply

    for register, name in ((app.evaluate, "fednl"), (app.query, "properties")):
        register(name)(lambda message, context: client_app.app(message, context))
    app.query("initial_adapter")(lambda message, context: client_app.app(message, context))
    return app


def rewrite(reply: Message, change) -> None:
    """Put other arrays into a reply."""
    arrays = border.arrays_of(reply.content)
    change(arrays)
    reply.content["arrays"] = border.pack_parcel(arrays)


def failures(config) -> dict[tuple[int, int], str]:
    events = rows(Path(config.output) / config.name, "events")
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "completed")
    lost = [e for e in events if e["event"] == "client-failed"]
    return {(e["round"], e["partition"]): e["reason"] for e in lost}


def test_nan_wrong_shape_stale_and_raising_clients_are_named_and_the_rest_counts(recipe):
    kept: dict[int, Message] = {}

    def change(partition, server_round, message, reply):
        if reply is None:
            return None
        name = next(iter(border.arrays_of(reply.content)))
        if partition == 1:
            rewrite(reply, lambda arrays: arrays[name].fill(np.nan))
        if partition == 2:
            rewrite(reply, lambda arrays: arrays.update({name: arrays[name][:1]}))
        if partition == 3:
            return border.failure(message, RuntimeError("out of order"))
        if partition == 4:  # its reply of round 1, again in round 2
            kept.setdefault(4, copy.deepcopy(reply.content))
            return Message(copy.deepcopy(kept[4]), reply_to=message)
        return None

    config = recipe(rounds=2, server__rule="mean")
    run_in_process(config, tampering(change))
    found = failures(config)
    assert found.keys() == {(r, p) for r in (1, 2) for p in (1, 2, 3)} | {(2, 4)}
    assert "not finite" in found[1, 1]
    assert "was expected" in found[1, 2]
    assert "RuntimeError" in found[2, 3]  # its words stay on the node
    assert found[2, 4] == "a reply of round 1 came again in round 2"


def test_false_counts_copied_replies_old_versions_and_other_bases_are_named(recipe):
    first: list[Message] = []

    def change(partition, server_round, message, reply):
        if reply is None and partition in (3, 4):
            other = copy.deepcopy(message)
            told = other.content["config"]
            told.update({"version": "0.0.9"} if partition == 3 else {"base": "f" * 64})
            return other
        if reply is None or reply.has_error():
            return None
        if partition == 0:
            first.append(copy.deepcopy(reply.content))
        if partition == 1:
            reply.content["metrics"]["num-examples"] = 10**6
        if partition == 2:
            return Message(copy.deepcopy(first[0]), reply_to=message)
        return None

    class Forward(InProcessGrid):  # client 0 answers first
        def push_messages(self, messages):
            return super().push_messages(sorted(messages, key=lambda m: m.metadata.dst_node_id))

    config = recipe(rounds=1)
    serve_on(Forward(tampering(change), 5, config.flat()), server_app.app, config)
    found = failures(config)
    assert found.keys() == {(1, p) for p in (1, 2, 3, 4)}
    assert "num-examples = 1000000: expected a whole number from 1 to" in found[1, 1]
    assert "another run, round, adapter or client" in found[1, 2]
    assert "fedloom 0.0.9 asked" in found[1, 3]
    assert "an adapter of base ffffffffffffffff came" in found[1, 4]
    alone = recipe(rounds=1, name="alone", clients__count=1)
    run_in_process(alone)
    assert equal(adapter_of(config), adapter_of(alone))  # nothing of client 0 was lost


class Loud(FedNLClient):
    """Client 1 sends ten times its change; where nothing was sent (FLoRA), ten times its B."""

    def fit(self, parameters, config):
        sent = dict(zip(self.array_names, parameters, strict=True))
        arrays, examples, metrics = super().fit(parameters, config)
        for i, name in enumerate(self.array_names):
            if self.partition_id == 1 and (name in sent or not name.endswith("lora_A.weight")):
                start = sent.get(name, np.float32(0))
                arrays[i] = start + 10 * (arrays[i] - start)
        return arrays, examples, metrics


def loud() -> ClientApp:
    app = ClientApp()
    serve(app, Loud, action="fednl")
    return app


@pytest.mark.parametrize("rule", ["svd", "flora", "rolora"])
def test_a_change_ten_times_too_large_is_dropped_by_default_in_the_first_round_and_later(
    recipe, rule
):
    """Also where LoRA is drawn anew and nothing was sent that it could be measured from."""
    config = recipe(rounds=3, server__rule=rule, evaluation__every=3)
    run_in_process(config, loud())
    found = failures(config)
    assert found.keys() == {(1, 1), (2, 1), (3, 1)}
    for reason in found.values():
        assert "times the median of accepted ones; expected at most 5 times" in reason
    trained = [r for r in rows(Path(config.output) / config.name, "metrics") if "update-norm" in r]
    assert [(r["round"], r["partition"]) for r in trained] == [
        (r, p) for r in (1, 2, 3) for p in (0, 2, 3, 4)
    ]
    assert all(r["update-norm"] > 0 for r in trained)


def test_honest_clients_of_one_row_and_fifty_stay_and_the_loud_one_between_them_goes(
    recipe, tmp_path
):
    random, tables = np.random.default_rng(5), tmp_path / "tables"
    tables.mkdir()
    for k, size in enumerate([1, 1, 1, 3, 50]):
        likely = random.dirichlet([0.1] * 4)  # letters that lean to one, another in each client
        lines = [
            {"question": f"{i} of {k}?", "subject": f"of_{k}", "choices": ["u", "v", "w", "x"],
             "answer": int(random.choice(4, p=likely))}
            for i in range(size + 1)
        ]  # fmt: skip
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (tables / f"{k}.jsonl").write_text(text, encoding="utf-8")
    few = {"data__min_train": 1, "data__min_test": 1, "data__max_test": 1, "data__test_share": 0.5}
    steps = {"train__max_steps": 0, "train__batch_size": 1, "evaluation__every": 2}
    config = recipe(data__source=f"path:{tables}", data__split="files", **few, **steps)
    run_in_process(config, loud())
    assert failures(config).keys() == {(1, 1), (2, 1)}
    trained = [r for r in rows(Path(config.output) / config.name, "metrics") if "update-norm" in r]
    assert [r["steps"] for r in trained if r["round"] == 2] == [1, 1, 3, 50]
    norms = [r["update-norm"] for r in trained if r["round"] == 2]
    assert norms[3] > 5 * norms[1]  # but for its steps it would be over the bound


def test_an_absolute_bound_needs_no_others(recipe):
    with pytest.raises(AggregationError, match="0 usable replies"):
        run_in_process(recipe(rounds=1, gate__norm=1e-9))


def test_a_share_of_those_asked_must_answer(recipe):
    class Half(FedNLClient):
        def fit(self, parameters, config):
            if self.partition_id < 3:
                raise RuntimeError("away")
            return super().fit(parameters, config)

    app = ClientApp()
    serve(app, Half, action="fednl")
    with pytest.raises(AggregationError, match="2 usable replies, at least 3 are needed"):
        run_in_process(recipe(rounds=1, sampling__min_share=0.6), app)


def test_who_keeps_failing_rests_and_is_asked_again(recipe):
    class Ill(FedNLClient):
        def fit(self, parameters, config):
            if self.partition_id == 2 and config["round"] < 3:
                raise RuntimeError("ill")
            return super().fit(parameters, config)

    app = ClientApp()
    serve(app, Ill, action="fednl")
    config = recipe(rounds=4, sampling__rest_after=2, evaluation__every=4, train__max_steps=1)
    run_in_process(config, app)
    folder = Path(config.output) / config.name
    rested = [e for e in rows(folder, "events") if e["event"] == "rested"]
    assert [(e["round"], e["partitions"]) for e in rested] == [(3, [2])]
    trained = {(r["round"], r["partition"]) for r in rows(folder, "metrics")
               if r["phase"] == "train"}  # fmt: skip
    assert trained == {(r, p) for r in (1, 2, 3, 4) for p in range(5)} - {(1, 2), (2, 2), (3, 2)}


REFUSED_AT_ONCE = [
    ({"version": "9.9"}, "fedloom 9.9 asked"),
    ({"version": ""}, "fedloom of no version asked"),
    ({"base": "0" * 64}, "an adapter of base 0000"),
    ({"round": 0}, "round 0 came"),
    ({"round": "2"}, "round '2' came"),
    ({"round": 1}, "round 1 came after round 3 of the same run"),
    ({"arrays": np.nan}, "came with a value that is not finite"),
]


def test_a_node_refuses_before_any_model_works(recipe, monkeypatch):
    grid = recorded(recipe(rounds=3, clients__count=1, train__max_steps=1, evaluation__every=3))
    *_, last = (m for m in grid.sent if m.metadata.message_type == "train.fednl")

    def no_model(config):
        raise AssertionError("a model was asked for")

    monkeypatch.setattr(fednl, "workbench", no_model)
    for change, said in REFUSED_AT_ONCE:
        content = copy.deepcopy(last.content)
        arrays = border.arrays_of(content)
        next(iter(arrays.values())).flat[0] = change.get("arrays", 0.0)
        content["arrays"] = border.pack_parcel(arrays)
        content["config"].update({k: x for k, x in change.items() if k != "arrays"})
        (reply,) = grid.send_and_receive([Message(content, 1000, "train.fednl")])
        line, _, refused = border.failure_reason(reply)
        assert refused
        assert said in line


def test_a_node_that_has_gone_to_pieces_sends_nothing(recipe):
    class Broken(FedNLClient):
        def fit(self, parameters, config):
            arrays, examples, metrics = super().fit(parameters, config)
            if self.partition_id == 1:
                arrays[0][:] = np.inf
            return arrays, examples, metrics

    app = ClientApp()
    serve(app, Broken, action="fednl")
    config = recipe(rounds=1, clients__count=2)
    run_in_process(config, app)
    found = failures(config)
    assert found.keys() == {(1, 1)}
    assert "not finite, and nothing was sent" in found[1, 1]
    ledger = rows(Path(config.output) / config.name, "ledger")
    up = {r["partition"] for r in ledger if (r["phase"], r["direction"]) == ("train", "up")}
    assert up == {0}

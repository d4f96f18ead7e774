"""The start of the adapter is one node's word: held against what is agreed and others have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.clientapp import ClientApp

from fedloom import border, wire
from fedloom.errors import Refusal
from fedloom.simulations import client_app
from fedloom.simulations.inprocess import run_in_process

from runs import adapter_of, equal, rows

ASKED = "initial-adapter"


def lying(change: Callable[[Message], None], *whose: int) -> ClientApp:
    """Some nodes change what they answer when they are asked for the start."""
    app = ClientApp()
    for register in (app.train, app.evaluate):
        register("fednl")(lambda message, context: client_app.app(message, context))
    app.query("properties")(lambda message, context: client_app.app(message, context))

    @app.query("initial_adapter")
    def start(message, context):
        reply = client_app.app(message, context)
        if context.node_config["partition-id"] in whose:
            change(reply)
        return reply

    return app


def poisoned(factor: str) -> Callable[[Message], None]:
    """Finite numbers that no node would start with."""

    def change(reply: Message) -> None:
        arrays = border.arrays_of(reply.content)
        name = min(n for n in arrays if factor in n)
        arrays[name] = arrays[name] + np.float32(0.3)
        reply.content["arrays"] = border.pack_arrays(arrays)

    return change


def not_finite(reply: Message) -> None:
    arrays = border.arrays_of(reply.content)
    arrays[min(arrays)][...] = np.nan
    reply.content["arrays"] = border.pack_arrays(arrays)


def another_base(reply: Message) -> None:
    told = reply.content.config_records["config"]
    told["manifest"] = str(told["manifest"]).replace('"base":"', '"base":"f')


def no_manifest(reply: Message) -> None:
    del reply.content.config_records["config"]["manifest"]


def no_peft(reply: Message) -> None:
    reply.content.config_records["config"]["peft"] = 7


def no_arrays(reply: Message) -> None:
    reply.content["arrays"] = ArrayRecord({})


def raising(reply: Message) -> None:
    raise Refusal("this node will not")


def failed(config) -> list[dict]:
    events = rows(Path(config.output) / config.name, "events")
    return [e for e in events if e["event"] == "client-failed"]


@pytest.mark.parametrize("factor", ["lora_A", "lora_B", "memory"])
def test_a_poisoned_start_is_refused_by_the_name_of_its_sender(recipe, factor):
    config = recipe(rounds=1, clients__count=3)
    with pytest.raises(
        Refusal, match=r"partition 0 \(Law/Ethics\) sent the adapter's start, and 3 of 3"
    ):
        run_in_process(config, lying(poisoned(factor), 0))
    assert {e["partition"] for e in failed(config)} == {0, 1, 2}
    assert all("is not the one that this node makes" in e["reason"] for e in failed(config))
    assert rows(Path(config.output) / config.name, "events")[-1]["event"] == "refused"
    assert not (Path(config.output) / config.name / "adapter").exists()


def test_also_where_nobody_trains_or_masks_hide_updates(recipe):
    for name, changes in (("none", {"local__method": "none"}), ("clipped", {"privacy__clip": 1.0})):
        config = recipe(rounds=1, clients__count=2, name=name, **changes)
        with pytest.raises(Refusal, match=r"partition 0 \(Law/Ethics\) sent the adapter's start"):
            run_in_process(config, lying(poisoned("memory"), 0))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (not_finite, "not finite"),
        (another_base, "of base f"),
        (no_manifest, "came without manifest"),
        (no_peft, "came without peft"),
        (no_arrays, "expected but did not come"),
    ],
)
def test_a_bad_start_is_named_and_the_next_node_is_asked(recipe, change, reason):
    config = recipe(rounds=1, clients__count=2, train__max_steps=1)
    run_in_process(config, lying(change, 0))
    (event,) = failed(config)
    assert (event["partition"], event["phase"]) == (0, ASKED)
    assert reason in event["reason"]
    run_in_process(plain := config.replaced(name="plain"))
    assert equal(adapter_of(config), adapter_of(plain))
    ledger = rows(Path(config.output) / config.name, "ledger")
    assert {r["partition"] for r in ledger if r["phase"] == ASKED} == {0, 1}


def test_if_nobody_has_a_good_start_the_first_reason_is_the_runs(recipe):
    config = recipe(rounds=1, clients__count=2)
    with pytest.raises(
        Refusal, match=r"partition \d \(.*\): the start of the adapter came without"
    ):
        run_in_process(config, lying(no_manifest, 0, 1))


def test_a_recipe_that_every_node_refuses_is_refused_in_their_words(recipe):
    """After three of them: the fourth would say the same, and would load a model for it."""
    config, asked = recipe(rounds=1), []

    def refuse(reply: Message) -> None:
        asked.append(1)
        failure = border.failure(reply, Refusal("memory.chunk is too long for this model"))
        reply.__dict__["_error"], reply.__dict__["_content"] = failure.error, None

    with pytest.raises(Refusal, match=r"^memory\.chunk is too long for this model$"):
        run_in_process(config, lying(refuse, 0, 1, 2, 3, 4))
    assert len(asked) == 3


def test_a_node_with_a_start_of_its_own_is_named_and_left_out(recipe, monkeypatch):
    """One of three differs: it is the odd one, and the round goes on with the others."""
    check = wire.check_own_start

    def odd(partition, came, own):
        check(partition, came, {n: a + 1 for n, a in own.items()} if partition == 2 else own)

    monkeypatch.setattr("fedloom.clients.fednl.check_own_start", odd)
    config = recipe(rounds=1, clients__count=3)
    run_in_process(config)
    (event,) = failed(config)
    assert (event["partition"], event["phase"]) == (2, "train")
    run_in_process(two := recipe(rounds=1, clients__count=2, name="two"))
    assert equal(adapter_of(config), adapter_of(two))


def test_rounding_of_another_processor_is_let_pass_and_no_more():
    own = {"centre": np.linspace(-1, 1, 50, dtype=np.float32), "B": np.zeros((3, 2), np.float32)}
    near = {**own, "centre": own["centre"] * np.float32(1.01)}
    wire.check_own_start(0, near, own)
    wire.check_own_start(0, {"side": np.ones(3)}, own)  # what is not in the start has its own rules
    for bad in ({"centre": own["centre"] * 1.05}, {"B": own["B"] + 1e-5}):
        with pytest.raises(Refusal, match=f"partition 4: the start that came .* {next(iter(bad))}"):
            wire.check_own_start(4, {**own, **bad}, own)


def test_faast_starts_from_zero_and_takes_nothing_else(digits):
    app = ClientApp()
    for register in (app.train, app.evaluate):
        register("faast")(lambda message, context: client_app.app(message, context))
    app.query("properties")(lambda message, context: client_app.app(message, context))

    @app.query("initial_adapter")
    def start(message, context):
        reply = client_app.app(message, context)
        if context.node_config["partition-id"] == 0:
            weights = border.arrays_of(reply.content)["weights"] + 1
            reply.content["arrays"] = border.pack_arrays({"weights": weights})
        return reply

    config = digits(clients__count=2)
    run_in_process(config, app)
    (event,) = failed(config)
    assert (event["partition"], event["phase"]) == (0, ASKED)
    assert "is not zero" in event["reason"]

"""Replies that are bad, missing, late, out of order or of another run, and the rule over them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from flwr.app import Array
from flwr.clientapp import ClientApp
from flwr.serverapp.exception import AggregationError
from safetensors.numpy import load_file

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.config import RunConfig
from fedloom.data.partition import holdings
from fedloom.errors import Refusal
from fedloom.models import tiny
from fedloom.simulations import client_app, server_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process, serve_on

from runs import Recorder, adapter_of, equal, recorded, rows


class _Flaky(FedNLClient):
    """Raises or poisons, by partition."""

    def fit(self, parameters, config):
        if self.partition_id == 1:
            raise RuntimeError("this node is out of order")
        arrays, examples, metrics = super().fit(parameters, config)
        if self.partition_id == 2:
            arrays[0] = np.full_like(arrays[0], np.nan)
        if self.partition_id == 3:
            arrays[0] = arrays[0][:1]
        if self.partition_id == 4:
            examples = 0
        return arrays, examples, metrics


def test_bad_clients_are_named_and_dropped_and_the_round_goes_on(recipe):
    app = ClientApp()
    serve(app, _Flaky, action="fednl")
    config = recipe(rounds=1)
    run_in_process(config, app)
    events = rows(Path(config.output) / config.name, "events")
    failed = {e["partition"]: e["reason"] for e in events if e["event"] == "client-failed"}
    assert failed.keys() == {1, 2, 3, 4}
    assert failed[1].startswith("RuntimeError at test_replies.py:")
    assert "out of order" not in failed[1]  # its words are the node's
    assert "not finite" in failed[2]
    assert "was expected" in failed[3]
    assert "positive number of examples" in failed[4]
    assert sum("Traceback" in e.get("traceback", "") for e in events) == 1
    alone = recipe(rounds=1, name="alone", clients__count=1)
    run_in_process(alone)
    assert equal(adapter_of(config), adapter_of(alone))  # what client 0 trained, untouched


@pytest.mark.parametrize("break_it", ["truncated", "bfloat16", "list weight", "no loss"])
@pytest.mark.parametrize("who", [0, 4])
def test_replies_that_cannot_be_read_are_dropped_whoever_sends_them(recipe, break_it, who):
    def broken(message, context):
        reply = client_app.app(message, context)
        if context.node_config["partition-id"] != who or reply.has_error():
            return reply
        name, array = next(iter(reply.content.array_records["arrays"].items()))
        if break_it == "truncated":
            bad = Array(array.dtype, array.shape, array.stype, array.data[:-7])
        else:
            bad = Array("bfloat16", array.shape, "torch.raw", array.data)
        if break_it in ("truncated", "bfloat16"):
            reply.content.array_records["arrays"][name] = bad
        metrics = reply.content.metric_records["metrics"]
        if break_it == "list weight":
            metrics["num-examples"] = [3]
        if break_it == "no loss":
            del metrics["loss"]
        return reply

    app = ClientApp()
    app.train("fednl")(broken)
    app.evaluate("fednl")(lambda message, context: client_app.app(message, context))
    app.query("properties")(lambda message, context: client_app.app(message, context))
    app.query("initial_adapter")(lambda message, context: client_app.app(message, context))
    config = recipe(rounds=1)
    run_in_process(config, app)
    folder = Path(config.output) / config.name
    failed = [e for e in rows(folder, "events") if e["event"] == "client-failed"]
    assert [e["partition"] for e in failed] == [who]
    trained = [r["partition"] for r in rows(folder, "metrics") if r["phase"] == "train"]
    assert trained == [p for p in range(5) if p != who]


def test_a_failed_last_evaluation_keeps_the_adapter_and_tells_the_truth(recipe):
    class NoScores(FedNLClient):
        def evaluate(self, parameters, config):
            if config["round"] == 2:
                raise RuntimeError("no room")
            return super().evaluate(parameters, config)

    app = ClientApp()
    serve(app, NoScores, action="fednl")
    config = recipe(rounds=2)
    with pytest.raises(RuntimeError, match="no client could score the last round"):
        run_in_process(config, app)
    assert adapter_of(config)
    assert rows(Path(config.output) / config.name, "events")[-1]["status"] == "failed"


def test_a_bad_row_is_refused_without_its_text(recipe, tmp_path):
    """A refusal travels to the coordinator: it says where and what kind, never what."""
    row = {
        "question": "secret patient?",
        "subject": "anatomy",
        "choices": ["secret"] * 6,
        "answer": 0,
    }
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    config = recipe(data__source=f"path:{tmp_path / 'q.jsonl'}")
    grid = Recorder(client_app.app, 5, config.flat())
    with pytest.raises(Refusal, match="line 1: choices are 6 entries"):
        serve_on(grid, server_app.app, config)
    assert grid.answered
    assert not any("secret" in reply.error.reason for reply in grid.answered)


def test_a_second_run_of_one_name_has_a_folder_of_its_own(recipe):
    config = recipe(rounds=1)
    run_in_process(config)
    run_in_process(config.replaced(seed=5))
    first, second = (Path(config.output) / name for name in (config.name, f"{config.name}-2"))
    assert len(rows(first, "metrics")) == len(rows(second, "metrics"))
    assert RunConfig.from_toml(second / "config.toml").seed == 5


def test_too_few_good_replies_end_the_run(recipe):
    app = ClientApp()
    serve(app, _Flaky, action="fednl")
    config = recipe(rounds=1, sampling__min_nodes=2)
    with pytest.raises(AggregationError, match="1 usable replies, at least 2"):
        run_in_process(config, app)
    events = rows(Path(config.output) / config.name, "events")
    assert (events[-1]["event"], events[-1]["status"]) == ("end", "failed")


def test_all_clients_raising_ends_the_run(recipe):
    config = recipe(train__learning_rate=1e30, train__max_steps=3)
    with pytest.raises(AggregationError, match="0 usable replies"):
        run_in_process(config)


def test_order_of_replies_does_not_matter(recipe):
    class Backwards(InProcessGrid):
        def push_messages(self, messages):
            return super().push_messages(reversed(list(messages)))

    config = recipe(rounds=2)
    run_in_process(config.replaced(name="forwards"))
    grid = Backwards(client_app.app, 5, config.flat())
    serve_on(grid, server_app.app, config.replaced(name="backwards"))
    assert equal(
        adapter_of(config.replaced(name="forwards")), adapter_of(config.replaced(name="backwards"))
    )


def test_a_node_of_another_recipe_is_refused(recipe):
    config = recipe()
    grid = InProcessGrid(client_app.app, 5, config.replaced(lora__rank=2).flat())
    with pytest.raises(Refusal, match="differs in recipe"):
        serve_on(grid, server_app.app, config)
    events = rows(Path(config.output) / config.name, "events")
    assert events[-1]["event"] == "refused"


def test_a_node_of_a_partition_that_does_not_exist_is_named_and_left_out(recipe):
    config = recipe(clients__count=6, rounds=1, train__max_steps=1)
    run_in_process(config)
    folder = Path(config.output) / config.name
    (failed,) = [e for e in rows(folder, "events") if e["event"] == "client-failed"]
    assert "5 clients, 0 to 4" in failed["reason"]
    trained = [r["partition"] for r in rows(folder, "metrics") if r["phase"] == "train"]
    assert trained == [0, 1, 2, 3, 4]


def test_a_different_partition_manifest_is_refused(recipe, tmp_path):
    config = recipe()
    _, partition = holdings(config.data, seed=99)
    (tmp_path / "other.json").write_text(partition.to_json())
    with pytest.raises(Refusal, match="partitions differ in seed"):
        run_in_process(config.replaced(data__manifest=str(tmp_path / "other.json")))
    _, own = holdings(config.data, seed=config.seed)
    (tmp_path / "own.json").write_text(own.to_json())
    run_in_process(config.replaced(data__manifest=str(tmp_path / "own.json"), name="own", rounds=1))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21's own
def test_saved_adapter_loads_in_plain_peft(recipe):
    config = recipe()
    run_in_process(config)
    folder = Path(config.output) / config.name / "adapter"
    plain = peft.PeftModel.from_pretrained(tiny.build("llama"), folder)
    saved = load_file(folder / "adapter_model.safetensors")
    loaded = peft.get_peft_model_state_dict(plain)
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], torch.from_numpy(saved[name])) for name in saved)
    assert any(array.any() for name, array in saved.items() if "lora_B" in name)


def products(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [name for name in arrays if ".lora_A." in name]
    return {n: arrays[n.replace(".lora_A.", ".lora_B.")].astype(float) @ arrays[n] for n in names}


def test_svd_rule_is_one_clients_own_product_and_repeats_to_the_bit(recipe):
    one = [
        recipe(name=rule, server__rule=rule, clients__count=1, rounds=1) for rule in ("mean", "svd")
    ]
    for config in one:
        run_in_process(config)
    plain, refactored = (products(adapter_of(config)) for config in one)
    assert max(np.abs(p).max() for p in plain.values()) > 1e-4
    for name, product in plain.items():
        # one rounding of each factor to float32
        np.testing.assert_allclose(
            refactored[name], product, rtol=0, atol=1e-7 + 1e-6 * abs(product).max()
        )
    five = [recipe(name=name, server__rule="svd") for name in ("once", "again")]
    for config in five:
        run_in_process(config)
    assert equal(*map(adapter_of, five))
    last = [e for e in rows(Path(five[0].output) / "once", "events") if e["event"] == "round"][-1]
    assert 0 < last["truncation-error"] < 1
    assert 0 < last["agg-error"] < 1


def test_svd_rule_is_nearer_to_the_mean_of_products_than_the_mean_of_factors(recipe):
    """After one round, from the same replies; only a test may form the dense target."""
    grid = recorded(recipe(name="mean", rounds=1))
    run_in_process(recipe(name="svd", rounds=1, server__rule="svd"))
    replies = [r for r in grid.answered if r.metadata.message_type == "train.fednl"]
    weights = np.array([border.metrics_of(r.content)["num-examples"] for r in replies], float)
    trained = [products(border.arrays_of(r.content)) for r in replies]
    made = {rule: products(adapter_of(recipe(name=rule))) for rule in ("mean", "svd")}
    for name in trained[0]:
        wanted = sum(w * t[name] for w, t in zip(weights / weights.sum(), trained, strict=True))
        off = {rule: np.linalg.norm(made[rule][name] - wanted) for rule in made}
        assert off["svd"] <= off["mean"] + 1e-9
    assert len(replies) == 5

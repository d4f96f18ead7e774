"""The laws of federation, on the real apps over a tiny model, every message serialised."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from safetensors.numpy import load_file

from fedloom import border, seeds
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.workbench import workbench
from fedloom.data.prompts import prompt
from fedloom.data.questions import load_questions
from fedloom.rules.contributions import A
from fedloom.simulations import client_app
from fedloom.simulations.inprocess import InProcessGrid, run_in_process
from fedloom.tasks import Task, length
from fedloom.training import _batches

from runs import METRICS_THAT_MAY_LEAVE, adapter_of, at_home, equal, recorded, rows


def test_same_seed_gives_the_same_bits_and_another_seed_does_not(recipe):
    runs = [recipe(name=n, seed=s) for n, s in (("a", 0), ("b", 0), ("c", 1))]
    for config in runs:
        run_in_process(config)
    a, b, c = map(adapter_of, runs)
    assert equal(a, b)
    assert not equal(a, c)


def test_sampling_depends_on_seed_and_round_alone(recipe):
    config = recipe(sampling__fraction=0.4, rounds=3)
    chosen = []
    for name in ("a", "b"):
        run_in_process(config.replaced(name=name))
        events = rows(Path(config.output) / name, "metrics")
        chosen.append([(r["round"], r["partition"]) for r in events if r["phase"] == "train"])
    assert chosen[0] == chosen[1]
    assert len(chosen[0]) == 6
    assert len({p for _, p in chosen[0]}) > 2  # not the same two each round


def test_one_client_is_central_training_step_for_step(recipe):
    """Against a loop of its own: plain AdamW, fresh each round, on the same batches."""
    config = recipe(clients__count=1, rounds=3, server__rule="mean")  # svd would turn the factors
    run_in_process(config)
    bench = workbench(config)
    bench.adapter.reset()
    rows_held = Task(config, bench.base, partition=0).lessons(1)
    model, parameters = bench.base.model, list(bench.adapter.parameters().values())
    for server_round in (1, 2, 3):
        seed = seeds.split(config.seed, server_round, 0, "training")
        optimiser = torch.optim.AdamW(
            parameters, lr=config.train.learning_rate, weight_decay=0.0, foreach=False
        )
        for batch in _batches(rows_held, length, config.train, seed):
            losses = []
            for row in batch:
                logits = model(torch.tensor([row.prompt_ids]), use_cache=False).logits[0, -1]
                losses.append(-logits.log_softmax(0)[row.letter_ids[row.gold]])
            optimiser.zero_grad()
            torch.stack(losses).mean().backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.train.clip_norm)
            optimiser.step()
    trained, central = adapter_of(config), bench.adapter.arrays()
    for name, array in central.items():
        # float32 row by row against batches: sums in another order, and Adam divides small by small
        np.testing.assert_allclose(trained[name], array, rtol=0, atol=5e-5, err_msg=name)
    start = _start(config)
    moved = max(float(np.abs(central[name] - start[name]).max()) for name in central)
    assert moved > 1e-3  # twenty times what is forgiven


def _start(config) -> dict[str, np.ndarray]:
    bench = workbench(config)
    bench.adapter.reset()
    return bench.adapter.arrays()


class _Same(FedNLClient):
    """Every node works as partition 0."""

    def fit(self, parameters, config):
        self.partition_id = 0
        return super().fit(parameters, config)


def test_gradients_of_many_clients_under_adam_are_one_optimiser_over_all_rows(recipe):
    """Against a loop of its own: one step a round on every client's rows at once."""
    config = recipe(
        rounds=3, data__max_train=4, train__optimizer="sgd", train__max_steps=1,
        train__batch_size=1000,
        train__clip_norm=0.0, train__learning_rate=1.0, server__rule="mean",
        server__optimizer="adam", server__momentum=0.9, server__adaptivity=1e-3,
        server__learning_rate=2e-3, server__memory_learning_rate=2e-2, server__warmup=2,
        server__last_rate=0.5,
    )  # fmt: skip
    run_in_process(config)
    bench = workbench(config)
    bench.adapter.reset()
    tasks = [Task(config, bench.base, partition) for partition in range(config.clients.count)]
    held = [row for task in tasks for row in task.lessons(1)]
    named = bench.adapter.parameters()
    first = {n: torch.zeros_like(p) for n, p in named.items()}
    second = {n: torch.full_like(p, 1e-6) for n, p in named.items()}
    for share in (0.5, 0.75, 0.5):  # warming up, then falling
        losses = []
        for row in held:
            logits = bench.base.model(torch.tensor([row.prompt_ids]), use_cache=False).logits[0, -1]
            losses.append(-logits.log_softmax(0)[row.letter_ids[row.gold]])
        bench.adapter.model.zero_grad()
        torch.stack(losses).mean().backward()
        with torch.no_grad():
            for name, p in named.items():
                first[name] = 0.9 * first[name] - 0.1 * p.grad
                second[name] = 0.99 * second[name] + 0.01 * p.grad**2
                rate = share * (2e-2 if ".memory." in name else 2e-3)
                p += rate * first[name] / (second[name].sqrt() + 1e-3)
    trained, central = adapter_of(config), bench.adapter.arrays()
    for name, array in central.items():
        np.testing.assert_allclose(trained[name], array, rtol=0, atol=2e-6, err_msg=name)
    start = _start(config)
    assert max(float(np.abs(trained[n] - start[n]).max()) for n in trained) > 1e-3


def test_identical_clients_are_one_client(recipe):
    app = ClientApp()
    serve(app, _Same, action="fednl")
    five, one = recipe(name="five"), recipe(name="one", clients__count=1)
    run_in_process(five, app)
    run_in_process(one)
    assert equal(adapter_of(five), adapter_of(one))


def _lone_client(config) -> FedNLClient:
    return FedNLClient(InProcessGrid(client_app.app, 1, config.flat())._contexts[1000])


def test_frozen_weights_are_bit_identical_after_a_run(recipe):
    config = recipe()
    model = workbench(config).base.model
    trained = set(map(id, workbench(config).adapter.parameters().values()))
    before = {n: p.clone() for n, p in model.named_parameters() if id(p) not in trained}
    run_in_process(config)
    after = dict(model.named_parameters())
    assert len(before) > 20
    assert all(torch.equal(after[name], array) for name, array in before.items())


@pytest.mark.parametrize("rule", ["svd", "fedex", "flora", "ffa", "rolora", "fedsa"])
def test_messages_hold_the_manifests_arrays_and_nothing_else(recipe, rule):
    """Allow-list on the bytes: no memory state, no optimiser moments, no text, no token ids."""
    config = recipe(server__rule=rule)
    grid = recorded(config)
    manifest = workbench(config).manifest
    modules = [name[: -len(A)] for name in manifest.arrays if name.endswith(A)]
    side = {module + end for module in modules for end in (".side_A.weight", ".side_B.weight")}
    seen = {True: set(), False: set()}
    texts = [word for q in load_questions(config.data.source) for word in (q.question, prompt(q))]
    for message in (*grid.sent, *grid.answered):
        content = message.content
        upwards = message in grid.answered
        for record in content.array_records.values():
            named = border.unpack_arrays(record)
            start = message.metadata.message_type == "query.initial_adapter"
            seen[upwards] |= set() if start else named.keys()
            own = {n: x for n, x in named.items() if not (n in side and not upwards)}
            listing = {**manifest.arrays, **(manifest.kept if start else {})}
            for name, array in own.items():
                assert (array.shape, str(array.dtype)) == listing[name]
        for record in content.metric_records.values():
            told = {k.removeprefix("local-").removeprefix("personal-") for k in record}
            assert told <= METRICS_THAT_MAY_LEAVE
            assert all(isinstance(value, int | float) for value in record.values())
        wire = recorddict_to_proto(content).SerializeToString()
        assert not any(text.encode() in wire for text in texts)
    assert seen[True] == manifest.arrays.keys()
    hidden = {name for name in manifest.arrays if ".lora_" in name and rule == "flora"}
    with_side = side if rule in ("fedex", "flora") else set()
    assert seen[False] == (manifest.arrays.keys() - hidden) | with_side
    assert all(
        set(m.content.config_records) == set()
        for m in grid.answered
        if m.metadata.message_type.startswith(("train", "evaluate"))
    )


def test_ledger_equals_the_serialised_bytes(recipe):
    config = recipe(sampling__fraction=0.5)
    grid = recorded(config)
    size = lambda m: len(recorddict_to_proto(m.content).SerializeToString())  # noqa: E731
    weighed = rows(Path(config.output) / config.name, "ledger")
    for direction, messages in (("down", grid.sent), ("up", grid.answered)):
        entries = [row for row in weighed if row["direction"] == direction]
        assert sum(row["bytes"] for row in entries) == sum(map(size, messages))
    values = [r for r in weighed if r["dtype"] == "float32" and r["phase"] == "train"]
    assert {row["bytes"] for row in values} == {workbench(config).manifest.nbytes()}
    assert {row["phase"] for row in weighed} > {"properties", "initial-adapter", "frozen"}


def test_share_memory_keeps_lora_at_home_and_apart(recipe):
    config = recipe(share="memory", rounds=2)
    grid = recorded(config)
    folder = Path(config.output) / config.name / "adapter"
    assert not (folder / "adapter_model.safetensors").exists()
    assert all(".memory." in name for name in load_file(folder / "memory.safetensors"))
    kept = list(at_home("adapter", 2).values())
    assert len(kept) == 5
    assert all(".lora_" in name for name in kept[0])
    for other in kept[1:]:
        assert not equal(kept[0], other)  # each client's own, never the next one's
    # Of the node's state Flower holds no more than which round of which run it has seen.
    for context in grid._contexts.values():
        assert set(context.state) == {"fedloom-gate"}
        assert set(context.state["fedloom-gate"]) == {"run", "round"}


def test_a_client_that_never_trained_can_join_with_theta_alone(recipe):
    """The last round's evaluation scores every client, also those never drawn."""
    config = recipe(sampling__fraction=0.2, rounds=1)
    run_in_process(config)
    metrics = rows(Path(config.output) / config.name, "metrics")
    trained = {r["partition"] for r in metrics if r["phase"] == "train"}
    scored = {r["partition"] for r in metrics if r["phase"] == "evaluate"}
    assert len(trained) == 1
    assert scored == {0, 1, 2, 3, 4}


def test_training_moves_the_gates_and_they_are_reported(recipe):
    config = recipe(train__memory_learning_rate=0.05)
    run_in_process(config)
    metrics = rows(Path(config.output) / config.name, "metrics")
    start = 1 / (1 + np.exp(3))
    last = [r for r in metrics if r["phase"] == "train" and r["round"] == 2]
    assert all(r["gate-max"] > start + 0.001 and r["gate-min"] < start - 0.001 for r in last)

"""The LoRA rules in whole runs: what every client's model is after a round, against dense sums.

Replies are read off the wire, ``D`` is formed densely (only a test may), and the effect on a
projection is measured on the client's own torch model with identity as its input.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from safetensors.numpy import load_file

from fedloom import border
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.workbench import workbench
from fedloom.config import BASELINES
from fedloom.rules.contributions import A, B
from fedloom.rules.exchange import SIDE_A, SIDE_B
from fedloom.simulations.inprocess import run_in_process
from fedloom.wire import arrays_digest

from runs import recorded, rows

CLIENTS = 3
NODE = 1000


def pairs(arrays: dict, held: dict, scale: float) -> dict[str, np.ndarray]:
    """Each projection's dense change by LoRA and side."""
    made = {}
    for module in {n[: -len(A)] for n in (*arrays, *held) if n.endswith(A)}:
        a, b = ({**held, **arrays}[module + side].astype("f8") for side in (A, B))
        made[module] = scale * b @ a
        if module + SIDE_A in held:
            made[module] += held[module + SIDE_B].astype("f8") @ held[module + SIDE_A].astype("f8")
    return made


def exchanged(grid, kind: str) -> list[dict[int, tuple[dict, dict, float]]]:
    """Return what was sent and answered by round and partition, with the reply's weight."""
    found: dict[int, dict] = {}
    for sent, reply in zip(grid.sent, grid.answered, strict=True):
        told = border.config_of(sent.content)
        if sent.metadata.message_type != f"{kind}.fednl" or told.get("frozen"):
            continue
        came = border.arrays_of(reply.content) if kind == "train" else {}
        weight = border.metrics_of(reply.content)["num-examples"]
        partition = sent.metadata.dst_node_id - NODE
        here = border.arrays_of(sent.content), came, weight
        found.setdefault(told["round"], {})[partition] = here
    return [found[number] for number in sorted(found)]


def client_with(grid, partition: int, arrays: dict) -> FedNLClient:
    """Return a client that has loaded a message's arrays."""
    client = FedNLClient(grid._contexts[NODE + partition])
    client.array_names = list(arrays)
    scored = [m for m in grid.sent if m.metadata.dst_node_id == NODE + partition]
    told = border.config_of(scored[-1].content)  # the last message to a node is the last score
    client._receive(list(arrays.values()), told, scoring=True)
    return client


def effect(config, modules) -> dict[str, np.ndarray]:
    """Measure what the adapter on this process's model adds to each projection's weight."""
    adapter = workbench(config).adapter
    made = {}
    for module in modules:
        layer = adapter.model.get_submodule(module)
        eye = torch.eye(layer.in_features, dtype=layer.get_base_layer().weight.dtype)
        with torch.no_grad():
            with_it = layer(eye)
            with adapter.off():
                made[module] = (with_it - layer(eye)).T.double().numpy()
    return made


def cut(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


EXACT = ("flora", "fedex", "ffa", "rolora")
CASES = [
    *((rule, "", "float64", 1e-9) for rule in (*EXACT, "svd", "flex")),
    *((rule, "4,1,2", "float64", 1e-9) for rule in ("flora", "svd", "flex")),
    # float32: weights of 0.05 beside a change of 0.001, seven digits for both
    *((rule, "", "float32", 2e-3) for rule in ("flora", "fedex", "svd")),
]


@pytest.mark.parametrize(("rule", "ranks", "dtype", "bound"), CASES)
def test_after_each_round_every_client_has_the_weighted_sum_of_what_clients_did(
    recipe, rule, ranks, dtype, bound
):
    config = recipe(
        clients__count=CLIENTS,
        rounds=3,
        lora__rank=4,
        lora__alpha=6.0,
        lora__ranks=ranks,
        server__rule=rule,
        model__dtype=dtype,
        train__learning_rate=1e-2,
    )
    grid = recorded(config)
    trained, scored = exchanged(grid, "train"), exchanged(grid, "evaluate")
    start = workbench(config).adapter
    start.reset()
    frozen_a = {n: x for n, x in start.arrays().items() if n.endswith(A)} if rule == "ffa" else {}
    assert len(trained) == len(scored) == 3
    for server_round in (0, 1, 2):
        replies = trained[server_round]
        total = sum(weight for _, _, weight in replies.values())
        wanted: dict[str, np.ndarray] = {}
        for partition, (sent, came, weight) in replies.items():
            done = pairs(came, {**frozen_a, **sent}, config.lora.scale_of(partition))
            for module, change in done.items():
                wanted[module] = wanted.get(module, 0.0) + weight / total * change
        for partition, (sent, _, _) in scored[server_round].items():
            client_with(grid, partition, sent)
            for module, got in effect(config, wanted).items():
                target = wanted[module]
                if rule in ("svd", "flex"):
                    target = cut(target, config.lora.rank_of(partition))
                assert np.linalg.norm(got - target) <= bound * np.linalg.norm(target)
    assert len(wanted) == 6
    if rule in EXACT:
        facts = [e for e in rows(Path(config.output) / config.name, "events") if "agg-error" in e]
        rounding = 1e-12 if dtype == "float64" else 1e-6
        assert len(facts) == 3
        assert all(e["agg-error"] < rounding for e in facts)


def test_clients_of_their_own_ranks_send_and_get_their_own_shapes(recipe):
    config = recipe(clients__count=CLIENTS, lora__ranks="8,1,4", server__rule="svd")
    grid = recorded(config)
    for server_round in exchanged(grid, "train"):
        for partition, (sent, came, _) in server_round.items():
            for arrays in (sent, came):
                ranks = {x.shape[0] for n, x in arrays.items() if n.endswith(A)}
                assert ranks == {config.lora.rank_of(partition)}
    saved = load_file(Path(config.output) / config.name / "adapter" / "adapter_model.safetensors")
    assert {x.shape[0] for n, x in saved.items() if n.endswith(A)} == {8}


@pytest.mark.parametrize("rule", ["flora", "fedex"])
def test_the_side_goes_down_only_and_to_those_who_were_not_asked(recipe, rule):
    config = recipe(
        clients__count=CLIENTS, server__rule=rule, sampling__fraction=0.3, rounds=2, seed=3
    )
    grid = recorded(config)
    trained, scored = exchanged(grid, "train"), exchanged(grid, "evaluate")
    assert not any(SIDE_A in n for _, came, _ in trained[1].values() for n in came)
    assert all(len(server_round) == 1 for server_round in trained)
    digests = {
        arrays_digest({n: x for n, x in sent.items() if ".side_" in n})
        for sent, _, _ in scored[1].values()
    }
    assert len(scored[1]) == CLIENTS
    assert len(digests) == 1
    base = workbench(config).base
    assert not any(".side_" in name for name, _ in base.model.named_parameters())


@pytest.mark.parametrize("rule", ["flora", "fedex", "ffa"])
def test_frozen_weights_are_bit_identical(recipe, rule):
    config = recipe(clients__count=2, server__rule=rule)
    bench = workbench(config)
    own = set(map(id, bench.adapter._own.values()))
    named = dict(bench.base.model.named_parameters())
    before = {n: p.clone() for n, p in named.items() if id(p) not in own}
    run_in_process(config)
    assert len(before) > 20
    assert all(torch.equal(named[name], array) for name, array in before.items())


def test_ffa_holds_one_a_on_every_client_in_every_round_and_never_sends_it(recipe):
    digests = set()

    class Watched(FedNLClient):
        def fit(self, parameters, config):
            made = super().fit(parameters, config)
            arrays = workbench(self.config).adapter.arrays()
            digests.add(arrays_digest({n: x for n, x in arrays.items() if n.endswith(A)}))
            assert not any(n.endswith(A) for n in self.array_names)
            return made

    app = ClientApp()
    serve(app, Watched, action="fednl")
    config = recipe(clients__count=CLIENTS, server__rule="ffa")
    run_in_process(config, app)
    saved = load_file(Path(config.output) / config.name / "adapter" / "adapter_model.safetensors")
    kept = {n: x for n, x in saved.items() if n.endswith(A)}
    assert digests == {arrays_digest(kept)} == {workbench(config).manifest.start}
    assert any(x.any() for n, x in saved.items() if n.endswith(B))
    sent = [
        s for server_round in exchanged(recorded(config), "train") for s in server_round.values()
    ]
    assert not any(n.endswith(A) for down, up, _ in sent for n in (*down, *up))


def test_rolora_sends_the_side_of_the_round_and_holds_the_other(recipe):
    config = recipe(clients__count=2, server__rule="rolora", rounds=3)
    rounds = exchanged(recorded(config), "train")
    for number, server_round in enumerate(rounds, 1):
        moving, still = (B, A) if number % 2 else (A, B)
        for _, came, _ in server_round.values():
            assert any(n.endswith(moving) for n in came)
            assert not any(n.endswith(still) for n in came)
    for before, after, still in zip(rounds, rounds[1:], (A, B), strict=False):
        then, now = (next(iter(each.values()))[0] for each in (before, after))
        assert all(np.array_equal(then[n], now[n]) for n in then if n.endswith(still))
        assert not all(np.array_equal(then[n], now[n]) for n in then)


def test_fedsa_leaves_b_with_its_client_and_a_stranger_has_none(recipe):
    config = recipe(clients__count=CLIENTS, server__rule="fedsa", sampling__fraction=0.6, rounds=2)
    grid = recorded(config)
    trained = exchanged(grid, "train")
    everything = [
        arrays for r in trained for sent, came, _ in r.values() for arrays in (sent, came)
    ]
    assert not any(n.endswith(B) for arrays in everything for n in arrays)
    seen = {partition for server_round in trained for partition in server_round}
    held = {}
    for partition in range(CLIENTS):
        client_with(grid, partition, exchanged(grid, "evaluate")[-1][partition][0])
        arrays = workbench(config).adapter.arrays()
        held[partition] = {n: x for n, x in arrays.items() if n.endswith(B)}
    for partition, own in held.items():
        assert any(x.any() for x in own.values()) == (partition in seen)
    assert len({arrays_digest(held[p]) for p in seen}) == len(seen) >= 2
    weights = {p: w for p, (_, _, w) in trained[-1].items()}
    saved = load_file(Path(config.output) / config.name / "adapter" / "adapter_model.safetensors")
    for name, array in saved.items():
        if name.endswith(A):
            mean = sum(w * trained[-1][p][1][name].astype("f8") for p, w in weights.items())
            np.testing.assert_allclose(array, mean / sum(weights.values()), rtol=0, atol=1e-7)
        elif name.endswith(B):
            assert not array.any()


def test_flex_and_svd_agree_on_the_first_round_and_in_nothing_but_the_gauge(recipe):
    made = {}
    for rule in ("svd", "flex"):
        config = recipe(name=rule, clients__count=2, rounds=1, server__rule=rule)
        run_in_process(config)
        made[rule] = load_file(Path(config.output) / rule / "adapter" / "adapter_model.safetensors")
    for name, a in made["svd"].items():
        if name.endswith(A):
            other = name[: -len(A)] + B
            one, two = (m[other].astype("f8") @ m[name].astype("f8") for m in made.values())
            np.testing.assert_allclose(one, two, rtol=0, atol=1e-6 * abs(two).max())
            used = made["svd"][other].any(axis=0)
            np.testing.assert_allclose(a[used] @ a[used].T, np.eye(used.sum()), atol=1e-5)
            norms = (
                np.linalg.norm(made["flex"][name], axis=1),
                np.linalg.norm(made["flex"][other], axis=0),
            )
            np.testing.assert_allclose(norms[0][used], norms[1][used], rtol=1e-4)


def test_no_baselines_column_is_another_ones(recipe):
    """After two rounds: in the first, RoLoRA trains B alone, as FFA does."""
    columns, adapters = {}, {}
    for name in ("fedavg", "ffa-lora", "rolora", "fedsa-lora", "flora", "fedex-lora", "flexlora"):
        config = recipe(name=name, baseline=name, clients__count=2, last_layers=1)
        assert config.server.rule == BASELINES[name]["server.rule"]
        run_in_process(config)
        folder = Path(config.output) / name
        scores = [r for r in rows(folder, "metrics") if r["phase"] == "evaluate"]
        columns[name] = tuple(r["gold-ce-sum"] for r in scores)
        saved = [load_file(path) for path in sorted((folder / "adapter").glob("*.safetensors"))]
        adapters[name] = arrays_digest({n: x for part in saved for n, x in part.items()})
    assert len(set(columns.values())) == len(set(adapters.values())) == len(columns)

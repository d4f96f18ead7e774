"""What a recipe's rule makes of the global state, and what the messages may hold: numpy alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedloom.config import RunConfig
from fedloom.config.learning import RULES
from fedloom.errors import Refusal
from fedloom.rules.contributions import A, B
from fedloom.rules.exchange import SIDE_A, SIDE_B, Exchange, travels
from fedloom.strategies import factor_rules
from fedloom.wire import Manifest, Update

OUT, IN, RANK = 7, 12, 3


def start(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    a = random.normal(size=(RANK, IN)).astype(np.float32)
    return {"q" + A: a, "q" + B: np.zeros((OUT, RANK), np.float32), "gate": np.zeros(2, np.float32)}


def replies(seed: int, count: int = 2) -> list[Update]:
    random = np.random.default_rng(seed)
    arrays = [{n: random.normal(size=x.shape).astype("f4") for n, x in start().items()}] * count
    moved = [{n: x + np.float32(k) for n, x in each.items()} for k, each in enumerate(arrays)]
    return [Update.of(x, 10 + k, k) for k, x in enumerate(moved)]


def recipe(**changes) -> RunConfig:
    return RunConfig().replaced(lora__rank=RANK, lora__alpha=4.5, clients__count=2, **changes)


def side(state) -> np.ndarray:
    return state["q" + SIDE_B].astype(float) @ state["q" + SIDE_A]


@pytest.mark.parametrize("rule", ["flora", "fedex"])
def test_a_side_stops_growing_at_the_shorter_side_and_stays_exact(rule):
    config, state, whole, widths = recipe(server__rule=rule), start(), np.zeros((OUT, IN)), []
    for server_round in (1, 2, 3, 4):
        updates = replies(server_round)
        total = sum(u.weight for u in updates)
        for u in updates:
            mean = u.mean()
            whole += u.weight / total * 1.5 * mean["q" + B] @ mean["q" + A]
        state, facts = factor_rules.fold(config, server_round, updates, state)
        pair = 1.5 * state["q" + B].astype(float) @ state["q" + A]
        np.testing.assert_allclose(side(state) + pair, whole, rtol=0, atol=2e-6 * abs(whole).max())
        whole -= pair  # FedEx's mean of factors is sent back and comes again within the next D
        widths.append(state["q" + SIDE_A].shape[0])
        assert facts["agg-error"] < 1e-6
        assert "truncation-error" not in facts
    assert widths == [6, 7, 7, 7]


def test_a_side_rank_cuts_to_the_nearest_and_says_what_it_cost():
    exact, _ = factor_rules.fold(recipe(server__rule="flora"), 1, replies(5), start())
    config = recipe(server__rule="flora", server__side_rank=2)
    made, facts = factor_rules.fold(config, 1, replies(5), start())
    u, s, vt = np.linalg.svd(side(exact))
    np.testing.assert_allclose(side(made), (u[:, :2] * s[:2]) @ vt[:2], rtol=0, atol=1e-5)
    lost = np.linalg.norm(s[2:]) / np.linalg.norm(s)
    assert facts["truncation-error"] == pytest.approx(lost, rel=1e-6)
    assert facts["agg-error"] == pytest.approx(lost, rel=0.5)  # 64 probes


def test_svd_keeps_the_sent_a_where_the_sum_has_no_use_for_it():
    sent = start()
    one = {**sent, "q" + B: np.zeros((OUT, RANK), np.float32)}
    one["q" + B][:, 0] = 1.0  # the product has rank one
    made, _ = factor_rules.fold(recipe(), 1, [Update.of(one, 4, 0)], sent)
    assert not made["q" + B][:, 1:].any()
    np.testing.assert_array_equal(made["q" + A][1:], sent["q" + A][1:])
    assert np.linalg.norm(made["q" + A][0]) == pytest.approx(1.0)


def test_without_lora_every_rule_is_the_mean_of_the_rest():
    state = {"gate": np.zeros(2, np.float32)}
    updates = [Update.of({"gate": np.float32([k, 1.0])}, 1, k) for k in (0, 1)]
    made, facts = factor_rules.fold(recipe(), 1, updates, state)
    np.testing.assert_array_equal(made["gate"], np.float32([0.5, 1.0]))
    assert facts == {}


def exchange(config: RunConfig) -> Exchange:
    manifest = Manifest.of(start(), method="fednl", version="1", base="b", tokenizer="t")
    return Exchange(config, manifest)


def test_down_and_up_are_each_others_shapes_and_keep_the_product():
    config = recipe(server__rule="flex", lora__ranks="3,1")
    state, _ = factor_rules.fold(config.replaced(lora__ranks=""), 1, replies(1), start())
    link = exchange(config)
    sent = link.down(1, state)
    wide = link.received(1, sent)
    assert {x.shape for x in wide.values()} == {x.shape for x in state.values()}
    made, (u, s, vt) = (
        4.5 * wide["q" + B] @ wide["q" + A],
        np.linalg.svd(1.5 * state["q" + B].astype(float) @ state["q" + A]),
    )
    np.testing.assert_allclose(made, s[0] * u[:, :1] @ vt[:1], rtol=0, atol=1e-5 * s[0])
    link.expected(1, 1).check_arrays(link.up(1, 1, wide))
    assert link.up(1, 1, wide)["q" + A].shape == (1, IN)
    with pytest.raises(Refusal, match="was expected"):
        link.expected(1, 1).check_arrays(link.up(1, 0, wide))


@pytest.mark.parametrize(
    ("rule", "width", "expected"),
    [
        ("svd", 2, "not in the manifest"),
        ("flora", 8, "expected 1 to 7"),
        ("flora", 0, "expected 1 to 7"),
    ],
)
def test_a_side_that_the_rule_does_not_send_is_refused(rule, width, expected):
    link = exchange(recipe(server__rule=rule))
    state = start() | {
        "q" + SIDE_A: np.zeros((width, IN), np.float32),
        "q" + SIDE_B: np.zeros((OUT, width), np.float32),
    }
    with pytest.raises(Refusal, match=expected):
        link.received(0, {name: state[name] for name in link.names_down(state)})


def test_half_a_side_or_one_that_is_not_finite_is_refused():
    link = exchange(recipe(server__rule="fedex"))
    whole = start() | {
        "q" + SIDE_A: np.zeros((2, IN), np.float32),
        "q" + SIDE_B: np.zeros((OUT, 2), np.float32),
    }
    assert link.received(0, whole).keys() == whole.keys()
    with pytest.raises(Refusal, match="did not come"):
        link.received(0, {n: x for n, x in whole.items() if n != "q" + SIDE_B})
    with pytest.raises(Refusal, match="not finite"):
        link.received(0, {**whole, "q" + SIDE_B: np.full((OUT, 2), np.nan, np.float32)})


def test_a_manifest_holds_the_start_of_what_stays():
    arrays = start()
    kept = {"q" + A: arrays["q" + A]}
    sent = {name: array for name, array in arrays.items() if name not in kept}
    about = {"method": "fednl", "version": "1", "base": "b", "tokenizer": "t"}
    manifest = Manifest.of(sent, kept=kept, **about)
    assert Manifest.from_json(manifest.to_json()) == manifest
    manifest.check_start(arrays)
    with pytest.raises(Refusal, match="not the one"):
        manifest.check_start({**arrays, "q" + A: arrays["q" + A] + 1})
    with pytest.raises(Refusal, match="did not come"):
        manifest.check_start(sent)
    assert replace(manifest, start="x").digest() != manifest.digest()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_folds_what_it_lets_clients_send(rule):
    link, state = exchange(recipe(server__rule=rule)), start()
    for server_round in (1, 2):
        before, updates = state, []
        for update in replies(server_round):
            sent = link.up(server_round, update.origin, update.mean())
            sent = {n: x.astype("f4") for n, x in sent.items() if travels(link.config, n)}
            assert len(sent) == (2 if rule in ("ffa", "rolora", "fedsa") else 3)
            updates.append(Update.of(sent, update.weight, update.origin))
        state, facts = factor_rules.fold(link.config, server_round, updates, before)
        assert before.keys() <= state.keys()
        assert any(not np.array_equal(x, before.get(n)) for n, x in state.items() if n != "gate")
        assert ("agg-error" in facts) == (rule != "fedsa")
        assert all(x.dtype == np.float32 for x in state.values())
        if rule in ("ffa", "fedsa"):
            still = "q" + (A if rule == "ffa" else B)
            np.testing.assert_array_equal(state[still], before[still])

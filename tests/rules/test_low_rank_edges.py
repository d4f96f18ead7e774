"""The corners of the low-rank rules: unequal sizes, dead directions, refusals, nothing dense."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fedloom import rules
from fedloom.errors import Refusal
from fedloom.rules import Factors
from fedloom.wire import Update

from cohorts import (
    SHAPES,
    SINGLE,
    TIGHT,
    cohort,
    contribution,
    dense,
    equal,
    every_rule,
    frozen,
    mixed,
    names,
    off,
    product,
    quick,
    same_bits,
    seeds_,
)


@quick
@given(seeds_, mixed)
def test_flex_gives_each_client_its_own_best(seed, ranks):
    clients = cohort(seed, ranks)
    made = rules.flex(clients)
    assert made.keys() == {c.client for c in clients}
    for c in clients:
        aggregate, cost = made[c.client]
        alone, alone_cost = rules.svd_refactor(clients, c.rank, c.scale)
        for name, array in aggregate.arrays.items():
            assert array.shape == c.arrays[name].shape
        assert rules.relative_error(aggregate.products(), alone.products()) < TIGHT
        assert cost.optimum == pytest.approx(alone_cost.optimum, abs=TIGHT)
        assert aggregate.scale == c.scale


def test_flex_serves_clients_that_were_not_asked():
    made = rules.flex(cohort(0, [2, 3]), {7: (1, 2.0), 8: (4, 0.5), 9: (4, 0.5)})
    assert made.keys() == {7, 8, 9}
    assert made[7][0].arrays["layer.q.lora_A.weight"].shape == (1, 9)
    assert made[8] is made[9]
    assert made[8][1].error <= made[7][1].error


def test_fedsa_averages_a_as_it_came_and_b_stays_at_home():
    clients = cohort(0, [3, 3, 3])
    made = rules.fedsa(clients, 2.0)
    weight = sum(c.weight for c in clients)
    a, _ = names("layer.q")
    plain = sum(c.weight / weight * c.arrays[a] for c in clients)
    np.testing.assert_allclose(made.arrays[a], plain, rtol=1e-13)
    assert not [name for name in made.arrays if "lora_B" in name]
    silent = [
        replace(c, arrays={n: x for n, x in c.arrays.items() if "lora_B" not in n}) for c in clients
    ]
    assert same_bits(rules.fedsa(silent, 2.0), made)


@quick
@given(seeds_, equal)
def test_gates_are_averaged_by_every_rule(seed, ranks):
    clients = cohort(seed, ranks, "float32")
    mean = rules.mean((Update.of(c.arrays, c.weight) for c in clients), clients[0].arrays)
    made = every_rule(clients, 3) | {"fedsa": rules.fedsa(clients, 1.0)}
    for rule, aggregate in made.items():
        np.testing.assert_array_equal(aggregate.arrays["layer.gate"], mean["layer.gate"], rule)


def test_gates_alone_are_enough():
    clients = [replace(c, arrays={"layer.gate": c.arrays["layer.gate"]}) for c in cohort(0, [1, 1])]
    made, cost = rules.svd_refactor(clients, 2, 1.0)
    assert list(made.arrays) == ["layer.gate"]
    assert (cost.error, cost.dead) == (0.0, 0)
    assert rules.fedit(clients, 1.0)[1] == 0.0


def test_a_factor_that_does_not_travel_is_the_servers():
    """FFA's saving: A need not come at all."""
    clients = frozen(cohort(1, [2, 2, 2]), "A")
    kept = {n: x for n, x in clients[0].arrays.items() if "lora_A" in n}
    silent = [
        replace(c, arrays={n: x for n, x in c.arrays.items() if n not in kept}) for c in clients
    ]
    assert same_bits(rules.ffa(silent, 1.5, kept), rules.ffa(clients, 1.5))
    assert same_bits(rules.ffa(clients, 1.5, kept), rules.ffa(clients, 1.5))
    with pytest.raises(Refusal, match=r"layer\.q\.lora_A\.weight did not come"):
        rules.ffa(silent, 1.5)
    with pytest.raises(Refusal, match=r"client 0: layer\.q\.lora_A\.weight is not what"):
        rules.ffa(clients, 1.5, {n: x + 1e-9 for n, x in kept.items()})


def test_zero_factors_stay_zero_and_can_be_filled():
    """B = 0 everywhere, as LoRA starts: D = 0, and a pair of zeros would never learn again."""
    clients = [
        replace(c, arrays={n: x * (0 if "lora_B" in n else 1) for n, x in c.arrays.items()})
        for c in cohort(0, [3, 4])
    ]
    made, cost = rules.svd_refactor(clients, 4, 2.0)
    assert (cost.error, cost.optimum, cost.dead) == (0.0, 0.0, 8)
    assert not any(np.any(x) for n, x in made.arrays.items() if "lora" in n)
    filled, _ = rules.svd_refactor(clients, 4, 2.0, fill=clients[1].arrays)
    a, b = names("layer.q")
    np.testing.assert_array_equal(filled.arrays[a], clients[1].arrays[a])
    assert not filled.arrays[b].any()
    assert rules.stack(clients).products()["layer.q"].norm() == 0.0
    assert rules.relative_error(made.products(), rules.target(clients)) == 0.0
    equal_ranks = [clients[0], replace(clients[0], client=5)]
    assert rules.fedit(equal_ranks, 1.0)[1] == 0.0


@quick
@given(seeds_, st.integers(1, 3), st.integers(2, 5), st.integers(1, 12))
def test_deficient_stacks_are_finite_and_exact(seed, rank, count, asked):
    (client,) = cohort(seed, [rank])
    clients = [replace(client, client=k) for k in range(count)]
    made, cost = rules.svd_refactor(clients, asked, 3.0, fill=cohort(1, [12])[0].arrays)
    assert all(np.isfinite(x).all() for x in made.arrays.values())
    assert cost.dead == 2 * max(0, asked - rank)
    assert cost.error == pytest.approx(cost.optimum, abs=TIGHT)
    for module in SHAPES:
        a, b = (made.arrays[name] for name in names(module))
        assert not b[:, rank:].any()
        assert (np.abs(a).max(axis=1) > 0).all()


@quick
@given(seeds_, st.integers(1, 3), st.floats(1e-7, 1e-2))
def test_clients_that_cancel_leave_no_noise_behind(seed, rank, rest):
    """D is a small rest of large products; directions of mere rounding count as dead."""
    (client,) = cohort(seed, [rank])
    against = {n: x * (rest - 1 if "lora_B" in n else 1) for n, x in client.arrays.items()}
    clients = [client, replace(client, client=1, arrays=against)]
    made, cost = rules.svd_refactor(clients, 2 * rank, 1.0)
    assert cost.dead == 2 * rank
    assert off(made.products(), dense(clients)) < 1e-14 / rest + TIGHT


def test_too_few_rows_to_fill_with_are_an_error():
    clients = cohort(0, [1])
    with pytest.raises(ValueError, match="1 rows"):
        rules.svd_refactor(clients, 3, 1.0, fill=clients[0].arrays)


def test_nothing_dense_is_ever_formed():
    """200,000 x 150,000 numbers would be 120 GB in float32; the factors are 6 MB a client."""
    shapes = {"huge": (200_000, 150_000)}
    random = np.random.default_rng(0)
    clients = [contribution(random, k, 4, "float32", shapes) for k in range(2)]
    clients = [replace(c, scale=0.5) for c in clients]
    tracemalloc.start()
    made, cost = rules.svd_refactor(clients, 4, 2.0, compress=True)
    _, error = rules.fedit(clients, 0.5)
    exact = rules.fedex(clients, 0.5)
    assert rules.relative_error(exact.products(), rules.target(clients)) < SINGLE
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 300e6
    assert cost.error == pytest.approx(cost.optimum, abs=SINGLE)
    assert 0.5 < error < 1.5
    assert made.arrays["huge.lora_B.weight"].shape == (200_000, 4)


@quick
@given(seeds_, mixed, st.integers(1, 4))
def test_distance_is_the_norm_of_the_difference(seed, ranks, width):
    """For any pair, also one that the singular vectors do not span."""
    random = np.random.default_rng(seed)
    for module, factors in rules.target(cohort(seed, ranks)).items():
        out, inner = SHAPES[module]
        pair = Factors(random.normal(size=(out, width)), random.normal(size=(width, inner)))
        apart = np.linalg.norm(product(factors) - product(pair))
        assert factors.spectrum().distance(pair) == pytest.approx(apart, rel=TIGHT)
        assert factors.minus(pair).norm() == pytest.approx(apart, rel=TIGHT)


def test_norm_does_not_lose_what_a_gram_matrix_would():
    a = np.array([[1.0, 1.0], [1.0, 1.0 + 1e-12]])
    thin = Factors(np.array([[1.0, -1.0]]), a)
    assert thin.norm() == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("rule", [rules.fedit, rules.fedex, rules.ffa, rules.fedsa])
def test_rules_of_one_rank_refuse_two(rule):
    with pytest.raises(Refusal, match=r"needs one rank: client 0 has 2, client 1 has 3; use svd"):
        rule(cohort(0, [2, 3]), 1.0)


def test_a_moved_factor_is_refused_by_name():
    clients = frozen(cohort(0, [2, 2, 2]), "A")
    a, _ = names("layer.v")
    moved = clients[2].arrays[a].copy()
    moved[0, 0] = np.nextafter(moved[0, 0], 9)
    clients[2] = replace(clients[2], arrays={**clients[2].arrays, a: moved})
    with pytest.raises(Refusal, match=r"^client 2: layer\.v\.lora_A\.weight .*; ffa is exact only"):
        rules.ffa(clients, 1.0)
    with pytest.raises(Refusal, match=r"lora_B\.weight is not what the others hold; rolora"):
        rules.rolora(clients, 2, 1.0)
    with pytest.raises(ValueError, match="count from 1"):
        rules.rolora_side(0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight": 0.0}, "client 0: weight 0.0"),
        ({"scale": float("nan")}, "scale nan"),
        ({"scale": -1.0}, "scale -1.0"),
        ({"arrays": {"q.lora_A.weight": np.full((1, 2), np.inf)}}, "not finite"),
        ({"arrays": {"q.lora_A.weight": np.ones((2, 3, 1, 1))}}, "expected a matrix"),
        ({"arrays": {"q.lora_A.weight": np.ones((0, 3))}}, "expected a matrix"),
        ({"arrays": {"q.lora_magnitude_vector.weight": np.ones(3)}}, "is LoRA, but neither"),
        ({"arrays": {"q.lora_embedding_A": np.ones((2, 3))}}, "is LoRA, but neither"),
        (
            {"arrays": {"q.lora_A.weight": np.ones((2, 3)), "q.lora_B.weight": np.ones((4, 1))}},
            r"ranks \[1, 2\]",
        ),
    ],
)
def test_what_no_rule_can_be_right_about_is_refused(change, expected):
    (client,) = cohort(0, [2])
    with pytest.raises(Refusal, match=expected):
        replace(client, **change)


def test_contributions_that_do_not_belong_together_are_refused():
    one, two = cohort(0, [2, 2])
    a, b = names("layer.q")
    with pytest.raises(Refusal, match="client 0 came twice"):
        rules.stack([one, replace(two, client=0)])
    other = {**two.arrays, a: np.ones((2, 8))}
    with pytest.raises(
        Refusal, match=r"client 1: layer\.q\.lora_A\.weight is \(r, 8\) float64, but"
    ):
        rules.stack([one, replace(two, arrays=other)])
    fewer = {n: x for n, x in two.arrays.items() if n != "layer.gate"}
    with pytest.raises(Refusal, match=r"layer\.gate is missing, but \(4\) float64 at client 0"):
        rules.fedit([one, replace(two, arrays=fewer)], 1.0)
    halves = [replace(c, arrays={n: x for n, x in c.arrays.items() if n != b}) for c in (one, two)]
    for rule in (rules.stack, rules.target, lambda c: rules.fedex(c, 1.0)):
        with pytest.raises(Refusal, match=r"layer\.q\.lora_B\.weight did not come"):
            rule(halves)
    with pytest.raises(Refusal, match="rank 0"):
        rules.svd_refactor([one], 0, 1.0)
    for rule in (rules.stack, lambda c: rules.fedit(c, 1.0), lambda c: rules.svd_refactor(c, 1, 1)):
        with pytest.raises(ValueError, match="no contribution"):
            rule([])


@quick
@given(seeds_, equal, st.integers(-8, 8))
def test_error_is_blind_to_units(seed, ranks, power):
    clients = cohort(seed, ranks)
    _, error = rules.fedit(clients, 1.0)
    assume(error > 1e-6)
    scaled = [
        replace(
            c,
            arrays={n: x * (10.0**power if "lora_B" in n else 1.0) for n, x in c.arrays.items()},
        )
        for c in clients
    ]
    assert rules.fedit(scaled, 1.0)[1] == pytest.approx(error, rel=1e-9)

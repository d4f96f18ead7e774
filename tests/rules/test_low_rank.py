"""Laws of the LoRA rules, against dense products that only this file ever forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import rules
from fedloom.rules import Factors
from fedloom.wire import Update, arrays_digest

from cohorts import (
    DTYPES,
    SHAPES,
    TIGHT,
    cohort,
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


@DTYPES
@quick
@given(seeds_, mixed)
def test_target_and_stack_are_d_at_any_ranks_scales_and_weights(dtype, bound, seed, ranks):
    clients = cohort(seed, ranks, dtype)
    wanted = dense(clients)
    assert off(rules.target(clients), wanted) < TIGHT
    stacked = rules.stack(clients)
    assert off(stacked.products(), wanted) < bound
    assert stacked.scale == 1.0
    a, b = names("layer.q")
    assert stacked.arrays[a].shape == (sum(ranks), 9)
    assert stacked.arrays[a].dtype == stacked.arrays[b].dtype == dtype


@DTYPES
@quick
@given(seeds_, equal, st.floats(0.1, 30))
def test_fedex_is_d(dtype, bound, seed, ranks, scale):
    clients = cohort(seed, ranks, dtype)
    made = rules.fedex(clients, scale)
    assert off(made.products(), dense(clients)) < bound
    assert made.residual["layer.q"].b.dtype == dtype


@DTYPES
@quick
@given(seeds_, equal, st.floats(0.1, 30))
def test_ffa_and_rolora_are_d_while_one_factor_rests(dtype, bound, seed, ranks, scale):
    clients = cohort(seed, ranks, dtype)
    for side, rule in {
        "A": lambda c: (rules.ffa(c, scale), rules.rolora(c, 1, scale)),
        "B": lambda c: (rules.rolora(c, 2, scale),),
    }.items():
        held = frozen(clients, side)
        wanted = dense(held)
        for made in rule(held):
            assert off(made.products(), wanted) < bound
            for module in SHAPES:
                name = names(module)["AB".index(side)]
                np.testing.assert_array_equal(made.arrays[name], held[0].arrays[name])


@quick
@given(seeds_, mixed, st.integers(1, 9), st.floats(0.1, 30))
def test_svd_refactor_is_as_near_as_a_dense_svd(seed, ranks, rank, scale):
    clients = cohort(seed, ranks)
    wanted = dense(clients)
    made, cost = rules.svd_refactor(clients, rank, scale)
    tails = [np.linalg.svd(d, compute_uv=False)[rank:] for d in wanted.values()]
    whole = np.sqrt(sum(np.square(d).sum() for d in wanted.values()))
    optimum = np.sqrt(sum(np.square(t).sum() for t in tails)) / whole
    assert cost.optimum == pytest.approx(optimum, abs=1e-10)
    assert cost.error == pytest.approx(optimum, abs=1e-10)
    assert off(made.products(), wanted) == pytest.approx(optimum, abs=1e-10)


@DTYPES
@quick
@given(seeds_, mixed)
def test_svd_refactor_of_full_rank_is_d(dtype, bound, seed, ranks):
    clients = cohort(seed, ranks, dtype)
    made, cost = rules.svd_refactor(clients, 9, 2.0)
    assert off(made.products(), dense(clients)) < bound
    assert cost.error < bound
    assert cost.optimum < TIGHT


def test_both_factors_share_the_singular_values_and_the_gauge_is_fixed():
    made, _ = rules.svd_refactor(cohort(0, [3, 4]), 5, 4.0)
    for module in SHAPES:
        a, b = (made.arrays[name] for name in names(module))
        np.testing.assert_allclose(b.T @ b, a @ a.T, atol=1e-12)
        np.testing.assert_allclose(b.T @ b, np.diag(np.diag(b.T @ b)), atol=1e-12)
        assert (b[np.abs(b).argmax(0), range(5)] > 0).all()


@quick
@given(seeds_, equal, st.floats(0.1, 30))
def test_fedit_is_off_by_the_covariance(seed, ranks, scale):
    clients = cohort(seed, ranks)
    wanted = dense(clients)
    made, error = rules.fedit(clients, scale)
    assert error == pytest.approx(off(made.products(), wanted), abs=TIGHT)
    # Nothing but the residual of FedEx separates the two.
    gap = {m: wanted[m] - product(f) for m, f in made.products().items()}
    residual = rules.fedex(clients, scale).residual
    for module, d in wanted.items():
        atol = TIGHT * np.abs(d).max() + 1e-12
        np.testing.assert_allclose(product(residual[module]), gap[module], rtol=0, atol=atol)


@pytest.mark.parametrize("seed", range(3))
def test_fedit_at_one_scale_is_the_plain_mean_and_agrees_with_the_probes(seed):
    clients = [replace(c, scale=2.0) for c in cohort(seed, [3] * 4)]
    made, error = rules.fedit(clients, 2.0)
    updates = [Update.of(c.arrays, c.weight) for c in clients]
    plain = rules.mean(updates, clients[0].arrays)
    assert arrays_digest(made.arrays) == arrays_digest(plain)
    gap = rules.ProductGap(seed=1, probes=4000)
    for update in updates:
        gap.add(update, 2.0)
    measured = gap.relative(made.products())
    assert measured == pytest.approx(error, rel=0.06)  # as in test_product_gap, and tighter


@quick
@given(seeds_, st.integers(1, 5), st.integers(1, 500))
def test_one_client_keeps_its_product(seed, rank, weight):
    (client,) = cohort(seed, [rank])
    clients = [replace(client, weight=float(weight))]
    wanted = dense([replace(client, weight=1.0)])
    for rule, made in every_rule(clients, rank).items():
        assert off(made.products(), wanted) < TIGHT, rule


@quick
@given(seeds_, st.integers(1, 4), st.integers(2, 4))
def test_equal_clients_are_one_client(seed, rank, count):
    (client,) = cohort(seed, [rank])
    clients = [replace(client, client=k, weight=k + 1.0) for k in range(count)]
    wanted = dense([client])
    for rule, made in every_rule(clients, rank).items():
        assert off(made.products(), wanted) < TIGHT, rule
    assert rules.fedit(clients, client.scale)[1] < TIGHT
    # In float32 too: another scale must not leave a rounded root of it behind.
    rounded = {n: x.astype("float32") for n, x in client.arrays.items()}
    residual = rules.fedex([replace(c, arrays=rounded) for c in clients], 1.5).residual["layer.q"]
    assert residual.norm() < TIGHT * np.linalg.norm(wanted["layer.q"])
    assert max(np.abs(residual.a).max(), np.abs(residual.b).max()) < TIGHT


@quick
@given(seeds_, equal, st.randoms(use_true_random=False))
def test_arrival_does_not_change_a_bit(seed, ranks, random):
    clients = cohort(seed, ranks, "float32")
    before, targets = every_rule(clients, 3), rules.target(clients)
    fedsa = rules.fedsa(clients, 1.0)
    held = [frozen(clients, "A"), frozen(clients, "B")]
    order = random.sample(range(len(ranks)), len(ranks))
    shuffled = [clients[i] for i in order]
    assert same_bits(rules.fedsa(iter(shuffled), 1.0), fedsa)
    for number, clients_held in enumerate(held, 1):
        made = rules.rolora([clients_held[i] for i in order], number, 1.5)
        assert same_bits(made, before[f"rolora {'AB'[number - 1]}"])
    assert same_bits(rules.stack(iter(shuffled)), before["stack"])
    assert same_bits(rules.svd_refactor(iter(shuffled), 3, 1.5)[0], before["svd"])
    assert same_bits(rules.fedit(iter(shuffled), 1.5)[0], before["fedit"])
    fedex = rules.fedex(iter(shuffled), 1.5)
    assert same_bits(fedex, before["fedex"])
    for module, found in rules.target(shuffled).items():
        np.testing.assert_array_equal(found.b, targets[module].b)
        np.testing.assert_array_equal(found.a, targets[module].a)
        residual = before["fedex"].residual[module]
        np.testing.assert_array_equal(fedex.residual[module].b, residual.b)
        np.testing.assert_array_equal(fedex.residual[module].a, residual.a)


@quick
@given(seeds_, st.lists(st.integers(1, 7), min_size=4, max_size=12))
def test_compression_is_exact_and_bounded(seed, ranks):
    clients = cohort(seed, ranks)
    wanted = dense(clients)
    squeezed = rules.target(iter(clients), compress=True)
    assert off(squeezed, wanted) < TIGHT
    for module, factors in squeezed.items():
        assert factors.width <= 2 * min(SHAPES[module])
    assert off(rules.stack(clients, compress=True).products(), wanted) < TIGHT
    _, cost = rules.svd_refactor(clients, 3, 1.0, compress=True)
    assert cost.error == pytest.approx(rules.svd_refactor(clients, 3, 1.0)[1].error, abs=1e-10)
    # Another arrival: the same within rounding.
    again = rules.target(clients[::-1], compress=True)
    assert rules.relative_error(again, squeezed) < TIGHT


@pytest.mark.parametrize("shape", [(4, 30), (30, 4), (5, 5)])
def test_folding_keeps_the_product(shape):
    random = np.random.default_rng(0)
    wide = Factors(random.normal(size=(shape[0], 11)), random.normal(size=(11, shape[1])))
    np.testing.assert_allclose(product(wide.folded()), product(wide), atol=1e-13)
    assert wide.folded().width == min(shape)
    assert wide.folded().folded().width == min(shape)

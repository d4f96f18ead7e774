# SPDX-License-Identifier: Apache-2.0
"""Fast weights against their definition: numpy's least squares, truncated at N ** -alpha."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.rules.solving import (
    BelowFloorWarning,
    Factorisation,
    floor,
    naive_solve,
    solve,
    solve_dual,
)
from fedloom.rules.statistics import Gram
from fedloom.rules.triangles import Triangle


def problem(n, d, p=3, *, decay=1.1, seed=0):
    """Rows whose singular values fall like ``j ** -decay``."""
    random = np.random.default_rng(seed)
    k = min(n, d)
    u, v = (np.linalg.qr(random.normal(size=(side, k)))[0] for side in (n, d))
    keys = (u * np.arange(1, k + 1.0) ** -decay) @ v.T
    return keys, random.normal(size=(n, p))


def oracle(keys, values, alpha):
    return np.linalg.lstsq(keys, values, rcond=len(keys) ** -alpha)[0]


def distance(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)


@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0, 1.5, 2.0])
@pytest.mark.parametrize(("n", "d"), [(5, 13), (13, 13), (101, 13), (1000, 37)])
def test_every_route_is_the_truncated_least_squares_solution(n, d, alpha):
    keys, values = problem(n, d)
    expected = oracle(keys, values, alpha)
    found = solve(Gram.of(keys, values), alpha=alpha)
    assert distance(found.weights, expected) < 1e-11
    assert distance(naive_solve(keys, values, alpha=alpha), expected) < 1e-12
    assert distance(Triangle.of(keys, values).solve(alpha=alpha).weights, expected) < 1e-12
    if n <= d:
        assert distance(solve_dual(keys, values, alpha=alpha).weights, expected) < 1e-11
    pinv = torch.linalg.pinv(torch.from_numpy(keys), atol=0.0, rtol=n**-alpha).numpy()
    assert distance(found.weights, pinv @ values) < 1e-11


@pytest.mark.parametrize("spoil", ["duplicate column", "zero row", "rank one less", "zero column"])
def test_deficient_keys_have_the_minimum_norm_solution(spoil):
    keys, values = problem(60, 11, decay=0.5)
    if spoil == "duplicate column":
        keys[:, 3] = keys[:, 7]
    elif spoil == "zero row":
        keys[5] = 0.0
    elif spoil == "zero column":
        keys[:, 2] = 0.0
    else:
        keys[:, 0] = keys[:, 1:] @ np.arange(10.0)
    assert distance(solve(Gram.of(keys, values)).weights, oracle(keys, values, 1.0)) < 1e-10


def test_the_filter_is_on_singular_values_and_not_on_their_squares():
    """With N = 100 and alpha = 1 the cut is at 0.01: a planted 0.05 stays; squared, it would go."""
    sigma = np.array([1.0, 0.5, 0.05, 0.005])
    u, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(100, 4)))
    found = solve(Gram.of(u * sigma, np.ones((100, 1))), alpha=1.0)
    assert found.rank == 3
    assert found.condition == pytest.approx(20.0)
    assert solve(Gram.of(u * sigma, np.ones((100, 1))), alpha=0.5).rank == 2


def test_float64_sums_find_the_rank_that_float32_sums_miss():
    """A mean direction and a falling tail, as language models have: N = 20000 (spec 5.4)."""
    n, d = 20_000, 256
    sigma = np.concatenate([[1.0], np.arange(2, d + 1.0) ** -1.5 / 30])
    random = np.random.default_rng(0)
    u = np.linalg.qr(random.normal(size=(n, d)))[0]
    v = np.linalg.qr(random.normal(size=(d, d)))[0]
    keys, values = (u * sigma) @ v.T, random.normal(size=(n, 2))
    factorised = Factorisation.of(Gram.of(keys, values))
    for alpha, rank in ((0.8, 20), (0.9, 39), (1.0, 76)):
        found = factorised.solve(alpha=alpha)
        assert found.rank == rank
        assert distance(found.weights, oracle(keys, values, alpha)) < 1e-6
    single = keys.astype(np.float32).T @ keys.astype(np.float32)
    eigen = np.clip(np.linalg.eigvalsh(single.astype(np.float64)), 0, None)
    assert (np.sqrt(eigen / eigen.max()) > 1 / n).sum() > 80  # noise that passes for directions


def test_below_the_floor_is_said_and_the_floor_is_used():
    keys, values = problem(1000, 16)
    with pytest.warns(BelowFloorWarning, match="triangles"):
        found = solve(Gram.of(keys, values), alpha=3.0)
    assert found.floored
    assert found.tolerance == floor(16)
    assert solve(Gram.of(keys, values), alpha=1.0).floored is False


def test_without_truncation_few_rows_are_interpolated():
    keys, values = problem(6, 20, decay=0.0)
    for found in (solve(Gram.of(keys, values)), solve_dual(keys, values)):
        assert keys @ found.weights == pytest.approx(values, abs=1e-10)
        assert found.explained == pytest.approx(1.0)
        assert found.rank == 6


def test_equivariance():
    keys, values = problem(50, 8)
    w = solve(Gram.of(keys, values)).weights
    q = np.linalg.qr(np.random.default_rng(9).normal(size=(8, 8)))[0]
    e = np.random.default_rng(8).normal(size=(3, 5))
    assert solve(Gram.of(keys @ q, values)).weights == pytest.approx(q.T @ w, abs=1e-9)
    assert solve(Gram.of(3 * keys, values)).weights == pytest.approx(w / 3, abs=1e-9)
    assert solve(Gram.of(keys, values @ e)).weights == pytest.approx(w @ e, abs=1e-9)


def test_a_ridge_is_a_ridge_and_its_explained_energy_is_measured():
    keys, values = problem(80, 9)
    factorised = Factorisation.of(Gram.of(keys, values))
    for found, ridge in zip(
        factorised.sweep(ridges=[1e-3, 0.1, 10.0]), [1e-3, 0.1, 10.0], strict=True
    ):
        exact = np.linalg.solve(keys.T @ keys + ridge * np.eye(9), keys.T @ values)
        assert found.weights == pytest.approx(exact, rel=1e-9, abs=1e-12)
        left = ((keys @ found.weights - values) ** 2).sum() / (values**2).sum()
        assert found.explained == pytest.approx(1 - left)


def test_one_factorisation_serves_a_whole_sweep(monkeypatch):
    calls = []
    eigh = np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda a: calls.append(1) or eigh(a))
    keys, values = problem(80, 9)
    factorised = Factorisation.of(Gram.of(keys, values))
    found = list(factorised.sweep(alphas=[0.2, 0.6, 1.0], ridges=[0.1]))
    assert len(calls) == 1
    assert [f.rank for f in found[:3]] == sorted(f.rank for f in found[:3])
    assert distance(found[1].weights, oracle(keys, values, 0.6)) < 1e-11


def test_at_most_so_many_directions():
    keys, values = problem(80, 9)
    u, s, rt = np.linalg.svd(keys, full_matrices=False)
    expected = rt[:4].T @ ((u[:, :4].T @ values) / s[:4, None])
    assert distance(solve(Gram.of(keys, values), rank=4).weights, expected) < 1e-11
    assert distance(Triangle.of(keys, values).solve(alpha=1, rank=4).weights, expected) < 1e-12


def test_triangles_merge_and_keep_the_condition_number():
    keys, values = problem(300, 20, decay=8.0)  # squared, its condition is beyond float64
    parts = [Triangle.of(keys[a : a + 30], values[a : a + 30]) for a in range(0, 300, 30)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merged + part
    assert merged.count == 300
    assert distance(merged.solve(alpha=3.0).weights, oracle(keys, values, 3.0)) < 1e-8
    with pytest.warns(BelowFloorWarning):
        loses = solve(Gram.of(keys, values), alpha=3.0)
    assert loses.rank < merged.solve(alpha=3.0).rank


def test_the_cut_is_strict_so_alpha_0_keeps_nothing():
    found = solve(Gram.of(*problem(50, 4)), alpha=0.0)
    assert found.rank == 0
    assert not found.weights.any()


def test_nothing_to_solve_is_said():
    with pytest.raises(ValueError, match="at least one"):
        solve(Gram.zero(3, 2))
    with pytest.raises(ValueError, match="at least one"):
        solve_dual(np.zeros((0, 3)), np.zeros((0, 2)))
    with pytest.raises(ValueError, match="expected none below 0"):
        solve(Gram.of(np.eye(2), np.eye(2)), alpha=-1.0)


def test_values_of_nothing_have_no_explained_energy():
    found = solve(Gram.of(np.eye(2), np.zeros((2, 1))))
    assert np.isnan(found.explained)
    assert not found.weights.any()

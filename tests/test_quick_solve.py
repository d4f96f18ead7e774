"""Solves without an eigendecomposition against the eigendecomposition, and where they fall back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom import quick_solve
from fedloom.quick_solve import Sums, Tridiagonal
from fedloom.rules.solving import Factorisation, tolerance
from fedloom.rules.statistics import Gram

ROWS, WIDTH, CLASSES = 400, 48, 5
J = np.arange(1.0, WIDTH + 1)
SPECTRA = {
    "slow": J**-0.5,
    "falling": J**-2.0,
    "geometric": 10.0 ** (-6 * (J - 1) / (WIDTH - 1)),
    "equal": np.ones(WIDTH),
    "steps": np.repeat([1.0, 0.1, 0.001], WIDTH // 3),
    "deficient": np.where(J <= 30, J**-0.3, 0.0),
    "hardly deficient": np.where(J <= WIDTH - 2, J**-0.3, 0.0),
    "mean direction": np.where(J == 1, 1000.0, J**-1.0),
}


def problem(sigma, seed=0):
    random = np.random.default_rng(seed)
    u, v = (np.linalg.qr(random.normal(size=(side, WIDTH)))[0] for side in (ROWS, WIDTH))
    return (u * sigma) @ v.T, random.integers(CLASSES, size=ROWS)


def summed(sigma, seed=0):
    return Sums.of(*problem(sigma, seed), CLASSES, np.arange(ROWS))


def plain(sums, alpha, ridge):
    return Factorisation.of(sums.gram()).solve(alpha=alpha, ridge=ridge)


def distance(a, b):
    return np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)


@pytest.fixture
def eigh(monkeypatch):
    """Count full eigendecompositions."""
    calls, real = [], np.linalg.eigh
    monkeypatch.setattr(np.linalg, "eigh", lambda a: calls.append(1) or real(a))
    return calls


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 1023, 1025, 3000])
def test_sums_are_the_gram_of_one_hot_values(count, dtype):
    random = np.random.default_rng(0)
    keys = random.normal(size=(3000, 7)).astype(dtype)
    labels, rows = random.integers(3, size=3000), random.permutation(3000)[:count]
    found = Sums.of(keys, labels, 3, rows)
    wanted = Gram.of(keys[rows], np.eye(3)[labels[rows]])
    got = found.gram()
    assert got.packed == pytest.approx(wanted.packed, rel=1e-13, abs=1e-11)
    assert got.cross == pytest.approx(wanted.cross, rel=1e-13, abs=1e-11)
    assert (got.count, got.squares) == (count, count)
    assert not np.triu(found.square, 1).any()
    assert found.times(np.eye(7)) == pytest.approx(wanted.dense())
    assert found.trace == pytest.approx(wanted.trace())


def test_sums_add_and_subtract_and_remember_what_they_were():
    keys, labels = problem(J**-0.5)
    first, rest = (Sums.of(keys, labels, CLASSES, r) for r in np.split(np.arange(ROWS), [150]))
    whole = first + rest
    assert whole.square == pytest.approx(summed(J**-0.5).square, abs=1e-14)
    assert (whole.count, whole.before) == (ROWS, 0.0)
    less = whole - rest
    assert less.square == pytest.approx(first.square, abs=1e-14)
    assert (less.count, less.before) == (150, whole.trace)
    assert (less + rest - first).before == pytest.approx(whole.trace, rel=1e-14)
    assert less.gram().before == whole.trace


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("alpha", [0.17, 0.4, 0.8, 1.2])
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_one_filter_is_that_of_an_eigendecomposition(name, alpha, ridge, eigh):
    sums = summed(SPECTRA[name])
    found, rank = quick_solve.solve(sums, alpha=alpha, ridge=ridge)
    assert not eigh
    wanted = plain(sums, alpha, ridge)
    assert rank == wanted.rank
    assert distance(found, wanted.weights) < max(1e-10, 1e-15 * wanted.condition**2)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 10.0])
def test_a_ridge_is_that_of_an_eigendecomposition(name, ridge, eigh):
    sums = summed(SPECTRA[name])
    found, rank = quick_solve.solve(sums, alpha=None, ridge=ridge)
    assert not eigh
    wanted = plain(sums, None, ridge).weights
    error = 1e-15 * SPECTRA[name].max() ** 2 / ridge  # of either, as the sums are conditioned
    assert distance(found, wanted) < max(1e-10, error)
    assert rank == WIDTH


@pytest.mark.parametrize("name", SPECTRA)
def test_without_a_filter_the_floor_is_one(name):
    sums = summed(SPECTRA[name])
    found, rank = quick_solve.solve(sums, alpha=None, ridge=0.0)
    wanted = plain(sums, None, 0.0)
    assert rank == wanted.rank
    kept = SPECTRA[name][SPECTRA[name] > 0]
    assert distance(found, wanted.weights) < max(1e-10, 1e-14 * (kept.max() / kept.min()) ** 2)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5.0, 0.0), min_size=WIDTH, max_size=WIDTH), st.floats(0.05, 1.0))
def test_any_spectrum_is_solved_alike(logarithms, alpha):
    sigma = 10.0 ** np.array(logarithms)
    sums = summed(sigma, seed=1)
    found, rank = quick_solve.solve(sums, alpha=alpha, ridge=0.0)
    wanted = plain(sums, alpha, 0.0)
    assert rank == wanted.rank
    error = 1e-15 * wanted.condition**2 if rank else 0.0  # of either, as the sums are conditioned
    assert distance(found, wanted.weights) < max(1e-10, error)


@pytest.mark.parametrize("few", ["dropped", "kept"])
def test_where_an_eigenvalue_is_on_the_cut_rounding_decides_as_it_did(few, eigh):
    """The same weights to the bit: there is nothing better to agree with."""
    cut = ROWS**-0.8
    kept = WIDTH - 5 if few == "dropped" else 5
    sigma = np.where(kept < J, cut / 10, 1.0)
    sigma[7] = cut
    sums = summed(sigma)
    assert Tridiagonal.of(sums).filtered(cut, 0.0) is None
    found, _ = quick_solve.solve(sums, alpha=0.8, ridge=0.0)
    assert len(eigh) == 1
    assert np.array_equal(found, plain(sums, 0.8, 0.0).weights)
    sigma[7] = 1.001 * cut  # and a thousandth beside it is not on it
    assert Tridiagonal.of(summed(sigma)).filtered(cut, 0.0) is not None


def test_what_cannot_be_factored_falls_back(eigh):
    sums = summed(SPECTRA["deficient"])
    found, _ = quick_solve.solve(sums, alpha=None, ridge=1e-40)  # Cholesky fails
    assert len(eigh) == 1
    assert np.array_equal(found, plain(sums, None, 1e-40).weights)
    nothing = Sums.of(np.zeros((9, WIDTH)), np.zeros(9, int), 2, np.arange(9))
    found, rank = quick_solve.solve(nothing, alpha=0.8, ridge=0.0)
    assert (rank, found.any()) == (0, False)
    narrow = Sums.of(np.eye(9), np.arange(9) % 2, 2, np.arange(9))
    assert isinstance(quick_solve.factorised(narrow), Factorisation)


@pytest.mark.parametrize("name", SPECTRA)
def test_many_solutions_at_once_are_each_by_itself(name, eigh):
    sums, ridges, ridge = summed(SPECTRA[name]), (1e-3, 0.1), 1e-4
    source = quick_solve.factorised(sums)
    assert isinstance(source, Tridiagonal)
    sizes = sorted(
        {
            int((source.sigma > tolerance(ROWS, WIDTH, a)[0] * source.sigma[0]).sum())
            for a in (0.15, 0.3, 0.5, 0.8)
        }
    )
    found = quick_solve.solutions(source, ridges, sizes, ridge)
    assert not eigh
    oracle = Factorisation.of(sums.gram())
    wanted = quick_solve.solutions(oracle, ridges, sizes, ridge)
    assert found.shape == wanted.shape == (len(ridges) + len(sizes), CLASSES, WIDTH)
    for j in range(len(found)):
        error = 1e-15 * SPECTRA[name].max() ** 2 / ridge
        assert distance(found[j], wanted[j]) < max(1e-10, error)
    assert source.sigma == pytest.approx(oracle.sigma, abs=1e-7 * oracle.sigma[0])


def test_a_ridge_below_rounding_among_many_stays_finite():
    source = Tridiagonal.of(summed(SPECTRA["deficient"]))
    assert source._shifted(source.inner, 1e-40) is None
    found = source.solutions((1e-40, 0.1), (30,), 0.0)
    assert np.isfinite(found).all()
    wanted = plain(summed(SPECTRA["deficient"]), 0.8, 0.0).weights
    assert distance(found[2].T, wanted) < 1e-10


def test_rows_that_are_not_numbers_are_said():
    with pytest.raises(ValueError, match="not finite"):
        Sums.of(np.full((3, 2), 1e200), np.zeros(3, int), 2, np.arange(3))

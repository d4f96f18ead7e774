"""One row's reach by brute force, noise that is what it says, and the exact Gaussian's price."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedloom.errors import Refusal
from fedloom.rules.private import (
    Accountant,
    Bounds,
    bound_client,
    calibrate,
    client_sigma,
    clip_rows,
    fresh,
    gaussian_delta,
    joint_norm,
    noisy,
    ridge_after,
    solve_noisy,
)
from fedloom.rules.statistics import Gram

from summations import source

BOUNDS = [(1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (0.5, 3.0)]


def frobenius(gram: Gram) -> float:
    return math.sqrt((gram.dense() ** 2).sum() + (gram.cross**2).sum())


def rows(random, count: int, width: int, longest: float) -> np.ndarray:
    made = random.normal(size=(count, width))
    lengths = longest * random.uniform(size=(count, 1)) ** random.choice([0, 0.3, 3])
    return made / np.linalg.norm(made, axis=1, keepdims=True) * lengths


def test_the_joint_norm_counts_both_triangles():
    random = np.random.default_rng(0)
    gram = Gram.of(random.normal(size=(20, 5)), random.normal(size=(20, 3)))
    assert joint_norm(gram) == pytest.approx(frobenius(gram), rel=1e-12)


@pytest.mark.parametrize(("key", "value"), BOUNDS)
def test_one_row_more_moves_the_sums_as_far_as_said_and_no_farther(key, value):
    """Against a data set with and without a row, over many rows; attained at full length."""
    random, bounds = np.random.default_rng(1), Bounds(key, value)
    whole = bounds.gram(random.normal(size=(30, 4)), random.normal(size=(30, 2)))
    farthest, packed, exact = 0.0, 0.0, bounds.sensitivity()
    for _ in range(300):
        k, v = rows(random, 1, 4, 3 * key), rows(random, 1, 2, 3 * value)
        moved = (whole + bounds.gram(k, v)) - whole
        farthest = max(farthest, frobenius(moved))
        packed = max(packed, math.hypot(*map(np.linalg.norm, (moved.packed, moved.cross))))
    assert exact == pytest.approx(math.sqrt(key**4 + key**2 * value**2))
    assert exact * 0.999 < farthest < exact * (1 + 1e-9)
    assert packed < exact * (1 + 1e-9)


def test_the_packed_triangle_moves_less_but_along_an_axis():
    """Off-diagonals once: between (1 + 1/d) / 2 of the square and all of it."""
    d, bounds = 6, Bounds(1.0, 1.0)

    def packed(key: np.ndarray) -> float:
        return float((bounds.gram(key[None], np.zeros((1, 1))).packed ** 2).sum())

    assert packed(np.eye(d)[2]) == pytest.approx(1.0)
    assert packed(np.full(d, d**-0.5)) == pytest.approx((1 + 1 / d) / 2)
    for key in rows(np.random.default_rng(2), 500, d, 1.0):
        fourth = (np.linalg.norm(key) ** 4 + (key**4).sum()) / 2
        assert packed(key) == pytest.approx(fourth)
        assert fourth <= 1 + 1e-12


@pytest.mark.parametrize(("key", "value"), BOUNDS)
def test_one_row_for_another(key, value):
    """Over pairs, by brute force and then by climbing from the farthest."""
    random, bounds = np.random.default_rng(3), Bounds(key, value)
    exact = bounds.sensitivity("replace-one")

    def within(pairs: np.ndarray, bound: float) -> np.ndarray:
        return clip_rows(pairs.reshape(-1, pairs.shape[-1]), bound).reshape(pairs.shape)

    def gaps(k: np.ndarray, v: np.ndarray) -> np.ndarray:  # [n, 2, width]: n pairs of rows
        moved = [np.einsum("nri,nrj,r->nij", k, x, [1.0, -1.0]) for x in (k, v)]
        return np.sqrt(sum((m**2).sum(axis=(1, 2)) for m in moved))

    k = within(random.normal(size=(20_000, 2, 3)) * key, key)
    v = within(random.normal(size=(20_000, 2, 2)) * value, value)
    for step in range(300):
        best = int(gaps(k, v).argmax())
        k, v = k[best : best + 1], v[best : best + 1]
        size = 0.5 * 0.97**step * (np.arange(200) > 0)[:, None, None]  # the best stays in
        k, v = (
            within(x + size * random.normal(size=(200, *x.shape[1:])), bound)
            for x, bound in ((k, key), (v, value))
        )
    best = int(gaps(k, v).argmax())
    one, other = (bounds.gram(k[best, i : i + 1], v[best, i : i + 1]) for i in range(2))
    assert frobenius(one - other) == pytest.approx(gaps(k, v).max())
    assert exact * 0.999 < frobenius(one - other) < exact * (1 + 1e-9)
    assert exact < 2 * bounds.sensitivity()


def test_the_claim_is_void_if_keys_are_not_clipped():
    """A row a hundred times too long moves unclipped sums ten thousand times too far."""
    random, bounds = np.random.default_rng(4), Bounds(1.0, 1.0)
    keys, values = rows(random, 50, 4, 1.0), rows(random, 50, 2, 1.0)
    keys[7] *= 100 / np.linalg.norm(keys[7])
    without = np.delete(keys, 7, axis=0), np.delete(values, 7, axis=0)
    naive = Gram.of(keys, values) - Gram.of(*without)
    clipped = bounds.gram(keys, values) - bounds.gram(*without)
    assert frobenius(naive) > 1e4 * 0.99
    assert frobenius(clipped) <= bounds.sensitivity() * (1 + 1e-9)
    # An adversary tells the two data sets apart through the noise every time, or hardly ever.
    sigma = calibrate(1.0, 1e-5, bounds.sensitivity())
    assert frobenius(naive) / sigma > 1000
    assert frobenius(clipped) / sigma < 0.3
    with pytest.raises(Refusal, match="clip the rows before they are summed"):
        noisy(Gram.of(keys, values), sigma, fresh(source(0)), bounds)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_clipping_shortens_and_leaves_be(size):
    given = np.array([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]) * size
    made = clip_rows(given, 2.5 * size)
    np.testing.assert_allclose(made / size, [[1.5, 2.0], [0.3, 0.4], [0.0, 0.0]], rtol=1e-15)
    np.testing.assert_array_equal(made[1:], given[1:])


def test_a_row_of_any_size_is_clipped():
    with np.errstate(all="raise"):
        made = clip_rows(np.array([[1e300, 1e300], [1e-300, 0.0]]), 1.0)
    np.testing.assert_allclose(made, [[0.5**0.5, 0.5**0.5], [1e-300, 0.0]])
    assert clip_rows(np.zeros((0, 3)), 1.0).shape == (0, 3)


@pytest.mark.parametrize(("rows_", "bound"), [([[np.nan]], 1.0), ([[np.inf]], 1.0), ([[1.0]], 0.0)])
def test_rows_that_cannot_be_clipped_are_refused(rows_, bound):
    with pytest.raises(Refusal, match="rows to be clipped"):
        clip_rows(np.array(rows_), bound)


def test_noise_is_symmetric_and_of_the_size_it_says():
    gram, sigma, draws = Gram.zero(6, 3), 2.5, 4000
    stream = fresh(source(5))
    made = [noisy(gram, sigma, stream) for _ in range(draws)]
    dense = np.stack([g.dense() for g in made])
    np.testing.assert_array_equal(dense, dense.transpose(0, 2, 1))
    spread = np.sqrt((dense**2).mean(axis=0))
    # A standard deviation of n draws is known to 1 / sqrt(2 n); 5 of these over 54 entries.
    close = 5 / math.sqrt(2 * draws)
    assert np.diag(spread) == pytest.approx(sigma, rel=close)
    assert spread[~np.eye(6, dtype=bool)] == pytest.approx(sigma / math.sqrt(2), rel=close)
    cross = np.stack([g.cross for g in made])
    assert np.sqrt((cross**2).mean(axis=0)) == pytest.approx(sigma, rel=close)
    assert np.abs(cross.mean(axis=0)).max() < 5 * sigma / math.sqrt(draws)
    assert all(math.isnan(g.squares) for g in made)


def test_noise_is_drawn_anew_unless_the_source_is_given():
    gram = Gram.zero(3, 1)
    one, other = (noisy(gram, 1.0, fresh()).packed for _ in range(2))
    assert not np.array_equal(one, other)
    one, other = (noisy(gram, 1.0, fresh(source(1))).packed for _ in range(2))
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("sigma", [0.0, -1.0, np.inf, np.nan])
def test_noise_that_is_none_is_refused(sigma):
    with pytest.raises(Refusal, match=r"noise of"):
        noisy(Gram.zero(2, 1), sigma, fresh())


def test_the_exact_count_is_not_released():
    random, bounds = np.random.default_rng(6), Bounds()
    keys = clip_rows(random.normal(size=(5000, 8)) * 100, 1.0)  # all of full length
    made = noisy(bounds.gram(keys, np.ones((5000, 1))), 10.0, fresh(source(2)), bounds)
    assert made.count != 5000
    # The trace of 8 diagonal entries of sigma 10: 28 to one standard deviation.
    assert made.count == pytest.approx(5000, abs=5 * 10 * math.sqrt(8))


def test_the_ridge_is_above_the_noise_and_solves():
    d, sigma = 80, 3.0
    noise = noisy(Gram.zero(d, 2), sigma, fresh(source(3)))
    size = float(np.abs(np.linalg.eigvalsh(noise.dense())).max())
    assert 0.85 * ridge_after(sigma, d) < size < 1.1 * ridge_after(sigma, d)
    solved = solve_noisy(noise, sigma)
    assert np.abs(solved.weights).max() < 5 * sigma / ridge_after(sigma, d)
    assert math.isnan(solved.explained)
    with pytest.raises(Refusal, match="expected above 0"):
        solve_noisy(noise, sigma, 0.0)


def test_with_little_noise_the_solution_is_the_ridges():
    random = np.random.default_rng(7)
    gram = Gram.of(random.normal(size=(500, 6)), random.normal(size=(500, 2)))
    wanted = np.linalg.solve(gram.dense() + 2.0 * np.eye(6), gram.cross)
    made = solve_noisy(noisy(gram, 1e-6, fresh(source(4))), 1e-6, ridge=2.0)
    np.testing.assert_allclose(made.weights, wanted, atol=1e-7)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 1.0, 4.0, 8.0, 50.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-10])
def test_sigma_meets_the_exact_equation_from_both_sides(epsilon, delta):
    sensitivity = 1.7
    sigma = calibrate(epsilon, delta, sensitivity)

    def exact(s: float) -> float:  # another implementation of the two tails
        a, b = sensitivity / (2 * s), epsilon * s / sensitivity
        return float(norm.cdf(a - b) - np.exp(epsilon + norm.logcdf(-a - b)))

    assert exact(sigma) == pytest.approx(delta, rel=1e-6)
    assert exact(sigma * (1 - 1e-4)) > delta > exact(sigma * (1 + 1e-4))
    assert gaussian_delta(epsilon, sensitivity / sigma) <= delta * (1 + 1e-9)


@pytest.mark.parametrize(("epsilon", "ratio"), [(0.3, 0.2), (1.0, 1.0), (3.0, 2.0)])
def test_delta_is_the_hockey_stick_of_two_gaussians(epsilon, ratio):
    """The definition: what one density exceeds exp(epsilon) times the other by, integrated."""

    def excess(x: float) -> float:
        return max(0.0, norm.pdf(x, ratio) - math.exp(epsilon) * norm.pdf(x))

    start = ratio / 2 + epsilon / ratio
    found, _ = quad(excess, start, start + 40)
    assert gaussian_delta(epsilon, ratio) == pytest.approx(found, rel=1e-6)


def test_the_analytic_gaussian_is_below_the_classical_one():
    for epsilon in (0.1, 0.5, 0.99):
        assert calibrate(epsilon, 1e-5) < math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilon


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (1.0, 0.0), (1.0, 1.0), (-1.0, 0.1)])
def test_a_budget_that_is_none_is_refused(epsilon, delta):
    with pytest.raises(Refusal, match="expected above 0"):
        calibrate(epsilon, delta)


def test_releases_compose():
    sensitivity, delta = 1.4, 1e-5
    once, many = Accountant(), Accountant()
    once.spend(sensitivity, calibrate(2.0, delta, sensitivity))
    assert once.epsilon(delta) == pytest.approx(2.0, rel=1e-9)
    assert once.delta(2.0) == pytest.approx(delta, rel=1e-6)
    for _ in range(9):  # nine releases of three times the noise are one
        many.spend(sensitivity, 3 * calibrate(2.0, delta, sensitivity))
    assert many.epsilon(delta) == pytest.approx(2.0, rel=1e-9)
    many.spend(sensitivity, 5.0)
    assert many.epsilon(delta) > 2.0
    assert Accountant().epsilon(delta) == 0.0


@pytest.mark.parametrize("rho", [1e-4, 0.01, 0.5, 5.0])
def test_looser_accounts_are_above_the_exact_one(rho):
    spent, delta = Accountant(rho), 1e-6
    by_zcdp = rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert spent.epsilon(delta) < spent.epsilon_by_moments(delta) < by_zcdp
    assert spent.epsilon_by_moments(delta) < 1.35 * spent.epsilon(delta)


def test_what_is_left_of_a_budget_is_spent_and_no_more():
    spent = Accountant()
    spent.spend(1.0, 2 * calibrate(1.0, 1e-5))
    spent.spend(1.3, spent.sigma_left(1.0, 1e-5, 1.3))
    assert spent.epsilon(1e-5) == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(Refusal, match="is spent"):
        Accountant(1.0).sigma_left(1.0, 1e-5, 1.0)
    for wrong in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(Refusal, match="expected both above 0"):
            spent.spend(*wrong)


@pytest.mark.parametrize("there", [7, 10])
def test_noise_of_clients_adds_up_to_what_was_promised(there):
    """Ten asked, seven promised: the variance of the sum is sigma's at seven, more at ten."""
    sigma, draws = 2.0, 20_000
    one = client_sigma(sigma, 7)
    zero = Gram.zero(1, draws)
    cross = sum(noisy(zero, one, fresh(source(100 + i))).cross for i in range(there))
    found = float(np.sqrt(np.mean(np.square(cross))))
    wanted = sigma * math.sqrt(there / 7)
    assert found == pytest.approx(wanted, rel=5 / math.sqrt(2 * draws))


def test_helpers_of_the_server_are_counted_out():
    assert client_sigma(2.0, 10, 6) == client_sigma(2.0, 4) == 1.0
    for wrong in ((3, 3), (0, 0), (3, -1)):
        with pytest.raises(Refusal, match="fewer than all"):
            client_sigma(1.0, *wrong)


def test_a_whole_client_is_bounded():
    random = np.random.default_rng(9)
    gram = Gram.of(random.normal(size=(100, 5)), random.normal(size=(100, 2)))
    assert frobenius(bound_client(gram, 3.0)) == pytest.approx(3.0)
    small = bound_client(gram, 1e9)
    np.testing.assert_array_equal(small.packed, gram.packed)
    assert joint_norm(bound_client(Gram.zero(2, 1), 1.0)) == 0.0

"""The sampled Gaussian accountant against published figures, a plain sum and an integral."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedloom.errors import Refusal
from fedloom.rules.private import Accountant, calibrate
from fedloom.rules.sampled_gaussian import (
    classic_epsilon,
    epsilon,
    moments,
    multiplier_for,
    naive_moments,
    tight_epsilon,
)

MNIST = 256 / 60_000


@pytest.mark.parametrize(
    ("multiplier", "epochs", "published"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]
)
def test_tensorflow_privacys_table_of_mnist(multiplier, epochs, published):
    """Its tutorial's README: batches of 256 of 60,000 rows, delta 1e-5, Mironov's conversion."""
    rounds = round(epochs / MNIST)
    assert round(epsilon(MNIST, multiplier, rounds, 1e-5, convert=classic_epsilon), 2) == published
    assert epsilon(MNIST, multiplier, rounds, 1e-5) < published


def test_opacus_documented_example():
    """Its compute_dp_sgd_privacy page: rate 0.01, noise 1, 300 steps, delta 1e-5: 2.39 at 5."""
    orders = (2.0, 5.0, 10.0, 20.0, 100.0)
    assert round(epsilon(0.01, 1.0, 300, 1e-5, orders), 2) == 2.39
    assert round(tight_epsilon(300 * moments(0.01, 1.0, 5.0), 5.0, 1e-5), 2) == 2.39


@pytest.mark.parametrize("rate", [0.004, 0.1, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("multiplier", [0.3, 1.0, 6.0])
def test_the_integral_is_the_binomial_sum_at_whole_orders(rate, multiplier):
    for order in (2, 3, 8, 17):
        if order**2 / multiplier**2 > 1400:
            continue  # the plain sum overflows
        plain = naive_moments(rate, multiplier, order)
        # The sum loses digits where it is close to one; the integral does, too.
        assert moments(rate, multiplier, float(order)) == pytest.approx(plain, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("order", [1.05, 1.5, 2.7, 9.3, 17.3])
def test_fractional_orders_by_plain_integration(order):
    """Simpson's rule on the definition, without any logarithm."""
    rate, z = 0.2, 1.4
    x = np.linspace(-25, 25 + order, 200_001)
    base = np.exp(-(x**2) / (2 * z * z)) / math.sqrt(2 * math.pi) / z
    ratio = (1 - rate) + rate * np.exp((2 * x - 1) / (2 * z * z))
    weights = np.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    whole = float((weights * base * ratio**order).sum() * (x[1] - x[0]) / 3)
    assert moments(rate, z, order) == pytest.approx(math.log(whole) / (order - 1), rel=1e-8)


def test_moments_grow_with_order_and_rate_and_fall_with_noise():
    orders = np.geomspace(1.02, 300, 60)
    grown = [moments(0.1, 1.0, float(a)) for a in orders]
    assert (np.diff(grown) > 0).all()
    rates = [moments(q, 1.0, 4.5) for q in (0.01, 0.1, 0.5, 0.99, 1.0)]
    assert rates == sorted(rates)
    noises = [moments(0.1, z, 4.5) for z in (0.5, 1.0, 2.0, 50.0)]
    assert noises == sorted(noises, reverse=True)


def test_without_sampling_it_is_close_above_the_exact_gaussian():
    """Renyi moments lose something; never the other way round."""
    for z, rounds in ((1.0, 1), (5.0, 20), (20.0, 100)):
        exact = Accountant()
        for _ in range(rounds):
            exact.spend(1.0, z)
        assert exact.epsilon(1e-5) < epsilon(1.0, z, rounds, 1e-5) < 1.15 * exact.epsilon(1e-5)


def test_a_multiplier_keeps_its_epsilon_and_hardly_more():
    for rate, rounds, target in ((0.1, 50, 2.0), (1.0, 3, 1.0)):
        found = multiplier_for(rate, rounds, target, 1e-5)
        assert (
            epsilon(rate, found, rounds, 1e-5)
            <= target
            < epsilon(rate, 0.998 * found, rounds, 1e-5)
        )
    assert multiplier_for(1.0, 4, 4.0, 1e-5) > 2 * calibrate(4.0, 1e-5)  # the exact one is less


@pytest.mark.parametrize(
    "given", [(0.0, 1.0, 1e-5), (1.1, 1.0, 1e-5), (0.5, 0.0, 1e-5), (0.5, 1.0, 1.0)]
)
def test_what_is_no_mechanism_is_refused(given):
    rate, multiplier, delta = given
    with pytest.raises(Refusal, match="expected a rate"):
        epsilon(rate, multiplier, 3, delta)
    assert epsilon(0.5, 1.0, 0, 1e-5) == 0.0
    with pytest.raises(Refusal, match="an epsilon of"):
        multiplier_for(0.5, 3, -1.0, 1e-5)

"""Server steps and control sums against plain loops over numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom import rules
from fedloom.config import ServerConfig
from fedloom.errors import Refusal
from fedloom.rules import ControlSum, control_names, only_controls, without_controls
from fedloom.strategies.server_step import ServerStep
from fedloom.wire import Update

numbers = st.floats(-10, 10)


@given(
    st.lists(numbers, min_size=1, max_size=6),
    st.floats(0, 0.95),
    st.floats(0, 0.999),
    st.floats(1e-4, 1.0),
    st.floats(1e-3, 2.0),
)
def test_adam_is_its_recurrence(means, beta1, beta2, tau, rate):
    x, moments = np.array([1.0]), None
    want, m, v = 1.0, 0.0, tau**2
    for mean in means:
        made, moments = rules.adam(
            {"x": x}, {"x": np.array([mean])}, moments, rate=rate, beta1=beta1, beta2=beta2, tau=tau
        )
        x, d = made["x"], mean - want
        m, v = beta1 * m + (1 - beta1) * d, beta2 * v + (1 - beta2) * d * d
        want += rate * m / (math.sqrt(v) + tau)
        assert x[0] == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_first_step_of_adam_by_hand():
    """d = 0.1: m = 0.01, v = 0.99e-6 + 1e-4, step = 0.5 * 0.01 / (sqrt(v) + 1e-3)."""
    made, moments = rules.adam({"x": np.zeros(1)}, {"x": np.full(1, 0.1)}, None, rate=0.5)
    assert moments.second["x"][0] == pytest.approx(1.0099e-4)
    assert made["x"][0] == pytest.approx(0.005 / (0.010049378 + 0.001), rel=1e-6)


def test_arrays_keep_their_dtype_and_the_server_its_digits():
    start = {"x": np.zeros(3, np.float32)}
    made, moments = rules.adam(start, {"x": np.ones(3, np.float32)}, None, rate=0.1)
    assert made["x"].dtype == np.float32
    assert moments.first["x"].dtype == np.float64
    moved, velocity = rules.momentum(start, {"x": np.ones(3, np.float32)}, None, 0.9, 0.5)
    assert moved["x"].tolist() == [0.5] * 3
    assert velocity["x"].tolist() == [1.0] * 3


def test_no_server_optimiser_is_the_mean_itself():
    averaged = {"x": np.float32([0.1, 0.2])}
    assert ServerStep(ServerConfig()).step({"x": np.zeros(2, np.float32)}, averaged) is averaged
    half = ServerStep(ServerConfig(rule="mean", learning_rate=0.5))
    for _ in range(2):  # no momentum: each step stands alone
        made = half.step({"x": np.zeros(2, np.float32)}, averaged)
        np.testing.assert_allclose(made["x"], [0.05, 0.1], rtol=1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 999), numbers, numbers), min_size=1, max_size=5),
    st.integers(0, 5),
)
def test_controls_move_by_plain_sum_over_all_clients_and_theta_by_weight(replies, absent):
    clients = len(replies) + absent
    sent = {"w": np.zeros(1), **control_names({"w": np.full(1, 0.5)})}
    sums = ControlSum(sent, clients)
    updates = [
        Update.of({"w": np.full(1, w), **control_names({"w": np.full(1, move)})}, weight)
        for weight, w, move in replies
    ]
    averaged = rules.mean(sums.set_aside(updates), without_controls(sent))
    total = sum(weight for weight, _, _ in replies)
    assert averaged.keys() == {"w"}
    wanted = sum(weight * w for weight, w, _ in replies) / total
    assert averaged["w"][0] == pytest.approx(wanted, abs=1e-9)
    moved = only_controls(sums.moved())["w"][0]
    assert moved == pytest.approx(0.5 + sum(move for _, _, move in replies) / clients, abs=1e-9)


def test_without_controls_an_update_passes_with_every_bit():
    update = Update.of({"w": np.float32([0.1, 0.3])}, 7, origin=3)
    sums = ControlSum({"w": np.zeros(2, np.float32)}, 2)
    (passed,) = sums.set_aside([update])
    assert passed.origin == 3
    assert passed.weight == 7
    assert np.array_equal(passed.sums["w"], update.sums["w"])
    assert sums.moved() == {}


def test_the_memory_has_a_rate_of_its_own_on_the_server():
    names = ("a.lora_A.weight", "a.memory.gate.logit")
    start = {name: np.zeros(2) for name in names}
    config = ServerConfig(rule="mean", learning_rate=0.5, memory_learning_rate=0.25)
    made = ServerStep(config).step(start, {name: np.ones(2) for name in names})
    assert [array.tolist() for array in made.values()] == [[0.5, 0.5], [0.25, 0.25]]


def test_the_servers_rates_grow_hold_and_fall():
    """Eleven rounds: two to grow, half of them held, then evenly to a tenth."""
    config = ServerConfig(
        rule="mean", learning_rate=0.8, memory_learning_rate=8.0, warmup=2, hold=0.5, last_rate=0.1
    )
    rates = [config.rates(n, 11) for n in (1, 2, 6, 11, 12)]
    assert [lora for lora, _ in rates] == pytest.approx([0.4, 0.8, 0.8, 0.08, 0.08])
    assert [memory for _, memory in rates] == pytest.approx([4.0, 8.0, 8.0, 0.8, 0.8])
    falling = [config.rates(n, 11)[0] for n in range(6, 12)]
    assert np.diff(falling) == pytest.approx([-0.144] * 5)


@pytest.mark.parametrize(
    "settings", [{"warmup": 3}, {"last_rate": 0.5}, {"memory_learning_rate": 0.1}]
)
def test_a_server_that_steps_needs_the_mean_of_factors(settings):
    with pytest.raises(Refusal, match="mean nothing"):
        ServerConfig(rule="svd", **settings)


@pytest.mark.parametrize(
    "settings",
    [{"warmup": -1}, {"hold": 1.0}, {"last_rate": 0.0}, {"memory_learning_rate": -0.1}],
)
def test_a_schedule_that_cannot_be_is_refused(settings):
    with pytest.raises(Refusal, match=r"expected (at least|above)"):
        ServerConfig(rule="mean", **settings)

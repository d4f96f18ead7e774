"""Clipped sums with noise: the bound of one client, the noise, and whom each round asks."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.ciphers import Stream
from fedloom.config import RunConfig
from fedloom.rules.private import calibrate
from fedloom.rules.releases import Promise, clipped, joint_norm, longest_sum, with_noise
from fedloom.rules.schedule import drawn, most_asked

from cohorts import quick
from summations import source


def update(seed: int, size: float) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"a": random.normal(size=(4, 5)) * size, "b": random.normal(size=7) * size}


def stream(seed: int) -> Stream:
    return Stream(source(seed)(32))


@quick
@given(st.integers(0, 10**6), st.floats(-12, 12), st.floats(1e-6, 1e6))
def test_clipping_bounds_the_joint_norm_and_leaves_short_updates_alone(seed, power, bound):
    given_ = update(seed, 10.0**power)
    short = clipped(given_, bound)
    assert joint_norm(short) <= bound * (1 + 1e-12)
    if joint_norm(given_) <= bound:
        assert all((short[n] == given_[n]).all() for n in given_)
    else:
        assert joint_norm(short) == pytest.approx(bound)
        assert short["b"][0] / given_["b"][0] == pytest.approx(short["a"][0, 0] / given_["a"][0, 0])


@quick
@given(st.integers(0, 10**6), st.integers(2, 9))
def test_one_client_moves_the_sum_by_the_bound_at_most(seed, clients):
    parts = [clipped(update(seed + k, 3.0), 0.5) for k in range(clients)]
    whole = {n: sum(p[n] for p in parts) for n in parts[0]}
    left = {n: sum(p[n] for p in parts[1:]) for n in parts[0]}
    assert joint_norm({n: whole[n] - left[n] for n in whole}) <= 0.5 * (1 + 1e-12)


def test_nothing_is_clipped_of_nothing():
    nothing = {"a": np.zeros(3)}
    assert (clipped(nothing, 1.0)["a"] == 0).all()


def test_noise_is_normal_independent_and_of_the_stream_alone():
    zeros = {"b": np.zeros((50, 40)), "a": np.zeros(3000)}
    made = with_noise(zeros, 0.3, stream(3))
    drawn_ = np.concatenate([made["a"], made["b"].ravel()]) / 0.3
    n = drawn_.size
    assert drawn_.std() == pytest.approx(1.0, abs=5 / math.sqrt(2 * n))
    assert abs(drawn_.mean()) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(drawn_[:-1], drawn_[1:])[0, 1]) < 5 / math.sqrt(n)
    assert abs((drawn_**4).mean() - 3) < 5 * math.sqrt(96 / n)
    turned = with_noise(dict(reversed(zeros.items())), 0.3, stream(3))
    assert all((turned[name] == made[name]).all() for name in made)
    assert (with_noise(zeros, 0.3, stream(4))["a"] != made["a"]).all()


def test_an_honest_sum_is_never_longer_than_it_is_allowed_to_be():
    for seed in range(200):
        noise = with_noise({"a": np.zeros(30)}, 2.0, stream(seed))
        assert joint_norm(noise) + 3 * 0.5 < longest_sum(3, 0.5, 2.0, 30)


def recipe(**changes) -> RunConfig:
    return RunConfig().replaced(privacy__clip=0.5, **changes)


def test_a_promise_is_kept_over_the_whole_run():
    for told in (
        {"rounds": 7},
        {"rounds": 7, "sampling__fraction": 0.4},
        {"rounds": 7, "sampling__fraction": 0.4, "privacy__sampling": "secret"},
        {"rounds": 7, "privacy__masks": True},
    ):
        promise = Promise.of(recipe(**told, privacy__epsilon=3.0))
        assert promise.epsilon(promise.releases) <= 3.0 + 1e-9
        assert promise.epsilon(promise.releases) > 2.99
        assert promise.epsilon(promise.releases + 1) > 3.0
        assert promise.epsilon(0) == 0.0


def test_public_draws_are_paid_for_one_by_one_and_secret_ones_by_the_rate():
    public = Promise.of(recipe(rounds=10, privacy__epsilon=2.0, sampling__fraction=0.4))
    assert public.rate == 1.0  # nothing is amplified
    assert public.releases == most_asked(recipe(rounds=10, sampling__fraction=0.4)) < 10
    assert public.multiplier == pytest.approx(calibrate(2.0, 1e-5) * math.sqrt(public.releases))
    secret = Promise.of(
        recipe(rounds=10, privacy__epsilon=2.0, sampling__fraction=0.4, privacy__sampling="secret")
    )
    assert (secret.rate, secret.releases) == (0.4, 10)
    assert secret.multiplier < calibrate(2.0, 1e-5) * math.sqrt(10)  # all rounds, without a secret


def test_without_noise_nothing_is_promised():
    assert Promise.of(recipe()).epsilon(1) == math.inf


def test_most_asked_counts_the_schedule_that_rounds_follow():
    config = recipe(rounds=9, sampling__fraction=0.4, seed=3)
    counts = np.zeros(5, int)
    for number in range(1, 10):
        counts[drawn(3, number, 0.4, 5)] += 1
    assert most_asked(config) == counts.max()

# SPDX-License-Identifier: Apache-2.0
"""Client-level differential privacy of averaged updates: clip, add, and count what it costs.

A round gives away ``sum_k clip(delta_k) + N(0, sigma^2)`` over the clients that were asked, divided
by their number (McMahan, Ramage, Talwar and Zhang, ICLR 2018, with equal weights).  Two runs that
must look alike differ in one client's rows, all of them: with the rows the client sends its update,
without them it sends zero, so the sum moves by ``clip`` at most.  Who is asked, who answers and by
what number is divided is public and the same in both.

Without a secret sample each client pays one plain Gaussian release for every round in which it was
asked; those compose exactly.  With one, rounds cost what ``sampled_gaussian`` says.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedloom.ciphers import Stream
from fedloom.config import RunConfig
from fedloom.rules import sampled_gaussian
from fedloom.rules.private import Accountant, calibrate
from fedloom.rules.schedule import most_asked
from fedloom.wire import Arrays


@dataclass(frozen=True)
class Promise:
    """What a run's noise keeps, as both ends read it off the recipe.

    >>> given = RunConfig.from_flat({"rounds": 4, "privacy.clip": 0.5, "privacy.noise": 10.0})
    >>> promise = Promise.of(given)
    >>> promise.sigma, promise.releases, round(promise.epsilon(4), 3)
    (5.0, 4, 0.726)
    """

    clip: float
    multiplier: float
    """Noise on the sum, in multiples of ``clip``; 0 is none, and no guarantee."""
    delta: float
    rate: float
    """Probability with which a client is drawn, in secret; 1 where it is no secret who is asked."""
    releases: int
    """Rounds that a client may be asked in: no more are paid for."""

    @classmethod
    def of(cls, config: RunConfig) -> Promise:
        """Read a recipe; an epsilon becomes noise here, before anything runs."""
        return _promise(config)

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on a round's sum."""
        return self.multiplier * self.clip

    def epsilon(self, releases: int) -> float:
        """Return what so many releases of one client's updates cost, at ``delta``."""
        if not self.multiplier:
            return math.inf
        if self.rate < 1:
            return sampled_gaussian.epsilon(self.rate, self.multiplier, releases, self.delta)
        spent = Accountant()
        for _ in range(releases):
            spent.spend(1.0, self.multiplier)
        return spent.epsilon(self.delta)


@functools.lru_cache(maxsize=16)
def _promise(config: RunConfig) -> Promise:
    given = config.privacy
    secret = given.sampling == "secret" and config.sampling.fraction < 1
    rate = config.sampling.fraction if secret else 1.0
    public = given.sampling == "public" and given.epsilon > 0
    releases = most_asked(config) if public else config.rounds
    multiplier = given.noise
    if given.epsilon and secret:
        multiplier = sampled_gaussian.multiplier_for(rate, releases, given.epsilon, given.delta)
    elif given.epsilon:  # Gaussian releases are together as telling as one of the root of their sum
        multiplier = calibrate(given.epsilon, given.delta) * math.sqrt(releases)
    return Promise(given.clip, multiplier, given.delta, rate, releases)


def joint_norm(arrays: Arrays) -> float:
    """Return the L2 norm of all arrays together, in float64."""
    return math.hypot(*(float(np.linalg.norm(np.asarray(a, np.float64))) for a in arrays.values()))


def clipped(arrays: Arrays, bound: float) -> dict[str, NDArray[np.float64]]:
    """Shorten arrays to a joint norm of ``bound``; shorter ones stay as they are.

    >>> clipped({"a": np.array([3.0]), "b": np.array([4.0])}, 1.0)["b"].round(6)
    array([0.8])
    """
    norm = joint_norm(arrays)
    factor = min(1.0, bound / norm) if norm > 0 else 1.0
    return {name: factor * np.asarray(array, np.float64) for name, array in arrays.items()}


def with_noise(arrays: Arrays, sigma: float, stream: Stream) -> dict[str, NDArray[np.float64]]:
    """Add independent Gaussian noise to every number, array by array in sorted order of names.

    Parameters
    ----------
    stream
        Of a fresh secret key; whoever knows it takes the noise off again.
    """
    made = {}
    for name in sorted(arrays):
        plain = np.asarray(arrays[name], np.float64)
        made[name] = plain + sigma * stream.normals(plain.size).reshape(plain.shape)
    return made


def longest_sum(parties: int, clip: float, sigma: float, numbers: int) -> float:
    """Return a length that an honest sum does not exceed but with probability 2e-11.

    The norm of ``n`` normal numbers is above ``sqrt(n) + t`` with probability ``exp(-t^2 / 2)``.
    """
    return parties * clip + sigma * (math.sqrt(numbers) + 7.0)

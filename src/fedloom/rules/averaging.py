# SPDX-License-Identifier: Apache-2.0
"""Weighted averaging of updates, FedNL eq. (6): ``theta = sum_k N_k / N theta_k``.

The mean's step away from the round's start may also feed a server optimiser, as a gradient would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.wire import Arrays, Update

Rate = float | Mapping[str, float]
"""One for all arrays, or by their names."""


def total(updates: Iterable[Update]) -> Update:
    """Add updates one at a time; memory does not grow with their number.

    Raises
    ------
    ValueError
        If there is none, or they are not of one adapter.
    """
    stream = iter(updates)
    try:
        running = next(stream)
    except StopIteration:
        raise ValueError("no update came: there is nothing to add") from None
    for update in stream:
        running = running + update
    return running


def mean(updates: Iterable[Update], like: Arrays) -> dict[str, NDArray[Any]]:
    """Average updates by weight, in float64 with compensation, and round once to ``like``'s dtypes.

    >>> like = {"w": np.zeros(1, np.float32)}
    >>> mean([Update.of({"w": np.float32([0.0])}, 1), Update.of({"w": np.float32([4.0])}, 3)], like)
    {'w': array([3.], dtype=float32)}
    """
    averaged = total(updates).mean()
    return {name: averaged[name].astype(like[name].dtype) for name in like}


def momentum(
    start: Arrays, averaged: Arrays, velocity: Arrays | None, factor: float, rate: Rate = 1.0
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.float64]]]:
    """Take a server step with momentum (FedAvgM, arXiv 1909.06335): ``v <- factor v + d``.

    ``d`` is the mean's step away from the round's start; the new arrays are ``start + rate v``.

    Returns
    -------
    dict
        The new arrays.
    dict
        The velocity, to be given to the next round.
    """
    fresh, kept = {}, {}
    for name, mean_array in averaged.items():
        before, step = _step(start[name], mean_array)
        kept[name] = step + factor * velocity[name] if velocity is not None else step
        fresh[name] = (before + _rate_of(name, rate) * kept[name]).astype(mean_array.dtype)
    return fresh, kept


@dataclass(frozen=True)
class Moments:
    """FedAdam's running means of the steps and of their squares."""

    first: dict[str, NDArray[np.float64]]
    second: dict[str, NDArray[np.float64]]


def adam(
    start: Arrays,
    averaged: Arrays,
    moments: Moments | None,
    *,
    rate: Rate,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
) -> tuple[dict[str, NDArray[Any]], Moments]:
    """Take a server step with FedAdam (arXiv 2003.00295, Algorithm 2; no bias correction).

    ``m <- b1 m + (1 - b1) d``, ``v <- b2 v + (1 - b2) d^2``, ``start + rate m / (sqrt(v) + tau)``,
    from ``m = 0`` and ``v = tau^2``; ``d`` is the mean's step away from the round's start.

    Returns
    -------
    dict
        The new arrays.
    Moments
        To be given to the next round.
    """
    fresh: dict[str, NDArray[Any]] = {}
    first: dict[str, NDArray[np.float64]] = {}
    second: dict[str, NDArray[np.float64]] = {}
    for name, mean_array in averaged.items():
        before, step = _step(start[name], mean_array)
        m = moments.first[name] if moments is not None else np.zeros_like(step)
        v = moments.second[name] if moments is not None else np.full_like(step, tau**2)
        first[name] = beta1 * m + (1 - beta1) * step
        second[name] = beta2 * v + (1 - beta2) * np.square(step)
        moved = before + _rate_of(name, rate) * first[name] / (np.sqrt(second[name]) + tau)
        fresh[name] = moved.astype(mean_array.dtype)
    return fresh, Moments(first, second)


def _rate_of(name: str, rate: Rate) -> float:
    return rate[name] if isinstance(rate, Mapping) else rate


def _step(
    start: NDArray[Any], averaged: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    before = np.asarray(start, np.float64)
    return before, np.asarray(averaged, np.float64) - before

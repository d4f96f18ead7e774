# SPDX-License-Identifier: Apache-2.0
"""Weighted averaging of updates, FedNL eq. (6): ``theta = sum_k N_k / N theta_k``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.wire import Arrays, Update


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
    start: Arrays, averaged: Arrays, velocity: Arrays | None, factor: float
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.float64]]]:
    """Take a server step with momentum (FedAvgM, arXiv 1909.06335): ``v <- factor v + d``.

    ``d`` is the mean's step away from the round's start.

    Returns
    -------
    dict
        The new arrays.
    dict
        The velocity, to be given to the next round.
    """
    fresh, kept = {}, {}
    for name, mean_array in averaged.items():
        before = np.asarray(start[name], np.float64)
        step = np.asarray(mean_array, np.float64) - before
        kept[name] = step + factor * velocity[name] if velocity is not None else step
        fresh[name] = (before + kept[name]).astype(mean_array.dtype)
    return fresh, kept

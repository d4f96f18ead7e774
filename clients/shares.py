# SPDX-License-Identifier: Apache-2.0
"""How a FAAST client gives its sums away: the only place where they leave it.

Noise first, then masks: what is under the masks is what anybody may see of this client's part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from fedloom import ciphers
from fedloom.ciphers import Source
from fedloom.clients.secure import finishers, masked
from fedloom.config import FaastConfig
from fedloom.rules.exact import rounded
from fedloom.rules.private import client_sigma, fresh, noisy
from fedloom.rules.shares import COUNT, Noise
from fedloom.rules.statistics import CROSS, GRAM, Gram


def own_sums(given: FaastConfig, keys: NDArray[Any], values: NDArray[Any]) -> Gram:
    """Sum over rows, each within the bounds that noise is sized for if there is any."""
    if not given.private:
        gram = Gram.of(keys, values)
        return rounded(gram, given.exact_bits) if given.exact_bits else gram
    noise = Noise.of(given)
    return noise.bounded(noise.bounds.gram(keys, values))


def sums_to_send(
    gram: Gram,
    given: FaastConfig,
    context: Context,
    config: Mapping[str, Any],
    source: Source = ciphers.system,
) -> dict[str, NDArray[Any]]:
    """Turn sums into the arrays of a reply, in the recipe's mode and no other.

    Parameters
    ----------
    gram
        What ``own_sums`` returned.
    config
        What came with the message; under masks, the letters of the other clients.
    source
        Of the noise's key: the system's generator, or whoever knows the seed takes the noise off.
    """
    arrays: dict[str, NDArray[Any]] = dict(gram.arrays())
    if given.private:
        noise = Noise.of(given)
        parties = finishers(context, config) if given.masked else 1
        bounds = noise.bounds if noise.client_bound is None else None  # shrunk sums have no count
        drawn = noisy(gram, client_sigma(noise.sigma, parties), fresh(source), bounds)
        arrays = {GRAM: drawn.packed, CROSS: drawn.cross}
    elif given.masked:
        arrays[COUNT] = np.array([float(gram.count)])
    return dict(masked(context, config, arrays)) if given.masked else arrays

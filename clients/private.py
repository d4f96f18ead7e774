# SPDX-License-Identifier: Apache-2.0
"""How a client's update leaves it under ``privacy``: the only place where it does.

What was changed is clipped, then noise is added, then masks: what is under the masks is what
anybody may see of this client's part.
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
from fedloom.config import RunConfig
from fedloom.rules.private import client_sigma, fresh
from fedloom.rules.releases import Promise, clipped, with_noise
from fedloom.secure.sums import LOSS, WEIGHT
from fedloom.wire import Arrays


def update_to_send(
    config: RunConfig,
    context: Context,
    told: Mapping[str, Any],
    start: Arrays,
    trained: Arrays,
    *,
    examples: int,
    loss: float,
    source: Source = ciphers.system,
) -> dict[str, NDArray[Any]]:
    """Turn trained arrays into those of a reply, in the recipe's way and no other.

    Parameters
    ----------
    told
        What came with the message; under masks, the letters of the other clients.
    start
        The arrays that came; what was changed is the difference.
    trained
        What would be sent without privacy.
    examples, loss
        This client's rows and mean loss: under masks without clipping they are summed, too, and
        otherwise they stay at home.
    source
        Of the noise's key: the system's generator, or whoever knows the seed takes the noise off.
    """
    given, promise = config.privacy, Promise.of(config)
    moved = {n: np.asarray(a, np.float64) - start[n] for n, a in trained.items()}
    if not given.masks:
        # Rounded to the adapter's dtype the update is still within the bound.
        spare = max(float(np.finfo(array.dtype).eps) for array in trained.values())
        short = clipped(moved, given.clip * (1.0 - spare))
        return {name: short[name].astype(array.dtype) for name, array in trained.items()}
    if not given.clip:
        sums = {name: examples * array for name, array in moved.items()}
        sums |= {WEIGHT: np.array([float(examples)]), LOSS: np.array([examples * loss])}
        return dict(masked(context, told, sums))
    sums = clipped(moved, given.clip)
    if promise.sigma:
        part = client_sigma(promise.sigma, finishers(context, told))
        sums = with_noise(sums, part, fresh(source))
    return dict(masked(context, told, sums))

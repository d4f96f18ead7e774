# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what rounding left of one update is added to the next one's (arXiv 1901.09847).

Kept by run and partition on the client's own disk, as its other state is.  The server restores
``start + decoded`` with one rounding to float32, and so does the client, to know what is left: over
any number of rounds the restored changes add up to the true ones, but for the last one's rest.
An update that was sent and lost is lost with its rounding, as it would be in full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom.local.home import Home
from fedloom.rounding import moved, rounded
from fedloom.rules.controls import CONTROL
from fedloom.wire import Arrays

_LEFT = "rounding"


def changes(
    trained: Arrays, received: Arrays, code: str, home: Home, server_round: int
) -> dict[str, NDArray[np.float32]]:
    """Return what is to be written in ``code``: changes since ``received``, and what was left.

    A control is a move already, and so is what was not received under its name.
    """
    earlier: dict[str, NDArray[Any]] = home.find(_LEFT, server_round) or {}
    sent, left = {}, dict(earlier)
    for name, array in trained.items():
        start = None if name.startswith(CONTROL) else received.get(name)
        wanted = array + earlier.get(name, np.zeros((), np.float32)).astype(np.float64)
        change = wanted if start is None else wanted - np.asarray(start, np.float64)
        sent[name] = change.astype(np.float32)
        left[name] = (wanted - moved(start, rounded(sent[name], code))).astype(np.float32)
    home.keep(_LEFT, left, server_round)
    return sent

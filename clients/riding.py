# SPDX-License-Identifier: Apache-2.0
"""Score what a training message brought before training from it, if the message says so.

A client's ``evaluate`` is given what a message of its own would have given it: the same arrays and
the same words.  So whatever it does there, under any method, comes out as it would have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fedloom import border
from fedloom.rules import without_controls
from fedloom.wire import Arrays

_LOG = logging.getLogger(__name__)


def apart(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what training is told and what scoring is told; the latter is empty if none is asked.

    Scoring is told what training is, but for what stands under the prefix.

    >>> apart({"round": 3, "run": "f0", "before-round": 2})
    ({'round': 3, 'run': 'f0'}, {'round': 2, 'run': 'f0'})
    """
    begins = border.BEFORE
    training = {key: value for key, value in config.items() if not key.startswith(begins)}
    own = {k.removeprefix(begins): v for k, v in config.items() if k.startswith(begins)}
    return training, {**training, **own} if own else {}


def scores(
    score: Callable[[Arrays], dict[str, Any]], arrays: Arrays, config: dict[str, Any]
) -> dict[str, Any]:
    """Return what to send of scores beside training's metrics.

    Where scoring fails there are none, as if a message of its own had failed: the server names the
    client, and what it trains counts all the same.

    Parameters
    ----------
    score
        Gives a client's ``evaluate`` arrays, and returns its metrics.
    arrays
        What came; of the frozen model none are scored, and controls never.
    """
    held: Arrays = {} if config.get("frozen") else without_controls(arrays)
    try:
        return {border.BEFORE + name: value for name, value in score(held).items()}
    except Exception as error:
        _LOG.error("what came could not be scored; training goes on", exc_info=error)
        return {}

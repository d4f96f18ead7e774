# SPDX-License-Identifier: Apache-2.0
"""The loop over rounds, which may begin after any whole one.

Flower's ``Strategy.start`` always counts from round 1 and says nothing between rounds, so a run
that goes on, or that keeps what it has after each round, cannot use it.  This loop asks a strategy
the same four questions in the same order: configure, aggregate, for training and then for scores.
"""

from __future__ import annotations

from collections.abc import Callable
from logging import INFO

from flwr.app import ArrayRecord, ConfigRecord
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy


def score_alone(
    strategy: Strategy,
    grid: Grid,
    arrays: ArrayRecord,
    *,
    after: int,
    rounds: int,
    whole: Callable[[int, ArrayRecord], None],
) -> Result:
    """Score the start where the last round's adapter would be: nobody trains."""
    result = Result()
    result.arrays = arrays
    if after < rounds:
        messages = strategy.configure_evaluate(rounds, arrays, ConfigRecord(), grid)
        strategy.aggregate_evaluate(rounds, grid.send_and_receive(messages))
        whole(rounds, arrays)
    return result


def run_rounds(
    strategy: Strategy,
    grid: Grid,
    arrays: ArrayRecord,
    *,
    after: int,
    rounds: int,
    timeout: float,
    whole: Callable[[int, ArrayRecord], None],
) -> Result:
    """Carry out rounds ``after + 1`` to ``rounds``.

    Parameters
    ----------
    arrays
        The global state after round ``after``.
    timeout
        How long a round's replies may take, in seconds.
    whole
        Told of each round, with the global state after it, when its scores are in or nothing but
        the next round's training will bring them.
    """
    result = Result()
    result.arrays = arrays
    for server_round in range(after + 1, rounds + 1):
        log(INFO, "[ROUND %s/%s]", server_round, rounds)
        asked = strategy.configure_train(server_round, result.arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages=asked, timeout=timeout)
        made, metrics = strategy.aggregate_train(server_round, replies)
        if made is not None:
            result.arrays = made
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        asked = strategy.configure_evaluate(server_round, result.arrays, ConfigRecord(), grid)
        replies = grid.send_and_receive(messages=asked, timeout=timeout)
        scores = strategy.aggregate_evaluate(server_round, replies)
        if scores is not None:
            result.evaluate_metrics_clientapp[server_round] = scores
        whole(server_round, result.arrays)
    return result

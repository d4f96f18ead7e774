# SPDX-License-Identifier: Apache-2.0
"""How much a client does in a round: it follows from its rows and the recipe, at both ends.

The client works by these numbers, and the server works them out again from the roll call, so that
nobody's own word about a round decides how far it may move the adapter.
"""

from __future__ import annotations

import math

from fedloom.config import RunConfig, TrainConfig


def steps_of(examples: int, config: TrainConfig) -> int:
    """Count the optimiser steps that a client with so many examples takes in a round.

    >>> steps_of(9, TrainConfig(batch_size=4)), steps_of(9, TrainConfig(max_steps=2))
    (3, 2)
    """
    return config.max_steps or config.epochs * math.ceil(examples / config.batch_size)


def lessons_of(rows: int, train: TrainConfig, rounds: int, server_round: int) -> tuple[int, int]:
    """Return which of a client's rows a round learns from, first and end, in its order.

    All of them, or the curriculum's share: never none where there are rows.

    >>> lessons_of(9, TrainConfig(), 3, 2), lessons_of(9, TrainConfig(curriculum=True), 3, 2)
    ((0, 9), (3, 6))
    """
    if not train.curriculum or server_round > rounds:
        return 0, rows
    stages = train.curriculum_stages or rounds
    stage = (server_round - 1) * stages // rounds
    first, end = ((stage + n) * rows // stages for n in (0, 1))
    return first, max(end, min(first + 1, rows))


def round_steps(config: RunConfig, rows: int, server_round: int) -> int:
    """Return how many optimiser steps a client with so many training rows takes in a round."""
    first, end = lessons_of(rows, config.train, config.rounds, server_round)
    return steps_of(end - first, config.train)


def reach(config: RunConfig, partition: int, rows: int, server_round: int) -> float:
    """Return how far a round's work can take a client's adapter, in a unit that all share.

    Each of AdamW's steps moves every number by about the rate, so a change is at most about rate
    times steps times the root of how many numbers are trained, and those grow with the rank.  An
    SGD step moves them by rate times gradient, which grows with the client's scale as well.
    Honest changes come to less: steps do not all go one way.
    """
    root = math.sqrt(config.lora.rank_of(partition)) if config.share == "all" else 1.0
    if config.share == "all" and config.train.optimizer == "sgd":
        root *= config.lora.scale_of(partition)
    return round_steps(config, rows, server_round) * root

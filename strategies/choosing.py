# SPDX-License-Identifier: Apache-2.0
"""Which strategy a recipe means: its method's, or a user's own that is installed on this server."""

from __future__ import annotations

from collections.abc import Mapping

from fedloom import border
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.references import named_class
from fedloom.strategies.adapter_strategy import AdapterStrategy

SOLVING = "fedrefine-solve"
"""FedRefine's other half: making a fuser."""


def strategy_of(
    config: RunConfig, methods: Mapping[str, type[AdapterStrategy]]
) -> type[AdapterStrategy]:
    """Return the class that a recipe names, or its method's.

    Raises
    ------
    Refusal
        If it cannot be had, sends messages that no client answers, or one of its ``own_keys`` has
        a value of another type.
    """
    if not config.strategy:
        solving = config.method == "fedrefine" and config.refine.solve
        return methods[SOLVING if solving else config.method]
    base, pushed = AdapterStrategy, border.pushed_folders()
    found = named_class("strategy", config.strategy, base, pushed)  # type: ignore[type-abstract]
    if found.action not in ("default", config.method):
        raise Refusal(
            f'strategy = "{config.strategy}" has action = "{found.action}": no client answers that;'
            f' take "{config.method}", or leave it out'
        )
    config.custom.over(found.own_keys)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Which class does ``local.method``, and what travels under it."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from fedloom.config import RunConfig
from fedloom.local.ala import FedALA
from fedloom.local.personal import Ditto, FineTune
from fedloom.local.scaffold import Scaffold
from fedloom.local.ssi import FedSSI
from fedloom.local.work import Plain
from fedloom.rules.exchange import is_memory_array, travels
from fedloom.wire import Arrays

METHODS: dict[str, type[Plain]] = {
    "plain": Plain,
    "none": Plain,  # its strategy asks nobody to train
    "pooled": Plain,  # its strategy asks one client, for all
    "fine-tune": FineTune,
    "scaffold": Scaffold,
    "ditto": Ditto,
    "fedala": FedALA,
    "fedssi": FedSSI,
}


def method_of(config: RunConfig) -> Plain:
    """Return the method for one message."""
    return METHODS[config.local.method]()


def travelling(config: RunConfig, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """Return what is sent of an adapter that holds ``arrays``, and what starts beside it."""
    sent = {n: array for n, array in arrays.items() if _is_shared(config, n)}
    return {**sent, **method_of(config).beside(sent)}


def _is_shared(config: RunConfig, name: str) -> bool:
    if config.share == "memory":
        return is_memory_array(name)
    return config.share == "all" and travels(config, name)

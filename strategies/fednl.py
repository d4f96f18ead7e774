# SPDX-License-Identifier: Apache-2.0
"""FedNL: average what is slow; what is fast stays at home (arXiv 2605.16350, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import rules
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.wire import Arrays, Update


class FedNL(AdapterStrategy):
    """Average LoRA and memory gates by example count, eq. (6): ``theta = sum_k N_k / N theta_k``.

    ``A`` and ``B`` of each LoRA pair are averaged separately, as the paper writes it; how far that
    is from averaging their products stands in each round's event as ``agg-error``.  The memory
    state is rebuilt from zero for every sequence on the node; it is never in a message.
    """

    action = "fednl"  # served by fedloom.clients.fednl
    _velocity: dict[str, NDArray[np.float64]] | None = None

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Average the replies; with ``server.momentum`` the server steps along their mean."""
        gap = rules.ProductGap(self.config.seed)
        averaged = rules.mean(gap.watch(updates), sent)
        self.round_facts["agg-error"] = gap.relative()
        factor = self.config.server.momentum
        if not factor:
            return averaged
        fresh, self._velocity = rules.momentum(sent, averaged, self._velocity, factor)
        return fresh

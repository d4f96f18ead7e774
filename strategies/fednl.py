# SPDX-License-Identifier: Apache-2.0
"""FedNL: average what is slow; what is fast stays at home (arXiv 2605.16350, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from fedloom import rules
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.server_step import ServerStep
from fedloom.wire import Arrays, Update


class FedNL(AdapterStrategy):
    """Average LoRA and memory gates by example count, eq. (6): ``theta = sum_k N_k / N theta_k``.

    ``A`` and ``B`` of each LoRA pair are averaged separately, as the paper writes it; how far that
    is from averaging their products stands in each round's event as ``agg-error``.  With
    ``server.rule = "svd"`` the products are averaged and the nearest adapter of the same rank is
    sent back; what the cut lost is ``truncation-error``.  The memory state is rebuilt from zero
    for every sequence on the node; it is never in a message.
    """

    action = "fednl"  # served by fedloom.clients.fednl
    _step: ServerStep | None = None

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Average the replies; with a server optimiser the server steps along their mean."""
        gap = rules.ProductGap(self.config.seed)
        watched = gap.watch(updates)
        if self.config.server.rule == "svd" and any(".lora_A." in name for name in sent):
            made = self._nearest(watched, sent)
        else:
            made = self._mean(watched, sent)
        self.round_facts["agg-error"] = gap.relative()
        return made

    def _mean(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        averaged = rules.mean(updates, sent)
        if self._step is None:
            self._step = ServerStep(self.config.server)
        return self._step.step(sent, averaged)

    def _nearest(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Take the adapter nearest to the mean of products; it holds all factors of a round."""
        lora = self.config.lora
        scale = lora.alpha / lora.rank
        contributions = (
            rules.LowRankUpdate(_as_trained(update, sent), update.weight, scale, update.origin)
            for update in updates
        )
        # Directions that nobody used keep the sent A, or no gradient would ever reach them again.
        made, cut = rules.svd_refactor(contributions, lora.rank, scale, fill=sent)
        self.round_facts["truncation-error"] = cut.error
        return {name: made.arrays[name].astype(sent[name].dtype) for name in sent}


def _as_trained(update: Update, sent: Arrays) -> dict[str, NDArray[Any]]:
    """Return a single contribution's arrays: a whole weight goes out as exactly as it came in."""
    return {name: array.astype(sent[name].dtype) for name, array in update.mean().items()}

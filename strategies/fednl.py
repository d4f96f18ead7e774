# SPDX-License-Identifier: Apache-2.0
"""FedNL: average what is slow; what is fast stays at home (arXiv 2605.16350, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord
from numpy.typing import NDArray

from fedloom import border, rules
from fedloom.strategies import factor_rules
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.server_step import ServerStep
from fedloom.wire import Arrays, Manifest, Update


class FedNL(AdapterStrategy):
    """Average LoRA and memory gates by example count, eq. (6): ``theta = sum_k N_k / N theta_k``.

    The paper averages ``A`` and ``B`` of each LoRA pair apart, which is ``server.rule = "mean"``.
    By default what they do is averaged, ``sum_k w_k s_k B_k A_k``, and the nearest adapter of the
    same rank is sent back; other rules are in ``factor_rules``.  Each round's event tells how far
    the rule was from that sum as ``agg-error``.  The memory state is rebuilt from zero for every
    sequence on the node; it is never in a message.
    """

    action = "fednl"  # served by fedloom.clients.fednl
    _step: ServerStep | None = None

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Fold by ``server.rule``; with a server optimiser the server steps along the mean."""
        made, facts = factor_rules.fold(self.config, self.server_round, updates, sent)
        self.round_facts.update(facts)
        if self.config.server.rule != "mean":
            return made
        if self._step is None:
            self._step = ServerStep(self.config.server)
        return self._step.step(sent, made)

    def for_client(self, partition: int, state: ArrayRecord) -> ArrayRecord:
        """Choose what the rule sends; a client of a smaller rank gets LoRA cut to it."""
        exchange = rules.Exchange(self.config, self.manifest)
        if exchange.whole_rank(partition):
            return ArrayRecord({name: state[name] for name in exchange.names_down(state)})
        return border.pack_arrays(exchange.down(partition, border.unpack_arrays(state)))

    def sent_to(self, partition: int) -> Arrays:
        """Return what ``for_client`` made for a client in this round, as arrays."""
        exchange = rules.Exchange(self.config, self.manifest)
        if exchange.whole_rank(partition):
            return {name: self._sent[name] for name in exchange.names_down(self._sent)}
        return exchange.down(partition, self._sent)

    def expected_reply(self, server_round: int, partition: int) -> Manifest:
        """Return what the rule lets this client send."""
        return rules.Exchange(self.config, self.manifest).expected(server_round, partition)

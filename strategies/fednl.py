# SPDX-License-Identifier: Apache-2.0
"""FedNL: average what is slow; what is fast stays at home (arXiv 2605.16350, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedloom import border, rules
from fedloom.strategies import factor_rules
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.checkpoint import Checkpoint, Torn
from fedloom.strategies.private_mean import PrivateMean
from fedloom.strategies.roster import ReplyStream
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

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._step = self.parts["server-step"] = ServerStep(self.config.server)
        self.private: PrivateMean | None = None
        if self.config.privacy.on:
            self.train_metrics = ()  # a client's own loss would tell what its update hides
            self.private = PrivateMean(self.config, self.roster, self.run_token, self.journal)
            self.parts["privacy"] = self.private

    def resume(self, held: Checkpoint | None, torn: Iterable[Torn]) -> None:
        """Go on, after counting what clients gave away in rounds that will be repeated."""
        super().resume(held, torn)
        if self.private is not None:
            for rounds in torn:
                self.private.count_torn(rounds)

    def draw(self, server_round: int) -> list[int]:
        """Return whom a round asks; masks need an exchange of keys first."""
        drawn = super().draw(server_round)
        if self.private is None:
            return drawn
        assert isinstance(self._grid, ReplyStream)
        return self.private.begin(self._grid, server_round, drawn)

    def told_apart(self, partition: int) -> Mapping[str, Any]:
        """Return a client's letters, where masks need them."""
        return {} if self.private is None else self.private.told(partition)

    def read_update(self, server_round: int, partition: int, records: RecordDict) -> Update:
        """Read a reply; under ``privacy`` it holds changes, clipped or masked, and no arrays."""
        if self.private is None:
            return super().read_update(server_round, partition, records)
        arrays = border.arrays_of(records)
        self.expected_reply(server_round, partition).check_arrays(arrays)
        border.checked_metrics(records)
        return self.private.read(partition, arrays)

    def admit(
        self, server_round: int, partition: int, update: Update, metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Hold a change against the gate; under ``privacy`` it has its own bound, or none shows."""
        if self.private is None:
            return super().admit(server_round, partition, update, metrics)
        return {}

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Fold by ``server.rule``; with a server optimiser the server steps along the mean."""
        if self.private is not None:
            self.private.fold(updates)
            return dict(sent)  # ``settle`` moves it, also where nobody was drawn
        made, facts = factor_rules.fold(self.config, self.server_round, updates, sent)
        self.round_facts.update(facts)
        return self._stepped(sent, made)

    def _stepped(self, start: Arrays, made: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        if self.config.server.rule != "mean":
            return made
        return self._step.step(start, made, self.server_round, self.config.rounds)

    def usable(self, come: int) -> int:
        """Count good replies; where clients are drawn in secret, a round of noise is one, too."""
        return max(come, 1) if self.private is not None and self.private.secret else come

    def settle(self, server_round: int, folded: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Return the fold; under ``privacy`` the state after a step along the private mean."""
        if self.private is None:
            return folded
        names = rules.Exchange(self.config, self.manifest).expected(server_round, 0).arrays
        start = {name: self._sent[name] for name in names}
        moved = self.private.step(start)
        self._train_loss = self.private.train_loss
        self.round_facts |= self.private.facts()
        self.private.tell(server_round)
        return {**folded, **self._stepped(start, moved)}

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
        expected = rules.Exchange(self.config, self.manifest).expected(server_round, partition)
        return expected if self.private is None else self.private.expected(expected)

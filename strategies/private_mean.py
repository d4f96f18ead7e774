# SPDX-License-Identifier: Apache-2.0
"""The mean of clients' changes that a server learns under masks, with noise, or with both.

Under ``privacy`` clients do not send their arrays but what they changed: weighted and masked, or
cut to ``privacy.clip``.  Every rule that is a weighted mean needs their sum and nothing else, so
one class serves them all; ``fedloom.clients.private`` is the other half.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import ciphers
from fedloom.ciphers import Source, Stream
from fedloom.config import RunConfig
from fedloom.errors import Refusal
from fedloom.rules.fixed_point import rounding_bound
from fedloom.rules.private import client_sigma, fresh
from fedloom.rules.releases import Promise, joint_norm, longest_sum, with_noise
from fedloom.secure.sums import LOSS, WEIGHT, masked_listing
from fedloom.strategies.checkpoint import State, Torn
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.secure_sum import SecureSum
from fedloom.wire import Arrays, Manifest, Update

_EXTRA = (WEIGHT, LOSS)


class PrivateMean:
    """One run's rounds: whom to ask, what their replies come to, and what it has cost so far.

    Parameters
    ----------
    config : RunConfig
        Its ``privacy`` part says what is hidden.
    run : str
        The run's token, to which masks are bound.
    source : callable
        Of the noise's keys and of secret samples: the system's generator, but for tests.
    """

    def __init__(
        self,
        config: RunConfig,
        roster: Roster,
        run: str,
        journal: Journal,
        source: Source = ciphers.system,
    ) -> None:
        given = self.given = config.privacy
        self.config, self.roster, self.journal, self._source = config, roster, journal, source
        self.promise = Promise.of(config)
        self._sum: SecureSum | None = None
        if given.masks:
            seconds = config.sampling.reply_seconds
            self._sum = SecureSum(
                roster, run, journal, threshold=given.threshold, bits=given.bits, seconds=seconds
            )
        self._asked: Counter[int] = Counter()  # partition -> rounds that it pays for
        self._by = 1.0  # what this round's sum is divided by: rows, or clients where all weigh one
        self._parties = 0
        self._total: Update | None = None
        self._lost: dict[int, str] = {}
        self.train_loss: float | None = None

    @property
    def secret(self) -> bool:
        """Whether the server draws clients by chance that nobody can repeat."""
        return self.given.sampling == "secret"

    def state(self) -> State:
        """Return who has paid for how many rounds, those that a crash tore among them."""
        return State({}, {"asked": {str(p): n for p, n in sorted(self._asked.items())}})

    def restore(self, state: State) -> None:
        """Take up the books of an earlier process."""
        self._asked = Counter({int(p): int(n) for p, n in state.tree["asked"].items()})

    def count_torn(self, rounds: Torn) -> None:
        """Count what clients gave away in rounds that a crash tore and that will be repeated.

        Raises
        ------
        Refusal
            If clients had been asked to open a sum under masks.
        """
        rounds.check_masks()
        for asked in rounds.values():  # under masks too, though nobody has seen their sum
            self._asked.update(self.roster.partitions if self.secret else asked)

    def begin(self, grid: ReplyStream, server_round: int, drawn: list[int]) -> list[int]:
        """Return whom to ask, of those whom the seed has drawn.

        Raises
        ------
        Refusal
            If masks need more clients than answer, or ``privacy.epsilon`` pays for no more rounds.
        """
        self._total, self._lost = None, {}
        paying = self.roster.partitions if self.secret else drawn
        if self.given.epsilon:
            paying = [p for p in paying if self._asked[p] < self.promise.releases]
            if not paying:
                raise Refusal(
                    f"round {server_round}: all who were drawn have been asked in the"
                    f" {self.promise.releases} rounds that privacy.epsilon = {self.given.epsilon:g}"
                    " pays for, and one that a crash tore is paid for too; the run ends here, with"
                    " the adapter of its last whole round"
                )
        self._asked.update(paying)
        if self.secret:
            drawn = self._drawn_in_secret()
            self._by = self.config.sampling.fraction * len(self.roster.nodes)
        else:
            drawn, self._by = paying, float(len(paying))
        return drawn if self._sum is None else self._sum.begin(grid, server_round, drawn)

    def _drawn_in_secret(self) -> list[int]:
        words = Stream(self._source(ciphers.KEY_BYTES)).words(len(self.roster.nodes))
        below = self.config.sampling.fraction * 2.0**64
        return [p for p, word in zip(self.roster.partitions, words, strict=True) if word < below]

    def told(self, partition: int) -> Mapping[str, Any]:
        """Return what one client's message says besides."""
        return self._sum.told(partition) if self._sum is not None else {}

    def expected(self, manifest: Manifest) -> Manifest:
        """Return what a reply is held against, given what a reply without privacy would be."""
        if self._sum is None:
            return manifest
        extra = () if self.given.clip else _EXTRA
        return replace(manifest, arrays=masked_listing(manifest.arrays, extra))

    def read(self, partition: int, arrays: Arrays) -> Update:
        """Take a reply's arrays; a ``Refusal`` says why they cannot be in the mean."""
        if self._sum is not None:
            self._sum.take(partition, arrays)
            return Update.summed({}, 1.0, partition)  # what it brought shows in the sum alone
        if (norm := joint_norm(arrays)) > self.promise.clip:
            raise Refusal(
                f"client {partition}: an update of length {norm:.6g} came, at most privacy.clip ="
                f" {self.promise.clip:g} was agreed on; it was left out"
            )
        return Update.of(arrays, 1.0, partition)

    def fold(self, updates: Iterable[Update]) -> None:
        """Add the round's replies; under masks ask for what takes them off the sum.

        Raises
        ------
        Refusal
            If fewer clients than the threshold stayed, or the sum cannot be one of honest clients.
        """
        for update in updates:
            if self._sum is None:
                self._total = update if self._total is None else self._total + update
        if self._sum is not None:
            found = self._sum.finish()
            self._lost = found.lost
            self._parties = len(found.partitions)
            self._total = self._checked(found.arrays)

    def _checked(self, sums: Mapping[str, NDArray[Any]]) -> Update:
        """Hold a sum of masked numbers against what honest clients can have sent."""
        parties = self._parties
        rest = {name: array for name, array in sums.items() if name not in _EXTRA}
        if self.given.clip:
            numbers = sum(array.size for array in rest.values())
            most = longest_sum(parties, self.promise.clip, self._sigma(), numbers)
            # Fixed point may lengthen the sum by half a step for each number and client.
            most += rounding_bound(parties, self.given.bits) * math.sqrt(numbers)
            if (norm := joint_norm(rest)) > most:
                raise Refusal(
                    f"the sum of {parties} clients is {norm:.3g} long, {most:.3g} is the most that"
                    f" privacy.clip = {self.promise.clip:g} allows: one of them has not clipped;"
                    " masks hide which, start a new run without it"
                )
            return Update.summed(rest, float(parties))
        weight, loss = float(sums[WEIGHT][0]), float(sums[LOSS][0])
        if weight < parties or weight != round(weight):
            raise Refusal(
                f"the weights of {parties} clients add up to {weight:g}: expected a whole number of"
                " rows, one a client at least; one of them sent a false weight"
            )
        self.train_loss, self._by = loss / weight, weight
        return Update.summed(rest, weight)

    def _sigma(self) -> float:
        """Return the noise on this round's sum: the server's, or the clients' together."""
        if self._sum is None or not self.promise.sigma:
            return self.promise.sigma
        return client_sigma(self.promise.sigma, self._sum.needed) * math.sqrt(self._parties)

    def step(self, start: Arrays) -> dict[str, NDArray[Any]]:
        """Return the round's mean as new arrays: ``start``, and what was changed.

        Noise that is the server's is added here, also where no client was drawn or came.
        """
        if self._total is None:
            sums = {name: np.zeros(array.shape) for name, array in start.items()}
        else:
            sums = self._total.whole()
        if self._sum is None and self.promise.sigma:
            sums = with_noise(sums, self.promise.sigma, fresh(self._source))
        return {
            name: (np.asarray(start[name], np.float64) + array / self._by).astype(start[name].dtype)
            for name, array in sums.items()
        }

    def facts(self) -> dict[str, float]:
        """Return what the round's event tells: what masks rounded off, and what was spent."""
        told: dict[str, float] = {}
        if self._sum is not None:
            told["mask-error"] = rounding_bound(self._parties, self.given.bits) / self._by
        if self.promise.multiplier:
            told["noise-sigma"] = self._sigma() / self._by
            told["epsilon-spent"] = self.promise.epsilon(self._most())
            told["delta"] = self.promise.delta
        return told

    def _most(self) -> int:
        return max(self._asked.values(), default=0)

    def tell(self, server_round: int) -> None:
        """Write down what the server saw of this round, and at what price."""
        told: dict[str, Any] = {"seen": self._seen(), "rule": self.config.server.rule}
        told |= {"clip": self.promise.clip, **self.facts()}
        if self._sum is not None:
            told |= {"threshold": self._sum.needed, "bits": self.given.bits}
            told |= {"lost": {str(p): why for p, why in sorted(self._lost.items())}}
        if self.promise.multiplier:
            told |= {"multiplier": self.promise.multiplier, "releases": self._most()}
            told |= {"sampling": self.given.sampling, "rate": self.promise.rate}
        self.journal.event("privacy", round=server_round, **told)
        if self.secret:
            self.journal.sync()  # where chance drew nobody, nothing else says that it was drawn

    def _seen(self) -> str:
        noisy = self.promise.multiplier > 0
        if self._sum is None:
            then = "; noise is added to their sum before it is used" if noisy else ""
            return f"each client's clipped update{then}"
        noise = " with noise on it" if noisy else ""
        return f"the sum of the clients' updates{noise}, and of each client words that are uniform"

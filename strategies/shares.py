# SPDX-License-Identifier: Apache-2.0
"""How clients' sums reach FAAST's server: as they are, under masks, with noise, or with both.

``faast.shares`` names the mode.  What a mode hides is hidden by the clients; this is the half that
reads what is left, and keeps the books of who was in, who was lost, and what was spent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message

from fedloom import border
from fedloom.config import RunConfig
from fedloom.rules.admission import check_noisy, check_sums
from fedloom.rules.candidates import candidates
from fedloom.rules.exact import check_rounded
from fedloom.rules.fixed_point import rounding_bound
from fedloom.rules.private import client_sigma, solve_noisy
from fedloom.rules.shares import COUNT, Noise, gram_of
from fedloom.rules.solving import FastWeights
from fedloom.strategies.checkpoint import State, Torn
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.secure_sum import SecureSum
from fedloom.wire import Arrays, Update

_SEEN = {
    "sums": "each client's sums",
    "masked": "the sum over all clients, and of each client words that are uniform",
    "private": "each client's sums with noise on them",
    "masked-private": "the sum over all clients with noise on it, and of each client words that are"
    " uniform",
}


class Shares:
    """One run's way of sharing sums.

    Parameters
    ----------
    config : RunConfig
        Its ``faast`` part names the mode.
    run : str
        The run's token, to which masks are bound.
    """

    def __init__(self, config: RunConfig, roster: Roster, run: str, journal: Journal) -> None:
        given = self.given = config.faast
        self.noise = Noise.of(given) if given.private else None
        seconds = config.sampling.reply_seconds
        self._sum: SecureSum | None = None
        if given.masked:
            share, bits = given.threshold, given.bits
            self._sum = SecureSum(roster, run, journal, threshold=share, bits=bits, seconds=seconds)
        self._variance = 0.0  # of the noise in the total
        self._releases: Counter[int] = Counter()  # partition -> how often its rows were given away
        self._lost: dict[int, str] = {}

    @property
    def masked(self) -> bool:
        """Whether replies are masked: then ``take`` reads them and ``finish`` ends a round."""
        return self._sum is not None

    def begin(self, grid: ReplyStream, server_round: int, partitions: list[int]) -> list[int]:
        """Return whom to ask for sums, after keys and shares were exchanged where masks need them.

        A later round's newcomers are summed by themselves: nobody is in two sums, whose difference
        would tell of those who are in one only. One newcomer alone would be a sum of one.

        Raises
        ------
        Refusal
            If fewer clients than the threshold answer.
        """
        if self._sum is not None:
            if server_round > 1 and len(partitions) < 2:
                return []
            return self._sum.begin(grid, server_round, partitions)
        if self.noise is not None:
            self._releases.update(partitions)
        return partitions

    @property
    def why_not_replaced(self) -> str:
        """Why nobody's sums can be taken out of the total again; empty if they can."""
        if self.masked:
            return "the sums that it would replace came under masks, and nobody has them"
        if self.noise is not None:
            return "the noisy sums that it would replace were not kept, and another release costs"
        if not self.given.keep_sums:
            return "the sums that it would replace were not kept; see faast.keep-sums"
        return ""

    def meet(self, roster: Roster) -> None:
        """Take these for the nodes that are there, between two rounds."""
        if self._sum is not None:
            self._sum.meet(roster)

    def state(self) -> State:
        """Return the books: noise in the total, releases, and who was lost."""
        releases = {str(p): n for p, n in self._releases.items()}
        lost = {str(p): why for p, why in self._lost.items()}
        return State({}, {"variance": self._variance, "releases": releases, "lost": lost})

    def restore(self, state: State) -> None:
        """Take up the books of an earlier process."""
        self._variance = float(state.tree["variance"])
        self._releases = Counter({int(p): int(n) for p, n in state.tree["releases"].items()})
        self._lost = {int(p): str(why) for p, why in state.tree["lost"].items()}

    def count_torn(self, rounds: Torn) -> None:
        """Count what clients gave away in rounds that a crash tore and that will be repeated.

        Raises
        ------
        Refusal
            If clients had been asked to open a sum under masks.
        """
        rounds.check_masks()
        for partitions in rounds.values():
            if self.noise is not None:  # under masks too, though nobody has seen their sum
                self._releases.update(partitions)

    def told(self, partition: int) -> Mapping[str, Any]:
        """Return what one client's message says besides."""
        return self._sum.told(partition) if self._sum is not None else {}

    def heed(
        self, replies: Iterable[Message], partition_of: Callable[[Message], int]
    ) -> Iterator[Message]:
        """Pass replies on; a client that refused gave nothing away, and nothing was spent."""
        for reply in replies:
            if not self.masked and reply.has_error() and border.failure_reason(reply)[2]:
                self._releases[partition_of(reply)] -= 1
            yield reply

    def take(self, partition: int, arrays: Arrays) -> None:
        """Add masked arrays to the round's sum."""
        assert self._sum is not None
        self._sum.take(partition, arrays)

    def read(self, arrays: Arrays, count: float, who: str, partition: int, rows: int) -> Update:
        """Read one client's arrays that have no masks, and hold them against what they can be."""
        if self.noise is None:
            update, bits, rounding = (
                Update.summed(arrays, count, partition),
                self.given.exact_bits,
                0.0,
            )
            if bits:
                check_rounded(arrays, bits, who)
                rounding = rounding_bound(1, bits)
            check_sums(gram_of(update), who, rows=rows, rounding=rounding)
            return update
        update = _noisy_update(arrays, partition)
        check_noisy(gram_of(update), who, self.noise.sigma)
        return update

    def added(self) -> None:
        """Enter that one client's noisy sums are in the total."""
        if self.noise is not None:
            self._variance += self.noise.sigma**2

    def finish(self) -> tuple[list[int], Update]:
        """Take the masks off the round's sum; return whose it is.

        Raises
        ------
        Refusal
            If too few clients stayed, or this cannot be a sum of sums.
        """
        assert self._sum is not None
        threshold, found = self._sum.needed, self._sum.finish()
        earlier = {p: why for p, why in self._lost.items() if p not in found.partitions}
        self._lost = {**earlier, **found.lost}
        parties = len(found.partitions)
        who = f"the sum of {parties} clients, one of whom cannot have sent sums"
        if self.noise is None:
            arrays = dict(found.arrays)
            count = float(arrays.pop(COUNT)[0])
            update = Update.summed(arrays, count)
            error = rounding_bound(parties, self.given.bits)
            check_sums(gram_of(update), who, rows=2**53, rounding=error)
            return found.partitions, update
        part = client_sigma(self.noise.sigma, threshold) ** 2 * parties
        self._variance += part
        self._releases.update(found.partitions)
        update = _noisy_update(found.arrays)
        check_noisy(gram_of(update), who, math.sqrt(part))
        return found.partitions, update

    def count_of(self, total: Update) -> float:
        """Return how many rows are in a total; after noise an estimate, one at least."""
        return total.weight if self.noise is None else max(1.0, total.weight)

    def solve(self, total: Update) -> list[FastWeights]:
        """Solve for every filter or, after noise, once with the ridge that belongs to it."""
        gram, given = gram_of(total), self.given
        if self.noise is None:
            return candidates(gram, given.alpha_list, given.ridge)
        return [solve_noisy(gram, math.sqrt(self._variance), given.ridge or None)]

    def _most(self) -> int:
        """Count the releases of the rows that were given away most often."""
        return max(self._releases.values(), default=0)

    def figures(self) -> dict[str, float]:
        """Return what a round tells of noise: of the total, and spent on whose rows cost most."""
        if self.noise is None:
            return {}
        spent = self.noise.spent(self._most())
        return {
            "epsilon-spent": spent,
            "delta": self.noise.delta,
            "total-sigma": math.sqrt(self._variance),
        }

    def facts(self, clients: int) -> dict[str, Any]:
        """Return what the report tells: what the server saw, of whom, and at what price."""
        told: dict[str, Any] = {"mode": self.given.shares, "seen": _SEEN[self.given.shares]}
        told["clients"] = clients
        if self._sum is not None:
            told |= {"threshold": self._sum.needed, "bits": self.given.bits}
            told |= {"lost": {str(p): why for p, why in sorted(self._lost.items())}}
        if self.noise is not None:
            told |= {"epsilon": self.noise.epsilon, "protects": self.given.protects}
            told |= {"sensitivity": self.noise.sensitivity, "sigma": self.noise.sigma}
            told |= {"releases": self._most(), **self.figures()}
        return told


def _noisy_update(arrays: Arrays, origin: int = -1) -> Update:
    """Read noisy sums, whose trace tells how many keys of length one they are of, about.

    The estimate is linear, so it adds up like a count; it may fall below zero.
    """
    bare = Update.summed(arrays, 1.0, origin)
    return replace(bare, weight=gram_of(bare).trace())

# SPDX-License-Identifier: Apache-2.0
"""FAAST: add sums, solve once (arXiv 2605.04651, without its Eq. 14).

Fast weights ``W = K^+ V`` depend on all clients' keys and values only through ``K'K`` and ``K'V``,
which are sums over rows.  So the server adds what clients send and solves the least-squares problem
of all rows together: the same weights for every split, to rounding.  One round is all it takes; in
later rounds clients join who were not drawn, failed or came since, and those with a new revision of
their rows replace what they had sent.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.exception import AggregationError
from numpy.typing import NDArray

from fedloom import border
from fedloom.config import FaastConfig
from fedloom.data.partition import Partition
from fedloom.errors import Refusal
from fedloom.flat import Scalar
from fedloom.rules.admission import check_rows
from fedloom.rules.candidates import best
from fedloom.rules.revisions import Contributions, digest_of
from fedloom.rules.shares import gram_of as gram_of
from fedloom.rules.shares import listing
from fedloom.rules.solving import FastWeights
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.checkpoint import Checkpoint, State, Torn
from fedloom.strategies.gate import Gate
from fedloom.strategies.inbox import Inbox
from fedloom.strategies.later_calls import RollCall, joined
from fedloom.strategies.roster import ReplyStream, Roster
from fedloom.strategies.shares import Shares
from fedloom.strategies.shelf import Choice, SumsShelf, summed_arrays, summed_of
from fedloom.strategies.tallies import keep_rows
from fedloom.wire import Arrays, Manifest, Update

WEIGHTS = "weights"
_VALIDATED = ("correct", "gold-ce-sum")


def sums_of(manifest: Manifest, given: FaastConfig | None = None) -> Manifest:
    """Describe a reply: the weights' manifest, with what travels of sums in their place."""
    keys, classes = manifest.arrays[WEIGHTS][0]
    return replace(manifest, arrays=listing(given or FaastConfig(), keys, classes))


class FAAST(AdapterStrategy):
    """Add every client's sums on arrival, factorise once, choose the filter on validation rows.

    The manifest's one array is ``weights`` ``[d, C]``, solved for one-hot values; clients whose
    labels have embeddings apply them when they read.  Server memory does not grow with clients.
    ``faast.shares`` says how sums travel: see ``fedloom.strategies.shares``.
    """

    action = "faast"  # served by fedloom.clients.faast
    train_metrics = ("revision",)
    roll_call: RollCall | None = None
    """Asks before a later round who is there; without it those of the first roll call stay."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        folder = self.journal.folder
        self.shelf = SumsShelf(folder / "sums" if folder is not None else None)
        self.shares = Shares(self.config, self.roster, self.run_token, self.journal)
        self.contributions = Contributions()
        self.choice: Choice | None = None
        self.parts |= {"sums": self, "shares": self.shares}
        self._needed_before: set[tuple[int, int]] = set()  # by the checkpoint before the last
        self._revisions: dict[int, int] = {}
        self._solutions: list[FastWeights] = []

    @classmethod
    def sizes(cls, manifest: Manifest) -> dict[str, int]:
        """Count keys and classes, and the bytes of one reply's sums."""
        keys, classes = manifest.arrays[WEIGHTS][0]
        return {"keys": keys, "classes": classes, "bytes": sums_of(manifest).nbytes()}

    def expected_reply(self, server_round: int, partition: int) -> Manifest:
        """Return the sums' names, shapes and dtypes: the same for every number of rows."""
        return sums_of(self.manifest, self.config.faast)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask those of the round's clients whose rows are not in the sums; nothing goes down."""
        self._grid, self._sent = grid, border.unpack_arrays(arrays)
        self.server_round, self.round_facts = server_round, {}
        assert isinstance(grid, ReplyStream)
        if server_round > 1 and self.roll_call is not None:
            found = self.roll_call(server_round, self.roster, {self.manifest.digest()})
            self.take_in(server_round, grid, found)
        asked = [partition for partition in self._drawn(server_round) if self._has_news(partition)]
        asked = self.shares.begin(grid, server_round, asked)
        told = {**config, **self.train_config(server_round)}
        nothing, each = ArrayRecord(), self.shares.told
        return self._messages("train", "train", server_round, asked, nothing, told, each)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the good replies and solve; count what the clients gave away."""
        heeded = self.shares.heed(replies, self.inbox.partition)
        return super().aggregate_train(server_round, heeded)

    def take_in(self, server_round: int, grid: ReplyStream, found: Roster) -> None:
        """Go on with those who answered a later roll call; say who came, went or has news."""
        before, seconds = self.roster, self.config.sampling.reply_seconds
        self._grid, self.roster = grid, joined(before, found)
        of_run = self.run_token, self.manifest.digest(), seconds
        self.inbox = Inbox(self.roster, self.journal, *of_run)
        self.gate = Gate(self.config, self.roster, self.journal)
        self.shares.meet(self.roster)
        come = [p for p in found.partitions if p not in before.nodes]
        held, why = self.contributions, self.shares.why_not_replaced
        news = [p for p in found.partitions if held.is_news(p, self._revision(p))]
        held_back = [p for p in news if p in held and why]
        self.journal.event(
            "roll-call",
            round=server_round,
            answered=len(found.nodes),
            joined=come,
            nodes=[{"partition": p, "name": self.roster.name(p)} for p in come],
            revised={
                str(p): self._revision(p)
                for p in news
                if p not in held_back and (p in held or p in held.gone)
            },
            held_back={str(p): f"revision {self._revision(p)}: {why}" for p in held_back},
            absent=[p for p in before.partitions if p not in found.nodes],
        )
        if come:
            told: dict[str, Any] = {"round": server_round, "frozen": True}
            frozen = self._messages("evaluate", "frozen", server_round, come, ArrayRecord(), told)
            self._gather_scores(server_round, "frozen", grid.send_and_receive(frozen))

    def _revision(self, partition: int) -> int:
        return int(self.roster.properties.get(partition, {}).get("revision", 1))

    def _has_news(self, partition: int) -> bool:
        if not self.contributions.is_news(partition, self._revision(partition)):
            return False
        return partition not in self.contributions or not self.shares.why_not_replaced

    def read_update(self, server_round: int, partition: int, records: RecordDict) -> Update:
        """Read sums as they are and hold them against what sums can be, before they are added."""
        who = f"client {partition} ({self._row(0, '', partition, {})['name'] or 'no name'})"
        arrays = border.arrays_of(records)
        metrics = border.checked_metrics(records, ("revision",))
        try:
            self.expected_reply(server_round, partition).check_arrays(arrays)
        except Refusal as refusal:
            raise Refusal(f"{who}: {refusal}") from refusal
        if self.shares.masked:
            self.shares.take(partition, arrays)
            return Update.summed({}, 1.0, partition)  # what it brought shows in the sum alone
        count, rows = metrics[border.WEIGHT], self._rows_to_sum(partition)
        update = self.shares.read(arrays, count, who, partition, rows)
        self._check_rows(update, who)
        held = self.contributions.total.weight if len(self.contributions) else 0.0
        self.config.faast.check_room(held + count, f"{who} and those before it")
        revision = int(metrics["revision"])
        old = self.contributions.check(partition, revision, digest_of(update))
        if old is not None and self.shelf.find(partition, old.revision) is None:
            raise Refusal(
                f"{who}: revision {revision} would replace {old.revision}, whose sums were not"
                " kept; set faast.keep-sums = true"
            )
        self._revisions[partition] = revision
        return update

    def admit(
        self, server_round: int, partition: int, update: Update, metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Leave it at what ``read_update`` has checked: sums have bounds of their own."""
        return {}

    def _check_rows(self, update: Update, who: str, clients: int = 1) -> None:
        """Hold the rows of one client, or of a sum under masks, against what the recipe allows."""
        sigma = self.shares.figures().get("total-sigma", 0.0) if clients > 1 else 0.0
        if clients == 1 and self.shares.noise is not None:
            sigma = self.shares.noise.sigma
        least, most = self.config.faast.min_count, self._most_rows
        check_rows(gram_of(update), who, least=least, most=most, clients=clients, sigma=sigma)

    @property
    def _most_rows(self) -> int:
        """The most rows that any client of this recipe sums."""
        given, cap = self.config.faast, self.config.data.max_train
        most = cap - given.held_out(cap)
        return min(given.max_count, most) if given.max_count else most

    def _rows_to_sum(self, partition: int) -> int:
        """Return how many rows a client may have summed.

        That is no more than the recipe lets it, than it said at the roll call and, in a simulation,
        than it was dealt.
        """
        told = self.roster.properties.get(partition, {}).get("train")
        rows = [n for n in (told, self._dealt.get(partition)) if n is not None]
        return min([self._most_rows, *(int(n) - self.config.faast.held_out(int(n)) for n in rows)])

    @functools.cached_property
    def _dealt(self) -> dict[int, int]:
        """Training rows by partition, where the roll call told of a partition that all agree on."""
        for told in self.roster.properties.values():
            with contextlib.suppress(Refusal):  # it may be none: then what was told has to do
                made = Partition.from_json(str(told.get("partition-json", "")))
                if made.digest() == told.get("data"):  # which the roll call held against all others
                    return {p: len(client.train) for p, client in enumerate(made.clients)}
        return {}

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Add each reply to the total, then solve it for every filter from one factorisation."""
        for update in updates:
            if not self.shares.masked:
                self._take(update)
        if self.shares.masked:
            partitions, update = self.shares.finish()
            who = f"the sum of {len(partitions)} clients, one of whom cannot have sent sums"
            self._check_rows(update, who, len(partitions))
            self.contributions.add_together(partitions, update)
        started = time.perf_counter()
        self._solutions = self.shares.solve(self.contributions.total)
        self.round_facts["solve-seconds"] = time.perf_counter() - started
        return {WEIGHTS: np.stack([found.weights for found in self._solutions])}

    def _take(self, update: Update) -> None:
        partition, revision = update.origin, self._revisions.pop(update.origin, 1)
        if partition in self.contributions:
            before = self.contributions[partition].revision
            old = self.shelf.find(partition, before)
            self.contributions.add(partition, revision, update, old)  # ``whole`` drops the old
        else:
            self.contributions.add(partition, revision, update)
        self.shares.added()
        if self.config.faast.keep_sums:
            self.shelf.put(partition, revision, update)

    def whole(self, server_round: int, arrays: ArrayRecord) -> None:
        """Keep the round, then drop sums that neither it nor the round before it can need."""
        super().whole(server_round, arrays)
        needed = {(p, self.contributions[p].revision) for p in self.contributions}
        last = server_round == self.config.rounds
        self.shelf.prune(needed if last else needed | self._needed_before)
        self._needed_before = needed

    def state(self) -> State:
        """Return the total, whose it is, and how it was solved."""
        choice = asdict(self.choice) if self.choice else None
        total = self.contributions.total if len(self.contributions) else None
        tree: dict[str, Any] = {"clients": self.contributions.to_tree(), "solved": choice}
        tree |= {"weight": total.weight if total else 0.0, "gone": self.contributions.gone_tree()}
        return State(summed_arrays(total) if total else {}, tree)

    def restore(self, state: State) -> None:
        """Take up the sums of an earlier process; the shelf may be a torn round ahead of them."""
        tree = state.tree
        total = summed_of(state.arrays, tree["weight"]) if state.arrays else None
        self.contributions = Contributions.from_tree(total, tree["clients"], tree.get("gone"))
        self._needed_before = {(p, self.contributions[p].revision) for p in self.contributions}
        if tree["solved"] is not None:
            self.choice = Choice(**tree["solved"])
            self.shelf.keep(self.contributions, self.choice)

    def resume(self, held: Checkpoint | None, torn: Iterable[Torn]) -> None:
        """Go on, after counting what clients gave away in rounds that will be repeated."""
        super().resume(held, torn)
        for rounds in torn:
            self.shares.count_torn(rounds)

    def usable(self, come: int) -> int:
        """Count the clients in the sums: a later round may bring none."""
        return len(self.contributions)

    def settle(self, server_round: int, folded: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Choose one solution, on the clients' validation rows if there is a choice."""
        if not self._solutions:  # nobody came with anything new, but some may have been asked
            self._tell_shares(server_round)
            return folded
        at = (0, 0)
        if self.config.faast.chooses:
            at = self._validate(server_round, folded[WEIGHTS])
        chosen, solutions = self._solutions[at[0]], self._solutions
        self._solutions = []
        given = self.config.faast
        self.choice = Choice(given.filters[at[0]], given.ridge, given.prior_list[at[1]])
        self.shelf.keep(self.contributions, self.choice)
        self.round_facts |= self._facts(chosen, sum(s.floored for s in solutions))
        self._tell_shares(server_round)
        return {WEIGHTS: chosen.weights}

    def _tell_shares(self, server_round: int) -> None:
        """Say what the server has seen so far, and what was spent."""
        self.round_facts |= self.shares.figures()
        told = self.shares.facts(len(self.contributions))
        size = self.expected_reply(server_round, 0).nbytes()
        self.journal.event("shares", round=server_round, reply_bytes=size, **told)

    def _facts(self, chosen: FastWeights, floored: int) -> dict[str, float]:
        assert self.choice is not None
        facts = {
            "alpha": self.choice.alpha,
            "prior": self.choice.prior,
            "memory-share": self._memory_share(self.choice.prior),
            "rank": chosen.rank,
            "tolerance": chosen.tolerance,
            "explained": chosen.explained,
            "condition": chosen.condition,
            "rows": self.shares.count_of(self.contributions.total),
            "summed-clients": len(self.contributions),
            "floored": floored,
        }
        return {k: v for k, v in facts.items() if v is not None and math.isfinite(v)}

    def _memory_share(self, prior: float) -> float:
        """Return ``r = N / (N + N0)``."""
        if not len(self.contributions):
            return 0.0
        rows = self.shares.count_of(self.contributions.total)
        return rows / (rows + prior)

    def evaluate_config(self, server_round: int) -> dict[str, Scalar]:
        """Tell how much of what is read is the memory's, besides."""
        share = self._memory_share(self.choice.prior if self.choice else 0.0)
        return {**self._round_config(server_round), "memory-share": share}

    def _validate(self, server_round: int, weights: NDArray[Any]) -> tuple[int, int]:
        """Let every client score all solutions on its validation rows; return the best's place."""
        given, grid = self.config.faast, self._grid
        assert grid is not None
        gone = self.contributions.gone.keys() - set(self.contributions)
        asked = [p for p in self.roster.partitions if self._validation_rows(p) and p not in gone]
        told: dict[str, Any] = {
            **self._round_config(server_round),
            "validation": True,
            "memory-shares": [self._memory_share(prior) for prior in given.prior_list],
        }
        arrays = border.pack_arrays({WEIGHTS: weights})
        messages = self._messages("evaluate", "validation", server_round, asked, arrays, told)
        places = list(np.ndindex(len(given.filters), len(given.prior_list)))
        needed = [f"{key}-{i}-{j}" for i, j in places for key in _VALIDATED]

        def read(partition: int, records: RecordDict) -> dict[str, Any]:
            metrics = border.checked_metrics(records, needed)
            return self._row(server_round, "validation", partition, metrics)

        replies = grid.send_and_receive(messages)
        rows = list(self.inbox.read(server_round, "validation", replies, read))
        self.inbox.report_missing(server_round, "validation")
        if not rows:
            raise AggregationError(
                "no client has scored validation rows; set one value for faast.alphas and"
                " faast.priors"
            )
        keep_rows(self.journal, rows)
        return self._best(server_round, rows, places)

    def _validation_rows(self, partition: int) -> int:
        """Return how many it has; a client that tells no rows at the roll call tells these."""
        told = self.roster.properties.get(partition, {})
        return int(told.get("validation", self.config.faast.held_out(int(told.get("train", 0)))))

    def _best(
        self, server_round: int, rows: list[dict[str, Any]], places: list[tuple[int, ...]]
    ) -> tuple[int, int]:
        """Add the clients' scores up, exactly: so no order of replies matters."""
        given, n = self.config.faast, math.fsum(row[border.WEIGHT] for row in rows)
        scored = [
            tuple(math.fsum(row[f"{key}-{i}-{j}"] for row in rows) for key in _VALIDATED)
            for i, j in places
        ]
        table = [
            {
                "alpha": given.filters[i],
                "prior": given.prior_list[j],
                "rank": self._solutions[i].rank,
                "accuracy": right / n,
                "gold-ce": ce / n,
            }
            for (i, j), (right, ce) in zip(places, scored, strict=True)
        ]
        at = best([(right, ce) for right, ce in scored])
        self.journal.event("choice", round=server_round, rows=n, solutions=table, taken=table[at])
        i, j = places[at]
        return i, j

# SPDX-License-Identifier: Apache-2.0
"""FedRefine: the server hands out fusers and carries sealed questions and caches between nodes.

Nothing is trained and nothing averaged (arXiv 2603.28772): every node has a language model of its
own, asks the others for caches of its questions, and answers among them.  The server needs neither
torch nor a model, and it cannot read what it carries (``fedloom.secure.channel``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp.exception import AggregationError
from flwr.serverapp.strategy import Result
from numpy.typing import NDArray

from fedloom import __version__, border
from fedloom.errors import Refusal
from fedloom.gains import read_gains
from fedloom.secure.channel import ANSWER, ASK, EXPORT, HELLO, KEEP
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.attacks import Attacks
from fedloom.strategies.mutual import Meeting
from fedloom.strategies.registry import Entry, Registry
from fedloom.strategies.roster import ReplyStream
from fedloom.strategies.tallies import keep_rows, macro, prefixed
from fedloom.wire import Arrays, Manifest, Update

_ROUND = 1
_SCORES = ("gold-ce-sum", "correct", "alone-gold-ce-sum", "alone-correct")


@dataclass(frozen=True)
class Peer:
    """A node with its model, as it told."""

    partition: int
    name: str
    model: str
    """Hash of its weights."""
    geometry: str
    public: str
    source: str
    held: frozenset[str]
    """Digests of the fusers on its shelf."""

    def told(self) -> dict[str, Any]:
        """Name it to another node."""
        said = {"partition": self.partition, "name": self.source}
        return {**said, "geometry": self.geometry, "public": self.public}


class FedRefine(AdapterStrategy):
    """Let every node answer its held-out questions among the others, or one node one question.

    An exchange is three steps: the receiver seals its questions, each sender reads them and seals
    its caches, the receiver answers.  Who fails, or is later than ``refine.deadline-seconds``, is
    left out of that exchange; receivers take turns, so that the server holds the caches of one.
    """

    action = "fedrefine"  # served by fedloom.clients.refine
    train_metrics = ()

    @classmethod
    def known_start(cls) -> tuple[dict[str, NDArray[Any]], Manifest, str]:
        """Return nothing: no array is averaged."""
        nothing = Manifest.of({}, method=cls.action, version=__version__, base="", tokenizer="")
        return {}, nothing, ""

    @classmethod
    def sizes(cls, manifest: Manifest) -> dict[str, int]:
        """Return nothing: no parameter is trained."""
        return {}

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Return what was there: nothing is averaged."""
        return dict(sent)

    def run(self, grid: ReplyStream, arrays: Arrays) -> Result:
        """Meet the nodes, give them their fusers, and let them answer."""
        self._grid = grid
        if self.config.refine.mutual and not self.config.refine.question:
            raise Refusal(
                f"refine.mutual = {self.config.refine.mutual} without refine.question: Co-C2C"
                " answers one question; give it, or ask with fedloom refine --mutual"
            )
        self._attacks = Attacks()
        registry = Registry(Path(self.config.refine.fusers))
        select = self.config.refine.select
        self._gains = {"gains": read_gains(select).to_json()} if select else {}
        peers = self._meet(grid)
        fusers = self._hand_out(grid, peers, registry)
        if self.config.refine.question:
            self._answer(grid, peers, fusers)
        else:
            self._score(grid, peers, fusers)
        return Result()

    def _meet(self, grid: ReplyStream) -> dict[int, Peer]:
        nothing = {p: border.content({}, {}) for p in self.roster.partitions}
        found, _ = self._question(grid, HELLO, nothing)
        peers = {}
        for partition, records in found.items():
            try:
                said = border.config_of(records)
                geometry, public = str(said["geometry"]), str(said["public"])
                model = str(json.loads(geometry)["model"])
                held = frozenset(str(said["held"]).split(","))
                told = geometry, public, str(said["model"]), held
                peers[partition] = Peer(partition, self.roster.name(partition), model, *told)
            except (KeyError, ValueError, TypeError) as error:
                self.inbox.failed(_ROUND, HELLO, partition, f"it did not say what it is: {error!r}")
        return peers

    def _hand_out(
        self, grid: ReplyStream, peers: Mapping[int, Peer], registry: Registry
    ) -> dict[int, str]:
        """Send each node the fusers that it lacks; return the digests of each node's."""
        models = {peer.model for peer in peers.values()}
        wanted: dict[int, list[Entry]] = {
            p: registry.among(models - {peer.model}, peer.model) if self._receives(p) else []
            for p, peer in peers.items()
        }
        self._tell_registry(wanted)
        if not any(wanted.values()) and len(models) == len(peers) and not self._gains:
            names = sorted({peer.source for peer in peers.values()})
            raise Refusal(
                f"{self.config.refine.fusers} has no fuser of two of {', '.join(names)}: make one"
                f" with fedloom fuser train --sender {names[0]} --receiver {names[-1]}"
            )
        lacking = {
            p: [entry for entry in entries if entry.digest not in peers[p].held]
            for p, entries in wanted.items()
        }
        while any(lacking.values()):  # one file a node at once: they may be large
            batch = {p: entries.pop() for p, entries in lacking.items() if entries}
            sent = {p: border.content({e.digest: e.data()}, {}) for p, e in batch.items()}
            self._question(grid, KEEP, sent)
        return {p: ",".join(e.digest for e in entries) for p, entries in wanted.items()}

    def _receives(self, partition: int) -> bool:
        """Say whether a node answers in this run: one that only reads for others needs no fuser."""
        given = self.config.refine
        return not given.question or bool(given.mutual) or partition == given.receiver

    def _tell_registry(self, wanted: Mapping[int, list[Entry]]) -> None:
        entries = {e.digest: e for listed in wanted.values() for e in listed}
        told = [entries[digest].told() for digest in sorted(entries)]
        self.journal.event("registry", round=0, fusers=told)

    def _score(
        self, grid: ReplyStream, peers: Mapping[int, Peer], fusers: Mapping[int, str]
    ) -> None:
        """Let each node in turn answer its questions; keep its scores with and without help."""
        rows = []
        drawn = self.roster.sample(self.config.seed, _ROUND, self.config.sampling.fraction)
        for receiver in [p for p in drawn if p in peers]:
            came = self._exchange(grid, peers, receiver, fusers[receiver])
            if came is None:
                continue
            arrays, told = came
            rows += self._one_scored(grid, receiver, arrays, told)
        for row in rows:
            alone = prefixed(row, "alone-")
            head = {"partition": row["partition"], "name": row["name"]}
            self.journal.metric(round=0, phase="frozen", **head, **alone)
            self._tell_pairs(row, peers)
        keep_rows(self.journal, rows)
        if rows:
            alone = macro([prefixed(row, "alone-") for row in rows])
            self.round_facts = {f"alone-{key}": value for key, value in alone.items()}
            self.round_facts |= self._attacks.all()
        self._announce_round(_ROUND, rows)

    def _one_scored(
        self, grid: ReplyStream, receiver: int, arrays: Arrays, told: dict[str, Any]
    ) -> list[dict[str, Any]]:
        packed = border.pack_arrays(arrays)
        messages = self._messages("evaluate", "evaluate", _ROUND, [receiver], packed, told)

        def read(partition: int, records: RecordDict) -> dict[str, Any]:
            metrics = border.checked_metrics(records, _SCORES)
            return self._row(_ROUND, "evaluate", partition, metrics)

        replies = grid.send_and_receive(messages)
        rows = list(self.inbox.read(_ROUND, "evaluate", replies, read))
        self.inbox.report_missing(_ROUND, "evaluate")
        return rows

    def _tell_pairs(self, row: Mapping[str, Any], peers: Mapping[int, Peer]) -> None:
        receiver, n = int(row["partition"]), row[border.WEIGHT]
        for sender in sorted(peers):
            pair = prefixed(dict(row), f"pair-{sender}-")
            if sender == receiver or "correct" not in pair:
                continue
            kept = ("gained", "spoilt", "used", "lost", "cache-bytes", "cache-tokens")
            self.journal.event(
                "pair",
                round=_ROUND,
                receiver=receiver,
                sender=sender,
                receiver_model=peers[receiver].source,
                sender_model=peers[sender].source,
                rows=n,
                refined=pair["correct"] / n,
                alone=row["alone-correct"] / n,
                **{key.replace("-", "_"): pair[key] for key in kept if key in pair},
                **self._attacks.of(receiver, sender),
            )

    def _answer(
        self, grid: ReplyStream, peers: Mapping[int, Peer], fusers: Mapping[int, str]
    ) -> None:
        """Let one node answer the run's question, or all together; keep receipts and answers."""
        receiver, rounds = self.config.refine.receiver, self.config.refine.mutual
        if rounds:
            found = self._meeting(grid, peers, fusers, rounds).answers()
            kept = [p for p in sorted(found) if self._keep_answer(peers[p], found[p])]
            if not kept:
                raise AggregationError("no node gave an answer that can be read")
            return
        if receiver not in peers:
            raise AggregationError(f"the receiver, partition {receiver}, is not there")
        came = self._exchange(grid, peers, receiver, fusers[receiver])
        found = {}
        if came is not None:
            found, _ = self._question(grid, ANSWER, {receiver: border.content(*came)})
        if receiver not in found:
            raise AggregationError(f"the receiver, partition {receiver}, gave no answer")
        if not self._keep_answer(peers[receiver], found[receiver]):
            raise AggregationError(f"partition {receiver}'s answer cannot be read")

    def _keep_answer(self, peer: Peer, records: RecordDict) -> bool:
        """Keep one node's receipt and its sealed answer; say whether they could be read."""
        try:
            said = border.config_of(records)
            text = border.arrays_of(records)["answer"].tobytes()
            told = {"receipt": json.loads(str(said["receipt"])), "public": str(said["public"])}
        except (KeyError, ValueError) as error:
            self.inbox.failed(_ROUND, ANSWER, peer.partition, f"an unreadable answer: {error!r}")
            return False
        who = {"partition": peer.partition, "model": peer.source}
        self.journal.event("answer", round=_ROUND, **who, sealed=text.hex(), **told)
        return True

    def _meeting(
        self, grid: ReplyStream, peers: Mapping[int, Peer], fusers: Mapping[int, str], rounds: int
    ) -> Meeting:
        def ask(
            action: str, asked: Mapping[int, RecordDict], seconds: float | None
        ) -> tuple[dict[int, RecordDict], dict[int, str]]:
            return self._question(grid, action, asked, seconds)

        def doubt(action: str, partition: int, reason: str) -> None:
            self.inbox.failed(_ROUND, action, partition, reason)

        told = {p: peer.told() for p, peer in peers.items()}
        seconds = self.config.refine.deadline_seconds
        return Meeting(ask, doubt, told, fusers, rounds=rounds, seconds=seconds)

    def _exchange(
        self, grid: ReplyStream, peers: Mapping[int, Peer], receiver: int, fusers: str
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        """Carry one receiver's questions to the others and their caches back.

        Returns
        -------
        arrays, config
            What the receiver needs to answer; nothing if it did not even ask.
        """
        exchange = uuid.uuid4().hex
        others = [peers[p].told() for p in sorted(peers) if p != receiver]
        told = {"exchange": exchange, "fusers": fusers, "senders": json.dumps(others)}
        asking = border.content({}, {**told, **self._gains})
        found, _ = self._question(grid, ASK, {receiver: asking})
        if receiver not in found:
            return None
        try:
            letters = {int(p): x for p, x in border.arrays_of(found[receiver]).items()}
            skipped = json.loads(str(border.config_of(found[receiver])["skipped"]))
            lost = {str(int(p)): str(cause) for p, cause in skipped.items()}
            if self._gains:
                log = json.loads(str(border.config_of(found[receiver])["selection"]))
                self.journal.event("selection", round=_ROUND, partition=receiver, selection=log)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            self.inbox.failed(_ROUND, ASK, receiver, f"a reply that cannot be read: {error!r}")
            return None
        who = {"exchange": exchange, "asker": receiver, "public": peers[receiver].public}
        asked = {p: border.content({"letter": x}, who) for p, x in letters.items() if p in peers}
        seconds = self.config.refine.deadline_seconds
        replies, failed = self._question(grid, EXPORT, asked, seconds)
        arrays: dict[str, NDArray[Any]] = {}
        for sender, records in sorted(replies.items()):
            try:
                arrays |= _slices(records, sender)
                self._attacks.keep(receiver, sender, border.config_of(records))
            except Refusal as error:
                self.inbox.failed(_ROUND, EXPORT, sender, str(error))
                failed[sender] = "integrity"
        lost |= {str(sender): cause for sender, cause in failed.items()}
        return arrays, {**told, "lost": json.dumps(lost)}

    def _question(
        self,
        grid: ReplyStream,
        action: str,
        asked: Mapping[int, RecordDict],
        seconds: float | None = None,
    ) -> tuple[dict[int, RecordDict], dict[int, str]]:
        """Ask nodes at once; return what came, and of the others why nothing did."""
        self.inbox.listen(grid)
        self.inbox.expect(action, asked, bound=False)
        self.journal.event("phase", round=_ROUND, phase=action, clients=len(asked))
        messages = []
        for partition, records in sorted(asked.items()):
            self._weigh_query(records, action, "down", partition)
            messages.append(Message(records, self.roster.nodes[partition], f"query.{action}"))
        found: dict[int, RecordDict] = {}
        lost: dict[int, str] = {}
        for reply in grid.send_and_receive(messages, timeout=seconds) if messages else ():
            partition = self.inbox.partition(reply)
            if reply.has_error():
                reason, trace, _ = border.failure_reason(reply)
                self.journal.weigh_error(reply, server_round=_ROUND, partition=partition)
                self.inbox.failed(_ROUND, action, partition, reason, trace)
                lost[partition] = "gone" if border.is_gone(reply) else "failed"
                continue
            self._weigh_query(reply.content, action, "up", partition)
            if partition in self.inbox.asked:
                self.inbox.asked.discard(partition)
                found[partition] = reply.content
                self.journal.event("reply", round=_ROUND, phase=action, partition=partition)
        for partition in sorted(self.inbox.asked):
            lost[partition] = "deadline"
            waited = self.config.sampling.reply_seconds if seconds is None else seconds
            self.inbox.failed(_ROUND, action, partition, f"no reply within {waited:.0f} s")
        return found, lost

    def _weigh_query(self, records: Any, action: str, direction: str, partition: int) -> None:
        where: dict[str, Any] = {"phase": action, "partition": partition, "direction": direction}
        self.journal.weigh(records, server_round=_ROUND, **where)


def _slices(records: RecordDict, sender: int) -> dict[str, NDArray[Any]]:
    """Name a sender's caches as the receiver looks for them; what they hold nobody here can see."""
    found = {}
    for name, array in border.arrays_of(records).items():
        if not (len(name) == 4 and name.isdigit()) or array.dtype != np.uint8 or array.ndim != 1:
            raise Refusal(f"array {name[:20]}: expected sealed caches, numbered, as bytes")
        found[f"{sender}-{name}"] = array
    return found

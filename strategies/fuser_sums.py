# SPDX-License-Identifier: Apache-2.0
"""``SolveFuser``: clients that hold the same pair of models send sums, the server solves a fuser.

A fuser in closed form depends on all texts only through sums over their tokens
(``fedloom.rules.fuser_maps``), as FAAST's fast weights do on rows.  So there is one round: each
client reads its own texts once with both models and sends the sums, the server adds them and solves
once, and every client scores what came out on questions that it held out.  The fuser is that of all
texts together, however they are divided, to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray
from safetensors.numpy import save

from fedloom import border
from fedloom.cards import FuserCard
from fedloom.disk import write_whole
from fedloom.errors import Refusal
from fedloom.rules.fuser_maps import (
    DOWN,
    Build,
    check_sums,
    grams_of,
    solve_maps,
    told_of,
    written,
)
from fedloom.strategies.adapter_strategy import AdapterStrategy
from fedloom.strategies.tallies import prefixed
from fedloom.wire import Arrays, Manifest, Update

FILE = "fuser.safetensors"
_SIDES = ("shuffled", "zeroed")
"""Controls that clients score beside the fuser: another question's cache, and an empty one."""


class SolveFuser(AdapterStrategy):
    """Add every client's sums on arrival and solve once.

    The manifest's arrays are the fuser's; nothing goes down before it is solved.  ``fuser/`` in the
    run's folder then holds the file with its card, as ``fedloom fuser solve`` writes it: a
    ``refine.fusers`` for runs to come.
    """

    action = "fedrefine"  # served by fedloom.clients.fuser_sums
    train_metrics = ()

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        told = self.roster.properties[self.roster.partitions[0]]
        self.build = Build.from_json(str(told.get("build", "")))
        if self.build.digest() != self.manifest.values:
            raise Refusal(
                "the nodes' fuser and their manifest are of two builds: use the same recipe and"
                " fedloom version on every node"
            )
        self._total: Update | None = None
        self._clients: list[int] = []
        self._explained: dict[str, float] = {}

    @classmethod
    def sizes(cls, manifest: Manifest) -> dict[str, int]:
        """Count the fuser's numbers and its bytes."""
        count = sum(math.prod(shape) for shape, _ in manifest.arrays.values())
        return {"fuser": count, "bytes": manifest.nbytes()}

    def expected_reply(self, server_round: int, partition: int) -> Manifest:
        """Return the sums' names, shapes and dtypes: the same for every number of texts."""
        return replace(self.manifest, arrays=self.build.listing())

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the round's clients for their sums; nothing goes down."""
        self._grid, self._sent = grid, border.unpack_arrays(arrays)
        self.server_round, self.round_facts = server_round, {}
        self._total, self._clients = None, []
        told = {**config, **self.train_config(server_round)}
        asked = self.draw(server_round)
        return self._messages("train", "train", server_round, asked, ArrayRecord(), told)

    def read_update(self, server_round: int, partition: int, records: RecordDict) -> Update:
        """Read sums as they are, and hold them against what sums can be."""
        who = f"client {partition} ({self.roster.name(partition)})"
        arrays = border.arrays_of(records)
        tokens = border.checked_metrics(records)[border.WEIGHT]
        try:
            self.expected_reply(server_round, partition).check_arrays(arrays)
            check_sums(grams_of(arrays, tokens), tokens)
        except Refusal as refusal:
            raise Refusal(f"{who}: {refusal}") from refusal
        return Update.summed(arrays, tokens, partition)

    def admit(
        self, server_round: int, partition: int, update: Update, metrics: Mapping[str, Any]
    ) -> dict[str, float]:
        """Leave it at what ``read_update`` has checked: sums are no change of anything."""
        return {}

    def fold(self, updates: Iterable[Update], sent: Arrays) -> dict[str, NDArray[Any]]:
        """Add each reply to the total, then solve every layer of the receiver once."""
        for update in updates:
            self._clients.append(update.origin)
            self._total = update if self._total is None else self._total + update
        assert self._total is not None
        started = time.perf_counter()
        rank = sent[DOWN].shape[2]
        grams = grams_of(self._total.whole(), self._total.weight)
        maps = solve_maps(grams, rank, ridge=self.config.refine.solve_ridge)
        self._explained = told_of(maps)
        self.round_facts |= {
            "solve-seconds": time.perf_counter() - started,
            "text-tokens": self._total.weight,
            "summed-clients": float(len(self._clients)),
            "rank": float(rank),
            **{name.replace("_", "-"): x for name, x in self._explained.items()},
        }
        return written(sent, maps, self.build.sources)

    def settle(self, server_round: int, folded: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Write the file at once: scores may never come."""
        self._write(folded, {})
        return folded

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the fuser to every client, to be scored."""
        self._sent = border.unpack_arrays(arrays)
        return super().configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Collect the scores, and write them on the file's card."""
        made = super().aggregate_evaluate(server_round, replies)
        if scores := self._scores():
            self._write(self._sent, scores)
        return made

    def _scores(self) -> dict[str, float]:
        """Return accuracies over all clients' held-out questions, each question counting the same.

        Alone, the receiver has read as it does with the fuser: both come from one message.
        """
        rows = self.journal.of_phase("evaluate")
        tested = sum(row[border.WEIGHT] for row in rows)
        if not tested:
            return {}
        sides = {"refined": rows} | {
            side: [prefixed(row, f"{side}-") for row in rows] for side in ("alone", *_SIDES)
        }
        found = {
            f"{'standalone' if side == 'alone' else side}_accuracy": sum(
                row.get("correct", 0) for row in told
            )
            / tested
            for side, told in sides.items()
        }
        gain = found["refined_accuracy"] - found["standalone_accuracy"]
        return found | {"gain": gain, "tested": float(tested)}

    def _write(self, arrays: Arrays, scores: Mapping[str, float]) -> Path | None:
        """Write the fuser with its card, as ``fedloom fuser solve`` would."""
        if self.journal.folder is None or self._total is None:
            return None
        sender, receiver = self.config.refine.listed
        card = FuserCard(
            sender_name=sender,
            receiver_name=receiver,
            sender=self.build.sender,
            receiver=self.build.receiver,
            config=dict(self.build.config),
            data={
                "source": self.config.data.source,
                "setting": "same",
                "clients": len(self._clients),
                "text_tokens": int(self._total.weight),
                "ridge": self.config.refine.solve_ridge,
            },
            scores={**self._explained, **scores},
            seed=self.config.seed,
            origin="federated",
        )
        folder = self.journal.folder / "fuser"
        folder.mkdir(exist_ok=True)
        kind = arrays[DOWN].dtype
        numbers = {name: np.array(x, kind) for name, x in self.build.numbers.items()}
        write_whole(folder / FILE, save({**arrays, **numbers}, metadata=card.to_metadata()))
        write_whole(folder / "card.md", card.to_text().encode())
        return folder / FILE

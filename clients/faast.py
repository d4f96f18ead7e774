# SPDX-License-Identifier: Apache-2.0
"""FAAST's local work: one forward pass over own rows, and sums that say nothing of their number.

No gradient, no optimiser, no step: keys of a frozen encoder are multiplied and added up.  Rows and
keys stay in this process; what leaves is ``K'K``, ``K'V``, counts, and sums of scores, or less
(``fedloom.clients.shares``).
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.common import NDArrays
from numpy.typing import NDArray

from fedloom import __version__, border, seeds
from fedloom.clients.bridge import AdapterClient, partition_of
from fedloom.clients.keys import SIDES, KeyBench, Side, encoder_of, key_bench, recipe_of, shown
from fedloom.clients.shares import own_sums, sums_to_send
from fedloom.errors import Refusal
from fedloom.rules.candidates import best, candidates, candidates_of_rows
from fedloom.rules.reading import one_hot, read, score_sums
from fedloom.rules.statistics import Gram
from fedloom.wire import other_manifest

Sums = dict[str, int | float]


class FAASTClient(AdapterClient):
    """One owner of labelled items, and a share in this process's encoder."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.config = context, recipe_of(context)
        self.partition_id = partition_of(context)
        self.source = encoder_of(self.config, context)
        self.revision = int(context.node_config.get("revision", 1))

    def bench(self) -> KeyBench:
        """Return what this process holds for this node's encoder, built on first use."""
        return key_bench(self.config, self.source)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say what this node holds and which frozen encoder it has.

        How many rows it will sum, and which, it says only where its sums would tell the same.
        """
        bench = self.bench()
        if config.get("adapter"):
            return {"manifest": bench.manifest.to_json(), "peft": ""}
        summed, held, test = (len(bench.rows(self.partition_id, side)) for side in SIDES)
        bare = self.config.faast.shares == "sums"
        named, mixed = bare and config.get("partition") and not bench.own, self.config.faast.mixed
        return {
            "partition": self.partition_id,
            "name": bench.partition.clients[self.partition_id].name,
            **({"train": summed + held} if bare else {"validation": held}),
            "test": test,
            "revision": self.revision,
            **({"held": bench.partition.digest()} if bare and bench.own else {}),
            "partition-json": bench.partition_json if named else "",
            "version": __version__,
            **{k: digest for k, digest in bench.digests.items() if mixed or k != "manifest"},
            **({"encoder": shown(self.source)} if mixed else {}),
            "device": self.config.model.device,
            "visible-gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
            "pid": os.getpid(),
        }

    def get_parameters(self, config: dict[str, Any]) -> NDArrays:
        """Return weights of zero: nothing is remembered at the start."""
        bench = self.bench()
        self.array_names = ["weights"]
        return [np.zeros((bench.encoder.width, len(bench.classes)))]

    def fit(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[NDArrays, int, dict[str, Any]]:
        """Sum over this client's rows; refuse where too few rows would show through."""
        bench = self._checked(config)
        self._check_enough(bench)
        before, started = bench.forwards, time.perf_counter()
        summed = bench.side(self.partition_id, "summed")
        encoded = time.perf_counter()
        given, values = self.config.faast, one_hot(summed.labels, len(bench.classes))
        gram = own_sums(given, summed.unit(), values)
        arrays = sums_to_send(gram, given, self.context, config)
        self.array_names = list(arrays)
        if given.shares != "sums":  # a count, a time or a score would tell what the arrays hide
            return list(arrays.values()), 1, {"revision": self.revision}
        metrics: dict[str, Any] = {
            "revision": self.revision,
            "seconds": time.perf_counter() - started,
            "seconds-encoding": encoded - started,
            "seconds-summing": time.perf_counter() - encoded,
            "pid": os.getpid(),
        }
        alone = self._alone(bench, summed, gram)
        metrics |= {f"local-{key}": value for key, value in alone.items()}
        metrics["forwards"] = bench.forwards - before  # with the rows that it scored itself on
        return list(arrays.values()), int(gram.count), metrics

    def _check_enough(self, bench: KeyBench) -> None:
        """Refuse numbers of rows that the server would drop, or should not see."""
        given, rows = self.config.faast, len(bench.rows(self.partition_id, "summed"))
        if rows < given.min_count:
            has = f"{rows} rows to sum," if given.shares == "sums" else "rows to sum, but"
            raise Refusal(
                f"client {self.partition_id} has {has} fewer than faast.min-count ="
                f" {given.min_count}: sums of few rows show them, and none were sent"
            )
        if 0 < given.max_count < rows:
            raise Refusal(
                f"client {self.partition_id} has more rows to sum than faast.max-count ="
                f" {given.max_count}; raise it, or lower data.max-train to take fewer"
            )

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Score the zero-shot head, all solutions on validation rows, or the chosen on test rows.

        ``forwards`` counts the items that had to be encoded for it.
        """
        frozen = bool(config.get("frozen"))
        bench = self.bench() if frozen else self._checked(config)
        before, started = bench.forwards, time.perf_counter()
        side = bench.side(self.partition_id, "validation" if config.get("validation") else "test")
        encoded = time.perf_counter()
        if frozen:
            metrics = self._frozen(bench, side)
        elif config.get("validation"):
            metrics = self._solutions(bench, side, parameters[0], config["memory-shares"])
        else:
            metrics = self._score(bench, side, parameters[0], float(config["memory-share"]))
        told: dict[str, Any] = {
            "seconds": time.perf_counter() - started,
            "seconds-encoding": encoded - started,
            "forwards": bench.forwards - before,
        }
        first = metrics.get("gold-ce-sum", metrics.get("gold-ce-sum-0-0", 0.0))
        return float(first) / max(len(side), 1), len(side), {**metrics, **told}

    def _checked(self, config: dict[str, Any]) -> KeyBench:
        """Hold the message's manifest against this node's before any item is encoded."""
        bench = self.bench()
        mine = bench.digests["manifest"]
        if config["manifest"] != mine:
            same = "encoder, classes, recipe"
            raise other_manifest(self.partition_id, str(config["manifest"]), mine, same)
        return bench

    def _score(
        self, bench: KeyBench, side: Side, weights: NDArray[Any], share: float = 1.0
    ) -> Sums:
        table = bench.table if self.config.faast.values == "labels" else None
        scores = read(side.unit(), weights, table, share)
        return score_sums(scores, side.labels, self.config.faast.scale)

    def _solutions(
        self, bench: KeyBench, side: Side, stack: NDArray[Any], shares: list[float]
    ) -> Sums:
        """Score ``[alphas, d, C]`` for every share; ``correct-1-0`` is the second alpha's first."""
        told: Sums = {}
        for i, weights in enumerate(stack):
            for j, share in enumerate(shares):
                found = self._score(bench, side, weights, share)
                told |= {f"{key}-{i}-{j}": found[key] for key in ("correct", "gold-ce-sum")}
        return told

    def _frozen(self, bench: KeyBench, side: Side) -> Sums:
        """Score the classes' names as the encoder knows them; without such, guess."""
        scale, classes = self.config.faast.scale, len(bench.classes)
        if bench.table is not None:
            return score_sums(side.unit() @ bench.table.T, side.labels, scale)
        sums = score_sums(np.zeros((len(side), classes)), side.labels, scale)
        drawn = seeds.generator(self.config.seed, self.partition_id, "guess")
        guesses = drawn.integers(classes, size=len(side))
        return {**sums, "correct": int((guesses == side.labels).sum())}

    def _alone(self, bench: KeyBench, summed: Side, gram: Gram) -> Sums:
        """Score what this client would have of its own rows alone, its filter chosen likewise."""
        given = self.config.faast
        if len(summed) < gram.keys:  # its rows are the shorter way to the same weights
            values = one_hot(summed.labels, len(bench.classes))
            solved = candidates_of_rows(summed.unit(), values, given.alpha_list, given.ridge)
        else:
            solved = [found.weights for found in candidates(gram, given.alpha_list, given.ridge)]
        held_out = bench.side(self.partition_id, "validation")
        scored = [self._score(bench, held_out, weights) for weights in solved if len(held_out)]
        taken = best([(s["correct"], s["gold-ce-sum"]) for s in scored]) if scored else 0
        test = bench.side(self.partition_id, "test")
        return {border.WEIGHT: len(test), **self._score(bench, test, solved[taken])}

# SPDX-License-Identifier: Apache-2.0
"""A client's part in solving a fuser: read own texts once with both models, send sums over tokens.

No gradient and no step.  Texts and caches stay in this process; what leaves is, for each layer of
the receiver, ``K'K``, ``K'V`` and ``|V|^2`` over aligned tokens, their number, and sums of scores.
Sums of few tokens would show them, so a client with too few sends nothing.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Context
from flwr.common import NDArrays
from numpy.typing import NDArray

from fedloom import __version__
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.clients.bridge import AdapterClient, client_at, partition_of, with_own_rows
from fedloom.clients.workbench import device, visible_gpus
from fedloom.config import RunConfig
from fedloom.data import by_file
from fedloom.data.partition import client_rows
from fedloom.data.questions import Question
from fedloom.errors import Refusal
from fedloom.holdings import holdings
from fedloom.models.base import load_base
from fedloom.refining import measured
from fedloom.refining.closed_form import build_of, fuser_sums, solvable
from fedloom.refining.hearing import Party, Shelf
from fedloom.refining.lessons import Encoded, encode_lessons, question_lesson
from fedloom.refining.scoring import Outcome, score, shuffled, zeroed
from fedloom.refining.teaching import handed
from fedloom.rules.fuser_maps import Build
from fedloom.wire import Manifest, other_manifest


@dataclass(frozen=True)
class _Pair:
    """The two models of this process, and the fuser that is asked for, with nothing in it yet."""

    sender: Shelf
    receiver: Shelf
    fuser: CacheFuser
    build: Build
    manifest: Manifest


class FuserSumsClient(AdapterClient):
    """One owner of questions who holds both models of a pair."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self.config = with_own_rows(RunConfig.from_flower(context.run_config), context)
        self.partition_id = partition_of(context)

    def get_properties(self, config: dict[str, Any]) -> dict[str, Any]:
        """Say what this node holds, and which pair its sums are of."""
        if config.get("adapter"):
            return {"manifest": self._pair().manifest.to_json(), "peft": ""}
        _, partition = holdings(self.config)
        client = client_at(partition, self.partition_id)
        own, pair = by_file.is_own(self.config.data.source), self._pair()
        digest = partition.digest()
        return {
            "partition": self.partition_id,
            "name": client.name,
            "train": len(client.train),
            "test": min(len(client.test), self.config.refine.questions),
            "partition-json": "",
            "version": __version__,
            "recipe": self.config.digest(),
            **({"data": by_file.OWN, "held": digest} if own else {"data": digest}),
            "base": pair.manifest.base,
            "tokenizer": pair.manifest.tokenizer,
            "values": pair.manifest.values,
            "build": pair.build.to_json(),
            "device": device(self.config),
            "visible-gpus": visible_gpus(),
            "pid": os.getpid(),
        }

    def get_parameters(self, config: dict[str, Any]) -> NDArrays:
        """Return the fuser's arrays before anything is solved."""
        arrays = _travelling(self._pair().fuser)
        self.array_names = list(arrays)
        return list(arrays.values())

    def fit(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[NDArrays, int, dict[str, Any]]:
        """Sum over the tokens of this client's training questions."""
        pair, started = self._checked(config), time.perf_counter()
        lessons = self._lessons(pair, test=False)
        sums = fuser_sums(pair.sender, pair.receiver, lessons, pair.fuser.config)
        if sums.tokens < (least := self.config.refine.solve_least):
            raise Refusal(
                f"client {self.partition_id} has fewer than refine.solve-least = {least} tokens to"
                " sum: sums of few tokens show them, and none were sent"
            )
        arrays = sums.arrays()
        self.array_names = list(arrays)
        seconds = {"seconds": time.perf_counter() - started, "pid": os.getpid()}
        return list(arrays.values()), sums.tokens, seconds

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Score held-out questions alone, or with the fuser that came, beside its controls."""
        frozen = bool(config.get("frozen"))
        pair = self._pair() if frozen else self._checked(config)
        held, started = self._lessons(pair, test=True), time.perf_counter()
        alone = _sums(score(pair.receiver, held, None, config=pair.fuser.config))
        metrics = dict(alone)
        if not frozen:
            fuser = pair.fuser
            came = dict(zip(self.array_names, parameters, strict=True))
            fuser.load(fuser.arrays() | came)  # single numbers stay as they are
            fuser.eval().requires_grad_(False).to(pair.receiver.party.base.model.dtype)
            given = [handed(pair.sender, lesson) for lesson in held]
            metrics = _sums(score(pair.receiver, held, fuser, given))
            sides = {
                "shuffled": score(
                    pair.receiver, held, fuser, shuffled(given, seed=self.config.seed)
                ),
                "zeroed": score(pair.receiver, held, fuser, [zeroed(piece) for piece in given]),
            }
            for side, found in {**{k: _sums(v) for k, v in sides.items()}, "alone": alone}.items():
                metrics |= {f"{side}-{k}": found[k] for k in ("correct", "gold-ce-sum")}
        metrics["tokens"] = sum(len(lesson.prompt_ids) for lesson in held)
        metrics["seconds"] = time.perf_counter() - started
        return metrics["gold-ce-sum"] / len(held), len(held), metrics

    def _pair(self) -> _Pair:
        """Load both models, once a process, and describe the fuser."""
        torch.set_num_threads(self.config.clients.threads)
        given, kind = self.config.refine, self.config.model.dtype
        bases = [load_base(source, kind, device(self.config)) for source in given.listed]
        sender, receiver = (Shelf(Party(base, measured(base))) for base in bases)
        ends = sender.party.geometry, receiver.party.geometry
        slides = len(ends[1].full) < ends[1].layers
        asked = FuserConfig(tail=0 if slides else 1, share=given.solve_share)
        fuser = CacheFuser(*ends, solvable(asked, ends[1]), seed=self.config.seed)
        if kind == "float64":
            fuser.double()
        build = build_of(fuser)
        manifest = Manifest.of(
            _travelling(fuser),
            method=self.config.method,
            version=__version__,
            base=_joined(base.base_hash for base in bases),
            tokenizer=_joined(base.tokenizer_hash for base in bases),
            values=build.digest(),
        )
        return _Pair(sender, receiver, fuser, build, manifest)

    def _checked(self, config: dict[str, Any]) -> _Pair:
        """Hold the message's manifest against this node's before any text is read."""
        pair = self._pair()
        mine = pair.manifest.digest()
        if config["manifest"] != mine:
            raise other_manifest(self.partition_id, str(config["manifest"]), mine, "models, recipe")
        return pair

    def _lessons(self, pair: _Pair, *, test: bool) -> list[Encoded]:
        """Return own questions in both models' tokens; what is too long is left out."""
        examples, partition = holdings(self.config)
        rows = cast("Sequence[Question]", examples)  # the recipe's task is mmlu
        sides = client_rows(partition, rows, self.partition_id)
        chosen = list(sides[1])[: self.config.refine.questions] if test else sides[0]
        return encode_lessons(
            [question_lesson(question) for question in chosen],
            pair.sender.party.base.tokenizer,
            pair.receiver.party.base.tokenizer,
            longest=self.config.refine.max_tokens,
            ends=True,
        )


def _travelling(fuser: CacheFuser) -> dict[str, NDArray[Any]]:
    """Return a fuser's arrays but for single numbers, which nothing here changes."""
    return {name: x for name, x in fuser.arrays().items() if x.ndim}


def _joined(hashes: Any) -> str:
    return hashlib.sha256("|".join(hashes).encode()).hexdigest()


def _sums(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Add up scores as other methods' clients do."""
    gold = [o.nats for o in outcomes]
    letter = [o.nats + float(np.logaddexp.reduce(o.options)) for o in outcomes]
    return {
        "correct": sum(o.correct for o in outcomes),
        "gold-ce-sum": math.fsum(gold),
        "gold-ce-sq-sum": math.fsum(x * x for x in gold),
        "letter-ce-sum": math.fsum(letter),
        "letter-ce-sq-sum": math.fsum(x * x for x in letter),
        "chance-sum": math.fsum(1 / len(o.options) for o in outcomes),
        "chance-ce-sum": math.fsum(math.log(len(o.options)) for o in outcomes),
    }

# SPDX-License-Identifier: Apache-2.0
"""What richer features and another measure of error bring to a fuser in closed form.

Each variant is solved from the same training rows, at the same share of the receiver's parameters,
scored on the same held-out rows as ``pairs.py`` has, then polished by a few steps of gradient and
scored again:

- ``plain``: three sender layers a receiver layer, every error counts alike;
- ``weighted``: an error counts as far as the receiver's queries and output matrices see it;
- ``layers``: five sender layers;
- ``neighbours``: the sender's last and next token beside each;
- ``random``: as many random ReLU features of a token's keys and values as it has numbers.

All but ``plain`` are weighted.  Features are made on the sender's cache before the fuser sees it,
as further KV heads, so that sums, solution, training and scoring are those of the product.  With
more features the same share of parameters leaves a smaller rank.  Run as
``python benchmarks/fedrefine/closed_features.py --help``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from pairs_letters import calibrated
from pairs_study import Study, rows_of
from question_sets import MADE_UP, SETS
from torch import Tensor

from fedloom import seeds
from fedloom.adapters.fuser import CacheFuser
from fedloom.refining.classroom import Classroom
from fedloom.refining.hearing import Party, Shelf
from fedloom.refining.scoring import Outcome, accuracy, nats, score, shuffled
from fedloom.refining.teaching import TeachConfig, handed, teach

VARIANTS = ("plain", "weighted", "layers", "neighbours", "random")
TIMES = {"neighbours": 3, "random": 2}  # KV heads that the fuser finds, for each of the model's
QUICK = {
    "pair": "tiny:llama-tiny:qwen3",
    "set": MADE_UP,
    "train": 24,
    "test": 12,
    "polish": 2,
    "longest": 400,
    "width": 8,
}


class Featured(Shelf):
    """Another shelf's slices with features beside their keys and values.

    ``neighbours``: the last and the next token's; the first and last stand in for themselves.
    ``random``: ``relu(W x)`` of what a token has in a layer, at unit mean square, W fixed.
    """

    def __init__(self, shelf: Shelf, feature: str) -> None:
        geometry = shelf.party.geometry
        name = hashlib.sha256(f"{geometry.model}|{feature}".encode()).hexdigest()
        wide = replace(geometry, heads=TIMES[feature] * geometry.heads, model=name)
        super().__init__(Party(shelf.party.base, wide), budget=0)
        self._inner, self._feature, self._width = shelf, feature, geometry.width
        self._maps: dict[str, Tensor] = {}

    def _of(self, ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        keys, values = (x.float() for x in self._inner._of(ids))  # [L, H, T, D]
        if self._feature == "neighbours":
            return _beside(keys), _beside(values)
        layers, heads, tokens, dim = keys.shape
        both = torch.cat((keys, values), dim=1).transpose(1, 2).flatten(2)  # [L, T, 2 H D]
        both = both / both.pow(2).mean(-1, keepdim=True).sqrt()
        made = []
        for name, x in (("keys", keys), ("values", values)):
            features = torch.relu(both @ self._map(name, layers)).view(layers, tokens, heads, dim)
            made.append(torch.cat((x, features.transpose(1, 2)), dim=1))
        return made[0], made[1]

    def _map(self, name: str, layers: int) -> Tensor:
        """Return a random matrix for each layer, [L, 2 H D, H D], the same in every run."""
        if name not in self._maps:
            made = torch.Generator().manual_seed(seeds.split(0, "random-features", name))
            size = (layers, 2 * self._width, self._width)
            self._maps[name] = torch.randn(size, generator=made) * (2 * self._width) ** -0.5
        return self._maps[name]


def _beside(x: Tensor) -> Tensor:
    """Put each token's last and next one beside it, as further heads: [L, H, T, D] to 3 H."""
    before = torch.cat((x[:, :, :1], x[:, :, :-1]), dim=2)
    after = torch.cat((x[:, :, 1:], x[:, :, -1:]), dim=2)
    return torch.cat((x, before, after), dim=1)


def tried(room: Classroom, study: Study, variant: str, given: argparse.Namespace) -> dict[str, Any]:
    """Solve one variant and score it, before and after a polish."""
    began = time.process_time()
    config = study.config(taps=5) if variant == "layers" else study.config()
    fuser, told = room.solved(config, ridge=given.ridge, weighted=variant != "plain")
    row: dict[str, Any] = {"explained": told["explained"], "kept": told["rank_kept"]}
    row |= {"share": fuser.parameter_share, "solve_seconds": time.process_time() - began}
    row |= scores_of(room, fuser, "")
    if given.polish:
        began = time.process_time()
        how = TeachConfig(steps=given.polish, batch=8, learning_rate=given.lr)
        teach(fuser, room.sender, room.receiver, room.learnt, how, seed=0)
        row |= {"polish_seconds": time.process_time() - began}
        row |= scores_of(room, fuser, "polished_")
    return row


def scores_of(room: Classroom, fuser: CacheFuser, name: str) -> dict[str, float]:
    pieces = [handed(room.sender, lesson) for lesson in room.held]
    found = score(room.receiver, room.held, fuser, pieces)
    others = score(room.receiver, room.held, fuser, shuffled(pieces, seed=0))
    told = said(found, room) | {"shuffled_nats": nats(others)}
    return {f"{name}{key}": value for key, value in told.items()}


def said(found: Sequence[Outcome], room: Classroom) -> dict[str, float]:
    """Return accuracy, and again with each letter's mean over these rows subtracted, and nats."""
    rows = calibrated(rows_of(found, room.held))
    known = mean(float(row["correct"]) for row in rows)
    return {"accuracy": accuracy(found), "calibrated": known, "nats": nats(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--pair", default="qwen-smol")
    parser.add_argument("--set", choices=(*SETS, MADE_UP), default="hotels-fr")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--polish", type=int, default=40, help="steps of 8 rows; 0 for none")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--ridge", type=float, default=1e-2)
    parser.add_argument("--longest", type=int, default=110, help="tokens of a text")
    parser.add_argument("--memory", type=int, default=512, help="MB of slices a model")
    parser.add_argument("--quick", action="store_true", help="tiny random models")
    given = parser.parse_args()
    given.slices = given.folder / "slices"
    vars(given).update(QUICK if given.quick else {"width": 0})
    torch.set_num_threads(1)
    study = Study(given, given.pair)
    made: dict[str, Any] = {}
    for variant in given.variants:
        sender = Featured(study.sender, variant) if variant in TIMES else study.sender
        room = study.room(sender)
        made[variant] = tried(room, study, variant, given)
        print(variant, json.dumps({k: round(v, 4) for k, v in made[variant].items()}), flush=True)
    room = study.room(study.sender)
    alone = score(room.receiver, room.held, None, config=study.config())
    made["standalone"] = said(alone, room)
    print(json.dumps({"pair": given.pair, "set": given.set, "variants": made}))


if __name__ == "__main__":
    main()

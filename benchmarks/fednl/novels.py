# SPDX-License-Identifier: Apache-2.0
"""Six owners of a novel each: what the memory is worth to a language model with a short window.

Studies (d) and (f).  ``run`` trains each condition over six clients by the product's own training
loop and rule, on the first part of every novel, and scores the last part of each: nats a token,
row by row, and along one text of 16K tokens read from left to right.  ``table`` pairs the rows.

============  ====================================================================================
frozen        the backbone as it is: full attention
windowed      the backbone as it is, every layer behind the window
fedavg        LoRA, behind the window: alpha = 0
fednl         LoRA and memory, behind the window
state-zeroed  fednl's arrays, but nothing is ever written to S
hebbian       a memory that never takes back what it wrote
no-gate       alpha = 1: the memory in place of what the window sees
lora-frozen   the memory alone is trained
reset         S is emptied every ``RESET`` tokens
detached      no gradient through S from one chunk to the next
============  ====================================================================================

Run as ``python benchmarks/fednl/novels.py run|table --help``; the last line of ``table`` is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import DynamicCache

from fedloom import seeds
from fedloom.adapters.memory import MemoryCache
from fedloom.clients.workbench import Workbench, workbench
from fedloom.config import RunConfig
from fedloom.data.text import load_text
from fedloom.evaluation import stream_cross_entropy
from fedloom.models.spans import Labelled, span_loss
from fedloom.paired import seeded_bootstrap
from fedloom.strategies import factor_rules
from fedloom.training import train_locally
from fedloom.wire import Update

TEXT = "packaged:austen"
ROW, TEST_ROW, EVERY, RESET = 192, 1024, 4, 64
"""Tokens of a training row and of a test row; one token in ``EVERY`` of a training row is learnt
from, as the output matrix costs more than the adapted layers; tokens between resets."""
TEST_SHARE, STREAM = 0.1, 16 * 1024
BASE = RunConfig().replaced(
    name="novels",
    last_layers=6,
    rounds=3,
    memory__window=64,
    memory__sinks=1,
    memory__beta_trainable=True,
    train__keep_trunk=4000,
    train__max_steps=6,
    train__batch_size=2,
    train__learning_rate=5e-4,
    train__memory_learning_rate=2e-2,
)
TRAINED: dict[str, dict[str, Any]] = {
    "fedavg": {"memory__gate": "shut", "server__rule": "svd"},
    "fednl": {},
    "hebbian": {"memory__rule": "hebbian"},
    "no-gate": {"memory__gate": "open"},
    "lora-frozen": {"lora__frozen": True},
    "reset": {"memory__reset_every": RESET},
    "detached": {"train__truncate_chunks": 1},
}
CONDITIONS = ("frozen", "windowed", *TRAINED, "state-zeroed")


def config_of(condition: str, seed: int) -> RunConfig:
    """Return the recipe of a condition; all share everything that is not named above."""
    changes: dict[str, Any] = {
        "frozen": {"memory__window": 0, "memory__sinks": 0, "train__keep_trunk": 0},
        "windowed": TRAINED["fedavg"],
        "state-zeroed": {"memory__rule": "none"},
    }.get(condition) or TRAINED.get(condition, {})
    return BASE.replaced(seed=seed, **changes)


class Novels:
    """Every novel as tokens, its last tenth apart."""

    def __init__(self, bench: Workbench) -> None:
        texts: dict[str, list[str]] = {}
        for document in load_text(TEXT):
            texts.setdefault(document.work, []).extend(document.sentences)
        tokenizer = bench.base.tokenizer
        self.ids = {
            name: tokenizer.encode(" ".join(said), add_special_tokens=False)
            for name, said in texts.items()
        }

    def train(self, name: str, seed: int, rows: int) -> list[Labelled]:
        """Draw rows of the first part of a novel; no two overlap."""
        ids = self.ids[name][: self._cut(name)]
        random = seeds.generator(seed, name, "rows")
        starts = random.permutation(len(ids) // ROW)[:rows] * ROW
        labels = tuple(range(1 + int(random.integers(EVERY)), ROW, EVERY))
        return [Labelled(tuple(ids[s : s + ROW]), labels) for s in starts]

    def test(self, name: str, rows: int) -> list[Labelled]:
        """Return evenly spaced rows of the last part."""
        ids = self.ids[name][self._cut(name) :]
        starts = np.linspace(0, len(ids) - TEST_ROW, rows).astype(int)
        return [Labelled(tuple(ids[s : s + TEST_ROW]), tuple(range(1, TEST_ROW))) for s in starts]

    def stream(self) -> list[int]:
        """Return one long held-out text: the last part of the longest novel."""
        name = max(self.ids, key=lambda n: len(self.ids[n]))
        return list(self.ids[name][self._cut(name) :][: STREAM + 1])

    def _cut(self, name: str) -> int:
        return int(len(self.ids[name]) * (1 - TEST_SHARE))


def federated(bench: Workbench, novels: Novels, config: RunConfig) -> dict[str, Any]:
    """Run the rounds: every client starts from the same arrays, and their sum makes the next."""
    arrays, adapter = bench.start(), bench.adapter
    steps = config.train.max_steps * config.train.batch_size
    held = {name: novels.train(name, config.seed, steps * config.rounds) for name in novels.ids}
    losses = []
    for server_round in range(1, config.rounds + 1):
        updates = []
        for partition, (name, rows) in enumerate(held.items()):
            adapter.load(arrays)
            report = train_locally(
                adapter,
                rows[(server_round - 1) * steps : server_round * steps],
                lambda batch: (span_loss(bench.base.model, batch, bench.trunk), ROW * len(batch)),
                lambda row: len(row.ids),
                config.train,
                seed=seeds.split(config.seed, server_round, partition, "training"),
            )
            losses.append(report.loss)
            updates.append(Update.of(adapter.arrays(), len(novels.ids[name]), partition))
        arrays, _ = factor_rules.fold(config, server_round, updates, arrays)
    adapter.load(arrays)
    return {"first": mean(losses[: len(held)]), "last": mean(losses[-len(held) :])}


def scored(bench: Workbench, novels: Novels, rows: int) -> dict[str, list[float]]:
    """Return each test row's nats a token."""
    with torch.inference_mode():
        return {
            name: [
                float(span_loss(bench.base.model, [row], bench.trunk))
                for row in novels.test(name, rows)
            ]
            for name in novels.ids
        }


def streamed(bench: Workbench, novels: Novels, *, frozen: bool) -> dict[str, list[float]]:
    """Read the long text once; a model without a window, as far as it was ever trained to see."""
    model, ids = bench.base.model, novels.stream()
    longest = model.config.max_position_embeddings
    cache = DynamicCache(config=model.config) if frozen else MemoryCache(model.config)
    curve = stream_cross_entropy(
        model, ids[: longest + 1] if frozen else ids, chunk=512, cache=cache
    )
    return {"nats": curve.nats, "relative": curve.relative}


def run(given: argparse.Namespace) -> None:
    """Train and score what has no file yet."""
    torch.set_num_threads(1)
    given.folder.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for condition in given.conditions:
            out = given.folder / f"{condition}-{seed}.json"
            if out.exists():
                continue
            began = time.perf_counter()
            bench = workbench(config_of(condition, seed))
            novels, told = Novels(bench), {}
            if condition in TRAINED:
                told["loss"] = federated(bench, novels, bench.adapter.config)
            arrays = given.folder / f"fednl-{seed}.safetensors"
            if condition == "fednl":
                save_file(bench.adapter.arrays(), arrays)
            if condition == "state-zeroed":
                bench.adapter.load(load_file(arrays))
            told |= condition_scores(bench, novels, condition, given)
            out.write_text(json.dumps({**told, "seconds": time.perf_counter() - began}))
            print(f"{condition} {seed}: {time.perf_counter() - began:.0f} s", flush=True)


def condition_scores(
    bench: Workbench, novels: Novels, condition: str, given: argparse.Namespace
) -> dict[str, Any]:
    """Score the rows, and the long text for the first seed."""
    frozen = condition == "frozen"
    if frozen:
        with bench.adapter.off():
            told: dict[str, Any] = {"rows": scored(bench, novels, given.rows)}
            return told | {"stream": streamed(bench, novels, frozen=True)}
    told = {"rows": scored(bench, novels, given.rows)}
    if condition in given.stream:
        told["stream"] = streamed(bench, novels, frozen=False)
    return told


def table(given: argparse.Namespace) -> None:
    """Print nats a token, paired differences, and the long text's curve."""
    found = {
        (c, s): json.loads(path.read_text())
        for c in CONDITIONS
        for s in given.seeds
        if (path := given.folder / f"{c}-{s}.json").exists()
    }
    held = [c for c in CONDITIONS if all((c, s) in found for s in given.seeds)]
    print("| condition | nats a token | perplexity | fednl less it |\n" + "| --- " * 4 + "|")
    told: dict[str, Any] = {}
    for condition in held:
        rows = [found[condition, s]["rows"] for s in given.seeds]
        nats = mean(mean(map(mean, of.values())) for of in rows)
        told[condition] = {"nats": round(nats, 4), "perplexity": round(float(np.exp(nats)), 2)}
        cell = ""
        if condition != "fednl" and "fednl" in held:
            told[condition]["fednl_less_it"] = apart = against(found, condition, given.seeds)
            cell = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*apart)
        print(f"| {condition} | {nats:.4f} | {np.exp(nats):.2f} | {cell} |")
    print()
    for condition in held:
        if curve := found[condition, given.seeds[0]].get("stream"):
            told[condition]["stream_nats"] = [round(x, 4) for x in curve["nats"]]
            print(condition, " ".join(f"{x:.3f}" for x in curve["nats"]))
    print(json.dumps({"conditions": told, "seeds": given.seeds}))


def against(found: dict[Any, Any], condition: str, seeds_: Sequence[int]) -> list[float]:
    """Pair fednl's rows with another condition's."""
    differences = [
        [
            np.subtract(found["fednl", s]["rows"][name], found[condition, s]["rows"][name])
            for name in found["fednl", s]["rows"]
        ]
        for s in seeds_
    ]
    interval = seeded_bootstrap(differences, seed=0)
    return [round(x, 4) for x in (interval.value, interval.low, interval.high)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, work in (("run", run), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        command.add_argument("--folder", type=Path, default=Path("runs/novels"))
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        if name == "run":
            command.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS)
            command.add_argument("--rows", type=int, default=4, help="test rows a novel")
            command.add_argument(
                "--stream", nargs="*", default=["windowed", "fedavg", "fednl", "state-zeroed"]
            )
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()

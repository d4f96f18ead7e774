# SPDX-License-Identifier: Apache-2.0
"""Seven owners of needles: whether it is the memory that answers, and what federation brings.

Study (c).  ``train`` runs the recipe ``niah`` for one method and seed; ``score`` asks what a run
left on test rows that no run trained on, row by row on this machine; ``table`` pairs the outcomes.
The conditions see the same rows, the same windowed backbone and the same budget of rows and steps:

=============  ==================================================================================
fednl          the recipe: memory and LoRA trained and averaged
state-zeroed   the same arrays, but nothing is ever written to S
fedavg         the same run with the gate shut: alpha = 0, the same window
untrained      the windowed backbone as it is
unwindowed     the frozen model with full attention: it sees the needles, and was never taught
=============  ==================================================================================

Values are not listed in the prompt: each of four is scored as what follows the question and the
fact's own words, and all four stand in the haystack (a counter's are four neighbouring states).
Only rows count of which no value stands in the window when the question begins; of a counter only
its base state is a value that is said.  Run as
``python benchmarks/fednl/needles.py train|score|table --help``; the last line of ``table`` is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from fedloom.adapters import centring
from fedloom.adapters.attach import attach
from fedloom.config import RunConfig
from fedloom.config.material import NEEDLES
from fedloom.intervals import macro, wilson
from fedloom.models.base import Base, load_base
from fedloom.paired import mcnemar, seeded_bootstrap
from fedloom.simulations.inprocess import run_in_process
from fedloom.tasks import Task

RECIPE = Path(__file__).parents[2] / "simulations" / "niah.toml"
TRAINED: dict[str, dict[str, Any]] = {"fednl": {}, "fedavg": {"memory__gate": "shut"}}
CONDITIONS = ("fednl", "state-zeroed", "fedavg", "untrained", "unwindowed")
CHANCE = 0.25


def recipe(method: str, seed: int, folder: Path, **changes: Any) -> RunConfig:
    """Return the recipe of one method; all share everything that is not named here."""
    settings = {**TRAINED[method], **changes, "seed": seed, "output": str(folder.resolve())}
    return RunConfig.from_toml(RECIPE).replaced(name=f"{method}-{seed}", **settings)


def train(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    run_in_process(recipe(given.method, given.seed, given.folder))


@contextmanager
def hung(base: Base, condition: str, seed: int, folder: Path) -> Iterator[RunConfig]:
    """Hang on the model what a condition tests, for as long as the block lasts."""
    method = "fedavg" if condition in ("fedavg", "untrained", "unwindowed") else "fednl"
    config = recipe(method, seed, folder)
    if condition == "unwindowed":
        yield config
        return
    if condition == "state-zeroed":
        config = config.replaced(memory__rule="none")
    adapter = attach(base.model, config, base.tokenizer.encode(centring.TEXT))
    try:
        if condition != "untrained":
            adapter.load(saved(folder / config.name / "adapter"))
        yield config
    finally:
        adapter.detach()


def saved(folder: Path) -> dict[str, np.ndarray]:
    """Read a run's adapter back."""
    files = ("adapter_model.safetensors", "memory.safetensors")
    parts = [load_file(folder / file) for file in files if (folder / file).exists()]
    return {name: array for part in parts for name, array in part.items()}


def score(given: argparse.Namespace) -> None:
    """Score one condition's test rows, one line a row; rows that are there already are kept."""
    torch.set_num_threads(given.threads)
    base = load_base(RunConfig.from_toml(RECIPE).model.source)
    out = given.folder / "scores" / f"{given.condition}-{given.seed}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["client"], row["tokens_made"]) for row in read(out)}
    with hung(base, given.condition, given.seed, given.folder) as config:
        for length, count in (pair.split(":") for pair in given.lengths.split(",")):
            rows = config.replaced(niah__test_tokens=length, niah__test_rows=int(count))
            for client, kind in enumerate(rows.niah.kind_names):
                if (kind, int(length)) in done:
                    continue
                began = time.perf_counter()
                found = Task(rows, base, client).score_rows()
                where = {"client": kind, "tokens_made": int(length)}
                lines = [json.dumps({**where, **asdict(row)}) + "\n" for row in found]
                with out.open("a", encoding="utf-8") as handle:
                    handle.writelines(lines)
                right = mean(row.correct for row in found)
                print(f"{kind:12} {length:>5} {right:.2f} {time.perf_counter() - began:.0f} s")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


Row = tuple[int, str]  # seed, what was asked
Outcomes = dict[str, dict[Row, dict[str, Any]]]  # condition -> row -> score


def table(given: argparse.Namespace) -> None:
    """Pair the conditions' outcomes and print them by client and by length."""
    window = RunConfig.from_toml(RECIPE).memory.window
    outcomes: Outcomes = {}
    for condition in CONDITIONS:
        rows: dict[Row, dict[str, Any]] = {}
        for seed in given.seeds:
            for row in read(given.folder / "scores" / f"{condition}-{seed}.jsonl"):
                if beyond(row, window):
                    rows[seed, row["row"]] = row
        if rows:
            outcomes[condition] = rows
    shared = set.intersection(*(set(rows) for rows in outcomes.values()))
    outcomes = {
        condition: {name: rows[name] for name in sorted(shared)}
        for condition, rows in outcomes.items()
    }
    print(f"{len(shared)} test rows beyond the window of {window} tokens; chance {CHANCE}\n")
    by_client(outcomes)
    by_length(outcomes)
    versus = {c: against(outcomes, c) for c in outcomes if c != "fednl"}
    for condition, row in versus.items():
        print(
            f"fednl - {condition}: {row['difference']:+.3f}"
            f" [{row['low']:+.3f}, {row['high']:+.3f}], McNemar by seed: {row['mcnemar']}"
        )
    macros = {c: round(of_clients(rows)[0].value, 4) for c, rows in outcomes.items()}
    print(json.dumps({"macro": macros, "chance": CHANCE, "rows": len(shared), "against": versus}))


def beyond(row: dict[str, Any], window: int) -> bool:
    """Whether no value is in sight of the question; a counter's steps are none, its base is one."""
    last_value = "distance" if row["client"] == "counter" else "nearest"
    return bool(row["place"][last_value] >= window)


def of_clients(rows: dict[Row, dict[str, Any]]) -> tuple[Any, dict[str, list[bool]]]:
    """Return the macro accuracy with its interval, and each client's outcomes."""
    held: dict[str, list[bool]] = {}
    for row in rows.values():
        held.setdefault(row["client"], []).append(row["correct"])
    return macro([wilson(sum(hits), len(hits)) for hits in held.values()]), held


def by_client(outcomes: Outcomes) -> None:
    print(
        "| client | rows | " + " | ".join(outcomes) + " |\n" + "| --- " * (2 + len(outcomes)) + "|"
    )
    each = {condition: of_clients(rows) for condition, rows in outcomes.items()}
    first = next(iter(each.values()))[1]
    for kind, name in NEEDLES.items():
        if kind in first:
            cells = [f"{mean(held[kind]):.3f}" for _, held in each.values()]
            print(f"| {name} | {len(first[kind])} | " + " | ".join(cells) + " |")
    cells = [f"{at.value:.3f} [{at.low:.3f}, {at.high:.3f}]" for at, _ in each.values()]
    print("| **macro** | | " + " | ".join(cells) + " |\n")


def by_length(outcomes: Outcomes) -> None:
    lengths = sorted({row["tokens_made"] for rows in outcomes.values() for row in rows.values()})
    print("| tokens | " + " | ".join(outcomes) + " |\n" + "| --- " * (1 + len(outcomes)) + "|")
    for length in lengths:
        cells = []
        for rows in outcomes.values():
            at = {name: row for name, row in rows.items() if row["tokens_made"] == length}
            cells.append(f"{of_clients(at)[0].value:.3f}")
        print(f"| {length} | " + " | ".join(cells) + " |")
    print()


def against(outcomes: Outcomes, other: str) -> dict[str, Any]:
    """Compare FedNL with a condition on the same rows: rows are drawn within seeds."""
    pairs: dict[int, dict[str, list[tuple[bool, bool]]]] = {}
    for (seed, name), row in outcomes["fednl"].items():
        pair = (row["correct"], outcomes[other][seed, name]["correct"])
        pairs.setdefault(seed, {}).setdefault(row["client"], []).append(pair)
    interval = seeded_bootstrap(
        [[[float(a) - float(b) for a, b in held] for held in of.values()] for of in pairs.values()],
        seed=0,
    )
    parted = []
    for of in pairs.values():
        ours, theirs = zip(*(pair for held in of.values() for pair in held), strict=True)
        test = mcnemar(ours, theirs)
        parted.append(f"{test.only_a}:{test.only_b} (p = {test.p:.2g})")
    return {
        "difference": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "mcnemar": ", ".join(parted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, work in (("train", train), ("score", score), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        command.add_argument("--folder", type=Path, default=Path("runs/needles"))
        if name == "table":
            command.add_argument("--seeds", type=int, nargs="+", default=[0])
            continue
        command.add_argument("--seed", type=int, default=0)
        if name == "train":
            command.add_argument("--method", choices=tuple(TRAINED), default="fednl")
        else:
            command.add_argument("--condition", choices=CONDITIONS, default="fednl")
            command.add_argument("--lengths", default="256:16,512:8,1024:4")
            command.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""How far honest clients go against the gate's medians, and whether ten times an update is caught.

Run as ``python benchmarks/norms.py``; ``--only WORD`` takes the cases whose names have it.  The
last line printed is one JSON object.  Seven clients of a tiny random model hold tables of made-up
questions with letters drawn from a Dirichlet (0.1): 12 rows each, or 4 to 40, or 4 and 200.  Each
case runs with the default bound, six honest clients and one that sends ten times its change in
every round.  Of the honest, the largest multiple that the gate worked out is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.clientapp import ClientApp

from fedloom import seeds
from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.clients.workbench import release
from fedloom.config import RunConfig
from fedloom.rules.bounds import MOVE, NORM, Move, typical_of
from fedloom.rules.controls import CONTROL
from fedloom.simulations.inprocess import run_in_process
from fedloom.strategies.gate import Gate
from fedloom.strategies.journal import Journal
from fedloom.strategies.roster import Roster

SEED, ROUNDS, TIMES, LOUD = 0, 4, 10.0, 3
EVEN = [12] * 7
UNLIKE = [4, 4, 8, 12, 16, 24, 40]
"""Training rows by client; at four a batch, 1 to 10 steps."""
MANY_SMALL = [4, 4, 4, 4, 4, 200, 200]
"""Two take 50 times the steps of the rest."""
WORDS = ("amber", "brook", "cedar", "dune", "ember", "fjord", "grove", "harbor", "inlet", "kelp")

SGD = {"train.optimizer": "sgd", "train.learning-rate": 0.05}
PER_STEP = {**SGD, "train.max-steps": 1, "train.batch-size": 8, "server.rule": "mean"}
CASES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "default, 1:50": (MANY_SMALL, {}),
    "default": (UNLIKE, {}),
    "fedsa": (UNLIKE, {"server.rule": "fedsa"}),
    "flora": (UNLIKE, {"server.rule": "flora"}),
    "scaffold, half asked": (UNLIKE, {"baseline": "scaffold", "sampling.fraction": 0.5}),
    "sgd": (UNLIKE, {**SGD, "server.rule": "mean"}),
    "int4": (UNLIKE, {"server.rule": "mean", "wire.dtype": "int4"}),
    "sgd, one step, adam": (EVEN, {**PER_STEP, "server.optimizer": "adam",
                                   "server.learning-rate": 0.01}),
    "rate 20 times": (UNLIKE, {"train.learning-rate": 1e-2}),
    "ranks 2, 4, 8": (EVEN, {"lora.ranks": "2,8,4,2,8,4,2"}),
    "rolora": (UNLIKE, {"server.rule": "rolora"}),
    "ditto": (UNLIKE, {"baseline": "ditto"}),
    "scaffold": (UNLIKE, {"baseline": "scaffold"}),
    "fedala": (UNLIKE, {"baseline": "fedala", "local.ala-passes": 10}),
    "fedsa, max-steps 1": (EVEN, {"server.rule": "fedsa", "train.max-steps": 1}),
    "fedprox": (UNLIKE, {"baseline": "fedprox"}),
    "flex, ranks 1, 16, sgd": (EVEN, {**SGD, "server.rule": "flex", "lora.rank": 16,
                                      "lora.ranks": "1,16,16,16,16,16,1"}),
    "ffa": (UNLIKE, {"server.rule": "ffa"}),
    "fedex": (UNLIKE, {"server.rule": "fedex"}),
    "rates fall to 0.1": (UNLIKE, {"train.last-rate": 0.1}),
    "fedssi": (UNLIKE, {"baseline": "fedssi"}),
    "flora, ranks 1, 16": (EVEN, {"server.rule": "flora", "lora.rank": 16,
                                  "lora.ranks": "16,1,1,1,1,1,16"}),
    "sgd, no clip": (UNLIKE, {**SGD, "server.rule": "mean", "train.clip-norm": 0.0}),
    "fedadam": (UNLIKE, {"baseline": "fedadam"}),
    "curriculum": (UNLIKE, {"train.curriculum": True}),
    "share = memory": (UNLIKE, {"share": "memory"}),
    "fedsa, 1:50": (MANY_SMALL, {"server.rule": "fedsa"}),
}  # fmt: skip
"""Name -> training rows by client, and keys of the recipe."""


class Loud(FedNLClient):
    """A client that sends ten times its change, and ten times its control's move."""

    def fit(self, parameters: Any, config: dict[str, Any]) -> Any:
        """Train as told, then exaggerate."""
        sent = dict(zip(self.array_names, parameters, strict=True))
        arrays, examples, metrics = super().fit(parameters, config)
        if self.partition_id == LOUD:
            rounded = self.config.wire.dtype != "float32"  # what came back is a change already
            for i, name in enumerate(self.array_names):
                still = rounded or name.startswith(CONTROL) or name not in sent
                start = np.float32(0) if still else sent[name]
                arrays[i] = (start + TIMES * (arrays[i] - start)).astype(np.float32)
                if self.config.server.rule == "flora" and name.endswith("lora_A.weight"):
                    arrays[i] /= np.float32(TIMES)  # its product is ten times as large
        return arrays, examples, metrics


def write_tables(folder: Path, sizes: list[int]) -> Path:
    """Write a table of questions a client: skewed letters, and words that lean to some."""
    folder.mkdir(exist_ok=True)
    for k, size in enumerate(sizes):
        random, lines = seeds.generator(SEED, k, "questions"), []
        letters = random.dirichlet([0.1] * 4)
        leaning = random.dirichlet([0.3] * len(WORDS))
        for i in range(size + 1):  # and one to test on
            choices = random.choice(WORDS, 4, replace=False)
            row = {
                "question": f"{i} {' '.join(random.choice(WORDS, 3, p=leaning))} {k}?",
                "subject": f"of_{k}",
                "choices": [str(word) for word in choices],
                "answer": int(random.choice(4, p=letters)),
            }
            lines.append(json.dumps(row))
        (folder / f"client-{k}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def recipe(folder: Path, case: str) -> RunConfig:
    sizes, keys = CASES[case]
    return RunConfig.from_flat(
        {
            "name": "norms",
            "output": str(folder),
            "rounds": ROUNDS,
            "seed": SEED,
            "model.source": "tiny:llama",
            "model.device": "cpu",
            "data.source": f"path:{write_tables(folder / 'tables', sizes)}",
            "data.split": "files",
            "data.max-test": 1,
            "data.min-train": 1,
            "data.min-test": 1,
            "data.test-share": 0.2,
            "clients.count": len(sizes),
            "evaluation.every": ROUNDS,
            **keys,
        }
    )


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    text = (folder / f"{kind}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def multiples(config: RunConfig, sizes: list[int]) -> Iterator[tuple[str, float, float, float]]:
    """Yield honest norms as multiples: of the bound's median, of its round's own, without work."""
    journal = Journal()
    journal.rows["metrics"] = rows(Path(config.output) / config.name, "metrics")
    told = {p: {"train": size} for p, size in enumerate(sizes)}
    gate = Gate(config, Roster({p: p for p in told}, told), journal)
    for server_round in range(1, config.rounds + 1):
        found = [r for r in journal.of_phase("train") if r["round"] == server_round]
        norms = {r["partition"]: {k: r[k] for k in (NORM, MOVE) if k in r} for r in found}
        for key in (NORM, MOVE):
            earlier = gate.earlier(server_round, key)
            present = gate.present(server_round, key, norms)
            for partition, have in norms.items():
                if key not in have or partition == LOUD:
                    continue
                move = gate.move(server_round, partition, key, have[key])
                if medians := gate.medians(key, move, earlier, present):
                    own = typical_of(present, move.reach) or max(medians)
                    plain = typical_of([Move(m.norm) for m in present]) or max(medians)
                    yield key, move.norm / max(medians), move.norm / own, move.norm / plain


def measure(folder: Path, case: str) -> dict[str, Any]:
    """Run a case under the default bound with one loud client."""
    config, app = recipe(folder, case), ClientApp()
    serve(app, Loud, action="fednl")
    run_in_process(config, app)
    release()
    found = list(multiples(config, CASES[case][0]))
    events = rows(folder / config.name, "events")
    lost = [e for e in events if e["event"] == "client-failed" and e["phase"] == "train"]
    for event in lost:
        if event["partition"] != LOUD:
            print(case, event["round"], event["partition"], event["reason"], file=sys.stderr)
    asked = {
        e["round"]
        for e in events
        if e["event"] in ("reply", "client-failed")
        and (e.get("phase"), e["partition"]) == ("train", LOUD)
    }
    return {
        "honest": max(near for key, near, *_ in found if key == NORM),
        "own": max(own for key, _, own, _ in found if key == NORM),
        "plain": max(plain for key, *_, plain in found if key == NORM),
        "control": max((near for key, near, *_ in found if key == MOVE), default=0.0),
        "loud": len(asked),
        "caught": sum(e["partition"] == LOUD for e in lost),
        "honest-dropped": sum(e["partition"] != LOUD for e in lost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    made = {}
    print("| case | honest | of its own round | without steps | controls | caught | dropped |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in (name for name in CASES if only in name):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FEDLOOM_STATE"] = str(Path(folder) / "clients")
            made[case] = m = measure(Path(folder), case)
        control = f"{m['control']:.2f}" if m["control"] else ""
        print(
            f"| {case} | {m['honest']:.2f} | {m['own']:.2f} | {m['plain']:.2f} | {control}"
            f" | {m['caught']} of {m['loud']} | {m['honest-dropped']} |",
            flush=True,
        )
    told = {
        "honest_max_ratio": round(max(m["honest"] for m in made.values()), 2),
        "control_max_ratio": round(max(m["control"] for m in made.values()), 2),
        "caught_10x": sum(m["caught"] for m in made.values()),
        "sent_10x": sum(m["loud"] for m in made.values()),
        "honest_dropped": sum(m["honest-dropped"] for m in made.values()),
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main()

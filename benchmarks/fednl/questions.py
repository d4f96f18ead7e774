# SPDX-License-Identifier: Apache-2.0
"""Five owners of questions: FedNL against every baseline, on the same rows, steps and seeds.

Study (b).  ``run`` trains each method from each seed in this process, one after another, and keeps
every test row's outcome under the adapter that its client would use: the global one, or its own
where the method gives it one.  What is there already is not run again, so the study may be stopped
at any time.  ``table`` compares: accuracy and letter cross-entropy, macro over clients; aggregation
drop; bytes as the ledger counted them; paired intervals against FedAvg over seeds and rows.

All methods share the recipe ``bigbench``: backbone, rank, rates, rows, steps, schedule.  Only the
layers next to the output are adapted, so that the frozen ones below are walked once a row.  Run as
``python benchmarks/fednl/questions.py run|table --help``; the last line of ``table`` is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from flwr.clientapp import ClientApp

from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from fedloom.config import BASELINES, RunConfig
from fedloom.paired import holm, mcnemar, seeded_bootstrap
from fedloom.simulations.inprocess import run_in_process

RECIPE = Path(__file__).parents[2] / "simulations" / "bigbench.toml"
METHODS = ("fednl", *(name for name in BASELINES if name != "fed-mamba"))
SHARED = {
    "last_layers": 4,
    "train__keep_trunk": 4000,
    "train__max_steps": 4,
    "train__learning_rate": 2e-3,
    "rounds": 3,
    "data__max_train": 120,
    "data__max_test": 48,
    "data__test_share": 0.2,
    "data__max_tokens": 128,
    "evaluation__every": 3,
}


def recipe(method: str, seed: int, folder: Path) -> RunConfig:
    """Return one run's recipe; a baseline is one line of it."""
    line = {} if method == "fednl" else {"baseline": method}
    keys = {**SHARED, **line, "seed": seed, "output": str(folder.resolve())}
    return RunConfig.from_toml(RECIPE).replaced(name=f"{method}-{seed}", **keys)


def recording(outcomes: dict[int, list[dict[str, Any]]]) -> ClientApp:
    """Return a ClientApp that leaves each client's last outcomes in ``outcomes``, here, row by row.

    In a last round the global adapter is scored first and a personal one after it.
    """

    class Recording(FedNLClient):
        def _score(self, bench: Any, trunk: Any) -> dict[str, Any]:
            rows = self._task(bench).score_rows(trunk)
            outcomes[self.partition_id] = [asdict(row) for row in rows]
            return super()._score(bench, trunk)

    app = ClientApp()
    serve(app, Recording, action="fednl")
    return app


def run(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for seed in given.seeds:
        for method in given.methods:
            out = given.folder / "scores" / f"{method}-{seed}.json"
            if out.exists():
                continue
            began, outcomes = time.perf_counter(), {}
            config = recipe(method, seed, given.folder)
            run_in_process(config, recording(outcomes))
            out.parent.mkdir(parents=True, exist_ok=True)
            told = {"seconds": time.perf_counter() - began, "rows": outcomes}
            out.write_text(json.dumps({**told, **facts(given.folder / config.name)}))
            print(f"{method} {seed}: {told['seconds']:.0f} s", flush=True)


def facts(folder: Path) -> dict[str, Any]:
    """Read what a run's folder says of bytes, steps and the last round."""
    ledger = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    last = max((row["round"] for row in metrics), default=0)
    drops = {}
    for phase in ("local", "evaluate"):
        rows = [r for r in metrics if r["phase"] == phase and r["round"] == last]
        drops[phase] = {r["partition"]: r["correct"] / r["num-examples"] for r in rows}
    return {
        "names": {r["partition"]: r["name"] for r in metrics},
        "bytes": sum(r["bytes"] for r in ledger if r["phase"] == "train"),
        "steps": sum(r.get("steps", 0) for r in metrics if r["phase"] == "train"),
        "accuracy_of": drops,
    }


def table(given: argparse.Namespace) -> None:
    found = {
        (method, seed): json.loads(path.read_text())
        for method in METHODS
        for seed in given.seeds
        if (path := given.folder / "scores" / f"{method}-{seed}.json").exists()
    }
    methods = [m for m in METHODS if all((m, s) in found for s in given.seeds)]
    chance = mean(1 / r["choices"] for r in all_rows(found[methods[0], given.seeds[0]]))
    print(f"{len(given.seeds)} seeds; chance {chance:.3f} over rows\n")
    print("| method | accuracy | letter CE | drop | MB | steps | less FedAvg's accuracy | Holm p |")
    print("| --- " * 8 + "|")
    versus = {m: against(found, m, given.seeds) for m in methods if m != "fedavg"}
    adjusted = worst_adjusted(versus)
    summary: dict[str, Any] = {}
    for method in methods:
        runs = [found[method, seed] for seed in given.seeds]
        summary[method] = row = {
            "accuracy": round(mean(macro(r, "correct") for r in runs), 4),
            "letter_ce": round(mean(macro(r, "letter_ce") for r in runs), 4),
            "drop": dropped(runs),
            "megabytes": round(mean(r["bytes"] for r in runs) / 1e6, 2),
            "steps": round(mean(r["steps"] for r in runs)),
        }
        cells = [told(value) for value in row.values()]
        if method in versus:
            v = versus[method]
            summary[method] |= v
            cells += [f"{v['value']:+.3f} [{v['low']:+.3f}, {v['high']:+.3f}]"]
            cells += [f"{adjusted[method]:.2g}"]
        print(f"| {method} | " + " | ".join(cells) + " |")
    print(json.dumps({"methods": summary, "chance": chance, "seeds": given.seeds}))


def all_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for rows in result["rows"].values() for row in rows]


def macro(result: dict[str, Any], measure: str) -> float:
    return mean(mean(float(row[measure]) for row in rows) for rows in result["rows"].values())


def drops(result: dict[str, Any]) -> list[float]:
    """Return by how much each client was more accurate before averaging than after."""
    local, after = result["accuracy_of"]["local"], result["accuracy_of"]["evaluate"]
    return [local[p] - after[p] for p in local if p in after]


def dropped(runs: Sequence[dict[str, Any]]) -> list[float] | None:
    """Return the mean drop with an interval over seeds and clients; none if nobody averages."""
    by_seed = [[drops(run)] for run in runs]
    if not all(clients[0] for clients in by_seed):
        return None
    interval = seeded_bootstrap(by_seed, seed=0)
    return [round(x, 4) for x in (interval.value, interval.low, interval.high)]


def told(value: Any) -> str:
    """Write a cell: a number, or a mean with its interval."""
    if isinstance(value, list):
        return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*value)
    return "-" if value is None else str(value)


def against(found: dict[Any, Any], method: str, seeds: Sequence[int]) -> dict[str, Any]:
    """Compare a method with FedAvg on the same rows, which are drawn within seeds."""
    differences, tests = [], []
    for seed in seeds:
        mine, base = found[method, seed]["rows"], found["fedavg", seed]["rows"]
        by_client, ours, theirs = [], [], []
        for client, rows in mine.items():
            right = {row["row"]: row["correct"] for row in base[client]}
            pairs = [(row["correct"], right[row["row"]]) for row in rows]
            by_client.append([float(a) - float(b) for a, b in pairs])
            ours += [a for a, _ in pairs]
            theirs += [b for _, b in pairs]
        differences.append(by_client)
        tests.append(mcnemar(ours, theirs).p)
    interval = seeded_bootstrap(differences, seed=0)
    return {
        "value": round(interval.value, 4),
        "low": round(interval.low, 4),
        "high": round(interval.high, 4),
        "p_by_seed": [round(p, 5) for p in tests],
    }


def worst_adjusted(versus: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Adjust each seed's tests for the number of methods; return each method's largest p.

    A seed's rows are another seed's too, so the tests are not put together.
    """
    by_seed = zip(*(v["p_by_seed"] for v in versus.values()), strict=True)
    adjusted = zip(*(holm(list(column)) for column in by_seed), strict=True)
    return {method: max(ps) for method, ps in zip(versus, adjusted, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, work in (("run", run), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        command.add_argument("--folder", type=Path, default=Path("runs/questions"))
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        if name == "run":
            command.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    given = parser.parse_args()
    given.work(given)


if __name__ == "__main__":
    main()

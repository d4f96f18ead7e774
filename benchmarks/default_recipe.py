# SPDX-License-Identifier: Apache-2.0
"""Run `make run`'s recipe over seeds and tabulate frozen, local and federated scores.

Run as ``python benchmarks/default_recipe.py --seeds 0 1 2``; the last line is one JSON object.  A
seed decides the split into train and test rows, the adapter's start and the order of training.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

MEASURES = ("gold-ce", "letter-ce", "accuracy")
COLUMNS = ("frozen", "local", "federated")


def run(seed: int, folder: Path, settings: list[str]) -> dict:
    """Run one seed and return its summary, with the seconds it took."""
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "fedloom.simulations",
        "run",
        "fednl",
        "--name",
        f"seed-{seed}",
    ]
    for setting in (f"seed={seed}", *settings):
        command += ["--set", setting]
    subprocess.run([*command, "--output", str(folder)], check=True, stdout=sys.stderr)
    summary = json.loads((folder / f"seed-{seed}" / "summary.json").read_text())
    return {**summary, "seconds": time.monotonic() - began}


def spread(values: list[float]) -> str:
    """Write mean and sample standard deviation over seeds."""
    return f"{mean(values):.3f} +- {stdev(values) if len(values) > 1 else math.nan:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], dest="settings")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [run(seed, Path(folder), given.settings) for seed in given.seeds]
    print("| macro over five clients | " + " | ".join(COLUMNS) + " |\n| --- | --- | --- | --- |")
    for measure in MEASURES:
        cells = [spread([r["macro"][c][measure]["value"] for r in runs]) for c in COLUMNS]
        print(f"| {measure} | " + " | ".join(cells) + " |")
    print(
        "\n| seed | client | test rows | frozen gold CE | local | federated |\n"
        + "| --- " * 6
        + "|"
    )
    for seed, r in zip(given.seeds, runs, strict=True):
        for client in r["per-client"]:
            scores = [f"{client[c]['gold-ce']['value']:.3f}" for c in COLUMNS]
            rows = client["frozen"]["examples"]
            print(f"| {seed} | {client['name']} | {rows} | " + " | ".join(scores) + " |")
    lower = [r["lower-than-frozen"]["gold-ce"]["lower"] for r in runs]
    print(
        json.dumps(
            {
                "seeds": given.seeds,
                "clients_lower_than_frozen": lower,
                "clients_letter_ce_below_chance": [
                    r["letter-ce-below-chance"]["lower"] for r in runs
                ],
                "seconds": [round(r["seconds"]) for r in runs],
                **{
                    f"{c}_{m}": round(mean(r["macro"][c][m]["value"] for r in runs), 4)
                    for c in COLUMNS
                    for m in MEASURES
                },
            }
        )
    )


if __name__ == "__main__":
    main()

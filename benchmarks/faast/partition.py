# SPDX-License-Identifier: Apache-2.0
"""Hold fast weights of sums against least squares over all rows, for every split of them.

Run as ``python benchmarks/faast/partition.py``; the last line printed is one JSON object.  1 to 200
clients hold the rows at random or by Dirichlet over classes; each sends a ``Gram``, which arrive in
shuffled order and are added and solved once.  The oracle is ``numpy.linalg.lstsq`` over all rows,
in a process of its own that never saw a split.  Beside it stands what averaging the clients'
own solutions by their rows gives (FAAST's Eq. 14 with a client for a chunk).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from fedloom import rules, seeds
from fedloom.rules import Gram
from fedloom.rules.paper_bank import averaged

from keys import distinct, keyed

CLIENTS = (1, 2, 10, 50, 200)
SPLITS = {"iid": None, "dirichlet-0.1": 0.1, "dirichlet-0.01": 0.01}
SETS = {
    "digits": ("packaged:digits", "relu:256:pixels:64"),
    "uci-sentences": ("packaged:uci-sentences", "packaged:minilm"),
    "cifar10": ("packaged:cifar10", "packaged:efficientnet-lite0"),
}
SEED = 0

Parts = list[NDArray[np.intp]]


def split(labels: NDArray[np.int64], clients: int, concentration: float | None) -> Parts:
    """Deal rows out; with a concentration, each class goes to clients by one Dirichlet draw."""
    random = seeds.generator(SEED, "split", clients, str(concentration))
    order = random.permutation(len(labels))
    if concentration is None:
        return np.array_split(order, clients)
    parts: list[list[NDArray[np.intp]]] = [[] for _ in range(clients)]
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        shares = random.dirichlet(np.full(clients, concentration))
        cuts = np.round(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        for part, piece in zip(parts, np.split(rows, cuts), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]


def oracle(folder: Path, alpha: float) -> dict[str, NDArray[Any]]:
    """Solve over all rows in another process."""
    command = [sys.executable, __file__, "--oracle", str(folder), "--alpha", str(alpha)]
    subprocess.run(command, check=True)
    return load_file(folder / "oracle.safetensors")


def be_oracle(folder: Path, alpha: float) -> None:
    rows = load_file(folder / "rows.safetensors")
    keys, values = rows["keys"].astype(np.float64), rows["values"]
    weights, _, _, sigma = np.linalg.lstsq(keys, values, rcond=len(keys) ** -alpha)
    rank = int((sigma > sigma[0] * len(keys) ** -alpha).sum())
    labels = (rows["queries"].astype(np.float64) @ weights).argmax(axis=1)
    made = {"weights": weights, "labels": labels, "rank": np.array([rank])}
    save_file(made, folder / "oracle.safetensors")


def solved_alone(keys: Any, values: Any, parts: Parts, alpha: float) -> Iterator[Any]:
    for part in parts:
        if len(part):
            mine = keys[part], values[part]
            few = len(part) <= keys.shape[1]
            alone = (
                rules.solve_dual
                if few
                else lambda k, v, alpha: rules.solve(Gram.of(k, v), alpha=alpha)
            )
            yield alone(*mine, alpha=alpha).weights, float(len(part))


def study(name: str, alpha: float) -> dict[str, Any]:
    data = keyed(*SETS[name])
    order = distinct(data.rows, seeds.generator(SEED, name, "test").permutation(len(data.rows)))
    cut = int(0.75 * len(order))
    train, test = order[:cut], order[cut:]
    keys, labels = data.keys[train], data.labels[train]
    values = np.eye(len(data.classes))[labels]
    queries, truth = data.keys[test].astype(np.float64), data.labels[test]
    with tempfile.TemporaryDirectory() as folder:
        rows = {"keys": keys, "values": values, "queries": data.keys[test]}
        save_file(rows, Path(folder) / "rows.safetensors")
        wanted = oracle(Path(folder), alpha)
    made: dict[str, Any] = {"rows": len(keys), "test": len(test), "width": keys.shape[1]}
    made |= {"alpha": alpha, "tolerance": len(keys) ** -alpha, "rank": int(wanted["rank"][0])}
    made["accuracy"] = round(float((wanted["labels"] == truth).mean()), 4)
    made["cases"] = []
    print(f"\n{name}: {made}\n\n| split | clients | with rows | error | same labels | averaged W |")
    print("| --- | --- | --- | --- | --- | --- |")
    for how, concentration in SPLITS.items():
        for clients in CLIENTS:
            parts = split(labels, clients, concentration)
            assert sorted(np.concatenate(parts).tolist()) == list(range(len(keys)))
            total = Gram.zero(keys.shape[1], values.shape[1])
            for i in seeds.generator(SEED, "arrival", how, clients).permutation(clients):
                sent = Gram.of(keys[parts[i]], values[parts[i]])
                total += Gram.from_arrays(sent.arrays(), sent.count)
            found = rules.solve(total, alpha=alpha)
            error = np.linalg.norm(found.weights - wanted["weights"])
            mixed = averaged(solved_alone(keys, values, parts, alpha))
            case = {
                "split": how,
                "clients": clients,
                "with_rows": sum(map(bool, map(len, parts))),
                "error": float(error / np.linalg.norm(wanted["weights"])),
                "identical": bool(
                    ((queries @ found.weights).argmax(axis=1) == wanted["labels"]).all()
                ),
                "averaged_w_accuracy": round(
                    float(((queries @ mixed).argmax(axis=1) == truth).mean()), 4
                ),
            }
            made["cases"].append(case)
            print(
                "|",
                " | ".join(f"{v:.1e}" if k == "error" else str(v) for k, v in case.items()),
                "|",
                flush=True,
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="*", default=["digits", "uci-sentences"])
    parser.add_argument("--alpha", type=float, default=0.8)  # the released code's, for vision
    parser.add_argument("--oracle", type=Path, default=None)
    told = parser.parse_args()
    if told.oracle:
        return be_oracle(told.oracle, told.alpha)
    print(f"Python {platform.python_version()}, numpy {np.__version__}")
    made = {name: study(name, told.alpha) for name in told.sets}
    cases = [case for study in made.values() for case in study["cases"]]
    worst = {
        name: {f"{c['split']}/{c['clients']}": c["averaged_w_accuracy"] for c in study["cases"]}
        for name, study in made.items()
    }
    print(
        json.dumps(
            {
                "max_error": max(c["error"] for c in cases),
                "identical_predictions": all(c["identical"] for c in cases),
                "averaged_w_accuracy": worst,
                "accuracy": {name: study["accuracy"] for name, study in made.items()},
                "alpha": told.alpha,
                "cases": len(cases),
            }
        )
    )


if __name__ == "__main__":
    main()

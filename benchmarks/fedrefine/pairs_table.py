# SPDX-License-Identifier: Apache-2.0
"""The table of ``pairs.py``: every condition against the refined answers, on the same rows.

Differences are crossed over seeds and rows (every seed is tested on the same rows); a condition
that ran for fewer seeds is compared on those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedloom.paired import crossed_bootstrap, mcnemar

Key = tuple[str, int]
WITHIN = ("standalone", "sender", "shuffled", "zeroed")
"""Scored in the file of ``refined``."""
CURVE = ("bf16", "int8", "int4", "bf16-half", "int8-half", "int4-half")
OTHERS = ("identical", "random", "tuned", "closed", "polished", "c2c")


def told(folder: Path, pairs: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Print a table for each pair and return all of it, the best pair's figures on top."""
    found = {pair: summary(load(folder, pair, seeds)) for pair in pairs}
    for pair, made in found.items():
        show(pair, made)
    ran = {pair: made for pair, made in found.items() if "refined_minus_standalone" in made}
    if not ran:
        raise SystemExit("no pair has its refined answers yet: run them first")
    best = max(ran, key=lambda pair: ran[pair]["refined_minus_standalone"][0])
    others = {pair: made for pair, made in ran.items() if pair != best}
    return {"best_pair": best, **ran[best], "other_pairs": others}


def load(folder: Path, pair: str, seeds: Sequence[int]) -> dict[Key, dict[str, Any]]:
    """Return what there is of a pair."""
    names = ("refined", "context", *OTHERS)
    paths = {(n, s): folder / "scores" / f"{pair}-{n}-{s}.json" for n in names for s in seeds}
    return {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}


def summary(found: Mapping[Key, Mapping[str, Any]]) -> dict[str, Any]:
    """Put a pair's figures together."""
    of = {name: seeds_of(found, name) for name in ("refined", "context", *OTHERS)}
    if not of["refined"]:
        return {}
    refined = [found["refined", s] for s in of["refined"]]
    made: dict[str, Any] = {
        "tested": len(rows(refined[0], "refined")),
        "seeds": len(refined),
        "accuracy": accuracies(found, of),
        "nats": {n: mean_of(refined, n, "nats") for n in ("refined", *WITHIN)},
        "fuser_parameter_share": round(refined[0]["parameter_share"], 4),
        "open_layers": [round(r["open_layers"]) for r in refined],
        "gate_gap_nats": round(mean(r["gate_gap_nats"] for r in refined), 4),
        "cpu_seconds": {
            name: round(mean(found[name, s]["cpu_seconds"] for s in which))
            for name, which in of.items()
            if which
        },
        "bytes": {name: round(x) for name, x in refined[0]["bytes"].items()},
    }
    for name in WITHIN:
        made |= compared(name, [(r, r) for r in refined], name)
    for name in OTHERS:
        shared = [s for s in of[name] if s in of["refined"]]
        both = [(found["refined", s], found[name, s]) for s in shared]
        made |= compared(name, both, "refined") if both else {}
    made |= curve(refined) | extras(found, of)
    return made


def extras(
    found: Mapping[Key, Mapping[str, Any]], of: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Add what the closed form and the setting ``context`` have of their own."""
    made: dict[str, Any] = {}
    for name in ("closed", "polished", "context", "c2c", "identical", "random"):
        runs = [found[name, s] for s in of[name]]
        if runs:
            gain = mean_of(runs, "refined") - mean_of(runs, "standalone")
            made[f"{name}_gain"] = round(gain, 4)
    if of["context"]:
        runs = [found["context", s] for s in of["context"]]
        made |= {
            f"context_{k.removeprefix('refined_')}": v
            for other in ("standalone", "shuffled", "zeroed")
            for k, v in compared(other, [(r, r) for r in runs], other).items()
        }
    if of["closed"]:
        run = found["closed", of["closed"][0]]
        made |= {
            "closed_explained": round(run["explained"], 4),
            "closed_solve_cpu_seconds": round(run["solve_cpu_seconds"], 1),
        }
    seconds = [found["refined", s]["train_cpu_seconds"] for s in of["refined"]]
    return made | {"trained_cpu_seconds": round(mean(seconds), 1)}


def seeds_of(found: Mapping[Key, Any], name: str) -> list[int]:
    return sorted(seed for condition, seed in found if condition == name)


def rows(run: Mapping[str, Any], name: str) -> dict[str, Mapping[str, Any]]:
    """Return a run's outcomes by row."""
    return {row["row"]: row for row in run["outcomes"][name]}


def mean_of(runs: Iterable[Mapping[str, Any]], name: str, what: str = "correct") -> float:
    return round(mean(mean(float(r[what]) for r in rows(run, name).values()) for run in runs), 4)


def accuracies(
    found: Mapping[Key, Mapping[str, Any]], of: Mapping[str, Sequence[int]]
) -> dict[str, float]:
    refined = [found["refined", s] for s in of["refined"]]
    made = {name: mean_of(refined, name) for name in ("refined", *WITHIN)}
    made |= {name: mean_of(refined[:1], name) for name in CURVE if name in refined[0]["outcomes"]}
    for name in OTHERS:
        if of[name]:
            made[name] = mean_of([found[name, s] for s in of[name]], "refined")
    for name in ("standalone", "refined", "shuffled"):
        if of["context"]:
            runs = [found["context", s] for s in of["context"]]
            made[f"context_{name}"] = mean_of(runs, name)
    return made


def compared(
    name: str, both: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], theirs: str
) -> dict[str, Any]:
    """Compare refined answers with others, seed by seed on the same rows."""
    differences, tests = [], []
    for ours, others in both:
        a, b = rows(ours, "refined"), rows(others, theirs)
        shared = sorted(a.keys() & b.keys())
        right = [[bool(side[row]["correct"]) for row in shared] for side in (a, b)]
        differences.append([float(x) - float(y) for x, y in zip(*right, strict=True)])
        tests.append(mcnemar(*right).p)
    interval = crossed_bootstrap(differences, seed=0)
    bounds = (interval.value, interval.low, interval.high)
    return {
        f"refined_minus_{name}": [round(x, 4) for x in bounds],
        f"mcnemar_p_{name}": [float(f"{p:.2g}") for p in tests],
    }


def curve(refined: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say what fewer bytes cost, from the first seed's fuser."""
    size = refined[0]["bytes"]
    if "int8-half" not in size:
        return {}
    loss = mean_of(refined[:1], "bf16") - mean_of(refined[:1], "int8-half")
    return {
        "int8_half_bytes_ratio": round(size["int8-half"] / size["bf16"], 4),
        "int8_half_loss_points": round(100 * loss, 2),
    }


def show(pair: str, made: Mapping[str, Any]) -> None:
    """Print one pair's table."""
    if not made:
        print(f"{pair}: nothing yet\n")
        return
    print(f"## {pair}: {made['tested']} held-out rows, {made['seeds']} seeds\n")
    print("| condition | accuracy | refined less this | McNemar p | bytes | CPU s |")
    print("| --- " * 6 + "|")
    for name, accuracy in made["accuracy"].items():
        difference = made.get(f"refined_minus_{name}")
        p = made.get(f"mcnemar_p_{name}")
        cells = [
            f"{accuracy:.3f}",
            "" if difference is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference),
            "" if p is None else ", ".join(map(str, p)),
            str(made["bytes"].get(name, "")),
            str(made["cpu_seconds"].get(name, "")),
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()

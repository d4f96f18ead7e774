# SPDX-License-Identifier: Apache-2.0
"""The table of ``pairs.py``: every condition against the refined answers, on the same rows.

Differences are crossed over seeds and rows (every seed is tested on the same rows); a condition
that ran for fewer seeds is compared on those.  ``calibrated`` figures have each letter's mean
log-probability over the held-out rows subtracted, without labels (``pairs_letters``): what a
condition knows beyond the letter that it likes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pairs_letters import calibrated, can_be_calibrated, letters
from pairs_study import sides

from fedloom.paired import crossed_bootstrap, holm, mcnemar

Key = tuple[str, int]
Run = Mapping[str, Any]
WITHIN = ("standalone", "sender", "shuffled", "zeroed")
"""Scored in the file of ``refined``."""
SCHEMES = ("bf16", "int8", "int4")
CURVE = tuple(s + part for part in ("", "-half", "-half-norm") for s in SCHEMES)
OTHERS = ("identical", "random", "tuned", "closed", "polished", "kept", "c2c")
CHOSEN = "the largest held-out gain over standalone of {} pairs; holm_p is adjusted for them"


def told(
    folder: Path, pairs: Sequence[str], seeds: Sequence[int], baselines: Path | None = None
) -> dict[str, Any]:
    """Print a table for each pair and return all of it, the best pair's figures on top as well."""
    found = {}
    for pair in pairs:
        runs = load(folder, pair, seeds)
        found[pair] = summary(runs, others_of(folder, pair, baselines))
    ran = {pair: made for pair, made in found.items() if made}
    adjusted = adjusted_p(ran)
    for pair, made in found.items():
        made |= {"holm_p": adjusted[pair]} if pair in adjusted else {}
        show(pair, made)
    if not ran:
        raise SystemExit("no pair has its refined answers yet: run them first")
    best = max(ran, key=lambda pair: ran[pair]["refined_minus_standalone"][0])
    chosen = {"best_pair": best, "best_pair_is": CHOSEN.format(len(ran))}
    return {**chosen, **ran[best], "pairs": ran}


def adjusted_p(ran: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Adjust p-values for having looked at all pairs (Holm); of seeds the largest counts."""
    made: dict[str, dict[str, float]] = {pair: {} for pair in ran}
    for name in ("standalone", "shuffled", "zeroed", "standalone_calibrated"):
        have = [pair for pair in ran if f"mcnemar_p_{name}" in ran[pair]]
        values = holm([max(ran[pair][f"mcnemar_p_{name}"]) for pair in have])
        for pair, p in zip(have, values, strict=True):
            made[pair][name] = float(f"{p:.2g}")
    return made


def load(folder: Path, pair: str, seeds: Sequence[int]) -> dict[Key, dict[str, Any]]:
    """Return what there is of a pair."""
    names = ("refined", "context", "several", *OTHERS)
    paths = {(n, s): folder / "scores" / f"{pair}-{n}-{s}.json" for n in names for s in seeds}
    return {key: json.loads(path.read_text()) for key, path in paths.items() if path.exists()}


def baselines_file(folder: Path, pair: str) -> Path:
    """Say where ``baselines.py`` leaves its outcomes by row."""
    return folder / "scores" / f"{pair}-baselines.json"


def others_of(folder: Path, pair: str, told: Path | None) -> dict[str, dict[str, bool]]:
    """Return what ``baselines.py`` left for a pair: way -> row -> whether it was right.

    A file of another pair is not taken: its own sender must be among the single models.
    """
    path = told or baselines_file(folder, pair)
    if not path.exists():
        return {}
    tree = json.loads(path.read_text())
    by_row, best = tree.get("rows", tree), tree.get("best_single_is", "")
    ways = sorted({way for row in by_row.values() for way in row})
    if f"single {sides(pair)[0]}" not in ways:
        return {}
    found = {way: {row: bool(told[way]) for row, told in by_row.items()} for way in ways}
    if best in found:
        found["best_single"] = found[best]
    kept = {
        way: rows for way, rows in found.items() if way != "standalone" and "single " not in way
    }
    return {way.replace(" ", "_"): rows for way, rows in kept.items()}


def summary(
    found: Mapping[Key, Run], baselines: Mapping[str, Mapping[str, bool]]
) -> dict[str, Any]:
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
    made |= said_and_calibrated(found, of)
    for name in WITHIN:
        made |= compared(name, [(r, r) for r in refined], name)
    for name in OTHERS:
        shared = [s for s in of[name] if s in of["refined"]]
        both = [(found["refined", s], found[name, s]) for s in shared]
        made |= compared(name, both, "refined") if both else {}
    made |= beside(refined, baselines) | curve(refined) | extras(found, of)
    return made | written(refined) | together(found)


def conditions(found: Mapping[Key, Run], of: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
    """Return every condition's outcomes, a list of rows for each seed."""
    refined = [found["refined", s] for s in of["refined"]]
    made = {name: [run["outcomes"][name] for run in refined] for name in ("refined", *WITHIN)}
    made |= {n: [refined[0]["outcomes"][n]] for n in CURVE if n in refined[0]["outcomes"]}
    for name in OTHERS:
        if of[name]:
            made[name] = [found[name, s]["outcomes"]["refined"] for s in of[name]]
    return made


def said_and_calibrated(
    found: Mapping[Key, Run], of: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Count letters, and score again without each letter's prior."""
    all_of = conditions(found, of)
    fit = {name: runs for name, runs in all_of.items() if all(map(can_be_calibrated, runs))}
    made: dict[str, Any] = {
        "letters": {name: letters(runs[0]) for name, runs in fit.items()},
        "calibrated_accuracy": {},
        "calibrated_by": "each condition's mean log-probabilities on the held-out rows, no labels",
    }
    moved = {name: [calibrated(rows) for rows in runs] for name, runs in fit.items()}
    for name, runs in moved.items():
        made["calibrated_accuracy"][name] = round(mean(map(accuracy, runs)), 4)
    for name in (*WITHIN, *OTHERS):
        if "refined" in moved and name in moved:
            count = min(len(moved["refined"]), len(moved[name]))
            for ours, label in ((fit, f"{name}_calibrated"), (moved, f"{name}_both_calibrated")):
                both = zip(ours["refined"][:count], moved[name][:count], strict=True)
                made |= margins(label, [(by_row(a), by_row(b)) for a, b in both])
    return made | by_training_rows(found, of)


def by_training_rows(found: Mapping[Key, Run], of: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Score alone and refined without priors that were measured on training rows, if they were."""
    runs = [found["refined", s] for s in of["refined"]]
    runs = [run for run in runs if "priors" in run]
    if not runs:
        return {}
    made = {
        name: [calibrated(run["outcomes"][name], run["priors"][name]) for run in runs]
        for name in ("standalone", "refined")
    }
    label = "standalone_calibrated_on_training_rows"
    both = [
        (rows(run, "refined"), by_row(alone))
        for run, alone in zip(runs, made["standalone"], strict=True)
    ]
    told = {f"{name}": round(mean(map(accuracy, x)), 4) for name, x in made.items()}
    return {"calibrated_on_training_rows": told} | margins(label, both)


def accuracy(outcomes: Sequence[Mapping[str, Any]]) -> float:
    return mean(float(row["correct"]) for row in outcomes)


def beside(refined: Sequence[Run], baselines: Mapping[str, Mapping[str, bool]]) -> dict[str, Any]:
    """Compare with votes, words and the best single model, on the rows that both have."""
    made: dict[str, Any] = {"baselines": {}}
    for way, right in baselines.items():
        theirs = {row: {"correct": x} for row, x in right.items()}
        both = [(rows(run, "refined"), theirs) for run in refined]
        if shared := [row for row in both[0][0] if row in right]:
            share = round(mean(float(right[row]) for row in shared), 4)
            made["baselines"][way] = {"accuracy": share, "rows": len(shared)}
            made |= margins(way, both)
    return made if made["baselines"] else {}


def written(refined: Sequence[Run]) -> dict[str, Any]:
    """Compare by what is written, where that was scored."""
    runs = [run for run in refined if "refined-written" in run["outcomes"]]
    if not runs:
        return {}
    names = ("refined-written", "standalone-written")
    both = [tuple(rows(run, name) for name in names) for run in runs]
    told = {
        name.removesuffix("-written"): {
            "accuracy": mean_of(runs, name),
            "no_letter": round(mean(_unsaid(run["outcomes"][name]) for run in runs), 4),
        }
        for name in names
    }
    return {"written": told} | margins("standalone_written", [(a, b) for a, b in both])


def _unsaid(outcomes: Sequence[Mapping[str, Any]]) -> float:
    return mean(float(not row["said"]) for row in outcomes)


def together(found: Mapping[Key, Run]) -> dict[str, Any]:
    """Compare one, two, ... senders at once with one fewer."""
    runs = [found["several", s] for s in seeds_of(found, "several")]
    if not runs:
        return {}
    counts = sorted(int(name.removeprefix("senders-")) for name in runs[0]["outcomes"])
    told = {str(n): mean_of(runs, f"senders-{n}") for n in counts}
    made: dict[str, Any] = {"several": {"senders": runs[0]["senders"], "accuracy": told}}
    for n in counts[1:]:
        both = [(rows(run, f"senders-{n}"), rows(run, f"senders-{n - 1}")) for run in runs]
        made |= margins(f"{n - 1}", both, f"senders_{n}_minus_", f"mcnemar_p_senders_{n}_")
    return made


def extras(
    found: Mapping[Key, Mapping[str, Any]], of: Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Add what the closed form and the setting ``context`` have of their own."""
    made: dict[str, Any] = {}
    for name in ("closed", "polished", "context", "kept", "c2c", "identical", "random"):
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
    if of["kept"]:
        run, whole = found["kept", of["kept"][0]], found["refined", of["refined"][0]]
        lost = mean_of([whole], "refined") - mean_of([run], "refined")
        made |= {
            "kept_tokens": run["kept_tokens"],
            "kept_bytes_ratio": round(run["bytes"]["kept"] / whole["bytes"]["bf16"], 4),
            "kept_loss_points": round(100 * lost, 2),
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
    return by_row(run["outcomes"][name])


def by_row(outcomes: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {row["row"]: row for row in outcomes}


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


def compared(name: str, both: Sequence[tuple[Run, Run]], theirs: str) -> dict[str, Any]:
    """Compare refined answers with others, seed by seed on the same rows."""
    return margins(name, [(rows(ours, "refined"), rows(others, theirs)) for ours, others in both])


def margins(
    name: str,
    both: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    head: str = "refined_minus_",
    test: str = "mcnemar_p_",
) -> dict[str, Any]:
    """Return the difference with its interval and, a seed each, McNemar's p."""
    differences, tests = [], []
    for a, b in both:
        shared = sorted(a.keys() & b.keys())
        right = [[bool(side[row]["correct"]) for row in shared] for side in (a, b)]
        differences.append([float(x) - float(y) for x, y in zip(*right, strict=True)])
        tests.append(mcnemar(*right).p)
    interval = crossed_bootstrap(differences, seed=0)
    bounds = (interval.value, interval.low, interval.high)
    return {
        f"{head}{name}": [round(x, 4) for x in bounds],
        f"{test}{name}": [float(f"{p:.2g}") for p in tests],
    }


def curve(refined: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Say what fewer bytes cost, from the first seed's fuser."""
    size = refined[0]["bytes"]
    if "int8-half" not in size:
        return {}
    whole = mean_of(refined[:1], "bf16")
    loss = whole - mean_of(refined[:1], "int8-half")
    by_norm = {}
    if "int8-half-norm" in size:
        points = 100 * (whole - mean_of(refined[:1], "int8-half-norm"))
        by_norm = {"int8_half_norm_loss_points": round(points, 2)}
    return by_norm | {
        "int8_half_bytes_ratio": round(size["int8-half"] / size["bf16"], 4),
        "int8_half_loss_points": round(100 * loss, 2),
    }


def show(pair: str, made: Mapping[str, Any]) -> None:
    """Print one pair's table."""
    if not made:
        print(f"{pair}: nothing yet\n")
        return
    print(f"## {pair}: {made['tested']} held-out rows, {made['seeds']} seeds\n")
    print("| condition | accuracy | calibrated | letters | refined less this | p | bytes | CPU s |")
    print("| --- " * 8 + "|")
    for name, share in made["accuracy"].items():
        moved, said = made["calibrated_accuracy"].get(name), made["letters"].get(name, {})
        cells = [
            f"{share:.3f}",
            "" if moved is None else f"{moved:.3f}",
            " ".join(f"{letter}{count}" for letter, count in said.items()),
            *margin_cells(made, name),
            str(made["bytes"].get(name, "")),
            str(made["cpu_seconds"].get(name, "")),
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, told in made.get("baselines", {}).items():
        cells = [f"{told['accuracy']:.3f}", "", "", *margin_cells(made, name), "", ""]
        print(f"| {name} ({told['rows']} rows) | " + " | ".join(cells) + " |")
    for name in ("standalone_calibrated", "standalone_calibrated_on_training_rows"):
        if f"refined_minus_{name}" in made:
            cells = ["", "", "", *margin_cells(made, name), "", ""]
            print(f"| {name} | " + " | ".join(cells) + " |")
    for side, told in made.get("written", {}).items():
        print(f"\nwritten, {side}: {told['accuracy']:.3f}, no letter in {told['no_letter']:.1%}")
    for count, share in made.get("several", {}).get("accuracy", {}).items():
        print(f"\nsenders at once, {count}: {share:.3f}")
    print(f"\np adjusted for all pairs (Holm): {made.get('holm_p', {})}\n")


def margin_cells(made: Mapping[str, Any], name: str) -> list[str]:
    """Write a difference with its interval, and p by seed."""
    difference, p = made.get(f"refined_minus_{name}"), made.get(f"mcnemar_p_{name}")
    return [
        "" if difference is None else "{:+.3f} [{:+.3f}, {:+.3f}]".format(*difference),
        "" if p is None else ", ".join(map(str, p)),
    ]

# SPDX-License-Identifier: Apache-2.0
"""Hold FAAST against a tuned logistic probe and other readers of the same frozen keys.

Run as ``python benchmarks/faast/probe.py``; the last line printed is one JSON object.  All readers
get the same cached keys; encoding is reported apart.  Each reader that has something to choose
chooses it on the same validation rows (a fifth of the support), then fits on all of the support;
its seconds include choosing.  Test items are distinct and in no support.

The headline is one reader's, named beforehand for all sets: ``FaastClassifier(ridge="auto")``,
which has FAAST's filters and plain ridges to choose from and chooses on the validation rows.  The
filter alone has its row in each table.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import tracemalloc
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sklearn
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression, LogisticRegressionCV, RidgeClassifier
from sklearn.model_selection import train_test_split
from sklearn.neighbors import KNeighborsClassifier, NearestCentroid

from fedloom import seeds
from fedloom.classifier import FaastClassifier

from keys import Keyed, distinct, keyed

SETS = {
    "uci-sentences": ("packaged:uci-sentences", "packaged:minilm", 0),
    "newsgroups": ("packaged:newsgroups", "packaged:minilm", 2000),
    "fashion-mnist": ("packaged:fashion-mnist", "relu:256:pixels:784", 20_000),
    "digits": ("packaged:digits", "relu:256:pixels:64", 0),
    "cifar10": ("packaged:cifar10", "packaged:efficientnet-lite0", 0),
}
CS = tuple(np.logspace(-4, 4, 10).tolist())  # LogisticRegressionCV's own
FEW_CS = (0.1, 1.0, 10.0, 100.0, 1000.0)  # for who knows that keys have length one
SHARPNESS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
SLOW = 10.0  # seconds of a fit that is not done again to count its bytes
MARGIN = 0.005  # what "at the probe's accuracy" allows
OURS = "FAAST, ridge too"  # whose figures the headline has, whatever the test rows say

Keys = NDArray[np.float32]
Labels = NDArray[np.int64]
Predict = Callable[[Keys], Labels]


@dataclass
class Fitted:
    """A reader after its fit."""

    predict: Predict
    kept: Sequence[NDArray[Any]]
    """What a reader must keep."""
    told: str = ""


def chosen(make: Callable[[Any, Keys, Labels], Predict], grid: Sequence[Any], k: Keys, y: Labels):
    """Fit each of a grid on four fifths; return the best on the rest, or the middle untried."""
    if np.bincount(y).max() < 2:
        return grid[len(grid) // 2]
    share = max(0.2, len(np.unique(y)) / len(y))
    counts = np.bincount(y)
    fit, rest = train_test_split(
        np.arange(len(y)),
        test_size=share,
        random_state=0,
        stratify=y if counts[counts > 0].min() > 1 else None,
    )
    right = [float((make(value, k[fit], y[fit])(k[rest]) == y[rest]).mean()) for value in grid]
    return grid[int(np.argmax(right))]


def logistic(k: Keys, y: Labels, classes: Any, cs: Sequence[float] = CS) -> Fitted:
    """Walk C upwards, each fit started from the one before: the quicker way to tune."""
    path = LogisticRegression(max_iter=1000, warm_start=True)

    def make(c: float, k: Keys, y: Labels) -> Predict:
        return path.set_params(C=c).fit(k, y).predict

    best = chosen(make, cs, k, y)
    final = LogisticRegression(C=best, max_iter=1000).fit(k, y)
    return Fitted(final.predict, [final.coef_, final.intercept_], f"C {best:g}")


def logistic_few(k: Keys, y: Labels, classes: Any) -> Fitted:
    return logistic(k, y, classes, FEW_CS)


def logistic_cv(k: Keys, y: Labels, classes: Any) -> Fitted | None:
    """Tune as scikit-learn's own estimator does: ten Cs, five folds, the same paths within each."""
    if np.bincount(y)[np.unique(y)].min() < 5:
        return None
    final = LogisticRegressionCV(
        Cs=10,
        cv=5,
        max_iter=1000,
        l1_ratios=(0.0,),
        use_legacy_attributes=False,
        scoring="accuracy",
    ).fit(k, y)
    return Fitted(final.predict, [final.coef_, final.intercept_], f"C {np.ravel(final.C_)[0]:g}")


def logistic_once(k: Keys, y: Labels, classes: Any) -> Fitted:
    """Do one fit at the C that tuning mostly finds: what the probe costs if C fell from the sky."""
    final = LogisticRegression(C=10.0, max_iter=1000).fit(k, y)
    return Fitted(final.predict, [final.coef_, final.intercept_], "C 10")


def faast(k: Keys, y: Labels, classes: Any, **how: Any) -> Fitted:
    model = FaastClassifier(**how).fit(k, y)
    told = f"alpha {model.alpha_}, rank {model.rank_}"
    if model.ridge_:
        told += f", ridge {model.ridge_:.2g}"
    if model.prior_:
        told += f", N0 {model.prior_:.3g}"
    return Fitted(model.predict, [model.weights_], told)


def faast_ridge(k: Keys, y: Labels, classes: Any) -> Fitted:
    return faast(k, y, classes, ridge="auto")


def faast_names(k: Keys, y: Labels, classes: Any) -> Fitted | None:
    if classes is None:
        return None
    present = np.unique(y)
    made = faast(k, y, classes, values=classes[present], prior="auto")
    return Fitted(made.predict, [*made.kept, classes], made.told)


def ridge(k: Keys, y: Labels, classes: Any) -> Fitted:
    def make(strength: float, k: Keys, y: Labels) -> Predict:
        return RidgeClassifier(strength).fit(k, y).predict

    best = chosen(make, (1e-3, 1e-2, 0.1, 1.0, 10.0), k, y)
    final = RidgeClassifier(best).fit(k, y)
    return Fitted(final.predict, [final.coef_, final.intercept_], f"strength {best:g}")


def nearest_mean(k: Keys, y: Labels, classes: Any) -> Fitted:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one row a class has no spread
        final = NearestCentroid().fit(k, y)
    return Fitted(final.predict, [final.centroids_])


def neighbours(k: Keys, y: Labels, classes: Any) -> Fitted:
    def make(count: int, k: Keys, y: Labels) -> Predict:
        return KNeighborsClassifier(min(count, len(k)), algorithm="brute").fit(k, y).predict

    best = chosen(make, (1, 3, 5, 10, 20), k, y) if np.bincount(y).max() > 1 else 1
    return Fitted(make(best, k, y), [k, y.astype(np.int32)], f"k {best}")


def softmax_memory(k: Keys, y: Labels, classes: Any) -> Fitted:
    """``softmax(s q K') V``, FAAST's own baseline at s = 100; s is tuned here."""

    def make(sharpness: float, k: Keys, y: Labels) -> Predict:
        def predict(q: Keys) -> Labels:
            scores = sharpness * (q @ k.T)
            heard = np.exp(scores - scores.max(axis=1, keepdims=True))
            return (heard @ np.eye(y.max() + 1)[y]).argmax(axis=1)

        return predict

    best = chosen(make, SHARPNESS, k, y)
    return Fitted(make(best, k, y), [k, y.astype(np.int32)], f"s {best:g}")


def tip_adapter(k: Keys, y: Labels, classes: Any) -> Fitted | None:
    """``100 q T' + a exp(-b (1 - q K')) Y``; with one-hot Y and names T (arXiv 2207.09519)."""
    if classes is None:
        return None

    def make(told: tuple[float, float], k: Keys, y: Labels) -> Predict:
        def predict(q: Keys) -> Labels:
            cache = np.exp(-told[1] * (1 - q @ k.T)) @ np.eye(len(classes))[y]
            return (100 * q @ classes.T + told[0] * cache).argmax(axis=1)

        return predict

    grid = [(a, b) for a in (0.3, 1.0, 3.0, 10.0, 30.0, 100.0) for b in (1.0, 3.0, 5.5, 10.0)]
    best = chosen(make, grid, k, y)
    return Fitted(
        make(best, k, y), [k, y.astype(np.int32), classes], f"a {best[0]:g}, b {best[1]:g}"
    )


READERS: dict[str, Callable[[Keys, Labels, Any], Fitted | None]] = {
    "FAAST": faast,
    "FAAST, ridge too": faast_ridge,
    "FAAST, names and zero-shot": faast_names,
    "logistic, tuned": logistic,
    "logistic, five Cs": logistic_few,
    "logistic, five folds": logistic_cv,
    "logistic, one C": logistic_once,
    "ridge, tuned": ridge,
    "nearest class mean": nearest_mean,
    "kNN": neighbours,
    "softmax memory": softmax_memory,
    "Tip-Adapter": tip_adapter,
}


def sides(data: Keyed, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return support and test: the source's own split, or 70 to 30."""
    order = seeds.generator(seed, "probe", "sides").permutation(len(data.rows))
    if data.test is not None:  # test items first: what is in both stays there
        order = np.concatenate([order[data.test[order]], order[~data.test[order]]])
        order = distinct(data.rows, order)
        return order[~data.test[order]], order[data.test[order]]
    order = distinct(data.rows, order)
    cut = int(0.7 * len(order))
    return order[:cut], order[cut:]


def shots_of(support: NDArray[np.intp], labels: Labels, shots: int) -> NDArray[np.intp]:
    """Take so many of each class; all rows for 0."""
    if not shots:
        return support
    rows = [support[labels[support] == c][:shots] for c in np.unique(labels)]
    return np.concatenate(rows)


def timed(read: Callable[..., Any], *told: Any, repeats: int) -> tuple[Any, float]:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        made = read(*told)
        seconds.append(time.process_time() - start)
    return made, float(np.median(seconds))


def peak_of(read: Callable[..., Any], *told: Any) -> int:
    """Fit once more and count what arrays it held at most, beyond what was there before."""
    tracemalloc.start()
    try:
        read(*told)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def study(
    data: Keyed, shots: int, seed: int, repeats: int, without: Sequence[str]
) -> dict[str, dict[str, Any]]:
    support, test = sides(data, seed)
    rows = shots_of(support, data.labels, shots)
    k, y = data.keys[rows], data.labels[rows]
    q, truth = data.keys[test], data.labels[test]
    made = {}
    for name, read in READERS.items():
        if name in without:
            continue
        fitted, seconds = timed(read, k, y, data.label_keys, repeats=repeats)
        if fitted is None:
            continue
        start = time.process_time()
        right = fitted.predict(q) == truth
        made[name] = {
            "accuracy": float(right.mean()),
            "seconds": seconds,
            "read_seconds": time.process_time() - start,
            "bytes": sum(x.nbytes for x in fitted.kept),
            "peak": peak_of(read, k, y, data.label_keys) if seed == 0 and seconds < SLOW else 0,
            "told": fitted.told,
            "rows": len(rows),
            "test": len(test),
        }
    return made


def summary(runs: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Average over seeds; the interval is the seeds' or one test set's, whichever is wider.

    Where the source has its own test items, seeds differ in the validation rows alone.
    """
    made = {}
    for name in runs[0]:
        accuracy = np.array([run[name]["accuracy"] for run in runs])
        spread = 1.96 * accuracy.std(ddof=1) / np.sqrt(len(runs)) if len(runs) > 1 else np.nan
        mean = accuracy.mean()
        binomial = 1.96 * np.sqrt(mean * (1 - mean) / runs[0][name]["test"])
        made[name] = {
            "accuracy": float(accuracy.mean()),
            "interval": float(np.fmax(spread, binomial)),
            "seconds": float(np.median([run[name]["seconds"] for run in runs])),
            "read_seconds": float(np.median([run[name]["read_seconds"] for run in runs])),
            "bytes": runs[0][name]["bytes"],
            "peak": max(run[name]["peak"] for run in runs),
            "told": runs[0][name]["told"],
        }
    return made


def show(
    name: str, shots: int, runs: list[dict[str, Any]], found: dict[str, dict[str, Any]]
) -> None:
    first = next(iter(runs[0].values()))
    title = f"{shots}-shot" if shots else "full"
    print(
        f"\n{name}, {title}: {first['rows']} rows, {first['test']} test items, {len(runs)} seeds\n"
    )
    print("| reader | accuracy % | fit s | read s | bytes | peak bytes | chosen (seed 0) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for reader, row in found.items():
        print(
            f"| {reader} | {100 * row['accuracy']:.1f} ± {100 * row['interval']:.1f} |"
            f" {row['seconds']:.3g} | {row['read_seconds']:.2g} | {row['bytes']} |"
            f" {row['peak'] or '-'} | {row['told']} |",
            flush=True,
        )


def headline(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare one reader with the tuned probe; None stands for what was not run."""
    probe, ours = found["logistic, tuned"], found[OURS]
    tuned = ("logistic, tuned", "logistic, five Cs", "logistic, five folds")
    best = max(found[name]["accuracy"] for name in tuned if name in found)

    def times(name: str) -> float | None:
        return round(found[name]["seconds"] / ours["seconds"], 1) if name in found else None

    stored = round(ours["bytes"] / found["kNN"]["bytes"], 5) if "kNN" in found else None
    return {
        "reader": OURS,
        "accuracy": round(ours["accuracy"], 4),
        "probe_accuracy": round(best, 4),
        "within_margin": bool(ours["accuracy"] >= best - MARGIN),
        "speedup_vs_probe": round(probe["seconds"] / ours["seconds"], 1),
        "speedup_vs_probe_of_five_cs": times("logistic, five Cs"),
        "speedup_vs_logistic_cv": times("logistic, five folds"),
        "speedup_vs_one_fit": times("logistic, one C"),
        "stored_bytes_vs_knn": stored,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="*", default=["uci-sentences", "digits"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--shots", default="1,5,16,0")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--most", type=int, default=None, help="items of a set; 0 for all")
    parser.add_argument("--encoder", help="in place of the sets' own, such as relu:1024:pixels:784")
    parser.add_argument("--without", nargs="*", default=[], choices=list(READERS))
    told = parser.parse_args()
    if {OURS, "logistic, tuned"} & set(told.without):
        parser.error(f'"{OURS}" and "logistic, tuned" are what is compared: expected others')
    warnings.simplefilter("ignore", ConvergenceWarning)
    print(
        f"Python {platform.python_version()}, numpy {np.__version__}, sklearn {sklearn.__version__}"
    )
    made: dict[str, Any] = defaultdict(dict)
    for name in told.sets:
        source, encoder, most = SETS[name]
        encoder = told.encoder or encoder
        data = keyed(source, encoder, most if told.most is None else told.most)
        pace = len(data.rows) / data.encoding_seconds
        spent = f"{data.encoding_seconds:.0f} CPU s, {pace:.0f} a second"
        print(f"\n{name}, {encoder}: encoded once in {spent}")
        for shots in map(int, told.shots.split(",")):
            runs = [
                study(data, shots, seed, told.repeats, told.without) for seed in range(told.seeds)
            ]
            found = summary(runs)
            show(name, shots, runs, found)
            if not shots:
                made[name] = headline(found) | {"encoding_seconds": round(data.encoding_seconds, 1)}
    held = [row for row in made.values() if row["within_margin"]]
    stored = [row["stored_bytes_vs_knn"] for row in held if row["stored_bytes_vs_knn"] is not None]
    print(
        json.dumps(
            {
                "speedup_vs_probe": min((row["speedup_vs_probe"] for row in held), default=None),
                "stored_bytes_vs_knn": max(stored, default=None),
                "sets_within_margin": [n for n, row in made.items() if row["within_margin"]],
                "sets_below": [n for n, row in made.items() if not row["within_margin"]],
                "sets": made,
            }
        )
    )


if __name__ == "__main__":
    main()

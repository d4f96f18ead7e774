# SPDX-License-Identifier: Apache-2.0
"""Time reads of fast weights solved from 100 to a million pairs, beside readers that keep pairs.

Run as ``python benchmarks/faast/latency.py``; the last line printed is one JSON object.  Each round
reads every size once, in an order drawn anew (who comes first finds colder caches), and medians are
compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import seeds
from fedloom.classifier import FaastClassifier

WIDTH, CLASSES = 256, 20
SIZES = (100, 10_000, 1_000_000)
KEPT = (100, 1_000, 10_000)  # pairs of a softmax memory
QUERIES = 256
_CHUNK = 100_000

Read = Callable[[NDArray[np.float32]], Any]


def pairs(count: int, chunk: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw keys of length one around means of classes."""
    means = seeds.generator(0, "means").standard_normal((CLASSES, WIDTH), np.float32)
    random = seeds.generator(0, "pairs", chunk)
    labels = random.integers(CLASSES, size=count)
    keys = means[labels] + 4 * random.standard_normal((count, WIDTH), np.float32)
    return keys / np.linalg.norm(keys, axis=1, keepdims=True), labels


def learned(count: int) -> FaastClassifier:
    model = FaastClassifier(alpha=0.8)
    for chunk, start in enumerate(range(0, count, _CHUNK)):
        keys, labels = pairs(min(_CHUNK, count - start), chunk)
        model.partial_fit(keys, labels, classes=np.arange(CLASSES))
    return model


def state_bytes(model: FaastClassifier) -> dict[str, int]:
    """Count what a reader keeps, and what has to be kept to go on learning."""
    arrays = (model.weights_, model.classes_, model.class_counts_)
    sums = sum(x.nbytes for x in model.gram_.arrays().values())
    return {"read": sum(x.nbytes for x in arrays), "learn": sums}


def softmax(keys: NDArray[np.float32], labels: NDArray[np.int64]) -> Read:
    one_hot = np.eye(CLASSES, dtype=np.float32)[labels]

    def read(queries: NDArray[np.float32]) -> NDArray[np.intp]:
        return (np.exp(100 * (queries @ keys.T - 1)) @ one_hot).argmax(axis=1)

    return read


def timed(
    reads: dict[str, Read], queries: NDArray[np.float32], rounds: int
) -> dict[str, list[float]]:
    """Time each read once a round; the first tenth of the rounds warms up."""
    random = seeds.generator(0, "order")
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    for turn in range(rounds + rounds // 10):
        for name in random.permutation(list(reads)):
            start = time.process_time()
            reads[name](queries)
            if turn >= rounds // 10:
                seconds[name].append(time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1500)
    told = parser.parse_args()
    queries, labels = pairs(QUERIES, -1)
    models = {count: learned(count) for count in SIZES}
    memories = {count: pairs(count, 0) for count in KEPT}
    reads: dict[str, Read] = {str(n): m.predict for n, m in models.items()}
    seconds = timed(reads, queries, told.rounds)
    seconds |= timed({f"softmax {n}": softmax(*m) for n, m in memories.items()}, queries, 40)
    print(f"Python {platform.python_version()}, numpy {np.__version__}; {QUERIES} queries a read\n")
    print("| reader | pairs | read ms | bytes to read | bytes to go on learning | accuracy % |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count, model in models.items():
        held, right = state_bytes(model), 100 * model.score(queries, labels)
        print(
            f"| FAAST | {count} | {1e3 * median(seconds[str(count)]):.3f} | {held['read']} |"
            f" {held['learn']} | {right:.1f} |"
        )
    for count, (keys, of) in memories.items():
        told_ms = 1e3 * median(seconds[f"softmax {count}"])
        print(f"| softmax memory | {count} | {told_ms:.3f} | {keys.nbytes + of.nbytes} | | |")
    small, large = str(SIZES[0]), str(SIZES[-1])
    held = [sum(state_bytes(models[n]).values()) for n in (SIZES[0], SIZES[-1])]
    ratio = median(seconds[large]) / median(seconds[small])
    print(
        json.dumps(
            {
                "read_seconds_ratio": round(ratio, 4),
                "state_bytes_ratio": held[1] / held[0],
                "within_5_percent": bool(abs(ratio - 1) <= 0.05 and held[0] == held[1]),
                "read_ms": {n: round(1e3 * median(seconds[n]), 4) for n in map(str, SIZES)},
                "state_bytes": held[1],
                "rounds": told.rounds,
            }
        )
    )


if __name__ == "__main__":
    main()

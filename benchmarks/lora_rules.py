# SPDX-License-Identifier: Apache-2.0
"""Time the LoRA rules on SmolLM2-135M's q, k, v and hold each against a dense float64 oracle.

Run as ``python benchmarks/lora_rules.py``; the last line printed is one JSON object. Factors are
drawn around one start with a drift of each client's own, as a round of training leaves them; a
lower rank holds the first rows of a higher one. Rules of a case run in turns within the same round,
and medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import rules, seeds
from fedloom.rules import Aggregate, LowRankUpdate
from fedloom.wire import Update

LAYERS, SHAPES = 30, {"q_proj": (576, 576), "k_proj": (192, 576), "v_proj": (192, 576)}
RANK, SCALE = 8, 2.0  # of the adapter that goes back
DRIFT = 0.3  # of the start's own size
EXACT = ("ffa", "rolora (A)", "fedex", "stack", "stack, compressed")

Dense = dict[str, NDArray[np.float64]]
Case = dict[str, Callable[[], Any]]


def cohort(ranks: list[int], dtype: str) -> list[LowRankUpdate]:
    """Draw clients with unequal weights and an alpha that is not the rank."""
    clients = []
    for client, rank in enumerate(ranks):
        arrays: dict[str, NDArray[Any]] = {}
        for layer in range(LAYERS):
            for name, (out, inner) in SHAPES.items():
                module = f"layers.{layer}.self_attn.{name}"
                start, own = (seeds.generator(0, module, who) for who in ("start", client))
                for side, width in (("A", inner), ("B", out)):
                    drawn = start.normal(size=(16, width)) + DRIFT * own.normal(size=(16, width))
                    factor = drawn[:rank] if side == "A" else drawn[:rank].T
                    arrays[f"{module}.lora_{side}.weight"] = (factor / 24).astype(dtype)
        random = seeds.generator(0, client, "client")
        weight, alpha = float(random.integers(50, 2000)), float(random.uniform(8, 32))
        clients.append(LowRankUpdate(arrays, weight, alpha / rank, client))
    return clients


def frozen(clients: list[LowRankUpdate], side: str) -> list[LowRankUpdate]:
    held = {n: x for n, x in clients[0].arrays.items() if f"lora_{side}" in n}
    return [replace(c, arrays={**c.arrays, **held}) for c in clients]


def dense(clients: list[LowRankUpdate]) -> Dense:
    """``D`` from its definition, all of it, which no rule may do."""
    weight, products = sum(c.weight for c in clients), {}
    for module in clients[0].modules():
        pairs = [(c.weight / weight * c.scale, c.pair(module)) for c in clients]
        products[module] = sum(
            (s * pair.b.astype(np.float64) @ pair.a.astype(np.float64) for s, pair in pairs),
            start=np.zeros(pairs[0][1].shape),
        )
    return products


def dense_svd(clients: list[LowRankUpdate]) -> dict[str, Any]:
    return {module: np.linalg.svd(d, full_matrices=False) for module, d in dense(clients).items()}


def off(made: Aggregate, wanted: Dense) -> float:
    """Relative Frobenius error over all projections, formed densely."""
    found = made.products()
    gap = sum(np.square(d - found[m].b @ found[m].a).sum() for m, d in wanted.items())
    return float(np.sqrt(gap / sum(np.square(d).sum() for d in wanted.values())))


def case(clients: list[LowRankUpdate], slow: bool) -> Case:
    """Name what can be run on these clients."""
    made: Case = {
        "stack": lambda: rules.stack(clients),
        "stack, compressed": lambda: rules.stack(clients, compress=True),
        "svd_refactor": lambda: rules.svd_refactor(clients, RANK, SCALE)[0],
        "flex": lambda: rules.flex(clients),
    }
    if slow:
        made["dense D and SVD"] = lambda: dense_svd(clients)
    if len({c.rank for c in clients}) > 1:
        return made
    still_a, still_b = frozen(clients, "A"), frozen(clients, "B")
    like = clients[0].arrays
    linear: Case = {
        "mean (no error)": lambda: rules.mean(
            (Update.of(c.arrays, c.weight) for c in clients), like
        ),
        "fedit": lambda: rules.fedit(clients, SCALE)[0],
        "ffa": lambda: rules.ffa(still_a, SCALE),
        "rolora (A)": lambda: rules.rolora(still_b, 2, SCALE),
        "fedsa": lambda: rules.fedsa(clients, SCALE),
        "fedex": lambda: rules.fedex(clients, SCALE),
    }
    return linear | made


def errors(clients: list[LowRankUpdate], names: list[str]) -> dict[str, float]:
    """Hold every rule that makes one product against the oracle."""
    works, found = case(clients, slow=False), {}
    for name in [n for n in names if n in (*EXACT, "fedit", "svd_refactor")]:
        side = {"ffa": "A", "rolora (A)": "B"}.get(name)
        held = frozen(clients, side) if side else clients
        found[name] = off(works[name](), dense(held))
    return found


def optimality_gap(clients: list[LowRankUpdate]) -> float:
    """Largest distance, over projections, between the error made and a dense SVD's optimum."""
    found = rules.svd_refactor(clients, RANK, SCALE)[0].products()
    gaps = []
    for module, d in dense(clients).items():
        tail = np.linalg.norm(np.linalg.svd(d, compute_uv=False)[RANK:])
        error = np.linalg.norm(d - found[module].b @ found[module].a)
        gaps.append(abs(error - tail) / np.linalg.norm(d))
    return float(max(gaps))


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(clients: list[LowRankUpdate], repeats: int) -> dict[str, float]:
    """Run a case's rules in turns; the first turn warms up, and the dense SVD has one turn."""
    times: dict[str, list[float]] = {}
    for turn in range(repeats + 1):
        for name, work in case(clients, slow=turn == 1).items():
            spent = seconds(work)
            if turn:
                times.setdefault(name, []).append(spent)
    return {name: median(spent) for name, spent in times.items()}


def cpu() -> str:
    """Name the CPU and count its cores."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((x.split(":")[1].strip() for x in lines if "model name" in x), platform.machine())
    return f"{model}, {os.cpu_count()} cores"


def table(rows: list[dict[str, Any]]) -> str:
    """Format rows as Markdown."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(x) for x in r.values()] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    cases = {
        f"{count} clients, {kind}": [ranks[k % len(ranks)] for k in range(count)]
        for count in (5, 20)
        for kind, ranks in (("r 8", [8]), ("r 4/8/16", [4, 8, 16]))
    }
    rows, identity, gap = [], 0.0, 0.0
    spent: dict[str, dict[str, float]] = {}
    start, before = time.perf_counter(), time.process_time()
    for what, ranks in cases.items():
        clients = cohort(ranks, "float32")
        times = measure(clients, args.repeats)
        found = errors(clients, list(times))
        identity = max(identity, *(found[name] for name in EXACT if name in found))
        gap = max(gap, optimality_gap(cohort(ranks, "float64")))
        spent[what] = {name: round(t, 4) for name, t in times.items()}
        rows += [
            {
                "case": what,
                "rule": name,
                "seconds": f"{t:.3f}",
                "relative error": f"{found[name]:.2g}" if name in found else "",
            }
            for name, t in times.items()
        ]
    cores_used = (time.process_time() - before) / (time.perf_counter() - start)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    print(f"{cpu()}; {threads} threads; {versions}; float32 factors\n")
    print(table(rows) + "\n")
    result = {
        "max_identity_error": identity,
        "svd_optimality_gap": gap,
        "seconds": spent,
        "threads": threads,
        "cores_used": round(cores_used, 2),
        "numpy": np.__version__,
        "cpu": cpu(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

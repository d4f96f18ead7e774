# SPDX-License-Identifier: Apache-2.0
"""Time the chunkwise delta rule against the recurrence, and against this machine's matmul.

Run as ``python benchmarks/delta_rule.py``; the last line printed is one JSON object. Whatever is
compared runs in turns within the same round, and medians over the rounds are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedloom.ops.delta_rule import delta_rule, naive_delta_rule

SHAPES = {"3x64": (3, 64, 64), "2x128": (2, 128, 64)}  # heads x dim: heads, dim, default chunk
GEMM = 2048  # side of the square sgemm


def inputs(T: int, H: int, d: int, G: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return q, k, v, beta of batch 1 with unit keys, seeded."""
    random = torch.Generator().manual_seed(T + d)
    q, k, v = (
        torch.randn(1, T, H, *group, d, generator=random, dtype=dtype) for group in ((G,), (), ())
    )
    beta = torch.rand(1, T, H, generator=random, dtype=dtype)
    return [x.requires_grad_() for x in (normalize(q, dim=-1), normalize(k, dim=-1), v, beta)]


def flops(T: int, H: int, d: int, chunk: int, G: int = 1) -> int:
    """Count a forward pass: 8Cd + 6d^2 per token and head, and 4Cd + 2d^2 per further query."""
    return T * H * (8 * chunk * d + 6 * d * d + (G - 1) * (4 * chunk * d + 2 * d * d))


def forward(rule: Callable[..., tuple[Tensor, Tensor]], x: list[Tensor], **options: Any) -> None:
    with torch.no_grad():
        rule(*x, **options)


def both_ways(rule: Callable[..., tuple[Tensor, Tensor]], x: list[Tensor], **options: Any) -> None:
    out, _ = rule(*x, **options)
    torch.autograd.grad(out, x, out.detach())


def seconds(work: Callable[..., Any], *given: Any, threads: int, **options: Any) -> float:
    torch.set_num_threads(threads)
    start = time.perf_counter()
    work(*given, **options)
    return time.perf_counter() - start


def max_error_fp64(T: int) -> float:
    """Largest difference from the recurrence in float64: outputs, state and all gradients."""
    worst = 0.0
    for H, d, chunk in SHAPES.values():
        x = inputs(T, H, d, G=3, dtype=torch.float64)
        x.append(torch.randn(1, H, d, d, dtype=torch.float64, requires_grad=True))
        found = []
        choices: list[tuple[Any, dict[str, Any]]] = [
            (naive_delta_rule, {}),
            (delta_rule, {"chunk": chunk}),
        ]
        for rule, options in choices:
            out, state = rule(*x, **options)
            grads = torch.autograd.grad(out.square().sum() + state.square().sum(), x)
            found.append((out, state, *grads))
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(*found, strict=True)))
    return worst


def measure(
    lengths: list[int], repeats: int, naive_repeats: int, G: int, threads: int
) -> dict[str, list[float]]:
    """Run everything in turns; a matmul stands beside each chunkwise run.

    The recurrence gets one thread: a 64 x 64 matrix by a vector is too small to share.
    """
    times: dict[str, list[float]] = defaultdict(list)
    a = torch.randn(GEMM, GEMM)
    for T in lengths:
        data = {name: inputs(T, H, d, G) for name, (H, d, _) in SHAPES.items()}
        for turn in range(repeats + 1):
            for name, x in data.items():
                many: dict[str, Any] = {"chunk": SHAPES[name][2], "threads": threads}
                row = {
                    "gemm": seconds(torch.mm, a, a, threads=threads),
                    "chunk forward": seconds(forward, delta_rule, x, **many),
                    "chunk both": seconds(both_ways, delta_rule, x, **many),
                }
                if turn <= naive_repeats:
                    row["naive forward"] = seconds(forward, naive_delta_rule, x, threads=1)
                    row["naive both"] = seconds(both_ways, naive_delta_rule, x, threads=1)
                for what, spent in row.items() if turn else ():  # the first turn warms up
                    times[f"{name} G{G} T{T} {what}"].append(spent)
    return times


def summary(times: dict[str, list[float]], G: int) -> list[dict[str, Any]]:
    """Medians, speed-ups and shares of the matmul's FLOP/s, a row each shape and length."""
    rows = []
    for key in times:
        if not key.endswith("chunk both"):
            continue
        name, _, length, *_ = key.split()
        (H, d, chunk), T = SHAPES[name], int(length[1:])
        spent = {what: median(times[f"{name} G{G} {length} {what}"]) for what in WHAT}
        gemm_flops = 2 * GEMM**3 / spent["gemm"]
        need = flops(T, H, d, chunk, G)
        rows.append(
            {
                "heads": name,
                "G": G,
                "T": T,
                "chunk": chunk,
                **{f"{what} ms": round(1e3 * spent[what], 2) for what in WHAT[1:]},
                "speedup forward": round(spent["naive forward"] / spent["chunk forward"], 1),
                "speedup both": round(spent["naive both"] / spent["chunk both"], 1),
                "gemm GFLOP/s": round(gemm_flops / 1e9, 1),
                "fraction forward": round(need / spent["chunk forward"] / gemm_flops, 3),
                "fraction both": round(3 * need / spent["chunk both"] / gemm_flops, 3),
            }
        )
    return rows


WHAT = ("gemm", "chunk forward", "chunk both", "naive forward", "naive both")


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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15, help="rounds of chunkwise and matmul")
    parser.add_argument("--naive-repeats", type=int, default=3, help="of them with the recurrence")
    parser.add_argument("--group", type=int, default=1, help="queries of a KV head (G)")
    parser.add_argument("--quick", action="store_true", help="T = 4096 only, 5 rounds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    repeats = min(args.repeats, 5) if args.quick else args.repeats
    torch.set_num_threads(1)
    error = max_error_fp64(300)
    start, before = time.perf_counter(), time.process_time()
    lengths = [4096] if args.quick else [512, 1024, 4096]
    times = measure(lengths, repeats, min(args.naive_repeats, repeats), args.group, args.threads)
    rows = summary(times, args.group)
    cores_used = (time.process_time() - before) / (time.perf_counter() - start)
    print(f"{cpu()}; {args.threads} threads; torch {torch.__version__}; float32, batch 1\n")
    print(table(rows) + "\n")
    last = [row for row in rows if row["T"] == 4096]
    result = {
        "speedup_T4096": min(row["speedup both"] for row in last),
        "gemm_fraction": min(row["fraction both"] for row in last),
        "max_error_fp64": error,
        "speedup_T4096_forward": min(row["speedup forward"] for row in last),
        "gemm_fraction_forward": min(row["fraction forward"] for row in last),
        "fractions": {
            row["heads"]: [row["fraction forward"], row["fraction both"]] for row in last
        },
        "gemm_gflops": min(row["gemm GFLOP/s"] for row in last),
        "threads": args.threads,
        "cores_used": round(cores_used, 2),
        "torch": torch.__version__,
        "cpu": cpu(),
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

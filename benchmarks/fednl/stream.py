# SPDX-License-Identifier: Apache-2.0
"""What a token costs after 1K, 2K, ... 16K others: windowed attention with the memory, or all keys.

Two paths through the same frozen LLM.  ``windowed`` has the memory and a window with sinks; its
cache holds S, the pool's last raw keys and the window.  ``plain`` is the LLM without adapter and
transformers' own cache of every key.

First a process a path reads a context in chunks.  At each length it decodes a few tokens, notes the
largest resident size since the last length, sums its cache tensor by tensor and saves the session.
``plain`` reads its context only with ``--read-plain``: 16K tokens of full attention take long, and
neither seconds nor bytes of a step depend on what the keys are, so they are drawn; its peak is then
that of decoding alone, less than that of reading.
Then one process loads all sessions and decodes with each in turns: seconds a token are medians over
rounds, ratios are medians of the ratios within a round, as the machine may be busy.  Run as
``python benchmarks/fednl/stream.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from fedloom import inference, seeds
from fedloom.adapters.attach import Adapter, attach
from fedloom.config import RunConfig
from fedloom.models.base import Base, load_base

LENGTHS = (1024, 2048, 4096, 8192, 16384)
PATHS = ("windowed", "plain")
TOKENS = 4  # decoded in a turn


def load(args: argparse.Namespace) -> tuple[Base, Adapter]:
    """Return the model with an adapter whose memory is heard."""
    torch.set_num_threads(args.threads)
    config = RunConfig().replaced(
        model__source=args.source, memory__window=args.window, memory__sinks=args.sinks
    )
    base = load_base(args.source)
    return base, attach(base.model, config)


def on(path: str, adapter: Adapter) -> contextlib.AbstractContextManager[None]:
    """Let the block run on one path."""
    return contextlib.nullcontext() if path == "windowed" else adapter.off()


def resident(what: str) -> int:
    """Read ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith(what))
    return 1024 * int(line.split()[1])


def fill(args: argparse.Namespace) -> None:
    """Read one context as far as the last length; a JSON line at each length on the way."""
    base, adapter = load(args)
    owner = inference.owner_of(base, adapter)
    session = inference.Session(adapter, chunk=args.chunk)
    random = seeds.generator(0, "stream")
    vocabulary = base.model.config.vocab_size
    with on(args.fill, adapter):
        for length in args.lengths:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from VmRSS
            began, read = time.perf_counter(), length - session.tokens
            if args.fill == "windowed" or args.read_plain:
                session.read(random.integers(vocabulary, size=read).tolist())
            else:
                draw_keys(session, read)
            seconds = time.perf_counter() - began
            list(session.generate(2))
            row = {
                "path": args.fill,
                "length": length,
                "peak_resident": resident("VmHWM"),
                **{f"{k}_bytes": n for k, n in inference.cache_bytes(session.cache).items()},
                "prefill_tokens_a_second": round(read / seconds, 1),
            }
            inference.save_state(state_file(args, args.fill, length), session, owner)
            print(json.dumps(row), flush=True)


def draw_keys(session: inference.Session, tokens: int) -> None:
    """Let a session of all keys look as if it had read so many tokens more."""
    if not session.tokens:
        session.read([0, 0])
        tokens -= 2
    for layer in session.cache.layers:
        B, H, _, D = layer.keys.shape
        layer.keys, layer.values = (
            torch.cat((x, torch.randn(B, H, tokens, D)), dim=2) for x in (layer.keys, layer.values)
        )
    session.tokens += tokens


def state_file(args: argparse.Namespace, path: str, length: int) -> Path:
    return Path(args.folder) / f"{path}-{length}.safetensors"


def decode(args: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Decode with all sessions in turns; seconds a token, one number a round."""
    base, adapter = load(args)
    owner = inference.owner_of(base, adapter)
    sessions = {}
    for path in PATHS:
        with on(path, adapter):
            for length in args.lengths:
                file = state_file(args, path, length)
                sessions[path, length] = inference.load_state(file, adapter, owner)
    spent: dict[tuple[str, int], list[float]] = defaultdict(list)
    order = list(sessions)
    for turn in range(args.rounds + 1):
        for key in order if turn % 2 else reversed(order):
            with on(key[0], adapter):
                began = time.perf_counter()
                assert len(list(sessions[key].generate(TOKENS))) == TOKENS
                if turn:  # the first turn warms up
                    spent[key].append((time.perf_counter() - began) / TOKENS)
    return spent


def ratio(spent: dict[tuple[str, int], list[float]], path: str, lengths: list[int]) -> float:
    """Last length to first, within each round."""
    pairs = zip(spent[path, lengths[-1]], spent[path, lengths[0]], strict=True)
    return round(median(a / b for a, b in pairs), 4)


def result(
    args: argparse.Namespace,
    rows: dict[tuple[str, int], dict[str, Any]],
    spent: dict[tuple[str, int], list[float]],
) -> dict[str, Any]:
    first, last = args.lengths[0], args.lengths[-1]

    def held(path: str, length: int) -> int:
        row = rows[path, length]
        return int(row["memory_bytes"] + row["attention_bytes"])

    return {
        "seconds_ratio_16k_1k": ratio(spent, "windowed", args.lengths),
        "peak_bytes_1k": rows["windowed", first]["peak_resident"],
        "peak_bytes_16k": rows["windowed", last]["peak_resident"],
        "kv_seconds_ratio_16k_1k": ratio(spent, "plain", args.lengths),
        "kv_peak_bytes_1k": rows["plain", first]["peak_resident"],
        "kv_peak_bytes_16k": rows["plain", last]["peak_resident"],
        "state_bytes": rows["windowed", last]["memory_bytes"],
        "cache_bytes_1k": held("windowed", first),
        "cache_bytes_16k": held("windowed", last),
        "kv_cache_bytes_1k": held("plain", first),
        "kv_cache_bytes_16k": held("plain", last),
        "seconds_a_token": {
            f"{path} {length}": round(median(times), 5) for (path, length), times in spent.items()
        },
        "lengths": args.lengths,
        "source": args.source,
        "window": args.window,
        "sinks": args.sinks,
        "rounds": args.rounds,
        "threads": args.threads,
        "load_average": round(os.getloadavg()[0], 2),
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(rows: dict[tuple[str, int], dict[str, Any]], found: dict[str, Any]) -> str:
    head = ("path", "context", "s a token", "S MB", "keys MB", "peak resident MB", "prefill tok/s")
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for (path, length), row in rows.items():
        sizes = [row[k] / 1e6 for k in ("memory_bytes", "attention_bytes", "peak_resident")]
        cells = [path, str(length), f"{found['seconds_a_token'][f'{path} {length}']:.4f}"]
        read = path == "windowed" or "--read-plain" in sys.argv
        cells += [f"{size:.2f}" for size in sizes]
        cells.append(str(row["prefill_tokens_a_second"]) if read else "drawn")
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="embedded:smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--read-plain", action="store_true", help="no keys drawn: read the context")
    parser.add_argument("--quick", action="store_true", help="a tiny random model")
    parser.add_argument("--fill", choices=PATHS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.source = "tiny:llama" if args.quick else args.source
    if args.fill:
        fill(args)
        return
    rows = {}
    with tempfile.TemporaryDirectory() as args.folder:
        for path in PATHS:
            command = [sys.executable, __file__, *sys.argv[1:], "--fill", path]
            made = subprocess.run(
                [*command, "--folder", args.folder], check=True, stdout=subprocess.PIPE, text=True
            )
            for line in made.stdout.splitlines():
                row = json.loads(line)
                rows[path, row["length"]] = row
        spent = decode(args)
    found = result(args, rows, spent)
    print(table(rows, found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

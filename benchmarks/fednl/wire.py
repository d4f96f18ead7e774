# SPDX-License-Identifier: Apache-2.0
"""What a round's messages take beside the arrays' values, and what fewer bits leave of those.

The default adapter's shapes (LoRA on q, k, v and a memory gate a layer, on SmolLM2-135M) are packed
by ``border`` as the apps do and serialised by Flower's protobuf, once as single arrays, which is
how Flower packs them, and once as a parcel.  Values are drawn: a message is as long for any.
Run as ``python benchmarks/fednl/wire.py``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.common.serde import recorddict_to_proto
from transformers import LlamaConfig, LlamaForCausalLM

from fedloom import __version__, border, seeds
from fedloom.adapters.attach import attach
from fedloom.config import RunConfig
from fedloom.rounding import CODES
from fedloom.rules import is_memory_array
from fedloom.training import TrainingReport

LAYERS = 30


def arrays() -> dict[str, np.ndarray]:
    """Draw values for the default adapter's arrays."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=49152,
                hidden_size=576,
                intermediate_size=1536,
                num_hidden_layers=LAYERS,
                num_attention_heads=9,
                num_key_value_heads=3,
                tie_word_embeddings=True,
            )
        ).requires_grad_(False)
    named = attach(model, RunConfig()).parameters()
    return {
        name: seeds.generator(0, name).normal(size=tuple(p.shape)).astype(np.float32)
        for name, p in sorted(named.items())
    }


def told() -> dict[str, dict[str, str | int | float | bool]]:
    """Return what goes beside the arrays: down the round's config, up the metrics."""
    down = {"round": 3, "manifest": "0" * 64, "run": "0" * 32, "version": __version__}
    said: dict[str, str | int | float | bool] = {
        name.replace("_", "-"): 12345 if kind == "int" else 1.5
        for name, kind in TrainingReport.__annotations__.items()
    }
    said |= {f"gate-layer-{i:02d}": 0.05 for i in range(LAYERS)}
    said |= {"gate-mean": 0.05, "gate-min": 0.05, "gate-max": 0.05}
    said |= {"gpu": 0, "pid": 12345, "base-loads": 1, border.TICKET: 2**56}
    said[border.WEIGHT] = said.pop("examples")
    return {"down": {**down, "base": "0" * 64, "last": False}, "up": said}


def weigh(record: ArrayRecord, way: str) -> int:
    """Serialise one message."""
    beside = told()[way]
    given = {"config": beside} if way == "down" else {"metrics": beside}
    return len(recorddict_to_proto(border.content(record, **given)).SerializeToString())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    whole = arrays()
    parts = {
        "LoRA and memory": whole,
        "memory": {n: a for n, a in whole.items() if is_memory_array(n)},
    }
    print(f"flwr {flwr.__version__}, torch {torch.__version__}, numpy {np.__version__}\n")
    head = ("sent", "arrays", "values, B", "way", "single, B", "over", "parcel, B", "over")
    print("| " + " | ".join(head) + " |\n" + "| --- " * len(head) + "|")
    found: dict[str, float] = {}
    for name, held in parts.items():
        values = sum(a.nbytes for a in held.values())
        for way in ("down", "up"):
            sizes = [weigh(pack(held), way) for pack in (border.pack_arrays, border.pack_parcel)]
            single, parcel = (size / values - 1 for size in sizes)
            cells = (name, len(held), f"{values:,}", way, f"{sizes[0]:,}", f"{single:.2%}")
            cells = (*cells, f"{sizes[1]:,}", f"{parcel:.2%}")
            print("| " + " | ".join(map(str, cells)) + " |")
            key = "memory" if name == "memory" else "whole"
            found |= {f"{key}_{way}_single": single, f"{key}_{way}": parcel}
    print("\n| update up in | message, B | of float32 |\n| --- | --- | --- |")
    bytes_up = {c: weigh(border.pack_parcel(whole, c), "up") for c in CODES}
    for code, size in bytes_up.items():
        print(f"| {code} | {size:,} | {size / bytes_up['float32']:.1%} |")
    result = {
        "wire_overhead": round(max(v for k, v in found.items() if not k.endswith("single")), 5),
        "wire_overhead_before": round(max(found.values()), 5),
        **{k: round(v, 5) for k, v in found.items()},
        **{f"bytes_up_{code}": size for code, size in bytes_up.items()},
    }
    print("\n" + json.dumps(result))


if __name__ == "__main__":
    main()

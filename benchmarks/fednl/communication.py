# SPDX-License-Identifier: Apache-2.0
"""What crosses the wire on Llama-3.2-1B's real shapes: FedNL's memory against LoRA.

The adapters are attached to the model built without storage (torch's meta device), so the names and
shapes are those of a real run; their values are drawn here, as a message is as long for any.  Each
message is what the apps send, packed by ``border`` and serialised by Flower's protobuf; its length
is what is counted, framing and all.  Run as ``python benchmarks/fednl/communication.py``; the last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import flwr
import torch
from flwr.app import RecordDict
from flwr.common.serde import recorddict_to_proto
from transformers import LlamaConfig, LlamaForCausalLM

from fedloom import border, seeds
from fedloom.adapters.attach import attach
from fedloom.config import RunConfig
from fedloom.rules import is_memory_array
from fedloom.training import TrainingReport

CLIENTS, ROUNDS = 7, 2  # the paper's needle run (section 3.5)
RANK, LAYERS = 16, 16
TARGETS = ("q,k,v", "q,k,v,o", "all-linear")


def shapes(targets: str) -> dict[str, tuple[int, ...]]:
    """Name the trainable arrays of an adapter on Llama-3.2-1B, with their shapes."""
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=2048,
                intermediate_size=8192,
                num_hidden_layers=LAYERS,
                num_attention_heads=32,
                num_key_value_heads=8,
                head_dim=64,
                tie_word_embeddings=True,
            )
        ).requires_grad_(False)
    config = RunConfig().replaced(lora__rank=RANK, lora__targets=targets)
    named = attach(model, config).parameters()
    return {name: tuple(parameter.shape) for name, parameter in named.items()}


@dataclass(frozen=True)
class Wire:
    """One client's messages of a round, in bytes."""

    parameters: int
    values: int
    """The arrays alone, one way."""
    down: int
    """The server's message: arrays and the round's config."""
    up: int
    """The reply: arrays and metrics."""

    def of_a_run(self, evaluated: bool = False) -> int:
        """All clients and rounds; a round that is evaluated sends the arrays down once more."""
        return ((2 if evaluated else 1) * self.down + self.up) * CLIENTS * ROUNDS


def metrics() -> dict[str, float]:
    """Return numbers under the names that a FedNL reply has on this model."""
    said = {name.replace("_", "-"): 1.5 for name in TrainingReport.__annotations__}
    said |= {f"gate-layer-{i:02d}": 0.05 for i in range(LAYERS)}
    said |= {"gate-mean": 0.05, "gate-min": 0.05, "gate-max": 0.05}
    said |= {"gpu": 0, "pid": 12345, "base-loads": 1}
    said[border.WEIGHT] = said.pop("examples")
    return said


def weigh(named: dict[str, tuple[int, ...]], dtype: str = "float32") -> Wire:
    """Serialise what a round sends to a client and gets back."""
    arrays = {
        name: seeds.generator(0, name).normal(size=shape).astype(dtype)
        for name, shape in named.items()
    }
    parcel = border.pack_parcel(arrays)
    down = border.content(parcel, config={"round": 1, "manifest": "0" * 64, "last": False})
    up = border.content(parcel, metrics=metrics())
    size, values = (
        sum(x) for x in zip(*((a.size, a.nbytes) for a in arrays.values()), strict=True)
    )
    return Wire(size, values, serialised(down), serialised(up))


def serialised(records: RecordDict) -> int:
    data = recorddict_to_proto(records).SerializeToString()
    assert len(data) == sum(border.wire_bytes(records).values())  # what a run's ledger says
    return len(data)


def measured(found: dict[str, Wire]) -> str:
    """Tabulate what was serialised."""
    head = (
        "sent",
        "parameters",
        "values one way",
        "message down",
        "message up",
        "7 x 2",
        "7 x 2 +",
    )
    lines = [" | ".join(head), " | ".join("---" for _ in head)]
    for name, wire in found.items():
        counts = (wire.parameters, wire.values, wire.down, wire.up)
        cells = [name, *(f"{n:,}" for n in (*counts, wire.of_a_run(), wire.of_a_run(True)))]
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def explained(found: dict[str, Wire]) -> str:
    """Set the paper's figures beside what makes them."""
    memory, lora = found["memory"].parameters, found["LoRA all-linear"].parameters
    mb, way = 1e-6, {"float16": 2, "float32": 4}
    runs = CLIENTS * ROUNDS
    rows = [
        ("figure", "paper", "what gives it", "ours"),
        ("---",) * 4,
        ("memory parameters", "32,768", "gate vector of 2048 a layer", f"{memory:,}"),
        ("LoRA parameters", "11.3 M", "rank 16 on all seven linear maps", f"{lora:,}"),
        (
            "memory a round",
            '0.26 MB "at fp16"',
            f"float32, both directions; float16 one way is {memory * way['float16'] * mb:.3f} MB",
            f"{memory * way['float32'] * 2 * mb:.3f} MB",
        ),
        (
            "LoRA a round",
            "22.5 MB fp16",
            "float16, one direction",
            f"{lora * way['float16'] * mb:.2f} MB",
        ),
        (
            "the two divided",
            "(not printed)",
            "a quarter of the ratio: twice the bytes, twice the directions",
            f"{lora * way['float16'] / (memory * way['float32'] * 2):.0f}x",
        ),
        ("saving", "about 350x", "parameters, like for like", f"{lora / memory:.0f}x"),
        (
            "memory, run",
            "3.6 MB",
            f"float32, both directions, {runs} client rounds",
            f"{memory * way['float32'] * 2 * runs * mb:.2f} MB",
        ),
        (
            "LoRA, run",
            "1.26 GB",
            f"float32, both directions, {runs} client rounds",
            f"{lora * way['float32'] * 2 * runs * mb / 1e3:.2f} GB",
        ),
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    named = {targets: shapes(targets) for targets in TARGETS}
    split = {t: {n: s for n, s in named[t].items() if not is_memory_array(n)} for t in TARGETS}
    memory = {n: s for n, s in named["q,k,v"].items() if is_memory_array(n)}
    found = {
        "memory": weigh(memory),
        "memory, float16": weigh(memory, "float16"),
        **{f"LoRA {targets}": weigh(split[targets]) for targets in TARGETS},
        "LoRA all-linear, float16": weigh(split["all-linear"], "float16"),
        "LoRA q,k,v and memory": weigh(named["q,k,v"]),
        "LoRA all-linear and memory": weigh(named["all-linear"]),
    }
    print(f"float32 where not said; bytes; flwr {flwr.__version__}, torch {torch.__version__}\n")
    print(measured(found) + "\n\n" + explained(found) + "\n")
    small, large = found["memory"], found["LoRA all-linear"]
    sent = {name: wire.down + wire.up for name, wire in found.items()}
    result = {
        "memory_parameters": small.parameters,
        "lora_parameters": large.parameters,
        "ratio": round(large.parameters / small.parameters, 1),
        "memory_bytes_wire": sent["memory"],
        "lora_bytes_wire": sent["LoRA all-linear"],
        "ratio_wire": round(sent["LoRA all-linear"] / sent["memory"], 1),
        "overhead": round(sent["memory"] / (2 * small.values) - 1, 5),
        "overhead_lora": round(sent["LoRA all-linear"] / (2 * large.values) - 1, 5),
        "lora_qkv_parameters": found["LoRA q,k,v"].parameters,
        "ratio_qkv": round(found["LoRA q,k,v"].parameters / small.parameters, 1),
        "share_all_bytes_wire": sent["LoRA q,k,v and memory"],
        "memory_bytes_run": small.of_a_run(),
        "lora_bytes_run": large.of_a_run(),
        "clients": CLIENTS,
        "rounds": ROUNDS,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

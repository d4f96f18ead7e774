# SPDX-License-Identifier: Apache-2.0
"""What of the language study needs back-propagation: LoRA, and a middle memory's read-out.

One epoch each over the same support, with as many parameters.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hidden_states import Document

from fedloom.adapters.attach import attach
from fedloom.adapters.fast_sums import Passage, compile_sums
from fedloom.adapters.fast_weights import FastMemory, decoder_of, middle_places
from fedloom.config import RunConfig, TrainConfig
from fedloom.language.compiling import nats
from fedloom.language.readout import train_readouts
from fedloom.models.base import Base
from fedloom.rules.solving import solve
from fedloom.training import train_locally

Scores = dict[str, list[float]]
"""Method -> nats of each test document."""


@dataclass(frozen=True)
class Split:
    """Who is what."""

    support: list[Document]
    validation: list[Document]
    test: list[Document]


def lora(
    base: Base, split: Split, args: argparse.Namespace, *, alone: bool = False
) -> tuple[Scores, dict[str, Any]]:
    """LoRA of as many parameters as ``W`` has, one epoch over the same support.

    ``alone`` puts all of them into the one block that a single middle memory's output enters.
    """
    blocks = len(decoder_of(base.model).layers)
    (place,) = middle_places(blocks, 1)
    rank = args.rank * blocks if alone else args.rank
    config = RunConfig().replaced(
        memory__enabled=False,
        lora__targets="q,v",
        lora__rank=rank,
        lora__alpha=2.0 * rank,
        last_layers=blocks - place if alone else 0,
    )
    train = TrainConfig(batch_size=1, learning_rate=args.rate, epochs=1)
    adapter = attach(base.model, config)
    learner = OneBlock(adapter, place) if alone else adapter
    began = time.process_time()

    def loss(batch: list[Document]) -> tuple[torch.Tensor, int]:
        ids = torch.tensor([d.ids for d in batch])
        logits = base.model(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()), ids.numel()

    report = train_locally(learner, split.support, loss, lambda d: len(d.ids), train, seed=0)
    spent = time.process_time() - began
    size = sum(p.numel() for p in learner.parameters().values())
    found = [nats(base, [d.ids])[0] for d in split.test]
    adapter.detach()
    base.model.requires_grad_(False)
    told = {"parameters": size, "cpu_seconds": round(spent, 1), "steps": report.steps}
    return {"LoRA in one block" if alone else "LoRA": found}, told


def lora_alone(base: Base, split: Split, args: argparse.Namespace) -> tuple[Scores, dict[str, Any]]:
    return lora(base, split, args, alone=True)


class OneBlock:
    """An adapter of which one block alone is trained; the others' LoRA stays at its start."""

    def __init__(self, adapter: Any, block: int) -> None:
        self._adapter, self._part = adapter, f".{block}."

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained."""
        return {n: p for n, p in self._adapter.parameters().items() if self._part in n}


def readout(base: Base, split: Split, args: argparse.Namespace) -> tuple[Scores, dict[str, Any]]:
    """One middle memory whose read-out is trained for an epoch on the same support."""
    train = TrainConfig(batch_size=2, learning_rate=args.readout_rate, epochs=1)
    texts = [base.tokenizer.decode(d.ids) for d in split.support]
    began = time.process_time()
    readouts, report = train_readouts(
        base, texts, train, memories=1, seed=0, length=len(split.support[0].ids)
    )
    trained = time.process_time() - began
    places = [*readouts]
    support = [Passage(d.ids) for d in split.support]
    sums = compile_sums(base.model, support, places=places, readouts=readouts)
    weights = {place: solve(gram, alpha=1.0).weights for place, gram in sums.items()}
    spent = time.process_time() - began
    memory = FastMemory(base.model, weights, readouts=readouts)
    found = {"middle memory, read-out trained": [nats(base, [d.ids])[0] for d in split.test]}
    memory.detach()
    told = {"parameters": sum(p.numel() for x in readouts.values() for p in x.parameters())}
    told |= {"cpu_seconds": round(spent, 1), "training_cpu_seconds": round(trained, 1)}
    told |= {"loss_first": report.loss_first, "loss_last": report.loss_last}
    return found, told


PARTS = {"lora": lora, "lora-alone": lora_alone, "readout": readout}

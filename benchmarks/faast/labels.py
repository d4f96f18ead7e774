# SPDX-License-Identifier: Apache-2.0
"""Labels by prompt on a language model: fast weights, examples in the context, LoRA, nothing.

``Review: {text}`` and ``Sentiment:``; the likelier of the two labels' logits counts.  Every method
gets the same support rows of each class: an output memory compiled from them (over all tokens of
the lessons, or their answers alone; alpha and r from validation rows), the lessons written before
the question, or a LoRA trained on the answers.  Test rows are distinct, the same for all seeds, and
in no support; seeds draw the support.  Run as ``python benchmarks/faast/labels.py``; the last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from fedloom import seeds
from fedloom.adapters.attach import attach
from fedloom.adapters.fast_sums import compile_sums
from fedloom.adapters.fast_weights import FastMemory, decoder_of
from fedloom.config import RunConfig, TrainConfig
from fedloom.data.labelled import Labelled, load_labelled
from fedloom.intervals import wilson
from fedloom.language.labels import Asked, choose_for_labels, classify, lessons, questions
from fedloom.models.base import Base, load_base
from fedloom.models.spans import Labelled as Row
from fedloom.models.spans import span_loss
from fedloom.paired import seeded_bootstrap
from fedloom.rules.solving import solve
from fedloom.training import train_locally

DATA = "packaged:uci-sentences"
Outcome = tuple[list[bool], float, str]
"""What was right row by row, CPU seconds to learn, and what was chosen."""


def dealt(data: Labelled, validation: int, test: int) -> tuple[list[int], list[int], list[int]]:
    """Return rows to draw support from, validation and test rows; no text is there twice."""
    order = seeds.generator(0, "faast", "labels").permutation(len(data)).tolist()
    seen: set[str] = set()
    rows = [i for i in order if not (data.items[i] in seen or seen.add(data.items[i]))]
    return rows[validation + test :], rows[:validation], rows[validation : validation + test]


def drawn(data: Labelled, pool: Sequence[int], shots: int, seed: int) -> list[int]:
    """Draw so many rows of each class, in a mixed order."""
    random = seeds.generator(seed, "faast", "labels", "support", shots)
    by_class = [[i for i in pool if data.labels[i] == c] for c in range(len(data.classes))]
    rows = [int(i) for of in by_class for i in random.choice(of, shots, replace=False)]
    return [rows[i] for i in random.permutation(len(rows))]


def right(base: Base, asked: Sequence[Asked]) -> list[bool]:
    return [row.correct for row in classify(base, asked)]


def memory(answers_only: bool) -> Callable[..., Outcome]:
    """Compile an output memory of the lessons; choose alpha and r on validation rows."""

    def run(base: Base, data: Labelled, rows: Any, asked: Any, held: Any) -> Outcome:
        place, began = len(decoder_of(base.model).layers), time.process_time()
        support = lessons(data, rows, base.tokenizer, answers_only=answers_only)
        gram = compile_sums(base.model, support, places=[place])[place]
        best, _ = choose_for_labels(base, gram, held)
        weights = solve(gram, alpha=best.alpha).weights
        spent = time.process_time() - began
        hung = FastMemory(base.model, {place: weights}, r=best.r)
        try:
            return right(base, asked), spent, f"alpha {best.alpha:g}, r {best.r:g}"
        finally:
            hung.detach()

    return run


@torch.inference_mode()
def in_context(base: Base, data: Labelled, rows: Any, asked: Any, held: Any) -> Outcome:
    """Write the lessons before each question; what the model holds of them is computed once."""
    began = time.process_time()
    ids = [token for lesson in lessons(data, rows, base.tokenizer) for token in lesson.ids]
    read = DynamicCache(config=base.model.config)
    base.model(torch.tensor([ids]), cache=read, use_cache=True)
    spent = time.process_time() - began
    found = []
    for each in asked:
        prompt = torch.tensor([each.prompt_ids])
        logits = base.model(prompt, cache=copy.deepcopy(read), use_cache=True).logits[0, -1]
        found.append(int(logits[list(each.letter_ids)].argmax()) == each.gold)
    return found, spent, f"{len(ids)} tokens before each question"


@contextmanager
def trained(base: Base, rows: Sequence[Row], args: argparse.Namespace) -> Iterator[float]:
    config = RunConfig().replaced(
        memory__enabled=False, lora__targets="q,v", lora__rank=6, lora__alpha=12.0
    )
    train = TrainConfig(batch_size=1, learning_rate=args.rate, epochs=args.epochs)
    adapter, began = attach(base.model, config), time.process_time()

    def loss(batch: list[Row]) -> tuple[torch.Tensor, int]:
        return span_loss(base.model, batch), sum(len(row.ids) for row in batch)

    train_locally(adapter, rows, loss, lambda row: len(row.ids), train, seed=0)
    try:
        yield time.process_time() - began
    finally:
        adapter.detach()
        base.model.requires_grad_(False)


def lora_of(args: argparse.Namespace) -> Callable[..., Outcome]:
    def run(base: Base, data: Labelled, rows: Any, asked: Any, held: Any) -> Outcome:
        told = lessons(data, rows, base.tokenizer, answers_only=True)
        taught = [Row(x.ids, tuple(range(x.first, len(x.ids)))) for x in told]
        with trained(base, taught, args) as spent:
            return right(base, asked), spent, f"{args.epochs} epochs"

    return run


def study(base: Base, args: argparse.Namespace) -> dict[str, Any]:
    data = load_labelled(DATA)
    pool, held_rows, test = dealt(data, args.validation, args.test)
    held, asked = (questions(data, rows, base.tokenizer) for rows in (held_rows, test))
    plain = right(base, asked)
    gold = np.array([each.gold for each in asked])
    chance = float(np.bincount(gold).max() / len(gold))
    print(f"{len(test)} test rows, {len(held)} validation rows, likeliest class {chance:.3f}")
    print("| shots | method | accuracy % | over no examples | 95 % | CPU s | chosen (seed 0) |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    base_told = wilson(sum(plain), len(plain))
    print(f"| 0 | frozen | {100 * base_told.value:.1f} | | | 0 | |")
    told: dict[str, Any] = {
        "frozen": round(base_told.value, 4),
        "likeliest_class": round(chance, 4),
    }
    methods: dict[str, Callable[..., Outcome]] = {
        "FAAST, all tokens": memory(answers_only=False),
        "FAAST, answers alone": memory(answers_only=True),
        "in context": in_context,
        "LoRA": lora_of(args),
    }
    for shots in args.shots:
        for name, run in methods.items():
            runs = [
                run(base, data, drawn(data, pool, shots, seed), asked, held)
                for seed in range(args.seeds)
            ]
            gains = [[np.array(hits, float) - np.array(plain, float)] for hits, _, _ in runs]
            gain = seeded_bootstrap(gains, seed=0)
            accuracy = float(np.mean([hits for hits, _, _ in runs]))
            spent = float(np.median([seconds for _, seconds, _ in runs]))
            print(
                f"| {shots} | {name} | {100 * accuracy:.1f} | {100 * gain.value:+.1f} |"
                f" {100 * gain.low:+.1f} to {100 * gain.high:+.1f} | {spent:.1f} | {runs[0][2]} |",
                flush=True,
            )
            told[f"{name}, {shots}"] = {
                "accuracy": round(accuracy, 4),
                "gain": [round(x, 4) for x in (gain.value, gain.low, gain.high)],
                "cpu_seconds": round(spent, 2),
            }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="embedded:smollm2-135m")
    parser.add_argument("--shots", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--validation", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=5e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    told = study(load_base(args.source), args)
    told |= {"cpu_seconds": round(time.process_time() - began, 1), "machine": platform.machine()}
    told |= {"torch": torch.__version__, "transformers": transformers.__version__}
    print("\n" + json.dumps(told))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Does the memory do what it is there for?  A small Llama learns to recall, by S and S alone.

A row is ``key value key value ... filler ... key ? key ? ...``; some keys are given a second value,
which is then the right answer.  The filler is longer than two layers of windowed attention reach
back, so what a question knows of the pairs came through the memory.  Layer 1 moves a key onto its
value's token, layer 2 writes the two and reads them: the smallest model that can bind at all.

S is zeroed or swapped at a cut.  ``WINDOW`` fillers before the first question, S is the only thing
that crosses it: no question sees a filler from before.  Right before the first question, attention
still sees fillers that have read the state, so that it must also be S that the answers come from.

Beside the model as FedNL has it, the same is trained with the Hebbian rule, which never takes back
what it wrote, and with S detached at every chunk, which cannot learn to store for later.  Run as
``python benchmarks/fednl/mechanism.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fedloom.adapters.attach import Adapter, attach
from fedloom.adapters.memory import MemoryCache, MemoryState
from fedloom.config import RunConfig

LAYERS, WINDOW, FILLER = 2, 8, 16
KEYS, VALUES = 16, 16
BLANK, FIRST_KEY, FIRST_VALUE = 0, 1, 1 + KEYS
CHANCE = 1 / VALUES
STEPS, WARM_UP, BATCH, RATE = 2000, 50, 32, 5e-3
NEARBY = 400  # first steps: little filler and few pairs, from which binding is learnt sooner
CONFIG = RunConfig().replaced(
    memory__window=WINDOW, memory__gate_init=0.0, memory__chunk=20, lora__targets="v"
)
VARIANTS = {
    "delta": CONFIG,
    "hebbian": CONFIG.replaced(memory__rule="hebbian"),
    # With a memory in layer 1 too, a Hebbian layer 2 can be taught the correction: layer 1 recalls
    # the old value and layer 2 writes the difference. Alone it has to do with its own rule.
    "delta, layer 2 alone": CONFIG.replaced(last_layers=1),
    "hebbian, layer 2 alone": CONFIG.replaced(last_layers=1, memory__rule="hebbian"),
    # Chunks so short that no question shares one with a pair, in the first phase either.
    "detached": CONFIG.replaced(memory__chunk=4, train__truncate_chunks=1),
}


# Shapes: B row, T token, A question (one for each key of the row).


@dataclass(frozen=True)
class Rows:
    """Rows of one length, in twos that share keys and questions but not values."""

    context_BT: Tensor
    questions_BT: Tensor
    """Each key that is asked, then a blank where its value would stand."""
    answer_BA: Tensor
    overwritten_BA: Tensor
    """True for keys that were given a second value."""


def draw(
    count: int, random: torch.Generator, *, pairs: int = 4, again: int = 2, filler: int = FILLER
) -> Rows:
    """Draw ``pairs`` keys a row with a value each, then a second value for ``again`` of them."""

    def shuffled(rows: int, among: int) -> Tensor:
        return torch.rand(rows, among, generator=random).argsort(dim=1)

    keys = shuffled(count // 2, KEYS)[:, :pairs].repeat_interleave(2, dim=0)
    values = FIRST_VALUE + shuffled(count, VALUES)[:, : pairs + again]
    written = FIRST_KEY + torch.cat((keys, keys[:, :again]), dim=1)
    given = torch.stack((written, values), dim=2).flatten(1)
    right = torch.cat((values[:, pairs:], values[:, again:pairs]), dim=1)
    order = shuffled(count // 2, pairs).repeat_interleave(2, dim=0)
    asked = FIRST_KEY + keys.gather(1, order)
    return Rows(
        context_BT=F.pad(given, (0, filler), value=BLANK),
        questions_BT=torch.stack((asked, torch.full_like(asked, BLANK)), dim=2).flatten(1),
        answer_BA=right.gather(1, order),
        overwritten_BA=order < again,
    )


def learn(seed: int, config: RunConfig = CONFIG, *, steps: int = STEPS) -> Adapter:
    """Train everything, from scratch, on the questions' answers."""
    shape = LlamaConfig(
        vocab_size=FIRST_VALUE + VALUES,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=64**-0.5,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0},  # it only turns in a window
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapter = attach(LlamaForCausalLM(shape), config.replaced(seed=seed))
    model = adapter.model.requires_grad_(True).train()
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    random = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = RATE * min(
            (step + 1) / WARM_UP, 1.0, 2 * (1 - step / steps)
        )
        nearby = step < NEARBY
        rows = (
            draw(BATCH, random, pairs=3, again=1, filler=step % 3)
            if nearby
            else draw(BATCH, random)
        )
        whole = torch.cat((rows.context_BT, rows.questions_BT), dim=1)
        logits = model(whole, use_cache=False).logits[:, rows.context_BT.shape[1] :: 2]
        F.cross_entropy(logits.flatten(0, 1), rows.answer_BA.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    model.eval()
    return adapter


Change = Callable[[MemoryState], MemoryState]


def zeroed(state: MemoryState) -> MemoryState:
    empty = (torch.zeros_like(x) for x in (state.S_BHDD, state.tail_BTHD))
    return MemoryState(*empty, state.seen_B)


def swapped(state: MemoryState) -> MemoryState:
    """Give each row the state of the row that shares its keys."""
    return MemoryState(swap(state.S_BHDD), swap(state.tail_BTHD), swap(state.seen_B))


def swap(x: Tensor) -> Tensor:
    """Exchange the rows of each two."""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


@torch.no_grad()
def said(adapter: Adapter, rows: Rows, change: Change | None = None, after: int = WINDOW) -> Tensor:
    """Read the rows up to ``after`` fillers before the end, change S, ask; logits [B, A, V]."""
    cache = MemoryCache(adapter.model.get_base_model().config)
    read = rows.context_BT.shape[1] - after
    adapter.model(rows.context_BT[:, :read], cache=cache, use_cache=True)
    assert LAYERS - 1 in cache.memory
    if change is not None:
        cache.memory = {layer: change(state) for layer, state in cache.memory.items()}
    rest = torch.cat((rows.context_BT[:, read:], rows.questions_BT), dim=1)
    return adapter.model(rest, cache=cache, use_cache=True).logits[:, after::2]


def share(hit: Tensor) -> float:
    return hit.float().mean().item()


def measure(seed: int, variant: str) -> dict[str, float]:
    """Train one variant from one seed and ask it on rows that it has not seen."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    adapter = learn(seed, VARIANTS[variant])
    seconds = time.perf_counter() - began
    rows = draw(1024, torch.Generator().manual_seed(10_000 + seed))
    hit = said(adapter, rows).argmax(-1) == rows.answer_BA
    off = [said(adapter, rows, zeroed, after).argmax(-1) for after in (WINDOW, 0)]
    follow = [said(adapter, rows, swapped, after).argmax(-1) for after in (WINDOW, 0)]
    return {
        "recall": share(hit),
        "overwritten": share(hit[rows.overwritten_BA]),
        "written_once": share(hit[~rows.overwritten_BA]),
        "zeroed": share(off[0] == rows.answer_BA),
        "zeroed_late": share(off[1] == rows.answer_BA),
        "follows_swap": share(follow[0] == swap(rows.answer_BA)),
        "follows_swap_late": share(follow[1] == swap(rows.answer_BA)),
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed in place of three")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    seeds = [0] if given.quick else [0, 1, 2]
    jobs = [(seed, variant) for variant in VARIANTS for seed in seeds]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        results = dict(zip(jobs, pool.map(measure, *zip(*jobs, strict=True)), strict=True))
    names = list(next(iter(results.values())))
    print(f"chance {CHANCE:.4f}; 4096 answers a seed\n")
    print("| variant | seed | " + " | ".join(names) + " |\n" + "| --- " * (len(names) + 2) + "|")
    for (seed, variant), row in results.items():
        print(f"| {variant} | {seed} | " + " | ".join(f"{row[n]:.3f}" for n in names) + " |")

    def over_seeds(variant: str, name: str) -> float:
        return round(mean(results[seed, variant][name] for seed in seeds), 4)

    print(
        json.dumps(
            {
                "recall_on": over_seeds("delta", "recall"),
                "recall_off": over_seeds("delta", "zeroed"),
                "swap_follow": over_seeds("delta", "follows_swap"),
                "delta_overwrite": over_seeds("delta", "overwritten"),
                "hebbian_overwrite": over_seeds("hebbian", "overwritten"),
                "delta_overwrite_alone": over_seeds("delta, layer 2 alone", "overwritten"),
                "hebbian_overwrite_alone": over_seeds("hebbian, layer 2 alone", "overwritten"),
                "detached_recall": over_seeds("detached", "recall"),
                "chance": CHANCE,
                "seeds": seeds,
            }
        )
    )


if __name__ == "__main__":
    main()

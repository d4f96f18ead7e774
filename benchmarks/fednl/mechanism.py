# SPDX-License-Identifier: Apache-2.0
"""Does the memory do what it is there for?  A small Llama learns to recall, by S and S alone.

A row is ``. . key value . . key value ... key word key word ... . . key ? key ? key ?``.  Of its
three keys two are written three times and one once; the seven writes come in one random order, and
the answer for a key is the last value that it was given.  Then keys are mentioned beside words that
are no values: to be left unwritten, which has to be learnt.  From the last write to the questions
is farther than windowed attention reaches: what a question knows of the writes came through the
memory.  ``memory.key-taps`` binds a value to the key before it, so one layer is enough.

**A writer cannot know how late a write is.**  What a token hands to the one memory of a one-layer
model depends on that token and the two before it, and two blanks stand before every key, the first
of the row too.  A write is hence a function of its own key and value; its place in the row, the
other pairs and the earlier values of its key are out of sight.  A rule that adds writes up, as
Hebb's does, ends in the same S whatever their order, and as all orders are equally likely, it can
expect to be right on no more than one in three of the overwritten keys (``order_blind``), however
long it is trained.  The delta rule looks at S when it writes.  ``same_reversed`` checks this
directly: the share of answers for overwritten keys that stay if the writes come in reverse.

In two layers with a memory each this does not hold: layer 1 reads the value that a key had, and
what layer 2 writes may depend on it.  Those rows show what each rule makes of that.

S is zeroed or swapped at a cut.  At ``WINDOW`` blanks before the first question, S is the only
thing with the values in it that a question can see.  Right before the first question, attention
still sees blanks that have read the state, so it must also be S that the answers come from.

``detached`` cuts the gradient through S at every chunk: it cannot learn what to store for later.
Run as ``python benchmarks/fednl/mechanism.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from fedloom.adapters.attach import Adapter, attach
from fedloom.adapters.memory import MemoryCache, MemoryState
from fedloom.config import RunConfig

WIDTH, HEADS, WINDOW = 32, 2, 4
GAP = 2  # blanks before a key: the taps look one raw key back, the step size two
MENTIONS, PAUSE = 8, 4  # after the last write: so often a key and a word, then so many blanks
KEYS, VALUES, WORDS = 16, 16, 16
BLANK, FIRST_KEY, FIRST_VALUE, FIRST_WORD = 0, 1, 1 + KEYS, 1 + KEYS + VALUES
CHANCE = 1 / VALUES
WRITES = (3, 3, 1)  # how often each key of a row is written
ORDER_BLIND = 1 / max(WRITES)  # an overwritten key's last value, guessed among its own
EASY = (1, 1, 1)  # the first steps' rows: binding is learnt sooner without second values
STEPS, EASY_STEPS, WARM_UP, BATCH, RATE = 600, 200, 50, 32, 5e-3
HELD_OUT = 512  # rows
CONFIG = RunConfig().replaced(
    memory__key_taps="fixed",
    memory__window=WINDOW,
    memory__gate_init=0.0,
    memory__chunk=24,
    lora__targets="v",
)
VARIANTS = {  # how many layers the Llama has, each with a memory, and what is hung on them
    "delta": (1, CONFIG),
    "hebbian": (1, CONFIG.replaced(memory__rule="hebbian")),
    # Chunks no longer than the pause: no question shares one with what went before it.
    "detached": (1, CONFIG.replaced(memory__chunk=PAUSE, train__truncate_chunks=1)),
    "delta, two layers": (2, CONFIG),
    "hebbian, two layers": (2, CONFIG.replaced(memory__rule="hebbian")),
}


# Shapes: B row, T token, W write, A question (one for each key of the row).


@dataclass(frozen=True)
class Rows:
    """Rows of one length, in twos that have all in common but the values."""

    context_BT: Tensor
    questions_BT: Tensor
    """Each key that is asked, then a blank where its value would stand."""
    answer_BA: Tensor
    overwritten_BA: Tensor
    """True for keys that were written more than once."""


def draw(count: int, random: torch.Generator, writes: tuple[int, ...] = WRITES) -> Rows:
    """Draw a key for each of ``writes`` and write it so often, all in one random order."""

    def shuffled(rows: int, among: int) -> Tensor:
        return torch.rand(rows, among, generator=random).argsort(dim=1)

    def in_twos(x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=0)

    asked, total = len(writes), sum(writes)
    times_A = torch.tensor(writes)
    keys_BA = FIRST_KEY + in_twos(shuffled(count // 2, KEYS))[:, :asked]
    whose_BW = torch.arange(asked).repeat_interleave(times_A)[in_twos(shuffled(count // 2, total))]
    values_BW = FIRST_VALUE + shuffled(count, VALUES)[:, :total]
    places_BWA = (whose_BW[..., None] == torch.arange(asked)) * torch.arange(total)[:, None]
    right_BA = values_BW.gather(1, places_BWA.amax(dim=1))
    order_BA = in_twos(shuffled(count // 2, asked))
    asked_BA = keys_BA.gather(1, order_BA)
    of_BN, word_BN = (
        in_twos(torch.randint(among, (count // 2, MENTIONS), generator=random))
        for among in (asked, WORDS)
    )
    mentions_BNT = torch.stack((keys_BA.gather(1, of_BN), FIRST_WORD + word_BN), dim=2)
    return Rows(
        context_BT=lay(keys_BA.gather(1, whose_BW), values_BW, mentions_BNT.flatten(1)),
        questions_BT=torch.stack((asked_BA, torch.full_like(asked_BA, BLANK)), dim=2).flatten(1),
        answer_BA=right_BA.gather(1, order_BA),
        overwritten_BA=times_A[order_BA] > 1,
    )


def lay(keys_BW: Tensor, values_BW: Tensor, mentions_BT: Tensor, gap: int = GAP) -> Tensor:
    """Lay the writes out, a gap before each; then the mentions and the pause; [B, T]."""
    pairs_BWT = torch.stack((keys_BW, values_BW), dim=2)
    writes_BT = F.pad(pairs_BWT, (gap, 0), value=BLANK).flatten(1)
    mentions_BT = F.pad(mentions_BT, (gap, PAUSE), value=BLANK)
    return torch.cat((writes_BT, mentions_BT), dim=1)


def parts(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys and values that the rows write, in order, [B, W] each, and the mentions."""
    tail = GAP + 2 * MENTIONS + PAUSE
    slots_BWT = rows.context_BT[:, :-tail].unflatten(1, (-1, GAP + 2))
    mentions_BT = rows.context_BT[:, -(2 * MENTIONS + PAUSE) : -PAUSE]
    return slots_BWT[..., -2], slots_BWT[..., -1], mentions_BT


def backwards(rows: Rows) -> Rows:
    """Put the writes in reverse; the answers stay those of the given order."""
    keys_BW, values_BW, mentions_BT = parts(rows)
    return replace(rows, context_BT=lay(keys_BW.flip(1), values_BW.flip(1), mentions_BT))


def learn(seed: int, variant: str = "delta", *, steps: int = STEPS) -> Adapter:
    """Train everything, from scratch, on the questions' answers."""
    layers, config = VARIANTS[variant]
    shape = LlamaConfig(
        vocab_size=FIRST_WORD + WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        initializer_range=WIDTH**-0.5,
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
        rows = draw(BATCH, random, EASY if step < EASY_STEPS else WRITES)
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
    empty = (torch.zeros_like(x) for x in (state.S_BHDD, state.tail_BTHD, state.asked_BTHGD))
    return MemoryState(*empty, state.seen_B)


def swapped(state: MemoryState) -> MemoryState:
    """Give each row the state of the row that shares its keys."""
    return MemoryState(*map(swap, vars(state).values()))


def swap(x: Tensor) -> Tensor:
    """Exchange the rows of each two."""
    twos: Tensor = x.unflatten(0, (-1, 2))
    return twos.flip(1).flatten(0, 1)


@torch.no_grad()
def said(adapter: Adapter, rows: Rows, change: Change | None = None, after: int = WINDOW) -> Tensor:
    """Read the rows up to ``after`` blanks before the end, change S, ask; logits [B, A, V]."""
    cache = MemoryCache(adapter.model.get_base_model().config)
    read = rows.context_BT.shape[1] - after
    adapter.model(rows.context_BT[:, :read], cache=cache, use_cache=True)
    assert cache.memory
    if change is not None:
        cache.memory = {layer: change(state) for layer, state in cache.memory.items()}
    rest = torch.cat((rows.context_BT[:, read:], rows.questions_BT), dim=1)
    logits: Tensor = adapter.model(rest, cache=cache, use_cache=True).logits
    return logits[:, after::2]


def share(hit: Tensor) -> float:
    return hit.float().mean().item()


def measure(seed: int, variant: str) -> dict[str, float]:
    """Train one variant from one seed and ask it on rows that it has not seen."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    adapter = learn(seed, variant)
    seconds = time.perf_counter() - began
    rows = draw(HELD_OUT, torch.Generator().manual_seed(10_000 + seed))
    answers = said(adapter, rows).argmax(-1)
    hit = answers == rows.answer_BA
    same = said(adapter, backwards(rows)).argmax(-1) == answers
    off = [said(adapter, rows, zeroed, after).argmax(-1) for after in (WINDOW, 0)]
    follow = [said(adapter, rows, swapped, after).argmax(-1) for after in (WINDOW, 0)]
    return {
        "recall": share(hit),
        "overwritten": share(hit[rows.overwritten_BA]),
        "written_once": share(hit[~rows.overwritten_BA]),
        "same_reversed": share(same[rows.overwritten_BA]),
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
    print(
        f"chance {CHANCE:.4f}; best of an order-blind writer on overwritten keys {ORDER_BLIND:.4f};"
        f" {HELD_OUT * len(WRITES)} answers a seed\n"
    )
    results: dict[tuple[int, str], dict[str, float]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        for job, row in zip(jobs, pool.map(measure, *zip(*jobs, strict=True)), strict=True):
            if not results:
                print("| variant | seed | " + " | ".join(row) + " |")
                print("| --- " * (len(row) + 2) + "|")
            results[job] = row
            cells = " | ".join(f"{number:.3f}" for number in row.values())
            print(f"| {job[1]} | {job[0]} | {cells} |", flush=True)

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
                "hebbian_written_once": over_seeds("hebbian", "written_once"),
                "order_blind": round(ORDER_BLIND, 4),
                "detached_recall": over_seeds("detached", "recall"),
                "delta_overwrite_two_layers": over_seeds("delta, two layers", "overwritten"),
                "hebbian_overwrite_two_layers": over_seeds("hebbian, two layers", "overwritten"),
                "chance": CHANCE,
                "seeds": seeds,
            }
        )
    )


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Pairs of real models on real questions: what a sender's cache adds, and what of it is the sender.

``run`` teaches and scores one condition after another for each pair and seed, and keeps every
held-out row's outcome in a file; what is there already is not run again, so the study may be
stopped at any time.  A condition that a pair does not allow is said and left out.  ``table``
compares them on the same rows: accuracy by the likelihood of the options, by what is written, and
with each letter's prior subtracted; which letters were said; McNemar's test and a paired bootstrap
interval, bytes, seconds; and what ``baselines.py`` left beside the scores.

Conditions, all on the same training rows and steps:

- ``refined``: the small fuser, with its controls (``shuffled``: another question's cache,
  ``zeroed``: an empty one) and, for the first seed, what 8 bits, 4 bits and under half of the
  tokens (the last ones, or those with the longest values) leave of it, though it was taught on all;
- ``identical``: the sender is the receiver's own model, so that only the fuser's parameters and
  the second reading are new; the margin over it is the other model's;
- ``random``: the sender has random weights;
- ``tuned``: no sender, the receiver itself is tuned (LoRA on its last layers) with as many
  parameters as the fuser has;
- ``closed``: the fuser solved without a gradient, from sums; ``polished``: taught from there;
- ``context``: the receiver sees the options alone, the sender the whole question;

and if they are named:

- ``kept``: taught and tested on under half of the tokens, the last ones;
- ``several``: one, two, ... senders at once, with the fusers of ``refined`` of this pair and of
  those that ``--together`` names;
- ``c2c``: Cache-to-Cache's size of fuser, some forty times as large.

The receiver reads all but its last token alone (``tail`` 1, FedRefine's equation as written), so
frozen caches are computed once, kept in the folder, and a step costs the fuser and one token.
Nothing is taught, stopped or set by held-out rows.  Two things look at them, and say so: the table
puts the pair with the largest held-out gain on top, all pairs beneath, with p-values adjusted for
having looked at all (Holm); and its calibration takes means of held-out log-probabilities, without
labels.  Run as ``python benchmarks/fedrefine/pairs.py run|table --help``; the last line of
``table`` is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from pairs_conditions import work_of
from pairs_study import Study
from pairs_table import told
from question_sets import MADE_UP, SETS

from fedloom.errors import Refusal

PAIRS = ("qwen-smol", "gemma-smol", "smol-qwen")
CONDITIONS = ("refined", "identical", "random", "tuned", "closed", "polished", "context")
MORE = ("kept", "several", "c2c")
SEEDLESS = ("closed",)
QUICK = {
    "pairs": ["tiny:llama-tiny:qwen3"],
    "seeds": [0],
    "set": MADE_UP,
    "train": 24,
    "test": 12,
    "steps": 3,
    "batch": 4,
    "longest": 400,
    "width": 8,
}
"""What ``--quick`` sets: tiny random models and made-up questions, to see that all runs."""


def run(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    given.slices = given.folder / "slices"
    for pair in given.pairs:
        study: Study | None = None
        for condition in given.conditions:
            for seed in given.seeds[:1] if condition in SEEDLESS else given.seeds:
                out = given.folder / "scores" / f"{pair}-{condition}-{seed}.json"
                if out.exists() or (seed != given.seeds[0] and condition not in given.repeated):
                    continue
                study = study or Study(given, pair)
                began, busy = time.perf_counter(), time.process_time()
                place = given.folder / "fusers" / f"{pair}-{condition}-{seed}"
                try:
                    made = work_of(condition)(study, seed, place)
                except Refusal as refusal:
                    print(f"{pair} {condition} {seed}: left out, {refusal}", flush=True)
                    continue
                made |= {"seconds": time.perf_counter() - began}
                made |= {"cpu_seconds": time.process_time() - busy, "set": given.set}
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(made))
                print(f"{pair} {condition} {seed}: {made['cpu_seconds']:.0f} CPU s", flush=True)


def table(given: argparse.Namespace) -> None:
    print(json.dumps(told(given.folder, given.pairs, given.seeds, given.baselines)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, work in (("run", run), ("table", table)):
        command = commands.add_parser(name)
        command.set_defaults(work=work)
        command.add_argument("--folder", type=Path, default=Path("runs/pairs"))
        command.add_argument("--pairs", nargs="+", default=["qwen-smol"], help=str(PAIRS))
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        command.add_argument("--quick", action="store_true", help="tiny random models")
        if name == "table":
            text = "outcomes of baselines.py; by default scores/PAIR-baselines.json in the folder"
            command.add_argument("--baselines", type=Path, help=text)
        if name == "run":
            everything = (*CONDITIONS, *MORE)
            command.add_argument("--conditions", nargs="+", choices=everything, default=CONDITIONS)
            command.add_argument("--repeated", nargs="+", default=["refined"])
            command.add_argument("--together", nargs="*", default=[], help="pairs for several")
            command.add_argument("--set", choices=(*SETS, MADE_UP), default="hotels-fr")
            command.add_argument("--train", type=int, default=400)
            command.add_argument("--test", type=int, default=200)
            command.add_argument("--steps", type=int, default=120)
            command.add_argument("--batch", type=int, default=8)
            command.add_argument("--lr", type=float, default=5e-4)
            command.add_argument("--tuned-lr", type=float, default=5e-4)
            command.add_argument("--width", type=int, default=0, help="rank; 0 for 5 %% of all")
            command.add_argument("--longest", type=int, default=110, help="tokens of a text")
            command.add_argument("--priors", type=int, default=200, help="training rows; 0: all")
            command.add_argument("--memory", type=int, default=512, help="MB of slices a model")
    given = parser.parse_args()
    if given.quick:
        told_apart = {"pairs"} if given.pairs != ["qwen-smol"] else set()
        vars(given).update({k: v for k, v in QUICK.items() if k in given and k not in told_apart})
    given.work(given)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What another order of senders changes: nothing as asked, and how much if they were seated so.

``given``: ``refine`` is handed the senders in every order.  It seats them by their models' hashes,
so the logits must be the same to the bit; ``given_gap`` is the largest difference and must be 0.

``seated``: the same slots are put before the receiver in every order, past ``refine``.  Positions
are in the keys, so a sender that sits elsewhere is heard elsewhere: ``seated_gap`` is the largest
difference of a next-token logit against the order of ``refine``, ``seated_nats`` the mean and the
largest divergence KL(as refine seats | as seated here), ``seated_token`` the share of orders in
which the likeliest token is another.  This is what the fixed order hides, not an error.

By default on tiny random models with untrained fusers: noise that matters, and no statement on what
trained ones do; give ``--receiver``, ``--sender`` and ``--fuser`` for that.  Run as
``python benchmarks/fedrefine/order.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from fedloom import seeds
from fedloom.adapters.fused import FusedContext
from fedloom.adapters.fuser import CacheFuser, FuserConfig, Guests
from fedloom.adapters.fuser_files import load_fuser
from fedloom.cards import read_card
from fedloom.data.prompts import prompt
from fedloom.data.questions import Question, load_questions
from fedloom.models.base import Base, load_base
from fedloom.refining import Sender, local, measured, refine
from fedloom.refining.guards import divergence
from fedloom.slices.slice import batch_of, export_cache

TINY = ("tiny:llama", "tiny:qwen2", "tiny:gemma3")


def fuser_of(sender: Base, receiver: Base, folder: Path | None, seed: int) -> CacheFuser:
    """Find the pair's fuser by the hashes on the cards, or make one that has learnt nothing."""
    of, into = measured(sender), measured(receiver)
    if folder is None:
        torch.manual_seed(seeds.split(seed, of.model, "order") % 2**63)
        return CacheFuser(of, into, FuserConfig(width=16)).eval().requires_grad_(False)
    for path in sorted(folder.glob("*.safetensors")):
        card = read_card(path)
        if (card.sender_model, card.receiver_model) == (of.model, into.model):
            return load_fuser(path, of, into)[0]
    raise SystemExit(f"{folder} has no fuser {sender.source} -> {receiver.source}")


def questions(count: int, tiny: bool) -> list[str]:
    if tiny:
        return [f"{i}: which of these {i} words is the longest?" for i in range(count)]
    rows = sorted(load_questions("packaged:mmlu-dev"), key=Question.row)
    order = seeds.generator(0, "order").permutation(len(rows))[:count]
    return [prompt(rows[i]) for i in order]


@torch.no_grad()
def given(receiver: Base, text: str, senders: Sequence[Sender]) -> tuple[float, bool]:
    """Hand ``refine`` every order; return the largest difference and whether answers are one."""
    made = [
        refine(receiver, text, order, max_new_tokens=4, stop=())
        for order in itertools.permutations(senders)
    ]
    gap = max(float((a.logits - made[0].logits).abs().max()) for a in made)
    return gap, all(a.ids == made[0].ids for a in made)


def slots(base: Base, fuser: CacheFuser, text: str) -> Guests:
    ids = base.tokenizer.encode(text)
    piece = export_cache(base.model, measured(base), ids, layers=fuser.sender_layers)
    return fuser(batch_of([piece]))


@torch.no_grad()
def seated(receiver: Base, text: str, guests: Sequence[Guests]) -> dict[str, Any]:
    """Seat the slots in every order; the first is that of the senders' hashes."""
    row = torch.tensor([receiver.tokenizer.encode(text)])

    def last(order: Sequence[Guests]) -> Tensor:
        return FusedContext(receiver.model, order).read(row, keep=1)[0, -1]

    ordered = sorted(guests, key=lambda one: one.sender)
    first, *others = [last(order) for order in itertools.permutations(ordered)]
    return {
        "gap": max(float((x - first).abs().max()) for x in others),
        "nats": [divergence(first, x) for x in others],
        "token": mean(float(x.argmax() != first.argmax()) for x in others),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    receiver, bases = load_base(args.receiver), [load_base(s) for s in args.sender]
    fusers = [fuser_of(base, receiver, args.fuser, args.seed) for base in bases]
    senders = [
        local(base, measured(base), fuser) for base, fuser in zip(bases, fusers, strict=True)
    ]
    texts = questions(args.questions, args.receiver.startswith("tiny:"))
    found: dict[str, Any] = {}
    for count in range(2, len(senders) + 1):
        asked = [given(receiver, text, senders[:count]) for text in texts]
        pairs = list(zip(bases, fusers, strict=True))[:count]
        rows = [seated(receiver, text, [slots(*pair, text) for pair in pairs]) for text in texts]
        nats = [x for row in rows for x in row["nats"]]
        found[str(count)] = {
            "given_gap": max(gap for gap, _ in asked),
            "given_same_answers": all(same for _, same in asked),
            "seated_gap": round(max(row["gap"] for row in rows), 6),
            "seated_nats": [round(mean(nats), 6), round(max(nats), 6)],
            "seated_token": round(mean(row["token"] for row in rows), 4),
        }
    told = {"receiver": args.receiver, "senders": args.sender, "questions": len(texts)}
    return {"by_senders": found, **told, "trained": args.fuser is not None, "seed": args.seed}


def table(found: dict[str, Any]) -> str:
    head = (
        "senders | as given: gap | same answers | as seated: gap | mean nats | most | other token"
    )
    lines = [f"| {head} |", "| --- " * 7 + "|"]
    for count, row in found["by_senders"].items():
        average, most = row["seated_nats"]
        same = "yes" if row["given_same_answers"] else "NO"
        cells = f"{count} | {row['given_gap']:g} | {same} | {row['seated_gap']:.3f} | {average:.4f}"
        lines.append(f"| {cells} | {most:.4f} | {row['seated_token']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receiver", default="tiny:qwen3")
    parser.add_argument("--sender", action="append", help=f"by default {', '.join(TINY)}")
    parser.add_argument("--fuser", type=Path, help="folder of trained fusers")
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="tiny random models, two questions")
    args = parser.parse_args()
    if args.quick:
        args.receiver, args.sender, args.fuser, args.questions = "tiny:qwen3", None, None, 2
    args.sender = args.sender or list(TINY)
    if len(args.sender) < 2:
        parser.error("an order needs two senders or more")
    torch.set_num_threads(1)
    found = measure(args)
    print(table(found) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""What an eavesdropper reads in captured frames, beside what the frames are worth to a receiver.

A sender reads packaged questions and sends its cache in frames: 16, 8 and 4 bits, all tokens or the
last half.  Somebody on the line, without the key but with the public model, names the tokens by
layer 0 (``recovered``).  The columns beside it: how often a receiver of the same model, who reads
only ``Answer:`` on top of those frames, picks the right letter, and how often it picks the letter
that it picks from the text itself.  ``shuffled`` is the attack with a table in another order.

Then the middle layer alone, as if a sender kept the lower ones back: from left to right, the
model's own likeliest candidates are read on top of what was recovered; the first token is given.
``found_on_right_prefix`` scores each token with the true ones before it.  Run as
``python benchmarks/fedrefine/leakage.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections import defaultdict
from statistics import mean
from typing import Any

import torch
import transformers

from fedloom import seeds
from fedloom.adapters.fused import FusedContext, pass_through
from fedloom.data.prompts import encode_question, letter_tokens
from fedloom.data.questions import Question, load_questions
from fedloom.models.base import Base, load_base
from fedloom.refining import leakage
from fedloom.refining.writing import chosen, own_choice
from fedloom.slices.frames import encode
from fedloom.slices.geometry import Geometry, geometry_of
from fedloom.slices.slice import CacheSlice, batch_of, export_cache

WAYS = [(scheme, share) for share in (1.0, 0.5) for scheme in ("bf16", "int8", "int4")]


def pick(base: Base, quick: bool, count: int) -> list[Question]:
    if quick:
        return [Question("made_up", f"is it {i}?", ("yes", "no"), i % 2) for i in range(3)]
    rows = sorted(load_questions("packaged:mmlu-dev"), key=Question.row)
    fit = [q for q in rows if len(encode_question(q, base.tokenizer).prompt_ids) <= 120]
    order = seeds.generator(0, "leakage").permutation(len(fit))[:count]
    return [fit[i] for i in order]


def tap(piece: CacheSlice, scheme: str) -> CacheSlice:
    """Return what a line carries of a slice, read without the key."""
    stream = b"".join(encode(piece, scheme, secrets.token_bytes(32), secrets.token_bytes(16)))
    return leakage.overheard(stream, piece.geometry)


def half(piece: CacheSlice, share: float) -> CacheSlice:
    """Keep the first token and the last ones."""
    keep = max(2, round(share * piece.tokens))
    places = [0, *range(piece.tokens - keep + 1, piece.tokens)]
    keys, values = ({n: x[:, places] for n, x in p.items()} for p in (piece.keys, piece.values))
    return CacheSlice(piece.geometry, keys, values, tuple(places))


@torch.no_grad()
def heard(base: Base, piece: CacheSlice, question: Question, cue: list[int]) -> int:
    """Let a receiver of the same model answer on top of a slice."""
    context = FusedContext(base.model, [pass_through(batch_of([piece]))])
    logits = context.read(torch.tensor([cue]), keep=1)[0, -1]
    letters = letter_tokens(base.tokenizer).ids[: len(question.choices)]
    return chosen(logits[list(letters)].tolist())


def by_table(base: Base, geometry: Geometry, asked: list[Question]) -> dict[str, dict[str, float]]:
    table = leakage.value_table(base.model, geometry)
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    cue = base.tokenizer.encode("\n" + letter_tokens(base.tokenizer).cue, add_special_tokens=False)
    rows: dict[tuple[str, float], list[dict[str, float]]] = defaultdict(list)
    for question in asked:
        full = list(encode_question(question, base.tokenizer).prompt_ids)
        ids = full[: -len(cue)]
        assert full == [*ids, *cue]  # the receiver reads on where the sender stopped
        whole, own = export_cache(base.model, geometry, ids), own_choice(base, question)
        for scheme, share in WAYS:
            piece = tap(half(whole, share) if share < 1 else whole, scheme)
            truth = [ids[place] for place in piece.places]
            said = heard(base, piece, question, cue)
            row = {
                "recovered": leakage.recovery_rate(leakage.lookup(piece, table), truth),
                "accuracy": float(said == question.gold),
                "as_from_text": float(said == own),
                "accuracy_of_text": float(own == question.gold),
            }
            if (scheme, share) == ("bf16", 1.0):
                found = leakage.lookup(piece, table[order])
                row["shuffled"] = leakage.recovery_rate(found, truth)
            rows[scheme, share].append(row)
    return {
        f"{scheme} x {share:g}": {k: round(mean(r[k] for r in found), 4) for k in found[0]}
        for (scheme, share), found in rows.items()
    }


def by_collision(
    base: Base, geometry: Geometry, asked: Question, layer: int, tokens: int, shortlist: int
) -> dict[str, Any]:
    """Read the first tokens of one question from one layer in 4 bits."""
    ids = list(encode_question(asked, base.tokenizer).prompt_ids)[: tokens + 1]
    piece = tap(export_cache(base.model, geometry, ids, layers=[layer]), "int4")
    read = leakage.of_layers(layer)
    seen, began = leakage.captured(piece, read)[1:], time.process_time()
    model = base.model
    told = {"read": read, "layers": [layer], "shortlist": shortlist}
    found = leakage.collide(model, geometry, seen, known=ids[:1], **told)
    seconds = (time.process_time() - began) / len(seen)
    right = [
        leakage.collide(model, geometry, row[None], known=ids[: 1 + t], **told)[0]
        for t, row in enumerate(seen)
    ]
    return {
        "deep_layer": layer,
        "deep_tokens": len(seen),
        "deep_shortlist": shortlist,
        "deep_recovered": round(leakage.recovery_rate(found, ids[1:]), 4),
        "deep_found_on_right_prefix": round(leakage.recovery_rate(right, ids[1:]), 4),
        "deep_seconds_a_token": round(seconds, 2),
        "deep_read": base.tokenizer.decode(found),
        "deep_text": base.tokenizer.decode(ids[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="embedded:smollm2-135m")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=10, help="read from the middle layer")
    parser.add_argument("--shortlist", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="a tiny random model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    busy = time.process_time()
    base = load_base("tiny:llama" if args.quick else args.source)
    geometry = geometry_of(base.model, base.base_hash, base.tokenizer_hash)
    asked = pick(base, args.quick, args.questions)
    rows = by_table(base, geometry, asked)
    names = ("recovered", "accuracy", "as_from_text")
    print("| frames | " + " | ".join(names) + " |\n| --- | --- | --- | --- |")
    for way, row in rows.items():
        print(f"| {way} | " + " | ".join(f"{row[n]:.3f}" for n in names) + " |")
    first = rows["bf16 x 1"]
    found: dict[str, Any] = {
        "recovered": {way: row["recovered"] for way, row in rows.items()},
        "accuracy": {way: row["accuracy"] for way, row in rows.items()},
        "as_from_text": {way: row["as_from_text"] for way, row in rows.items()},
        "accuracy_of_text": first["accuracy_of_text"],
        "shuffled": first["shuffled"],
        "questions": len(asked),
    }
    shortlist = 0 if args.quick else args.shortlist
    found |= by_collision(base, geometry, asked[0], geometry.layers // 2, args.tokens, shortlist)
    found |= {
        "source": str(base.source),
        "cpu_seconds": round(time.process_time() - busy, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(f"\naccuracy from the text itself {found['accuracy_of_text']:.3f}\n")
    print(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()

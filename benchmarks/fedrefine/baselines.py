# SPDX-License-Identifier: Apache-2.0
"""What a fused cache has to beat on the same questions: text, a vote, the best single model.

T2T with budgets of 0, 16, 40 and 80 tokens (one message is written, the smaller budgets are its
beginning), the majority of receiver and senders, and the single model that is best on rows kept for
choosing: the first of ``pairs.py``'s training rows.  Rows are those that ``pairs.py`` tests, in its
order: same set, counts and longest text.  Everything is scored by the likelihood of options.
Each row's outcome is written under the name that ``pairs.py`` gives it, to
``scores/PAIR-baselines.json`` in the folder, where ``pairs.py table`` takes it up; if that study
has refined answers there, they are compared with every baseline on the rows that both have.  Run as
``python benchmarks/fedrefine/baselines.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from pairs_study import SHORT
from pairs_table import baselines_file
from question_sets import MADE_UP, SETS, question_set

from fedloom import seeds
from fedloom.data.questions import LETTERS, Question
from fedloom.intervals import wilson
from fedloom.models.base import Base, load_base
from fedloom.paired import mcnemar, paired_bootstrap
from fedloom.refining.lessons import Lesson, continuation, question_lesson
from fedloom.refining.text import backgrounds, best_single, in_context, shortened, vote
from fedloom.refining.writing import chosen, continuation_scores

BUDGETS = (0, 16, 40, 80)


def choice(base: Base, prompt: str, lesson: Lesson) -> int:
    """Return the option that a model finds likeliest after a prompt."""
    head = base.tokenizer.encode(prompt)
    tails = [continuation(option, base.tokenizer) for option in lesson.options]
    if all(len(tail) == 1 for tail in tails):  # letters: one distribution has them all
        return chosen(_next(base, head, [tail[0] for tail in tails]))
    return chosen(continuation_scores(base, head, tails))


@torch.no_grad()
def _next(base: Base, head: Sequence[int], tokens: Sequence[int]) -> list[float]:
    logits = base.model(torch.tensor([list(head)]), logits_to_keep=1).logits[0, -1]
    found: list[float] = logits[list(tokens)].tolist()
    return found


def without_options(shown: str) -> str:
    """Return the question as Cache-to-Cache's sender is asked: no options, no cue."""
    rows = shown.splitlines()
    kept = [r for r in rows if not re.match(rf"[{LETTERS}]\. ", r) and not r.startswith("Answer:")]
    return "\n".join(kept)


def rows_of(args: argparse.Namespace) -> tuple[list[Question], list[Question]]:
    """Part the questions as ``pairs.py`` does: those to learn from, those tested."""
    if args.quick:
        rows = question_set(MADE_UP, args.folder)[:8]
        return rows[4:], rows[:4]
    found, count = question_set(args.set, args.folder), args.train + args.test
    if len(found) < count:
        raise SystemExit(f"{args.set} has {len(found)} rows, {count} are wanted")
    order = seeds.generator(0, "pairs", args.set).permutation(len(found))[:count]
    rows = [found[i] for i in order]
    return rows[: args.train], rows[args.train :]


def short_enough(bases: Sequence[Base], lesson: Lesson, longest: int) -> bool:
    return all(len(base.tokenizer.encode(lesson.shown)) <= longest for base in bases)


def outcomes(
    receiver: Base, senders: list[Base], lessons: list[Lesson], budgets: Sequence[int]
) -> dict[str, list[bool]]:
    """Answer every lesson in every way; whether it was right, by way."""
    found: defaultdict[str, list[bool]] = defaultdict(list)
    asked = [without_options(lesson.shown) for lesson in lessons]
    written = [backgrounds(sender, asked, max(budgets)) for sender in senders]
    for number, lesson in enumerate(lessons):
        gold = lesson.options.index(lesson.answer)
        own = choice(receiver, lesson.prompt, lesson)
        theirs = [choice(sender, lesson.shown, lesson) for sender in senders]
        found["standalone"].append(own == gold)
        found["vote"].append(vote([own, *theirs]) == gold)
        for sender, answer in zip(senders, theirs, strict=True):
            found[f"single {sender.source}"].append(answer == gold)
        for budget in budgets:
            said = [
                shortened(sender, made[number], budget)
                for sender, made in zip(senders, written, strict=True)
            ]
            text = in_context(lesson.prompt, said)
            answer = own if text == lesson.prompt else choice(receiver, text, lesson)
            found[f"t2t {budget}"].append(answer == gold)
        print(f"{number + 1} of {len(lessons)}", file=sys.stderr, flush=True)
    return dict(found)


def refined_of(args: argparse.Namespace) -> dict[str, bool]:
    """Return the refined outcomes of this pair by row, from the first seed there is."""
    for path in sorted((args.folder / "scores").glob(f"{args.pair}-refined-*.json")):
        made = json.loads(path.read_text())
        if made.get("set") == args.set:
            return {x["row"]: bool(x["correct"]) for x in made["outcomes"]["refined"]}
    return {}


def against(refined: dict[str, bool], names: list[str], found: dict[str, list[bool]]) -> Any:
    """Compare refined answers with each baseline on the rows that both have."""
    here = [i for i, name in enumerate(names) if name in refined]
    told = {}
    for way, right in found.items() if here else ():
        a, b = [refined[names[i]] for i in here], [right[i] for i in here]
        at = paired_bootstrap([[float(x) - float(y) for x, y in zip(a, b, strict=True)]], seed=0)
        gap = [round(x, 4) for x in (at.value, at.low, at.high)]
        told[way] = {"refined_minus": gap, "mcnemar_p": round(mcnemar(a, b).p, 4)}
    return told


def chosen_single(receiver: Base, senders: list[Base], lessons: list[Lesson]) -> str:
    """Choose the single model on rows that are not tested; the receiver may be it."""
    right = {}
    for name, base in (("standalone", receiver), *((f"single {s.source}", s) for s in senders)):
        texts = [lesson.prompt if base is receiver else lesson.shown for lesson in lessons]
        pairs = zip(texts, lessons, strict=True)
        right[name] = [choice(base, t, x) == x.options.index(x.answer) for t, x in pairs]
    return best_single(right)


def compared(found: dict[str, list[bool]], single: str) -> dict[str, Any]:
    told = found | {"best_single": found[single]}
    rows: dict[str, Any] = {}
    for name, right in told.items():
        at = wilson(sum(right), len(right))
        gap = [float(a) - float(b) for a, b in zip(right, told["standalone"], strict=True)]
        paired = paired_bootstrap([gap], seed=0)
        rows[name] = {
            "accuracy": round(at.value, 4),
            "interval": [round(at.low, 4), round(at.high, 4)],
            "over_standalone": [round(x, 4) for x in (paired.value, paired.low, paired.high)],
            "mcnemar_p": round(mcnemar(right, told["standalone"]).p, 4),
        }
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/pairs"))
    parser.add_argument("--pair", default="qwen-smol", help="SENDER-RECEIVER")
    parser.add_argument("--more", nargs="*", default=[], help="more senders: of smol, gemma, qwen")
    parser.add_argument("--set", choices=(*SETS, MADE_UP), default="hotels-fr")
    parser.add_argument("--setting", default="same")
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--longest", type=int, default=110)
    parser.add_argument("--rows", type=int, default=0, help="test so many of them; 0 for all")
    parser.add_argument("--choosing", type=int, default=100, help="rows for the best single model")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--out", type=Path, help="by default scores/PAIR-baselines.json")
    parser.add_argument("--quick", action="store_true", help="tiny random models, four rows")
    args = parser.parse_args()
    if args.quick:
        args.pair, args.longest = "tiny:qwen3-tiny:llama", 10_000
    if args.out is None and not args.quick:
        args.out = baselines_file(args.folder, args.pair)
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    busy = time.process_time()
    first, receiving = args.pair.split("-", 1)
    senders = [load_base(SHORT.get(s, s)) for s in (first, *args.more)]
    receiver = load_base(SHORT.get(receiving, receiving))
    kept, tested = (
        [
            x
            for x in (question_lesson(q, args.setting) for q in part)
            if short_enough([receiver, *senders], x, args.longest)
        ]
        for part in rows_of(args)
    )
    tested = tested[: args.rows or None]
    found = outcomes(receiver, senders, tested, args.budgets)
    single = chosen_single(receiver, senders, kept[: args.choosing])
    rows, names = compared(found, single), [lesson.row() for lesson in tested]
    if args.out:
        by_row = {name: {w: r[i] for w, r in found.items()} for i, name in enumerate(names)}
        about = {"pair": args.pair, "set": args.set, "best_single_is": single}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**about, "rows": by_row}, indent=1) + "\n")
    print(
        "| way | accuracy | 95 % | over standalone | McNemar p |\n| --- | --- | --- | --- | --- |"
    )
    for name, row in rows.items():
        gap = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["over_standalone"])
        low, high = row["interval"]
        print(f"| {name} | {row['accuracy']:.3f} | {low:.3f}-{high:.3f} | {gap} |", end="")
        print(f" {row['mcnemar_p']:.3f} |")
    told = {
        "rows": len(tested),
        "best_single_is": single,
        "refined": against(refined_of(args), names, found | {"best_single": found[single]}),
        "pair": args.pair,
        "more": args.more,
        "set": args.set,
        "setting": args.setting,
        "cpu_seconds": round(time.process_time() - busy, 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print("\n" + json.dumps({name: row["accuracy"] for name, row in rows.items()} | told))


if __name__ == "__main__":
    main()

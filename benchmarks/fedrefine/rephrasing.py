# SPDX-License-Identifier: Apache-2.0
"""How often a small model's rephrasing passes, why it is turned down, and what still tells names.

Ten made-up questions with names, dates, addresses and numbers of people who do not exist, and ten
packaged ones without.  For the first ten the model also rewords the raw text once, with no rule
taking anything out: ``recall_by_model_alone`` is the share of entities that it leaves in.  Run as
``python benchmarks/fedrefine/rephrasing.py [--quick]``; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from statistics import mean

import torch

from fedloom import seeds
from fedloom.data.questions import Question, load_questions
from fedloom.models.base import Base, load_base
from fedloom.refining.rephrasing import ASK, Rephrased, entities, entity_recall, rephrase, scrub
from fedloom.refining.writing import decoded, instructed, write

PRIVATE = (
    (
        "My client Rosa Diaz took a coat from a shop on 12 March 2021 unpaid. Which offence is it?",
        ("Theft", "Fraud", "Arson", "Perjury"),
        0,
    ),
    (
        "On 3/4/2019 Dr. Ivan Petrov saw a fever with a stiff neck. What is to be ruled out first?",
        ("Meningitis", "Gout", "Asthma", "Anaemia"),
        0,
    ),
    (
        "Invoice 20210113 to Marta Klein shows 19 percent tax on 200 euros. How much is that?",
        ("19 euros", "38 euros", "20 euros", "219 euros"),
        1,
    ),
    (
        "Please tell tom.reed@mail.example which vitamin prevents scurvy.",
        ("Vitamin A", "Vitamin B12", "Vitamin C", "Vitamin K"),
        2,
    ),
    (
        "Call Anna Bell at 555-0199 and say which planet is the largest.",
        ("Mars", "Venus", "Jupiter", "Earth"),
        2,
    ),
    (
        "The tenant Omar Haddad paid the rent late in May 2022. What may the landlord send first?",
        ("A reminder", "The police", "A bill for a car", "Nothing ever"),
        0,
    ),
    (
        "Our employee Li Wei, badge AB-1234, cut her hand at a machine. Who has to be told?",
        ("The safety officer", "A rival firm", "The press", "Nobody"),
        0,
    ),
    (
        "Sofia Rossi was born on 7 July 2004. In which year does she become eighteen?",
        ("2020", "2021", "2022", "2024"),
        2,
    ),
    (
        "In the case 2021-CV-0113 judge Helen Moore asked for proof. Who has to prove guilt?",
        ("The prosecution", "The accused", "The jury", "The clerk"),
        0,
    ),
    (
        "Mr. Jonas Berg, account 12345678, saves for thirty years. What grows his savings most?",
        ("Compound interest", "Cash at home", "Stamps", "A loan"),
        0,
    ),
)


def questions(base: Base, quick: bool, count: int) -> list[Question]:
    made = [Question("made_up", text, options, gold) for text, options, gold in PRIVATE]
    if quick:
        return made[:2]
    rows = sorted(load_questions("packaged:mmlu-dev"), key=Question.row)
    fit = [q for q in rows if 12 <= len(base.tokenizer.encode(q.question)) <= 40]
    fit = [q for q in fit if not entities(q.question)]
    order = seeds.generator(0, "rephrasing").permutation(len(fit))[:count]
    return [*made, *(fit[i] for i in order)]


def unaided(base: Base, question: Question, seed: int) -> str:
    """Let the model reword the raw text, told nothing of names."""
    ids, stop = instructed(base, ASK.format(question=question.question))
    room = 2 * len(base.tokenizer.encode(question.question))
    return decoded(base, write(base, ids, room, temperature=0.7, seed=seed, stop=stop))


def measure(base: Base, asked: list[Question], tries: int) -> tuple[dict[str, object], list[str]]:
    passed, reasons, recalls, scrubbed, alone, lines = [], Counter[str](), [], [], [], []
    for number, question in enumerate(asked):
        got = rephrase(base, question, seed=0, tries=tries)
        good = isinstance(got, Rephrased)
        passed.append(good)
        kinds = [" ".join(w for w in a.reason.split() if not w.isdigit()) for a in got.attempts]
        reasons.update(kind for kind in kinds if kind)
        last = got.attempts[-1]
        if question.subject == "made_up":
            kept = question.choices
            scrubbed.append(
                entity_recall(question.question, scrub(question.question, kept)[0], kept)
            )
            alone.append(entity_recall(question.question, unaided(base, question, number), kept))
            recalls.append(entity_recall(question.question, last.text, kept))
        lines.append(f"| {'passed' if good else last.reason} | {question.question} | {last.text} |")
        print(f"{number + 1} of {len(asked)}", file=sys.stderr, flush=True)
    private = [p for p, q in zip(passed, asked, strict=True) if q.subject == "made_up"]

    def of(found: list[float | None]) -> float | None:
        told = [x for x in found if x is not None]
        return round(mean(told), 4) if told else None

    return {
        "questions": len(asked),
        "pass_rate": round(mean(passed), 4),
        "pass_rate_with_entities": round(mean(private), 4),
        "tries": tries,
        "reasons": dict(reasons.most_common()),
        "recall_in_original": 1.0,
        "recall_by_model_alone": of(alone),
        "recall_after_rules": of(scrubbed),
        "recall_after_rules_and_model": of(recalls),
    }, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", default="embedded:smollm2-135m")
    parser.add_argument("--packaged", type=int, default=10, help="questions without entities")
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, two questions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    busy = time.process_time()
    base = load_base("tiny:llama" if args.quick else args.source)
    asked = questions(base, args.quick, args.packaged)
    found, lines = measure(base, asked, args.tries)
    print("| outcome | question | last attempt |\n| --- | --- | --- |")
    print("\n".join(lines) + "\n")
    told = {"source": str(base.source), "cpu_seconds": round(time.process_time() - busy, 1)}
    print(json.dumps(found | told))


if __name__ == "__main__":
    main()

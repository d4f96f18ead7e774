# SPDX-License-Identifier: Apache-2.0
"""Sentence pairs for the translation study, out of the packaged BIG-bench archive.

MultiEmo's hotel reviews are there in eleven languages, sentence by sentence in one order.  They
were written in Polish, and all other languages are machine translations of it (Kocoń et al., ICCS
2021): a reference here is a machine's.  Rows stay in the study's folder and are never committed:
BIG-bench asks for that.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedloom import archives, seeds
from fedloom.language.translations import read_pairs

Pair = tuple[str, str]
TASKS = ("multiemo/hotels_sentence_en", "multiemo/hotels_sentence_fr")
MADE_UP = ("made-up", "made-up")
"""Tasks that need no archive: sentences whose words have one translation each."""
SHORTEST, LONGEST = 20, 160  # characters, on both sides
_FOLDER = "bigbench/benchmark_tasks/"
_WORDS = {
    "amber": "ambre",
    "brook": "ruisseau",
    "cedar": "cèdre",
    "ember": "braise",
    "harbor": "port",
    "island": "île",
    "kettle": "bouilloire",
    "lantern": "lanterne",
}


def sentence_pairs(tasks: Sequence[str], folder: Path) -> list[Pair]:
    """Return distinct pairs, from the folder's file or else from the archive."""
    if tuple(tasks) == MADE_UP:
        return distinct(_made_up())
    path = folder / f"{'-'.join(tasks).replace('/', '-')}.tsv"
    if not path.exists():
        rows = distinct(aligned(tasks, _examples(tasks)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{left}\t{right}\n" for left, right in rows), encoding="utf-8")
    return read_pairs(path)


def aligned(tasks: Sequence[str], found: dict[str, list[dict[str, Any]]]) -> list[Pair]:
    """Pair examples by their index; two files that part anywhere in their labels are refused."""
    left, right = (found[task] for task in tasks)
    if [_label(x) for x in left] != [_label(x) for x in right]:
        raise SystemExit(
            f"{tasks[0]} ({len(left)} rows) and {tasks[1]} ({len(right)} rows) have not the same"
            " labels in the same order: expected two files with one order of sentences"
        )
    return [(_text(a), _text(b)) for a, b in zip(left, right, strict=True)]


def distinct(rows: Iterable[Pair]) -> list[Pair]:
    """Keep pairs of fitting length whose sentences are new on both sides; names are no pairs.

    Case, blanks and punctuation make no other sentence: many reviews say the same short thing.
    """
    seen: tuple[set[str], set[str]] = set(), set()
    kept = []
    for pair in rows:
        left, right = (_letters(text) for text in pair)
        fits = all(SHORTEST <= len(text) <= LONGEST for text in pair)
        if fits and left != right and left not in seen[0] and right not in seen[1]:
            seen[0].add(left)
            seen[1].add(right)
            kept.append(pair)
    return kept


def dealt(
    pairs: Sequence[Pair], validation: int, test: int
) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Return pairs to draw support from, validation and test pairs; the last two for all seeds."""
    order = seeds.generator(0, "faast", "translation").permutation(len(pairs)).tolist()
    mixed = [pairs[i] for i in order]
    return mixed[validation + test :], mixed[:validation], mixed[validation : validation + test]


def drawn(pool: Sequence[Pair], count: int, seed: int) -> list[Pair]:
    if count > len(pool):
        raise SystemExit(f"--support {count}: expected at most {len(pool)}, all that is left")
    random = seeds.generator(seed, "faast", "translation", "support", count)
    return [pool[i] for i in random.choice(len(pool), count, replace=False).tolist()]


def shuffled(pairs: Sequence[Pair], seed: int) -> list[Pair]:
    """Give every sentence the translation of another."""
    order = seeds.generator(seed, "faast", "translation", "shuffled").permutation(len(pairs))
    other = dict(zip(order.tolist(), [*order[1:].tolist(), int(order[0])], strict=True))
    return [(left, pairs[other[i]][1]) for i, (left, _) in enumerate(pairs)]


def _examples(tasks: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Read all tasks in one pass: to unpack the archive is most of the work."""
    names, found = {f"{_FOLDER}{task}/task.json": task for task in tasks}, {}
    with tarfile.open(archives.fetch(archives.BIGBENCH), "r|gz") as members:
        for member in members:
            task = names.get(member.name.partition("/")[2])
            if task is not None:
                stream = members.extractfile(member)
                assert stream is not None
                found[task] = json.load(stream)["examples"]
            if len(found) == len(names):
                return found
    raise SystemExit(f"the archive holds no {' or '.join(set(tasks) - set(found))}")


def _label(example: dict[str, Any]) -> str:
    scores: dict[str, float] = example["target_scores"]
    return max(scores, key=scores.__getitem__)


def _text(example: dict[str, Any]) -> str:
    return " ".join(str(example["input"]).split())


def _letters(text: str) -> str:
    return "".join(c for c in text.casefold() if c.isalnum())


def _made_up() -> list[Pair]:
    random, words = seeds.generator(0, "faast", "translation", "made-up"), list(_WORDS)
    rows = [[str(word) for word in random.choice(words, 4, replace=False)] for _ in range(200)]
    return [(" ".join(row), " ".join(_WORDS[word] for word in row)) for row in rows]

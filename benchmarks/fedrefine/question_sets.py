# SPDX-License-Identifier: Apache-2.0
"""Four-choice questions for pairs of models, out of the packaged BIG-bench archive.

BIG-bench (Srivastava et al., arXiv 2206.04615): wikiHow's goals and steps, and reviews of hotels
in several languages with the words for their sentiment as options.  Rows stay in the study's folder
and are never committed: BIG-bench asks for that.
"""

from __future__ import annotations

import json
import tarfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom import archives, seeds
from fedloom.data.questions import Question, distinct

_FOLDER = "bigbench/benchmark_tasks/"
_FEELINGS = ("positive", "negative", "neutral", "ambivalent")
SETS = {
    "goal": "goal_step_wikihow/goal_inference",
    "step": "goal_step_wikihow/step_inference",
    "hotels-en": "multiemo/hotels_sentence_en",
    "hotels-fr": "multiemo/hotels_sentence_fr",
    "hotels-es": "multiemo/hotels_sentence_es",
    "hotels-zh": "multiemo/hotels_sentence_zh",
}
MADE_UP = "made-up"
"""A set that needs no archive: which of four words comes first in the alphabet."""
_WORDS = ("amber", "brook", "cedar", "dune", "ember", "fjord", "grove", "harbor", "inlet", "kelp")
_MOST = 4000  # rows that are kept of a set
_LONGEST = 240  # characters of a text: CPU time goes with it


def question_set(name: str, folder: Path) -> list[Question]:
    """Return a set's questions in the order of their hashes, from the folder or the archive."""
    if name == MADE_UP:
        return _made_up()
    path = folder / f"{name}.jsonl"
    if not path.exists():
        made = _questions(name, _examples(SETS[name]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(vars(q), ensure_ascii=False) + "\n" for q in made))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Question(**{**row, "choices": tuple(row["choices"])}) for row in rows]


def _made_up() -> list[Question]:
    random = seeds.generator(0, MADE_UP)
    rows = []
    for i in range(200):
        options = tuple(str(word) for word in random.choice(_WORDS, 4, replace=False))
        rows.append(Question("made_up", f"{i}: first?", options, options.index(min(options))))
    return _balanced(distinct(rows))


def _examples(task: str) -> list[Mapping[str, Any]]:
    with tarfile.open(archives.fetch(archives.BIGBENCH), "r|gz") as members:
        for member in members:
            if member.name.endswith(f"{_FOLDER}{task}/task.json"):
                stream = members.extractfile(member)
                assert stream is not None
                return json.load(stream)["examples"]  # type: ignore[no-any-return]
    raise SystemExit(f"the archive holds no {task}")


def _questions(name: str, examples: list[Mapping[str, Any]]) -> list[Question]:
    """Make rows of four options: wikiHow's in a drawn order, feelings in one order, balanced."""
    random = seeds.generator(0, name, "options")
    made: list[Question] = []
    for example in examples:
        scores = {str(k).strip(): float(v) for k, v in example["target_scores"].items()}
        text = " ".join(str(example["input"]).split())
        best = max(scores, key=scores.__getitem__)
        if len(scores) != 4 or not 20 <= len(text) <= _LONGEST:
            continue
        options = list(_FEELINGS) if set(scores) == set(_FEELINGS) else list(scores)
        if options != list(_FEELINGS):
            if sum(map(len, options)) > _LONGEST:
                continue
            options = [options[i] for i in random.permutation(4)]
        question = f"Review: {text}" if set(scores) == set(_FEELINGS) else text
        made.append(Question(name.replace("-", "_"), question, tuple(options), options.index(best)))
    return _balanced(distinct(made))[:_MOST]


def _balanced(rows: list[Question]) -> list[Question]:
    """Let each letter be right equally often, so that a guess is worth a quarter."""
    by_gold: defaultdict[int, list[Question]] = defaultdict(list)
    for row in rows:
        by_gold[row.gold].append(row)
    least = min(map(len, by_gold.values()))
    return [
        row for group in zip(*(g[:least] for g in by_gold.values()), strict=True) for row in group
    ]

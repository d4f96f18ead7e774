# SPDX-License-Identifier: Apache-2.0
"""Five clients of BIG-bench tasks, hundreds of rows each: a stand-in for MMLU, and not MMLU.

MMLU's packaged questions give a client some 60 rows.  Where no hub can be reached, multiple-choice
tasks of BIG-bench (Srivastava et al., arXiv 2206.04615) from the PyPI archive ``bigbench`` are
grouped into the kinds of clients of FedNL's Table 3 (arXiv 2605.16350).  No score on them can be
compared with a score on MMLU.

A row is an instruction of ours, the task's input, and its two to five options.  Inputs that
repeat, rows with no or several best options, with more than five, or longer than ``LONGEST``
characters are left out; a task gives at most ``MOST`` rows, drawn with a fixed seed, so that none
outweighs the others.  The right answer stands at each letter equally often, within one row, among
a task's rows with the same number of options.  Many tasks come from templates: train and test
share no input, but they share templates.

The archive is Apache-2.0 and says nothing of single tasks, so ``Task.source`` gives what is known
of where they come from; the terms named there were not checked.  BIG-bench asks that nobody
pretrains on it or publishes copies: rows stay in the cache.
"""

from __future__ import annotations

import json
import logging
import os
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from fedloom import archives, seeds
from fedloom.data import files

log = logging.getLogger(__name__)

NAME = "bigbench"
PREFIX = "bigbench_"
MOST = 300  # rows a task; the largest has 14 200
LONGEST = 1200  # characters of a question with its options, some 300 tokens
OPTIONS = range(2, 6)
_FOLDER = "bigbench/benchmark_tasks/"
_OURS = "written or generated for BIG-bench"


@dataclass(frozen=True)
class Task:
    """A task of the archive and why it is in its client."""

    path: str
    """Its folder below ``benchmark_tasks``."""
    ask: str
    """The instruction put before each input; empty where the input is a question."""
    why: str
    """What it has in common with the client's subjects in the paper."""
    source: str = _OURS
    """Where its rows come from, and under which terms if not the archive's."""

    @property
    def subject(self) -> str:
        """Name it as a subject, in a spelling that no subject of MMLU has."""
        return PREFIX + self.path.replace("/", "_")


_ENTAILED = "Does the premise entail the hypothesis?"
_PARAPHRASE = "Which sentence says the same?"
_VIGNETTES = "vignettes of published studies"
_BBQ = "BBQ (Parrish et al. 2022), CC BY 4.0"
_METAPHORS = "pairs after Mohammad et al. 2016"
_STORIES = "modelled on Happe's Strange Stories"

CLIENTS: tuple[tuple[str, tuple[Task, ...]], ...] = (
    (
        "Ethics/Logic",  # Law/Ethics; no task is about law
        (
            Task("moral_permissibility", "", "moral disputes", _VIGNETTES),
            Task("simple_ethical_questions", "", "moral scenarios"),
            Task("causal_judgment", "", "blame and intention, as in law", _VIGNETTES),
            Task("logical_fallacy_detection", "", "logical fallacies"),
            Task("formal_fallacies_syllogisms_negation", "", "formal logic"),
            Task("bbq_lite_json/religion_ambig", "", "fairness to groups", _BBQ),
            Task("bbq_lite_json/religion_disambig", "", "fairness to groups", _BBQ),
        ),
    ),
    (
        "Humanities",
        (
            Task("hindu_knowledge", "", "world religions"),
            Task(
                "anachronisms", "Does the statement contain an anachronism?", "history, prehistory"
            ),
            Task("misconceptions", "Is the statement true (T) or false (F)?", "global facts"),
            Task("strategyqa", "", "miscellaneous", "StrategyQA (Geva et al. 2021), MIT"),
            Task("sports_understanding", "Is the statement plausible?", "miscellaneous"),
            Task("understanding_fables", "", "philosophy"),
            Task(
                "swahili_english_proverbs",
                "Which English proverb is closest to the Swahili one?",
                "sociology, languages",
            ),
            Task("metaphor_understanding/met2lit", _PARAPHRASE, "language, literature", _METAPHORS),
            Task("metaphor_understanding/lit2met", _PARAPHRASE, "language, literature", _METAPHORS),
        ),
    ),
    (
        "STEM",
        (
            Task("physics", "Which formula helps most to solve the problem?", "physics"),
            Task("physical_intuition", "", "conceptual physics, chemistry"),
            Task("unit_conversion/unit_identification", "", "physics, units"),
            Task("unit_conversion/si_conversion", "", "physics, units"),
            Task("unit_conversion/different_systems", "", "engineering, units"),
            Task("unit_conversion/chained_conversion", "", "engineering, units"),
            Task("cryobiology_spanish", "", "biology, in Spanish"),
            Task(
                "empirical_judgments",
                "Is the relation in the sentence causal, correlative or neither?",
                "method of the sciences",
            ),
        ),
    ),
    (
        "Math/CS",
        (
            Task(
                "elementary_math_qa/question_only",
                "",
                "mathematics",
                "MathQA (Amini et al. 2019), from AQuA-RAT, Apache-2.0",
            ),
            Task("identify_math_theorems", "Which version of the theorem is true?", "mathematics"),
            Task("mathematical_induction", "Is the argument by induction valid?", "mathematics"),
            Task("code_line_description", "What does the Python code do?", "computer science"),
            Task(
                "cs_algorithms/valid_parentheses",
                "Are the parentheses properly matched?",
                "computer science",
            ),
            Task("navigate", "Do the steps lead back to the starting point?", "computer science"),
            Task("logical_deduction/three_objects", "Which statement is true?", "discrete maths"),
            Task("logical_deduction/five_objects", "Which statement is true?", "discrete maths"),
            Task("tracking_shuffled_objects/three_objects", "", "computer science, permutations"),
        ),
    ),
    (
        "Med/Psych",
        (
            Task("social_iqa", "", "psychology", "Social IQa (Sap et al. 2019), CC BY 4.0"),
            Task("strange_stories/multiple_choice", "", "psychology", _STORIES),
            Task("strange_stories/boolean", "", "psychology", _STORIES),
            Task(
                "implicatures",
                "Does speaker 2 mean yes or no?",
                "psychology, pragmatics",
                "George & Mamidi 2020",
            ),
            Task(
                "epistemic_reasoning",
                _ENTAILED,
                "psychology, what others believe",
                "sentences of SNLI (Bowman et al. 2015), CC BY-SA 4.0",
            ),
            Task(
                "similarities_abstraction", "", "psychology, after a part of an intelligence test"
            ),
            Task("human_organs_senses", "", "anatomy, clinical knowledge"),
            Task(
                "fact_checker/covid19_scientific",
                "",
                "virology, clinical knowledge",
                "claims after Lee et al. 2021",
            ),
        ),
    ),
)
"""Partition ids 0 to 4: name and tasks, in the order of the paper's clients."""


def groups() -> list[tuple[str, tuple[str, ...]]]:
    """List each client's name and subjects, as ``mmlu.CLIENTS`` does."""
    return [(name, tuple(task.subject for task in tasks)) for name, tasks in CLIENTS]


def rows() -> Iterator[files.Row]:
    """Yield (place, row in MMLU's columns) of all tasks, from the cache or from the archive.

    Raises
    ------
    Refusal
        If the archive is not in the cache and cannot be downloaded.
    """
    path = archives.cache_dir() / "data" / f"{NAME}-{_selection()}.jsonl"
    if not path.exists():
        with archives.locked(path.with_name(path.name + ".lock")):
            if not path.exists():  # another process was quicker
                _extract(archives.fetch(archives.BIGBENCH), path)
    yield from files.rows(path)


def select(task: Task, examples: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn a task's examples into rows in MMLU's columns: cleaned, drawn and balanced."""
    kept: dict[str, tuple[str, str, list[str]]] = {}
    for example in examples:
        clean = _clean(task, example)
        if clean is not None:
            kept.setdefault(" ".join(clean[0].split()).casefold(), clean)
    random = seeds.generator(0, task.path, "rows")
    drawn = random.permutation(len(kept))[:MOST]
    candidates = list(kept.values())
    by_size: defaultdict[int, list[tuple[str, str, list[str]]]] = defaultdict(list)
    for index in drawn:
        by_size[1 + len(candidates[index][2])].append(candidates[index])
    made = []
    for size, group in sorted(by_size.items()):
        first = int(random.integers(size))  # else small groups would all begin with A
        for turn, (question, right, wrong) in enumerate(group, start=first):
            choices = [wrong[i] for i in random.permutation(len(wrong))]
            choices.insert(turn % size, right)
            row = {"subject": task.subject, "question": question, "choices": choices}
            made.append({**row, "answer": turn % size})
    return made


def _clean(task: Task, example: Mapping[str, Any]) -> tuple[str, str, list[str]] | None:
    """Return (question, right option, wrong options), or nothing for a row to leave out."""
    scores = {str(k).strip(): float(v) for k, v in (example.get("target_scores") or {}).items()}
    text = str(example.get("input", "")).strip()
    best = [option for option, score in scores.items() if score == max(scores.values())]
    question = f"{task.ask}\n{text}" if task.ask else text
    length = len(question) + sum(map(len, scores))
    if not text or "" in scores or len(scores) not in OPTIONS or len(best) != 1 or length > LONGEST:
        return None
    return question, best[0], [option for option in scores if option != best[0]]


def _extract(archive: Path, path: Path) -> None:
    """Read the tasks in one pass over the archive and write the rows whole or not at all."""
    log.info("reading BIG-bench tasks out of %s, once", archive.name)
    found = dict(_tasks(archive))
    made = [row for _, tasks in CLIENTS for task in tasks for row in select(task, found[task.path])]
    partial = path.with_name(path.name + ".partial")
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
    partial.write_text(lines, encoding="utf-8")
    os.replace(partial, path)


def _tasks(archive: Path) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    wanted = {task.path for _, tasks in CLIENTS for task in tasks}
    with tarfile.open(archive, "r|gz") as members:  # a stream: nothing is unpacked to disk
        for member in members:
            _, _, place = member.name.partition(_FOLDER)
            name = place.removesuffix("/task.json")
            stream = members.extractfile(member) if name != place and name in wanted else None
            if stream is not None:
                yield name, json.load(stream)["examples"]
                wanted.remove(name)
            if not wanted:
                return


def _selection() -> str:
    """Identify which rows the cache holds: another archive, table or rule makes another file."""
    table = [(name, [asdict(task) for task in tasks]) for name, tasks in CLIENTS]
    told = json.dumps([archives.BIGBENCH.sha256, table, MOST, LONGEST, "balanced 1"])
    return sha256(told.encode()).hexdigest()[:12]

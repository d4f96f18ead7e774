# SPDX-License-Identifier: Apache-2.0
"""RULER's eight needle tasks in its own format: free generation, scored by string match.

After the generator of Hsieh et al. (RULER, arXiv 2404.06654): tasks, wording, where needles go and
how long a haystack may be.  Two things are ours: the essays are any text of ``fedloom.data.text``
cut by its rules (RULER's are Paul Graham's, cut by nltk), and each row has its own random stream.
"""

from __future__ import annotations

import functools
import json
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from fedloom import seeds
from fedloom.data.niah.words import load_words
from fedloom.data.prompts import Encodes
from fedloom.data.text import load_text, sentences
from fedloom.errors import Refusal, nearest

ANSWER_TOKENS = 128
"""Left free for the answer."""
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it."
    " I will quiz you about the {kind} afterwards.\n{context}\nWhat are all the special magic"
    " {kind} for {asked} mentioned in the provided text?"
)
_PREFIX = " The special magic {kind} for {asked} mentioned in the provided text are"
_DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # RULER's 40 depths, in percent


@dataclass(frozen=True)
class Task:
    """What sets one task apart."""

    haystack: str
    """``noise`` (one line again and again), ``essay`` or ``needle`` (distractors alone)."""
    key: str
    value: str
    """``words``, ``numbers`` or ``uuids``."""
    keys: int = 1
    values: int = 1
    """Values of each key."""
    queries: int = 1
    """Keys that are asked for."""


TASKS: dict[str, Task] = {
    "single_1": Task("noise", "words", "numbers"),
    "single_2": Task("essay", "words", "numbers"),
    "single_3": Task("essay", "words", "uuids"),
    "multikey_1": Task("essay", "words", "numbers", keys=4),
    "multikey_2": Task("needle", "words", "numbers"),
    "multikey_3": Task("needle", "uuids", "uuids"),
    "multivalue": Task("essay", "words", "numbers", values=4),
    "multiquery": Task("essay", "words", "numbers", keys=4, queries=4),
}


@dataclass(frozen=True)
class RulerRow:
    """One line of RULER's JSONL."""

    index: int
    input: str
    """The prompt, up to where the model goes on."""
    outputs: tuple[str, ...]
    """All that the answer must say."""
    length: int
    """Tokens of the prompt and of the answer's room."""

    def to_json(self) -> str:
        """Write the row as one canonical line."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def task_named(name: str) -> str:
    """Return a task's name, with or without RULER's ``niah_`` before it.

    Raises
    ------
    Refusal
        If there is no such task.
    """
    short = name.removeprefix("niah_")
    if short not in TASKS:
        hint = nearest(short, TASKS)
        raise Refusal(f'RULER task "{name}"{hint}: expected one of {", ".join(TASKS)}')
    return short


def string_match(answer: str, outputs: Sequence[str]) -> float:
    """Return which share of the outputs the answer says, whatever the case.

    >>> string_match("They are 12 and Amber.", ["12", "amber", "13", "14"])
    0.5
    """
    said = answer.lower()
    return sum(output.lower() in said for output in outputs) / len(outputs)


def make_task(
    name: str, *, tokens: int, rows: int, seed: int, text: str, tokenizer: Encodes
) -> list[RulerRow]:
    """Make one task's rows.

    Parameters
    ----------
    name
        One of ``TASKS``.
    tokens
        Length of prompt and answer together, at most, by ``tokenizer``.
    rows
        How many.
    seed
        Decides all that is drawn.
    text
        Source of the essay haystacks, as ``load_text`` takes it.

    Raises
    ------
    Refusal
        If ``tokens`` are too few for a haystack, or the text cannot be had.
    """
    if rows < 1:
        raise Refusal(f"--rows {rows}: expected at least 1")
    task = TASKS[name]
    words = _essay_words(text) if task.haystack == "essay" else ()

    def write(size: int, index: int) -> RulerRow:
        return _row(task, words, size, index, seeds.split(seed, "ruler", name, index), tokenizer)

    # Distractor needles are drawn anew for each size, so the largest that fits is found by looking.
    step = 500 if task.haystack == "essay" else 25 if tokens >= 4096 else 5
    largest = _largest(lambda size: write(size * step, 0).length <= tokens)
    if not largest:
        raise Refusal(
            f"--tokens {tokens}: RULER's {name} with its smallest haystack has"
            f" {write(step, 0).length} tokens, {ANSWER_TOKENS} of them for the answer; expected"
            " at least so many"
        )
    made = []
    for index in range(rows):
        sizes = (write(size, index) for size in range(largest * step, 0, -step))
        row = next((row for row in sizes if row.length <= tokens), None)
        if row is None:
            raise Refusal(f"--tokens {tokens}: too few for row {index} of RULER's {name}; raise it")
        made.append(row)
    return made


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, 0 if not even 1 does."""
    top = 1
    while fits(top):
        top *= 2
    low, high = top // 2, top  # low fits or is 0, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _row(
    task: Task, words: Sequence[str], size: int, index: int, seed: int, tokenizer: Encodes
) -> RulerRow:
    draw = random.Random(seed)
    count = max(task.keys, task.queries)
    keys = [_drawn(task.key, draw) for _ in range(count)]
    values = [[_drawn(task.value, draw) for _ in range(task.values)] for _ in keys]
    needles = [
        _NEEDLE.format(kind=task.value, key=key, value=value)
        for key, own in zip(keys, values, strict=True)
        for value in own
    ]
    random.Random(seed).shuffle(needles)
    context = _hidden(task, needles, words, size, draw)
    asked = draw.sample(range(count), task.queries)
    outputs = tuple(value for i in asked for value in values[i])
    prompt = _prompt(task, context, [keys[i] for i in asked])
    return RulerRow(index, prompt, outputs, len(tokenizer.encode(prompt)) + ANSWER_TOKENS)


def _hidden(
    task: Task, needles: Sequence[str], words: Sequence[str], size: int, draw: random.Random
) -> str:
    """Put needles into an essay of ``size`` words, or among as many lines."""
    if task.haystack == "essay":
        return _in_essay(needles, words, size, draw)
    if task.haystack == "noise":
        lines = [_NOISE] * size
    else:
        lines = [
            _NEEDLE.format(
                kind=task.value, key=_drawn(task.key, draw), value=_drawn(task.value, draw)
            )
            for _ in range(size)
        ]
    places = sorted(draw.sample(range(size), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _in_essay(needles: Sequence[str], words: Sequence[str], size: int, draw: random.Random) -> str:
    repeated = [words[i % len(words)] for i in range(size)]
    essay = list(sentences(" ".join(repeated)))
    depths = sorted(draw.sample(_DEPTHS, len(needles)))
    places = [len(essay) * depth // 100 for depth in depths]
    pieces, done = [], 0
    for place, needle in zip(places, needles, strict=True):
        pieces += [" ".join(essay[done:place]), needle]
        done = place
    return " ".join(piece for piece in [*pieces, " ".join(essay[done:])] if piece)


def _prompt(task: Task, context: str, asked: Sequence[str]) -> str:
    names = ", ".join(asked[:-1]) + ", and " + asked[-1] if len(asked) > 1 else asked[0]
    template, kind = _PROMPT + _PREFIX, task.value
    if task.queries * task.values == 1:
        template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
        kind = kind.removesuffix("s")
    return template.format(kind=kind, context=context, asked=names)


def _drawn(kind: str, draw: random.Random) -> str:
    if kind == "numbers":
        return str(draw.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=draw.getrandbits(128), version=4))
    return draw.choice(_magic_words())


@functools.cache
def _magic_words() -> tuple[str, ...]:
    lists = load_words()
    return tuple(sorted({f"{a}-{n}" for a in lists.adjectives for n in lists.nouns}))


@functools.lru_cache(maxsize=2)
def _essay_words(text: str) -> tuple[str, ...]:
    return tuple(
        word
        for document in load_text(text)
        for sentence in document.sentences
        for word in sentence.split()
    )

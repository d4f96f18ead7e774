# SPDX-License-Identifier: Apache-2.0
"""The rows of a needle client, each made from (seed, client, side, index) and nothing else."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from fedloom import seeds
from fedloom.config.material import NEEDLES, NiahConfig
from fedloom.data.niah.encode import prompt_tokens
from fedloom.data.niah.events import Story, shortened, tell
from fedloom.data.niah.haystack import Filler, fill, share_out
from fedloom.data.niah.words import Pools
from fedloom.data.partition import Client, Partition, rows_hash
from fedloom.data.prompts import Encodes, letter_tokens
from fedloom.data.questions import LETTERS
from fedloom.data.text import Document
from fedloom.errors import Refusal

SIDES = ("train", "test")
LEAST_FILLER = 32
"""Tokens of filler that a haystack has at least."""
OPTIONS = 4
_LEAST_EVENTS = OPTIONS  # the wrong ones are other events' values
_TRIES = 100


@dataclass(frozen=True)
class NeedleExample:
    """A haystack, a question about one of its events, and four values to choose from."""

    kind: str
    side: str
    """``train`` or ``test``."""
    index: int
    """Among the rows of its side and, for testing, of its budget."""
    budget: int
    """Tokens that the prompt was allowed."""
    context: str
    question: str
    options: tuple[str, str, str, str]
    gold: int
    """Index of the right option."""
    value: str
    """The right option's text."""
    events: tuple[str, ...]
    """The sentences that were hidden, in their order."""
    stem: str
    """How an answer begins: the words that stood before the value."""
    asks: tuple[tuple[str, str, str], ...]
    """Question, stem and value of each event; of a counter none: its events have no question."""
    starts: tuple[int, ...]
    """Of each event, the index of its first character in the context."""
    asked: int
    """Index of the event that the question is about; a counter's needs it and all after it."""
    depth: float
    """Tokens before that event as a share of the context's."""
    distance: int
    """Tokens from that event's end to the context's end, where the question follows."""
    nearest: int
    """Tokens from the last event's end to there: a window that is no longer holds no value."""
    tokens: int
    """Of the whole prompt with its options."""

    def row(self) -> str:
        """Identify the row by what is asked: 16 hex digits of a SHA-256."""
        parts = [self.kind, self.side, self.context, self.question, *self.options, self.gold]
        return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()[:16]

    def permuted(self, order: Sequence[int]) -> NeedleExample:
        """Return the same question with its options in another order."""
        a, b, c, d = (self.options[i] for i in order)
        return replace(self, options=(a, b, c, d), gold=list(order).index(self.gold))

    def to_json(self) -> str:
        """Write the row as one canonical line."""
        tree = {**asdict(self), "letter": LETTERS[self.gold], "row": self.row()}
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class _Draft:
    """A row before it has any filler."""

    kind: str
    side: str
    index: int
    budget: int
    story: Story
    depths: tuple[float, ...]
    gold: int
    options: tuple[str, str, str, str]
    primer: bool = False
    """A first lesson: few events, all before the filler."""

    def seeds(self) -> tuple[str, str, str, int]:
        return _path(self.kind, self.side, self.index, self.budget)


@dataclass(frozen=True)
class _Asked:
    """What ``encode`` needs of an example that is being made."""

    context: str
    question: str
    options: tuple[str, str, str, str]
    gold: int


def make_rows(
    niah: NiahConfig, seed: int, kind: str, side: str, tokenizer: Encodes
) -> list[NeedleExample]:
    """Make one side of one client.

    Gold letters are drawn in blocks of four rows that hold each letter once, the asked depth in
    blocks that hold each depth once: both are balanced, and a row depends on no other one.

    Raises
    ------
    Refusal
        If a budget is too small, or the filler cannot be had.
    """
    drafts = _drafts(niah, seed, kind, side)
    _check_budgets(niah, drafts, tokenizer)
    documents = share_out(niah.filler, seed)[side]
    if side == "train":
        drafts = _primers(niah, seed, kind, tokenizer) + drafts
    return [_example(draft, seed, documents, tokenizer) for draft in drafts]


@functools.lru_cache(maxsize=2)
def needle_holdings(
    niah: NiahConfig, seed: int, tokenizer: Encodes
) -> tuple[tuple[NeedleExample, ...], Partition]:
    """Make every client's rows, and the partition that names them.

    Raises
    ------
    Refusal
        If a budget is too small for its events, or the filler cannot be had.
    """
    cells = [(kind, side) for kind in niah.kind_names for side in SIDES]
    for side in SIDES:  # before any text is fetched
        drafts = [d for kind in niah.kind_names for d in _drafts(niah, seed, kind, side)]
        _check_budgets(niah, drafts, tokenizer)
    made = {cell: make_rows(niah, seed, *cell, tokenizer) for cell in cells}
    clients = []
    for kind in niah.kind_names:
        train, test = (tuple(row.row() for row in made[kind, side]) for side in SIDES)
        clients.append(Client(NEEDLES[kind], train, test, {kind: len(train) + len(test)}))
    rows = tuple(row for cell in cells for row in made[cell])
    return rows, Partition(seed, f"niah in {niah.filler}", rows_hash(rows), tuple(clients))


def _drafts(niah: NiahConfig, seed: int, kind: str, side: str) -> list[_Draft]:
    if side == "test":
        planned = [(i, budget) for budget in niah.test_lengths for i in range(niah.test_rows)]
    else:
        low, high = niah.train_tokens_min, niah.train_tokens_max
        drawn = (
            seeds.generator(seed, *_path(kind, side, i, 0), "budget").integers(low, high + 1)
            for i in range(niah.train_rows)
        )
        planned = [(i, int(budget)) for i, budget in enumerate(drawn)]
    return [_draft(niah, seed, kind, side, index, budget) for index, budget in planned]


def _path(kind: str, side: str, index: int, budget: int) -> tuple[str, str, str, int]:
    """Name a row's random stream; a training row's does not depend on its budget."""
    return "niah", kind, f"test {budget}" if side == "test" else side, index


def _draft(niah: NiahConfig, seed: int, kind: str, side: str, index: int, budget: int) -> _Draft:
    *cell, _ = path = _path(kind, side, index, budget)
    random = seeds.generator(seed, *path, "events")
    wanted = niah.depth_fractions
    asked = _balanced(seed, cell, "asked", index, len(wanted))
    extra = random.uniform(0.0, 1.0, size=max(0, _LEAST_EVENTS - len(wanted)))
    depths = tuple(sorted([*wanted, *map(float, extra)]))
    story = tell(kind, Pools(side, random), len(depths), depths.index(wanted[asked]))
    if kind == "counter":
        depths = tuple(np.linspace(wanted[0], max(0.9, wanted[-1]), len(story.events)).tolist())
    gold = _balanced(seed, cell, "letter", index, OPTIONS)
    return _Draft(kind, side, index, budget, story, depths, gold, _options(story, gold))


def _options(story: Story, gold: int) -> tuple[str, str, str, str]:
    options = list(story.wrong)
    options.insert(gold, story.answer)
    a, b, c, d = options
    return a, b, c, d


def _primers(niah: NiahConfig, seed: int, kind: str, tokenizer: Encodes) -> list[_Draft]:
    """Draft first lessons: one event, then two and more, and more and more filler after them.

    What is left of the row asks for one fact just out of the window's sight, until the memory can
    find that; the wrong options of such rows are in events that were left out.
    """
    made = []
    most = niah.primer_tokens_max or niah.primer_tokens
    growing = np.linspace(niah.primer_tokens, most, niah.primer_rows).round()
    for i, filler in enumerate(map(int, growing)):
        index = -1 - i  # a stream of its own: an ordinary row's index is 0 or more
        whole = _draft(niah, seed, kind, "train", index, 0)
        count = 1 + niah.primer_events * i // niah.primer_rows
        few = shortened(whole.story, count, place=i % count)
        apart = i % 2  # filler between the events as in a test, or all of it behind them
        depths = tuple(apart * j / len(few.events) for j in range(len(few.events)))
        options = _options(few, whole.gold)
        draft = replace(whole, story=few, depths=depths, options=options, primer=True)
        room = filler + _bare_tokens(draft, tokenizer)
        made.append(replace(draft, budget=room))
    return made


def _balanced(seed: int, cell: Sequence[str], purpose: str, index: int, choices: int) -> int:
    """Draw one of so many choices such that each block of that many rows has them all."""
    block, place = divmod(index, choices)
    return int(seeds.generator(seed, *cell, purpose, block).permutation(choices)[place])


def _bare_tokens(draft: _Draft, tokenizer: Encodes) -> int:
    return _count(draft, " ".join(event.text for event in draft.story.events), tokenizer)


def _count(draft: _Draft, context: str, tokenizer: Encodes) -> int:
    asked = _Asked(context, draft.story.question, draft.options, draft.gold)
    return prompt_tokens(asked, tokenizer)


def _check_budgets(niah: NiahConfig, drafts: Iterable[_Draft], tokenizer: Encodes) -> None:
    """Refuse a budget that one of the rows cannot keep, naming one that all can."""
    need = {draft: LEAST_FILLER + _bare_tokens(draft, tokenizer) for draft in drafts}
    worst = max(need, key=lambda draft: need[draft])
    if worst.side == "train":
        key, said = "niah.train-tokens-min", niah.train_tokens_min
    else:
        key, said = "niah.test-tokens", min(niah.test_lengths)
    if said < need[worst]:
        raise Refusal(
            f"{key} = {said}: {NEEDLES[worst.kind]} has events, question and options that need"
            f" {need[worst]} tokens with a little filler; the smallest that works is"
            f" {need[worst]}, or leave {worst.kind} out of niah.kinds"
        )


def _example(
    draft: _Draft, seed: int, documents: Sequence[Document], tokenizer: Encodes
) -> NeedleExample:
    story = draft.story
    texts = tuple(event.text for event in story.events)
    for attempt in range(_TRIES):
        random = seeds.generator(seed, *draft.seeds(), "filler", attempt)
        woven = fill(
            Filler(documents, random),
            texts,
            draft.depths,
            draft.budget,
            lambda context: _count(draft, context, tokenizer),
        )
        if _says_each_once(draft, woven.text):
            break
    else:
        raise Refusal(
            f"the filler says a value of {NEEDLES[draft.kind]} row {draft.index} in {_TRIES} drawn"
            " places: expected running prose without the needles' values; use another niah.filler"
        )
    start, ends = (
        woven.starts[story.asked],
        [s + len(t) for s, t in zip(woven.starts, texts, strict=True)],
    )
    opening = len(letter_tokens(tokenizer).opening)
    whole, before, after, last = (
        opening + len(tokenizer.encode(woven.text[:end], add_special_tokens=False))
        for end in (len(woven.text), max(0, start - 1), ends[story.asked], ends[-1])
    )
    return NeedleExample(
        kind=draft.kind,
        side=draft.side,
        index=draft.index,
        budget=draft.budget,
        context=woven.text,
        question=story.question,
        options=draft.options,
        gold=draft.gold,
        value=story.answer,
        events=texts,
        stem=story.stem,
        asks=tuple((e.question, e.stem, e.value) for e in story.events if e.question),
        starts=woven.starts,
        asked=story.asked,
        depth=round(before / whole, 4),
        distance=whole - after,
        nearest=whole - last,
        tokens=_count(draft, woven.text, tokenizer),
    )


def _says_each_once(draft: _Draft, context: str) -> bool:
    """Tell whether no value stands in the filler too; a counter's digits are no such values."""
    if draft.kind == "counter":
        return True
    values = (re.escape(event.value) for event in draft.story.events)
    return all(len(re.findall(rf"(?<!\w){value}(?!\w)", context)) == 1 for value in values)

# SPDX-License-Identifier: Apache-2.0
"""What the conditions of ``pairs.py`` share: models, rows, how a fuser is taught, what is sent."""

from __future__ import annotations

import argparse
import hashlib
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from question_sets import question_set
from transformers import AutoModelForCausalLM

from fedloom import seeds
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.models.base import Base, load_base
from fedloom.refining.classroom import Classroom
from fedloom.refining.hearing import Party, Shelf, Turn, hear
from fedloom.refining.lessons import Encoded, question_lesson
from fedloom.refining.scoring import Outcome, as_sent
from fedloom.refining.teaching import TeachConfig, calibrate, handed, teach
from fedloom.slices.frames import encode
from fedloom.slices.slice import CacheSlice

SHORT = {
    "smol": "embedded:smollm2-135m",
    "gemma": "embedded:gemma3-270m",
    "qwen": "embedded:qwen2.5-coder-0.5b",
}
HALF = 0.44
"""Of the tokens: with scales and frames, their 8 bits are a quarter of all tokens' 16."""
WRITTEN = 3
"""Tokens that are written before a letter is looked for."""


def sides(pair: str) -> tuple[str, str]:
    """Return the sources of a pair's sender and receiver."""
    sender, receiver = (SHORT.get(x, x) for x in pair.split("-", 1))
    return sender, receiver


@dataclass
class Study:
    """One pair with everything that its conditions share."""

    given: argparse.Namespace
    pair: str

    def __post_init__(self) -> None:
        sender, receiver = sides(self.pair)
        rows = question_set(self.given.set, self.given.folder)
        count = self.given.train + self.given.test
        if len(rows) < count:
            raise SystemExit(f"{self.given.set} has {len(rows)} rows, {count} are wanted")
        order = seeds.generator(0, "pairs", self.given.set).permutation(len(rows))[:count]
        self.questions = [rows[i] for i in order]
        self.receiver = self.shelf(load_base(receiver))
        self.sender = self.shelf(load_base(sender))

    def shelf(self, base: Base) -> Shelf:
        """Keep a model's slices in the study's folder."""
        return Shelf(Party.of(base), budget=self.given.memory << 20, folder=self.given.slices)

    def room(self, sender: Shelf, setting: str = "same") -> Classroom:
        """Part the questions: the same rows are held out in every condition and from every seed."""
        parts = [[question_lesson(q, setting) for q in part] for part in self.parts()]
        return Classroom.of(sender, self.receiver, parts[0], parts[1], longest=self.given.longest)

    def parts(self) -> tuple[list[Any], list[Any]]:
        """Return the questions to learn from and those held out."""
        return self.questions[: self.given.train], self.questions[self.given.train :]

    def config(self, **told: Any) -> FuserConfig:
        """Read all but the last token alone, unless the receiver slides windows."""
        if told.get("size", "small") == "small":
            told["width"] = self.given.width
        if slides(self.receiver):
            return FuserConfig(**told)
        return FuserConfig(tail=1, sink="receiver", **told)

    def how(self, **told: Any) -> TeachConfig:
        """Teach every condition alike."""
        given = self.given
        usual = {"steps": given.steps, "batch": given.batch, "learning_rate": given.lr}
        return TeachConfig(**{**usual, **told})

    def fuser_file(self, pair: str, seed: int) -> Path:
        """Say where the taught fuser of a pair lies."""
        return self.given.folder / "fusers" / f"{pair}-refined-{seed}" / "fuser.safetensors"


def slides(shelf: Shelf) -> bool:
    """Whether a model slides a window in some layer."""
    return len(shelf.party.geometry.full) < shelf.party.geometry.layers


def rows_of(outcomes: Sequence[Outcome], lessons: Sequence[Encoded]) -> list[dict[str, Any]]:
    """Write outcomes down with the right option's number."""
    gold = {lesson.row: lesson.gold for lesson in lessons}
    return [{**asdict(o), "gold": gold[o.row]} for o in outcomes]


def taught(
    study: Study,
    room: Classroom,
    seed: int,
    place: Path,
    fuser: CacheFuser | None = None,
    size: str = "small",
    **changes: Any,
) -> tuple[CacheFuser, dict[str, Any]]:
    """Teach a fuser, from a checkpoint if one is there."""
    if fuser is None:
        fuser = room.fresh(study.config(size=size), seed=seed)
        calibrate(fuser, room.sender, room.receiver, room.learnt, seed=seed)
    how = study.how(**changes)
    began = time.process_time()

    def progress(step: int, loss: float) -> None:
        if step % 25 == 0 or step == how.steps:
            print(f"  {step} of {how.steps}: {loss:.3f}", flush=True)

    report = teach(
        fuser,
        room.sender,
        room.receiver,
        room.learnt,
        how,
        seed=seed,
        folder=place,
        progress=progress,
    )
    facts = {"loss_first": report.loss_first, "loss_last": report.loss_last}
    facts |= {"train_cpu_seconds": time.process_time() - began, "resumed": report.resumed}
    return fuser, facts


def kept_of(lesson: Encoded) -> int:
    """Return how many tokens are ``HALF`` of a lesson's."""
    return max(int(HALF * len(lesson.shown_ids)), 2)


def by_norm(shelf: Shelf, lesson: Encoded) -> CacheSlice:
    """Keep the first token and those of the others with the longest values, layers alike.

    As ``slices.export_cache`` does with ``by="value-norm"``, from a slice that is there already.
    """
    whole, keep = handed(shelf, lesson), kept_of(lesson)
    norm = torch.stack([v.norm(dim=-1).mean(0) for v in whole.values.values()])
    size = (norm / norm.mean(1, keepdim=True)).mean(0)[1:]
    at = [0, *sorted((size.argsort(descending=True, stable=True)[: keep - 1] + 1).tolist())]
    parts = ({n: x[:, at] for n, x in p.items()} for p in (whole.keys, whole.values))
    return CacheSlice(whole.geometry, *parts, tuple(at))


def curve_of(shelf: Shelf, held: Sequence[Encoded]) -> dict[str, list[CacheSlice]]:
    """Return what is left of every slice: 16, 8 and 4 bits of all tokens and of two halves."""
    given = {}
    for name, pieces in (
        ("", [handed(shelf, lesson) for lesson in held]),
        ("-half", [handed(shelf, lesson, kept_of(lesson)) for lesson in held]),
        ("-half-norm", [by_norm(shelf, lesson) for lesson in held]),
    ):
        for scheme in ("bf16", "int8", "int4"):
            given[scheme + name] = [as_sent(piece, scheme) for piece in pieces]
    return given


def bytes_of(pieces: Sequence[CacheSlice], scheme: str) -> float:
    """Return the mean bytes of a slice in frames, layers that the fuser looks at or not."""
    key, session = secrets.token_bytes(32), secrets.token_bytes(16)
    return mean(sum(len(f) for f in encode(p, scheme, key, session)) for p in pieces[:20])


def scrambled(base: Base, seed: int) -> Base:
    """Return a model of the same architecture that has learnt nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds.split(seed, "random-sender"))
        made = AutoModelForCausalLM.from_config(base.model.config, attn_implementation="sdpa")
    name = hashlib.sha256(f"{base.base_hash}|random|{seed}".encode()).hexdigest()
    return replace(base, model=made.requires_grad_(False).eval(), base_hash=name)


@torch.no_grad()
def generated(
    receiver: Shelf,
    lessons: Sequence[Encoded],
    letters: Sequence[str],
    fuser: CacheFuser | None,
    slices: Sequence[CacheSlice] = (),
    *,
    config: FuserConfig,
    batch: int = 16,
) -> list[dict[str, Any]]:
    """Write a few tokens, greedily, and read the letter off the text; none is wrong, too.

    Parameters
    ----------
    letters
        The right one of each lesson.
    """
    tokenizer, found = receiver.party.base.tokenizer, []
    for start in range(0, len(lessons), batch):
        group, given = lessons[start : start + batch], slices[start : start + batch]
        made: list[tuple[int, ...]] = [() for _ in group]
        for _ in range(WRITTEN):
            turns = [
                Turn(x.prompt_ids, (*ids, 0), x.prompt_ends)
                for x, ids in zip(group, made, strict=True)
            ]
            logits = hear(receiver, turns, fuser, given, config=config)
            best = logits[:, -1].argmax(-1).tolist()
            made = [(*ids, token) for ids, token in zip(made, best, strict=True)]
        for lesson, ids, gold in zip(group, made, letters[start : start + batch], strict=True):
            said = letter_in(tokenizer.decode(list(ids)))
            found.append({"row": lesson.row, "correct": said == gold, "said": said})
    return found


def letter_in(text: str) -> str:
    """Return the letter that a text begins with, by itself; nothing if there is none.

    A word may be a letter, too: what follows must not be a word.

    >>> [letter_in(x) for x in (" B", "(C) because", "Because", "D.", "A nice", "")]
    ['B', 'C', '', 'D', '', '']
    """
    match = re.match(r"\W*([A-J])(?:$|[^\w ])", text)
    return match[1] if match else ""

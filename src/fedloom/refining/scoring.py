# SPDX-License-Identifier: Apache-2.0
"""How well a receiver answers lessons, row by row, with a fuser or without one.

Options are compared by the log-probability of their tokens, not by generated text: part of what a
fuser brings may be the form of an answer, and that part counts for nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch

from fedloom import seeds
from fedloom.adapters.fuser import CacheFuser, FuserConfig
from fedloom.adapters.gates import Draw
from fedloom.refining.hearing import Shelf, Turn, hear
from fedloom.refining.lessons import Encoded
from fedloom.slices.quantise import quantise, restore
from fedloom.slices.slice import CacheSlice


@dataclass(frozen=True)
class Outcome:
    """One lesson's answer.

    Attributes
    ----------
    correct : bool
        The likeliest option is the right one; of an open lesson, every token is.
    nats : float
        Cross-entropy of the right answer's tokens, over the whole vocabulary.
    options : tuple of float
        Log-probability of each option.
    """

    row: str
    correct: bool
    nats: float
    options: tuple[float, ...]


@torch.no_grad()
def score(
    receiver: Shelf,
    lessons: Sequence[Encoded],
    fuser: CacheFuser | None,
    slices: Sequence[CacheSlice] = (),
    *,
    config: FuserConfig | None = None,
    draw: Draw | None = None,
    batch: int = 16,
) -> list[Outcome]:
    """Score every lesson.

    Parameters
    ----------
    slices
        What the sender hands over, one for each lesson; whose they are is the caller's choice.
    config
        How the receiver reads when there is no fuser, so that both read alike.
    draw
        Score with gates that are drawn, as in training.
    """
    how = fuser.config if fuser is not None else config or FuserConfig()
    found: list[Outcome] = []
    for start in range(0, len(lessons), batch):
        group = lessons[start : start + batch]
        given = slices[start : start + batch]
        found += _scored(receiver, group, fuser, given, how, draw)
    return found


def _scored(
    receiver: Shelf,
    lessons: Sequence[Encoded],
    fuser: CacheFuser | None,
    slices: Sequence[CacheSlice],
    config: FuserConfig,
    draw: Draw | None,
) -> list[Outcome]:
    short = all(len(o) == 1 for lesson in lessons for o in lesson.option_ids)
    turns, given = [], []
    for i, lesson in enumerate(lessons):  # one token an option: all are read off one distribution
        answers = [lesson.answer_ids] if short or not lesson.option_ids else lesson.option_ids
        turns += [Turn(lesson.prompt_ids, answer, lesson.prompt_ends) for answer in answers]
        given += [slices[i]] * len(answers) if fuser is not None else []
    logits = hear(receiver, turns, fuser, given, config=config, draw=draw)
    logp_BAV = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    found, at = [], 0
    for lesson in lessons:
        if not lesson.option_ids:
            ids = list(lesson.answer_ids)
            rows = logp_BAV[at, : len(ids)]
            right = rows.argmax(-1).tolist() == ids
            nats = -float(rows[range(len(ids)), ids].mean())
            found.append(Outcome(lesson.row, right, nats, ()))
            at += 1
            continue
        if short:
            scores = [float(logp_BAV[at, 0, ids[0]]) for ids in lesson.option_ids]
        else:
            scores = [
                float(logp_BAV[at + j, range(len(ids)), list(ids)].sum())
                for j, ids in enumerate(lesson.option_ids)
            ]
        best = max(range(len(scores)), key=scores.__getitem__)
        nats = -scores[lesson.gold] / len(lesson.option_ids[lesson.gold])
        found.append(Outcome(lesson.row, best == lesson.gold, nats, tuple(scores)))
        at += 1 if short else len(scores)
    return found


def accuracy(outcomes: Sequence[Outcome]) -> float:
    """Return the share of right answers."""
    return mean(float(o.correct) for o in outcomes)


def nats(outcomes: Sequence[Outcome]) -> float:
    """Return the mean cross-entropy."""
    return mean(o.nats for o in outcomes)


def shuffled(slices: Sequence[CacheSlice], *, seed: int) -> list[CacheSlice]:
    """Hand everyone somebody else's: a cyclic turn of a drawn order, so that none stays."""
    order = seeds.generator(seed, "shuffled").permutation(len(slices)).tolist()
    other = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [slices[other[i]] for i in range(len(slices))]


def zeroed(piece: CacheSlice) -> CacheSlice:
    """Empty a slice of all but its shape."""
    keys, values = (
        {n: torch.zeros_like(x) for n, x in part.items()} for part in (piece.keys, piece.values)
    )
    return replace(piece, keys=keys, values=values)


def as_sent(piece: CacheSlice, scheme: str) -> CacheSlice:
    """Return what is left of a slice after a scheme's bytes."""
    made = {}
    for n in piece.layers:
        shape = tuple(piece.keys[n].shape)
        parts = quantise(piece.keys[n], piece.values[n], scheme)
        made[n] = restore(parts, scheme, (shape[0], shape[1], shape[2]))
    keys, values = ({n: pair[i].to(piece.keys[n]) for n, pair in made.items()} for i in (0, 1))
    return replace(piece, keys=keys, values=values)


def gate_report(
    receiver: Shelf,
    lessons: Sequence[Encoded],
    fuser: CacheFuser,
    slices: Sequence[CacheSlice],
    hard: Sequence[Outcome],
    *,
    seed: int,
) -> dict[str, float]:
    """Say how many layers listen, and what is lost by making drawn gates hard.

    ``gate_gap_nats`` is the loss with gates drawn at temperature 1 less the one with hard gates:
    far from zero, training was about another fuser than the one that is served.
    """
    noise = torch.Generator().manual_seed(seeds.split(seed, "soft"))
    soft = score(receiver, lessons, fuser, slices, draw=Draw(1.0, noise))
    return {
        "layers": float(len(fuser.layers)),
        "open_layers": float(len(fuser.open_layers())),
        "gate_gap_nats": nats(soft) - nats(hard),
    }

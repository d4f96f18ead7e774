# SPDX-License-Identifier: Apache-2.0
"""Co-C2C: models that refine each other at the same time (FedRefine, arXiv 2603.28772).

All prefill, all exchange, then all refine: in a round everyone reads the caches of before the round
(Jacobi).  If one read what another has just refined, the result would depend on who was first
(Gauss and Seidel); that is ``one-by-one``, for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedloom.adapters.fuser import CacheFuser
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.refining.answer import Refinement, prefixed
from fedloom.refining.refine import measured
from fedloom.refining.scoring import as_sent
from fedloom.slices.slice import CacheSlice, export_cache

SCHEDULES = ("together", "one-by-one")
Fusers = Mapping[tuple[int, int], CacheFuser]
"""(sender's place, receiver's place) -> the fuser of the pair; who has none is not heard."""


@dataclass(frozen=True)
class Party:
    """A model with its own wording of the question, as token ids of its own."""

    base: Base
    prompt: Sequence[int]


@torch.no_grad()
def mutual(
    parties: Sequence[Party],
    fusers: Fusers,
    *,
    rounds: int = 1,
    schedule: str = "together",
    scheme: str = "",
) -> list[Refinement]:
    """Let models refine each other's answers and return each, ready to go on.

    Parameters
    ----------
    rounds
        Exchanges; 0 leaves everyone alone. From the second on, caches that were refined are
        exchanged: the paper has one round, and fusers are trained on caches that were not.
    scheme
        What is exchanged is rounded as ``bf16``, ``int8`` or ``int4`` on a wire; empty does not
        round. With it, ``together`` gives the same bits, and so does a federation.

    Raises
    ------
    Refusal
        For a residual fuser, or if a later round needs a sender's layer that slides a window.
    """
    if rounds < 0 or schedule not in SCHEDULES:
        raise Refusal(
            f'rounds = {rounds}, schedule = "{schedule}": expected 0 or more, and one of'
            f" {', '.join(SCHEDULES)}"
        )
    if any(fuser.config.mode != "prefix" for fuser in fusers.values()):
        raise Refusal("residual fusers do not exchange caches of different texts: use prefix ones")
    apart = any(is_apart(fuser) for fuser in fusers.values())
    if apart and (rounds > 1 or schedule != "together"):
        raise Refusal(
            f'rounds = {rounds}, schedule = "{schedule}": fusers with a tail or the receiver\'s own'
            " sink leave the prompt's cache as it was, so there is nothing new to exchange; take"
            " one round together"
        )
    places = range(len(parties))
    held = [export_cache(p.base.model, measured(p.base), p.prompt) for p in parties]
    made = [_read(place, parties, held, {}) for place in places] if not rounds else []
    for _ in range(rounds):
        made, before = [], list(held)
        for place in places:
            given = before if schedule == "together" else held
            made.append(_read(place, parties, given, fusers, scheme))
            if not apart:
                held[place] = made[-1].own_slice(measured(parties[place].base))
    return made


def is_apart(fuser: CacheFuser) -> bool:
    """Say whether a receiver reads part of its prompt alone: that part is never refined."""
    return fuser.config.tail > 0 or fuser.config.sink != "sender"


def _read(
    place: int,
    parties: Sequence[Party],
    held: Sequence[CacheSlice],
    fusers: Fusers,
    scheme: str = "",
) -> Refinement:
    sources = [
        (fusers[sender, place], as_sent(held[sender], scheme) if scheme else held[sender])
        for sender in range(len(parties))
        if sender != place and (sender, place) in fusers
    ]
    me = parties[place]
    return prefixed(me.base, measured(me.base), me.prompt, sources)

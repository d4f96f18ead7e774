# SPDX-License-Identifier: Apache-2.0
"""Co-C2C one party at a time, by frames and with receipts: what a node does of ``mutual``.

Everyone reads the question alone, hands its cache to all, and reads it again among theirs; with
more rounds what is handed over next is what the question's tokens have become (Jacobi, FedRefine,
arXiv 2603.28772).  Whoever is not heard is missing from that exchange and is named in the receipt;
with nobody heard an answer is its model's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from fedloom.adapters.fuser import CacheFuser
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.refining.answer import Refinement
from fedloom.refining.mutual import Fusers, is_apart
from fedloom.refining.refine import Answer, measured, refine
from fedloom.refining.sources import Request, Sender
from fedloom.refining.terms import Terms
from fedloom.slices.frames import encode
from fedloom.slices.slice import CacheSlice, export_cache


def unfit(fuser: CacheFuser, rounds: int) -> str:
    """Say why a fuser cannot take part in so many exchanges, or nothing if it can."""
    if fuser.config.mode != "prefix":
        return "a residual fuser does not exchange caches: use a prefix one"
    if rounds > 1 and is_apart(fuser):
        return (
            "a fuser with a tail or the receiver's own sink leaves the question's cache as it was:"
            " there is nothing new to exchange after the first round; take one round"
        )
    return ""


@torch.no_grad()
def opening(base: Base, text: str, max_tokens: int = 4096) -> CacheSlice:
    """Return a model's cache of a text, of before any exchange.

    Raises
    ------
    Refusal
        If the text is longer than ``max_tokens``.
    """
    ids = base.tokenizer.encode(text)
    if len(ids) > max_tokens:
        raise Refusal(f"a text of {len(ids)} tokens: at most {max_tokens} are read")
    return export_cache(base.model, measured(base), ids)


def turned(base: Base, text: str, senders: Sequence[Sender], terms: Terms) -> CacheSlice:
    """Read a text among senders; return what its tokens have become, to be handed over next."""
    made: list[Refinement] = []
    refine(base, text, senders, terms=terms, max_new_tokens=0, then=made.append)
    return made[0].own_slice(measured(base))


def handed(
    piece: CacheSlice, layers: Collection[int], scheme: str, key: bytes, session: bytes
) -> Iterator[bytes]:
    """Write the layers that somebody asked for as frames.

    Raises
    ------
    Refusal
        If one is not there: a refined cache has no layers that slide a window.
    """
    if missing := set(layers) - set(piece.layers):
        raise Refusal(
            f"the slice lacks the sender's layer {min(missing)}: it slides a window, and a refined"
            " cache has forgotten part of it; take one round"
        )
    keys, values = ({n: part[n] for n in sorted(layers)} for part in (piece.keys, piece.values))
    kept = CacheSlice(piece.geometry, keys, values, piece.places, piece.ends)
    return encode(kept, scheme, key, session)


def together(
    bases: Sequence[Base],
    fusers: Fusers,
    text: str,
    *,
    rounds: int = 1,
    terms: Terms | None = None,
    max_new_tokens: int = 64,
    stop: Collection[int] | None = None,
) -> list[Answer]:
    """Let models in one process refine each other's answers; return each with its receipt.

    Parameters
    ----------
    fusers
        (sender's place, receiver's place) -> fuser.
    rounds
        Exchanges, 1 or more.

    Raises
    ------
    Refusal
        If fewer than two models meet, a fuser cannot take part, or a part of the tokens is to be
        kept: whole caches are exchanged.
    """
    terms = terms or Terms()
    if len(bases) < 2 or rounds < 1:
        raise Refusal(f"{len(bases)} models, {rounds} rounds: expected two or more, and 1 or more")
    if terms.share != 1 or terms.part:
        raise Refusal("Co-C2C exchanges whole caches: leave the share of tokens and of bytes out")
    if odd := [why for fuser in fusers.values() if (why := unfit(fuser, rounds))]:
        raise Refusal(odd[0])
    held = [opening(base, text, terms.max_tokens) for base in bases]

    def others(place: int) -> list[Sender]:
        there = [n for n in range(len(bases)) if n != place]
        return [_holding(bases[n], held[n], fusers.get((n, place))) for n in there]

    for _ in range(rounds - 1):
        held = [turned(base, text, others(n), terms) for n, base in enumerate(bases)]
    told: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop": stop}
    return [refine(base, text, others(n), terms=terms, **told) for n, base in enumerate(bases)]


def _holding(base: Base, piece: CacheSlice, fuser: CacheFuser | None) -> Sender:
    """Make a sender of a cache that is there already."""

    def ask(request: Request) -> Iterator[bytes]:
        return handed(piece, request.layers, request.scheme, request.key, request.session)

    return Sender(measured(base), ask, fuser, str(base.source), source=str(base.source))

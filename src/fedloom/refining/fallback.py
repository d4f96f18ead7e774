# SPDX-License-Identifier: Apache-2.0
"""``refine_or_ask``: caches first, the senders' words (T2T) where none is left, then alone.

Whoever lost its cache to the line, to time or to its fuser may still say in words what it knows,
within what is left of the deadline.  Who fell to a guard is not asked: what a guard does not let in
as a cache it must not bring in as text.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from fedloom.models.base import Base
from fedloom.refining.refine import Answer, Terms, refine
from fedloom.refining.selected import Telling
from fedloom.refining.sources import Sender
from fedloom.refining.text import in_context

MESSAGE = 80
"""Tokens of a message: what Cache-to-Cache's senders write on average (arXiv 2510.03215)."""
_WRITING = 0.8  # of the seconds left: the rest is for the way, and for what is late by a little


def refine_or_ask(
    receiver: Base,
    prompt: str,
    senders: Sequence[Sender],
    *,
    tokens: int = MESSAGE,
    shown: str | None = None,
    terms: Terms | None = None,
    max_new_tokens: int = 64,
    stop: Collection[int] | None = None,
) -> Answer:
    """Answer a prompt as ``refine`` does; if no cache is left, with what senders write.

    The receipt has a line for each cache that fell away, and one more for each message.

    Parameters
    ----------
    tokens
        Of a message, at most.
    """
    terms = terms or Terms()
    telling: list[Telling] = []

    def words(seconds: float, fallen: Sequence[Sender]) -> list[int] | None:
        until = time.monotonic() + seconds
        if seconds <= 0:
            return None
        short = replace(terms, deadline=_WRITING * seconds)
        asked = [sender for sender in fallen if sender.tell is not None]
        telling.extend(Telling(s, prompt if shown is None else shown, tokens, short) for s in asked)
        for each in telling:
            each.start()
        for each in telling:
            each.done.wait(max(0.0, until - time.monotonic()))
            each.settle(seconds)
        said = [each.message for each in telling if each.message is not None]
        return receiver.tokenizer.encode(in_context(prompt, said)) if said else None

    answer = refine(
        receiver,
        prompt,
        senders,
        shown=shown,
        terms=terms,
        max_new_tokens=max_new_tokens,
        stop=stop,
        words=words,
    )
    told = [*answer.receipt.sources, *(each.receipt for each in telling)]
    sources = tuple(sorted(told, key=lambda source: (source.model, source.name)))
    return replace(answer, receipt=replace(answer.receipt, sources=sources))

# SPDX-License-Identifier: Apache-2.0
"""``refine_selected``: an answer with those whom a choice took, each in its own way.

Caches are fused as always; messages in words (T2T) are written at the same time and stand before
the receiver's prompt.  Whoever was left is not asked and is no fallback: the choice in the receipt
says why.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.refining.receipt import (
    LOST,
    STANDALONE,
    T2T,
    USED,
    SourceReceipt,
    kind_of_fallback,
)
from fedloom.refining.refine import Answer, Terms, refine
from fedloom.refining.selection import TEXT
from fedloom.refining.sources import Sender, SourceLost
from fedloom.refining.text import Written, in_context
from fedloom.slices.reading import FrameError

_LONGEST = 64  # bytes of text for each token that was allowed: more is not what was asked for


def refine_selected(
    receiver: Base,
    prompt: str,
    senders: Sequence[Sender],
    chosen: Mapping[str, Any],
    *,
    question: str | None = None,
    shown: str | None = None,
    terms: Terms | None = None,
    max_new_tokens: int = 64,
    stop: Collection[int] | None = None,
) -> Answer:
    """Answer a prompt with the senders that ``decide`` took.

    Parameters
    ----------
    senders
        Those that were to be chosen from, or some of them.
    chosen
        What ``decide`` returned; it becomes the receipt's ``selection``.
    question
        What writers of messages are asked; by default what readers are shown.
    """
    terms = terms or Terms()
    caches, writers = by_way(senders, chosen["chosen"])
    asked = next(text for text in (question, shown, prompt) if text is not None)
    telling = [Telling(sender, asked, chosen["message_tokens"], terms) for sender in writers]
    until = time.monotonic() + terms.deadline
    for each in telling:
        each.start()

    def late() -> str:
        for each in telling:
            each.done.wait(max(0.0, until - time.monotonic()))
            each.settle(terms.deadline)
        return in_context(prompt, [each.message for each in telling if each.message is not None])

    answer = refine(
        receiver,
        prompt,
        caches,
        shown=shown,
        terms=terms,
        max_new_tokens=max_new_tokens,
        stop=stop,
        late=late if telling else None,
    )
    told = [*answer.receipt.sources, *(each.receipt for each in telling)]
    sources = tuple(sorted(told, key=lambda source: (source.model, source.name)))
    mode = answer.receipt.mode
    if mode == STANDALONE and any(each.receipt.status == USED for each in telling):
        mode = T2T
    receipt = replace(
        answer.receipt,
        mode=mode,
        fallback=kind_of_fallback(sources, mode),
        sources=sources,
        selection=dict(chosen),
    )
    return replace(answer, receipt=receipt)


def by_way(senders: Sequence[Sender], ways: Mapping[str, str]) -> tuple[list[Sender], list[Sender]]:
    """Return who hands out a cache, with its scheme, and who writes; the others are left."""
    kept = [(sender, ways[sender.name]) for sender in senders if sender.name in ways]
    caches = [replace(sender, scheme=way) for sender, way in kept if way != TEXT]
    return caches, [sender for sender, way in kept if way == TEXT]


@dataclass(frozen=True)
class _Lost:
    cause: str
    reason: str


class Telling(threading.Thread):
    """One sender writing; a daemon, so that one who never ends holds up no exit."""

    def __init__(self, sender: Sender, text: str, tokens: int, terms: Terms) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.message: Written | None = None
        geometry = sender.geometry
        self.receipt = SourceReceipt(model=geometry.model, name=sender.name, way=TEXT)
        self._sender, self._text, self._tokens, self._terms = sender, text, tokens, terms
        self._came: Written | _Lost | None = None
        self._began = time.monotonic()

    def run(self) -> None:
        """Write, in the thread."""
        try:
            self._came = self._write()
        except SourceLost as error:
            self._came = _Lost(error.cause, str(error))
        except FrameError as error:
            self._came = _Lost("integrity", str(error))
        except Refusal as error:
            self._came = _Lost("failed", str(error))
        except Exception as error:  # a sender's fault is no fault of the answer
            said = " ".join(str(error).split())[:200]
            self._came = _Lost("failed", f"{type(error).__name__}: {said}")
        self.done.set()

    def _write(self) -> Written | _Lost:
        if self._sender.tell is None:
            return _Lost("failed", "it writes no messages")
        made = self._sender.tell(self._text, self._tokens, self._terms.deadline)
        size = len(made.text.encode())
        if size > _LONGEST * self._tokens:
            return _Lost("integrity", f"a message of {size} bytes for {self._tokens} tokens")
        if not made.text.strip():
            return _Lost("failed", "it wrote nothing")
        model = self._sender.geometry.model  # not what it calls itself
        return replace(made, sender=model, nbytes=size)

    def settle(self, deadline: float) -> None:
        """Say what has come by now; what comes later is nobody's."""
        came = self._came or _Lost("deadline", f"no message within {deadline:g} s")
        spent = time.monotonic() - self._began
        if isinstance(came, _Lost):
            self.receipt = replace(
                self.receipt,
                status=LOST,
                cause=came.cause,
                reason=came.reason,
                seconds=min(spent, deadline),
            )
            return
        self.message = came
        self.receipt = replace(
            self.receipt, tokens=came.tokens, bytes=came.nbytes, seconds=came.seconds
        )

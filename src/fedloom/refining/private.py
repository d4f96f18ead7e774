# SPDX-License-Identifier: Apache-2.0
"""Private mode: what senders read is the receiver's own rewording of a question, or nothing.

FedRefine (arXiv 2603.28772) lets the receiver rephrase before it asks.  The receiver itself answers
the original among caches of the rewording.  Where no checked rewording is found nobody is asked,
and the answer is the receiver's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedloom.data.questions import Question
from fedloom.errors import Refusal
from fedloom.models.base import Base
from fedloom.refining.receipt import STANDALONE
from fedloom.refining.refine import Answer
from fedloom.refining.rephrasing import Rephrased, Standalone, rephrase
from fedloom.refining.sources import Sender

Reword = Callable[..., Rephrased | Standalone]
"""Called as ``rephrase`` is."""


@dataclass(frozen=True)
class Reworded:
    """A question as others may read it.

    Attributes
    ----------
    question : Question or None
        In other words, options as they were; None if it stays at home.
    retries : int
        Attempts that were turned down before one passed, or in all.
    removed : int
        Entities that the rules took out first.
    """

    question: Question | None
    retries: int
    removed: int

    def facts(self) -> dict[str, Any]:
        """Return what a receipt says of it; no text."""
        passed = self.question is not None
        told = {"rephrased": passed, "retries": self.retries, "standalone": not passed}
        return {**told, "removed": self.removed}


def reworded(
    base: Base, question: Question, *, seed: int, tries: int, reword: Reword = rephrase
) -> Reworded:
    """Let the receiver's model reword a question with options."""
    return _made(reword(base, question, seed=seed, tries=tries))


def reworded_text(
    base: Base, text: str, *, seed: int, tries: int, reword: Reword = rephrase
) -> Reworded:
    """Let it reword an open question: there is no choice between options to be kept."""
    asked = Question("asked", text, ("", ""), 0)
    return _made(reword(base, asked, seed=seed, tries=tries, choose=lambda _: 0))


def _made(found: Rephrased | Standalone) -> Reworded:
    turned_down = sum(bool(attempt.reason) for attempt in found.attempts)
    question = found.question if isinstance(found, Rephrased) else None
    return Reworded(question, turned_down, len(found.removed))


def marked(answer: Answer, facts: dict[str, Any] | None) -> Answer:
    """Say in an answer's receipt what was done to its question before others saw it."""
    if facts is None:
        return answer
    fallback = STANDALONE if facts["standalone"] else answer.receipt.fallback
    receipt = replace(answer.receipt, rephrasing=dict(facts), fallback=fallback)
    return replace(answer, receipt=receipt)


def aligned(senders: Sequence[Sender]) -> list[Sender]:
    """Return the senders whose fusers need both models to read one text."""
    return [s for s in senders if s.fuser is not None and s.fuser.config.mode == "residual"]


def check_private(senders: Sequence[Sender]) -> None:
    """Refuse senders who cannot be heard on another text than the receiver's.

    Raises
    ------
    Refusal
        If one has a residual fuser.
    """
    if odd := aligned(senders):
        raise Refusal(
            f"{odd[0].name or odd[0].geometry.model[:12]} has a residual fuser, which adds token to"
            " token of one text: it cannot be asked in other words; use a prefix fuser"
        )

# SPDX-License-Identifier: Apache-2.0
"""Running text with events in it, as long as a budget of tokens lets it be."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedloom import seeds
from fedloom.data.niah.words import TEST_SHARE
from fedloom.data.text import Document, load_text
from fedloom.errors import Refusal

_WORKS = 4  # with so many, no article or novel is on both sides; with fewer, passages are dealt out
_DANGLING = ",;:-\u2013\u2014"  # before the full stop that ends a cut sentence
_SLACK = 2  # tokens under the budget that are not worth another count


@dataclass(frozen=True)
class Woven:
    """A context and where its events stand."""

    text: str
    starts: tuple[int, ...]
    """Of each event, the index of its first character."""


def share_out(source: str, seed: int) -> dict[str, tuple[Document, ...]]:
    """Divide a text into documents for ``train`` and for ``test`` that share no sentence.

    A source that has such splits keeps them; else a quarter of its works goes to testing, or of its
    passages if the works are few.

    Raises
    ------
    Refusal
        If there is not enough text for two sides.
    """
    documents = load_text(source)
    if documents[0].side:
        sides = {side: [d for d in documents if d.side == side] for side in ("train", "test")}
    else:
        sides = _dealt(documents, seed)
    known = {sentence for document in sides["train"] for sentence in document.sentences}
    fresh = [
        Document(d.work, d.part, tuple(s for s in d.sentences if s not in known), d.side)
        for d in sides["test"]
    ]
    made = {"train": tuple(sides["train"]), "test": tuple(d for d in fresh if d.sentences)}
    if not (made["train"] and made["test"]):
        raise Refusal(
            f"niah.filler {source} has {len(documents)} passage(s) of text: expected enough for"
            " training and testing to share none; give it more text"
        )
    return made


def _dealt(documents: Sequence[Document], seed: int) -> dict[str, list[Document]]:
    works = list(dict.fromkeys(document.work for document in documents))
    whole = len(works) >= _WORKS
    units: list[str | tuple[str, int]] = (
        [*works] if whole else [(d.work, d.part) for d in documents]
    )
    order = seeds.generator(seed, "niah", "filler").permutation(len(units))
    tested = {units[i] for i in order[: max(1, round(TEST_SHARE * len(units)))]}
    sides: dict[str, list[Document]] = {"train": [], "test": []}
    for document in documents:
        unit = document.work if whole else (document.work, document.part)
        sides["test" if unit in tested else "train"].append(document)
    return sides


class Filler:
    """An endless slice of a side's documents that starts at a random sentence."""

    def __init__(self, documents: Sequence[Document], random: np.random.Generator) -> None:
        self._stream = _sentences(documents, random)
        self._drawn: list[list[str]] = []
        self._words = 0

    def take(self, words: int) -> list[str]:
        """Return sentences of so many words in all; the last one may be cut short."""
        while self._words < words:
            self._drawn.append(next(self._stream).split(" "))
            self._words += len(self._drawn[-1])
        taken, left = [], words
        for sentence in self._drawn:
            if left <= 0:
                break
            kept = sentence[:left]
            whole = len(kept) == len(sentence)
            taken.append(" ".join(kept) if whole else f"{' '.join(kept).rstrip(_DANGLING)}.")
            left -= len(kept)
        return taken


def _sentences(documents: Sequence[Document], random: np.random.Generator) -> Iterator[str]:
    order = random.permutation(len(documents))
    first = documents[order[0]].sentences
    yield from first[int(random.integers(len(first))) :]
    for index in itertools.cycle([*order[1:], order[0]]):  # a short text is read again
        yield from documents[index].sentences


def weave(filler: Sequence[str], events: Sequence[str], depths: Sequence[float]) -> Woven:
    """Put events between sentences, each where its fraction of the filler's words is reached.

    >>> weave(["A b.", "C d."], ["E."], [0.5])
    Woven(text='A b. E. C d.', starts=(5,))
    """
    ends = np.cumsum([0, *(sentence.count(" ") + 1 for sentence in filler)])
    slots = [int(np.abs(ends - depth * ends[-1]).argmin()) for depth in depths]
    pieces: list[str] = []
    starts = []
    for index, sentence in enumerate([*filler, ""]):
        for event, slot in zip(events, slots, strict=True):
            if slot == index:
                starts.append(len(" ".join([*pieces, ""])))
                pieces.append(event)
        if sentence:
            pieces.append(sentence)
    return Woven(" ".join(pieces), tuple(starts))


def fill(
    filler: Filler,
    events: Sequence[str],
    depths: Sequence[float],
    budget: int,
    count: Callable[[str], int],
) -> Woven:
    """Weave as much filler around the events as a budget of tokens allows, to about a word.

    Parameters
    ----------
    filler
        Where the sentences are from.
    events, depths
        What is hidden and where, in rising order.
    budget
        Tokens that the whole prompt may have.
    count
        Tokens of the whole prompt with a given context; with no filler it is within the budget.
    """
    best = weave([], events, depths)
    bare = tokens = count(best.text)
    fits, too_many, per_word = 0, 0, 1.4
    while budget - tokens > _SLACK:
        words = fits + max(1, int((budget - tokens) / per_word))
        if too_many and words >= too_many:
            words = (fits + too_many) // 2
        if words == fits:
            break
        tried = weave(filler.take(words), events, depths)
        came = count(tried.text)
        per_word = max((came - bare) / words, 0.1)
        if came <= budget:
            best, tokens, fits = tried, came, words
        else:
            too_many = words
    return best

# SPDX-License-Identifier: Apache-2.0
"""Texts into sequences, sequences into sums, sums into a memory that hangs on the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fedloom.adapters.fast_sums import Grams, Passage, compile_sums
from fedloom.adapters.fast_weights import ReadOut, decoder_of
from fedloom.data.text import load_text
from fedloom.errors import Refusal
from fedloom.evaluation import stream_cross_entropy
from fedloom.models.base import Base
from fedloom.models.tokenizer import Tokenizer
from fedloom.rules.solving import solve

LENGTH = 512
"""Tokens of a sequence; the paper packs 1024."""


def read_texts(sources: Sequence[str]) -> list[str]:
    """Return the documents of files (each is one, as it stands) and of named text sources.

    Raises
    ------
    Refusal
        If a file cannot be read as UTF-8, or a source is not known.
    """
    found: list[str] = []
    for source in sources:
        if source.partition(":")[0] in ("packaged", "hub", "path"):
            found += [" ".join(document.sentences) for document in load_text(source)]
        else:
            found.append(_file(Path(source)))
    return found


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refusal(
            f"{path}: {error.strerror}; expected a text file, or a source such as"
            " packaged:wikipedia"
        ) from error
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 ({error.reason}): expected a text file") from error


def windows(text: str, tokenizer: Tokenizer, length: int = LENGTH) -> list[tuple[int, ...]]:
    """Cut a document into sequences of ``length`` tokens; none overlaps, none is a single token.

    >>> from fedloom.models.tokenizer import ByteTokenizer
    >>> [len(ids) for ids in windows("a" * 10, ByteTokenizer(), 4)]
    [4, 4, 3]
    """
    ids = tokenizer.encode(text)
    cut = [tuple(ids[i : i + length]) for i in range(0, len(ids), length)]
    return [row for row in cut if len(row) > 1]


def compile_text(
    base: Base,
    texts: Iterable[str],
    *,
    places: Sequence[int] | None = None,
    readouts: Mapping[int, ReadOut] | None = None,
    length: int = LENGTH,
    batch_size: int = 1,
) -> Grams:
    """Sum over all neighbouring tokens of ``texts`` in one forward pass a sequence.

    Parameters
    ----------
    places : sequence of int, optional
        The output memory's alone if left out.

    Raises
    ------
    Refusal
        If the texts hold no two tokens in a row.
    """
    where = [len(decoder_of(base.model).layers)] if places is None else places
    passages = (Passage(row) for text in texts for row in windows(text, base.tokenizer, length))
    sums = compile_sums(
        base.model, passages, places=where, readouts=readouts, batch_size=batch_size
    )
    if not all(gram.count for gram in sums.values()):
        raise Refusal("the support text holds no two tokens in a row: expected running text")
    return sums


def solved(sums: Grams, alpha: float) -> dict[int, NDArray[Any]]:
    """Solve each place's fast weights."""
    return {place: solve(gram, alpha=alpha).weights for place, gram in sums.items()}


def nats(base: Base, rows: Iterable[Sequence[int]], *, chunk: int = 256) -> tuple[float, int]:
    """Return the cross-entropy of all next tokens of ``rows``, added up, and how many they are.

    Whatever hangs on the model is heard.  Each row is read from its start, so that no token sees
    more context than when the memory was compiled.
    """
    total, tokens = 0.0, 0
    for row in rows:
        curve = stream_cross_entropy(base.model, row, chunk=chunk)
        total, tokens = total + math.fsum(curve.sums), tokens + sum(curve.counts)
    return total, tokens

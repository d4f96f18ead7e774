# SPDX-License-Identifier: Apache-2.0
"""Items with labels, for classification: texts or images, and the names of their classes.

``packaged:NAME`` rides in archives of package registries and is read out of them as data;
``path:FILE`` is the user's own table with the columns ``text`` and ``label``.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedloom import archives
from fedloom.data import files, images, sentences
from fedloom.errors import Refusal, nearest

Items = Sequence[str] | NDArray[np.uint8]
"""Texts, or images ``[n, height, width]`` or ``[n, height, width, 3]``."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """A data set; its order says nothing."""

    items: Items
    labels: NDArray[np.int64]
    """Index of each item's class: ``[n]``."""
    classes: tuple[str, ...]
    """What the classes are called, for people and for label embeddings."""
    owners: tuple[str, ...] = ()
    """Who holds each item by nature (a shop, a paper); empty if nobody in particular."""
    test: NDArray[np.bool_] | None = None
    """The source's own test items; none if it has no split."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self) -> tuple[str, ...]:
        """Name each item by its content and label: 16 hex digits of a SHA-256."""
        return tuple(
            _row(item, self.classes[label])
            for item, label in zip(self.items, self.labels, strict=True)
        )


def _row(item: Any, label: str) -> str:
    # JSON says where one part ends: with a plain mark between, "a|b" and "c" are "a" and "b|c".
    if isinstance(item, str):
        data = json.dumps([item, label]).encode()
    else:
        plain = np.ascontiguousarray(item)
        head = json.dumps([plain.dtype.str, plain.shape, label])
        data = head.encode() + plain.tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def load_labelled(source: str) -> Labelled:
    """Load a data set by name.

    Raises
    ------
    Refusal
        If the source is not known or cannot be had.
    """
    kind, _, name = source.partition(":")
    if kind == "path" and name:
        return _table(Path(name).expanduser().resolve())
    if source not in SOURCES:
        raise Refusal(
            f'data "{source}"{nearest(source, SOURCES)}: expected path:FILE or one of'
            f" {', '.join(SOURCES)}"
        )
    return SOURCES[source]()


def _digits() -> Labelled:
    from sklearn.datasets import load_digits  # not for a coordinator

    bunch = load_digits()
    pixels = (bunch.images * (255 / 16)).round().astype(np.uint8)
    return Labelled(pixels, bunch.target.astype(np.int64), tuple(map(str, range(10))))


def _uci() -> Labelled:
    """Sentences of three kinds of reviews, 500 for and 500 against of each: CC BY 4.0."""
    read = list(sentences.uci(archives.fetch(archives.SENTIMENT)))
    shops, texts, labels = zip(*read, strict=True)
    return Labelled(texts, np.array(labels, np.int64), ("negative", "positive"), shops)


def _newsgroups() -> Labelled:
    """20 Newsgroups, lower-cased and without anything but letters, with its split by date."""
    archive = archives.fetch(archives.ORANGE_TEXT)
    read = [
        (label, text, side == "test")
        for side in ("train", "test")
        for label, text in sentences.orange(archive, f"20newsgroups-{side}")
    ]
    names, texts, test = zip(*read, strict=True)
    return _named(texts, names, test=np.array(test))


def _fashion_mnist() -> Labelled:
    """60 000 and 10 000 grey pictures of clothes, 28 x 28: MIT."""
    pixels, labels, test = images.fashion_mnist(archives.fetch(archives.FASHION))
    return Labelled(pixels, labels, images.CLOTHES, test=test)


def _cifar10() -> Labelled:
    """Read the 10 000 pictures of CIFAR-10's test set, all that the archive has of it."""
    pixels, labels = images.cifar10()
    return Labelled(pixels, labels, images.CIFAR10)


def _table(path: Path) -> Labelled:
    """Read rows of text and label; whose they are if there is a column ``owner``."""
    texts, names, owners = [], [], []
    for place, row in files.rows(path):
        text, label = (str(row.get(c, "")).strip() for c in ("text", "label"))
        if not text or not label:
            raise Refusal(f"{place}: expected a text and a label in the columns of those names")
        texts.append(text)
        names.append(label)
        owners.append(str(row.get("owner") or ""))
    if len(set(names)) < 2:
        raise Refusal(f"path:{path} has {len(set(names))} classes: expected two or more labels")
    return _named(texts, names, tuple(owners) if any(owners) else ())


def _named(
    texts: Sequence[str],
    names: Sequence[str],
    owners: tuple[str, ...] = (),
    test: NDArray[np.bool_] | None = None,
) -> Labelled:
    classes, labels = np.unique(np.array(names), return_inverse=True)
    return Labelled(tuple(texts), labels.astype(np.int64), tuple(classes.tolist()), owners, test)


SOURCES: dict[str, Callable[[], Labelled]] = {
    "packaged:digits": _digits,
    "packaged:uci-sentences": _uci,
    "packaged:newsgroups": _newsgroups,
    "packaged:fashion-mnist": _fashion_mnist,
    "packaged:cifar10": _cifar10,
}

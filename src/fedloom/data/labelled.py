# SPDX-License-Identifier: Apache-2.0
"""Items with labels, for classification: texts or images, and the names of their classes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    if isinstance(item, str):
        data = item.encode()
    else:
        plain = np.ascontiguousarray(item)
        data = f"{plain.dtype.str}|{plain.shape}|".encode() + plain.tobytes()
    return hashlib.sha256(data + b"|" + label.encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=2)
def load_labelled(source: str) -> Labelled:
    """Load a data set by name.

    Raises
    ------
    Refusal
        If the source is not known or cannot be had.
    """
    if source not in SOURCES:
        raise Refusal(
            f'data "{source}"{nearest(source, SOURCES)}: expected one of {", ".join(SOURCES)}'
        )
    return SOURCES[source]()


def _digits() -> Labelled:
    from sklearn.datasets import load_digits  # not for a coordinator

    bunch = load_digits()
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)
    return Labelled(images, bunch.target.astype(np.int64), tuple(map(str, range(10))))


SOURCES: dict[str, Callable[[], Labelled]] = {"packaged:digits": _digits}

# SPDX-License-Identifier: Apache-2.0
"""Frozen encoders: an item goes through one forward pass and comes out as a key."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom.data.labelled import Items
from fedloom.errors import Refusal


class Encoder(Protocol):
    """Makes keys; the same bytes on every node that has the same ``digest``."""

    @property
    def width(self) -> int:
        """Width of a key, d."""

    @property
    def digest(self) -> str:
        """SHA-256 over weights, architecture and preprocessing: all that decides a key."""

    def encode(self, items: Items) -> NDArray[np.float32]:
        """Return keys ``[n, d]``, each from one forward pass of its item."""

    def label_keys(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Return the classes' names as vectors in the keys' space ``[C, d]``, if it has them."""


class Pixels:
    """An image is its own key: brightness from 0 to 1, normalised to length one."""

    def __init__(self, width: int = 64) -> None:
        self.width = width
        self.digest = hashlib.sha256(f"pixels/{width}".encode()).hexdigest()

    def encode(self, items: Items) -> NDArray[np.float32]:
        """Flatten and normalise.

        Raises
        ------
        Refusal
            If the items are no images of that many pixels.
        """
        flat = np.asarray(items).reshape(len(items), -1)
        if flat.dtype != np.uint8 or flat.shape[1] != self.width:
            raise Refusal(
                f"items of {flat.shape[1]} {flat.dtype} numbers: expected images of {self.width}"
                " pixels; use another encoder"
            )
        keys = flat.astype(np.float32) / np.float32(255)
        return keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), np.float32(1e-12))

    def label_keys(self, classes: Sequence[str]) -> None:
        """Return nothing: a name has no pixels."""


@functools.lru_cache(maxsize=4)
def load_encoder(source: str, device: str = "cpu") -> Encoder:
    """Load an encoder by name, the same object at each call.

    Raises
    ------
    Refusal
        If the source is not known or cannot be had.
    """
    kind, _, rest = source.partition(":")
    if kind == "pixels":
        return Pixels(int(rest or 64))
    raise Refusal(f'encoder "{source}": expected pixels or pixels:WIDTH')

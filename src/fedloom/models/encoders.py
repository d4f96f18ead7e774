# SPDX-License-Identifier: Apache-2.0
"""Frozen encoders: an item goes through one forward pass and comes out as a key.

``packaged:minilm`` and ``packaged:efficientnet-lite0`` ride in wheels, ``hub:ORG/NAME`` and
``path:DIR`` are sentence encoders or CLIPs in safetensors, ``lm:SOURCE`` is any language model,
``pixels`` an image itself, and ``relu:WIDTH:ENCODER`` widens the keys of another one.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedloom import seeds
from fedloom.data.labelled import Items
from fedloom.errors import Refusal

EXAMPLES = (
    *("packaged:minilm", "packaged:efficientnet-lite0", "lm:embedded:smollm2-135m"),
    *("hub:sentence-transformers/all-MiniLM-L6-v2", "hub:openai/clip-vit-base-patch32"),
    *("path:DIR", "pixels:64", "relu:512:pixels:64"),
)


class Encoder(Protocol):
    """Makes keys of length one; nodes with the same ``digest`` make the same, to rounding."""

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


def unit(keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale rows to length one; a row of zeros stays."""
    lengths = np.linalg.norm(keys, axis=1, keepdims=True)
    return np.asarray(keys / np.maximum(lengths, np.float32(1e-12)), np.float32)


def digest_of(*parts: object) -> str:
    """Hash what decides a key, in words."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


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
        return unit(flat.astype(np.float32) / np.float32(255))

    def label_keys(self, classes: Sequence[str]) -> None:
        """Return nothing: a name has no pixels."""


class ReluFeatures:
    """Another encoder's keys ``k`` as ``relu(k R)``, with random and fixed ``R``.

    What RanPAC (arXiv 2307.02251) does to frozen features: a linear read-out of more and nonlinear
    features fits more.
    """

    def __init__(self, width: int, base: Encoder) -> None:
        self.width, self.base = width, base
        self.digest = digest_of("relu", width, base.digest)
        drawn = seeds.generator(0, "relu", width, base.width).standard_normal((base.width, width))
        self._matrix = drawn.astype(np.float32)

    def encode(self, items: Items) -> NDArray[np.float32]:
        """Encode by the other encoder and widen."""
        return self.widen(self.base.encode(items))

    def label_keys(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Widen the other encoder's, if it has them."""
        found = self.base.label_keys(classes)
        return None if found is None else self.widen(found)

    def widen(self, keys: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map the other encoder's keys ``[n, d]`` to ``[n, width]``."""
        return unit(np.maximum(keys @ self._matrix, 0.0))


def load_encoder(source: str, device: str = "cpu") -> Encoder:
    """Load an encoder by name, the same object at each call.

    Raises
    ------
    Refusal
        If the source is not known or cannot be had.
    """
    return _load(source, device)  # a default left out or written out is one entry of the cache


@functools.lru_cache(maxsize=4)
def _load(source: str, device: str) -> Encoder:
    kind, _, rest = source.partition(":")
    if kind == "pixels":
        return Pixels(_size(source, rest or "64"))
    if kind == "relu":
        width, _, base = rest.partition(":")
        return ReluFeatures(_size(source, width), _load(base, device))
    if source == "packaged:efficientnet-lite0":
        from fedloom.models import image_encoders  # torch: not for who only names encoders

        return image_encoders.efficientnet_lite0(device)
    if source == "packaged:minilm" or (kind in ("lm", "hub", "path") and rest):
        from fedloom.models import text_encoders

        if kind == "lm":
            return text_encoders.language_model(rest, device)
        return text_encoders.minilm(device) if kind == "packaged" else _folder(source, device)
    raise Refusal(f'encoder "{source}": expected one like {", ".join(EXAMPLES)}')


def _folder(source: str, device: str) -> Encoder:
    from fedloom.models import image_encoders, sources, text_encoders

    location = sources.locate(sources.parse_source(source))
    if image_encoders.is_clip(location):
        return image_encoders.clip(location, device)
    return text_encoders.sentence_encoder(location, device)


def _size(source: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise Refusal(f'encoder "{source}": expected a width, as in pixels:64, relu:512:pixels:64')
    return int(text)
